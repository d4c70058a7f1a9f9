"""Circuits equal their plain definitions: whole maps of tokens, whole products of matrices."""

from dataclasses import replace

import pytest
import torch
from decoders import ALL, make
from planted_heads import PREVIOUS, inspect_plainly, planted

from memlm.inspect.circuits import (
    DISTANCES,
    TokenTables,
    compositions,
    copied_scores,
    copying_scores,
    head_weights,
    matching_scores,
    positive_share,
    random_composition,
)
from memlm.model import Decoder
from memlm.model.positions import apply_rope

KINDS = ["rotary", "learned", "sandwich norms", "output norms", "query and key norms",
         "post-norm layer-norm relu", "parallel gelu biases", "windows"]  # fmt: skip


def unbiased(name):
    decoder = make(ALL[name])
    with torch.no_grad():
        for key, parameter in decoder.named_parameters():
            if key.endswith("bias"):
                parameter.zero_()
    return decoder


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_projections_with_their_gains_are_what_attention_computes(name):
    """A single token attends to itself alone, so the layer writes the sum of its heads' values."""
    decoder = unbiased(name)
    for layer, block in enumerate(decoder.blocks):
        hidden_11D = torch.randn(1, 1, 16, dtype=torch.float64)
        context_read = decoder.blocks[layer].attention.project(
            block.attention_norm(hidden_11D) if block.has_input_norm else hidden_11D
        )
        weights = head_weights(decoder, layer)
        centered_D = hidden_11D.flatten() - hidden_11D.mean() * (decoder.config.norm == "layer")
        size = (centered_D.square().mean() + decoder.config.norm_eps).sqrt() if block.has_input_norm else 1.0
        read_D = hidden_11D.flatten() / size
        for head in range(4):
            value_d = context_read.value_BGTd[0, head // 2, 0]
            torch.testing.assert_close(weights.value_HdD[head] @ read_D, value_d)
            query_d, key_d = context_read.query_BHTd[0, head, 0], context_read.key_BGTd[0, head // 2, 0]
            for ours_d, theirs_d in (
                (weights.query_HdD[head] @ read_D, query_d),
                (weights.key_HdD[head] @ read_D, key_d),
            ):
                torch.testing.assert_close(torch.cosine_similarity(ours_d, theirs_d, dim=0).item(), 1.0)


@pytest.mark.parametrize("name", ["rotary", "learned", "sandwich norms", "parallel gelu biases"])
@torch.no_grad()
def test_scores_are_those_of_the_whole_map_of_tokens(name):
    decoder = unbiased(name)
    tables = TokenTables(decoder, range(40))
    copying_LH, matching_LH = copying_scores(decoder, tables), matching_scores(decoder, tables)
    for layer in range(2):
        weights, input_VD = head_weights(decoder, layer), tables.input_ND(layer)
        for head in range(4):
            ov_VV = tables.output_ND @ weights.out_HDd[head] @ weights.value_HdD[head] @ input_VD.T
            assert positive_share(ov_VV[None]).item() == pytest.approx(copying_LH[layer, head].item(), abs=1e-9)
            assert ov_VV.trace() / torch.linalg.eigvals(ov_VV).abs().sum() == pytest.approx(
                copying_LH[layer, head].item(), abs=1e-9
            )
            shares = []
            angles = decoder.rotary.of_layer(layer) if decoder.rotary else None
            for distance in DISTANCES if angles else (0,):
                query_Vd, key_Vd = input_VD @ weights.query_HdD[head].T, input_VD @ weights.key_HdD[head].T
                if angles is not None:
                    query_Vd = apply_rope(query_Vd, angles.at(torch.tensor([distance]), (distance, distance + 1)))
                shares.append(positive_share((query_Vd @ key_Vd.T)[None]).item())
            assert sum(shares) / len(shares) == pytest.approx(matching_LH[layer, head].item(), abs=1e-9)


@torch.no_grad()
def test_later_layers_read_tokens_with_the_first_feed_forward():
    decoder = make(ALL["rotary"])
    tables, block = TokenTables(decoder, range(40)), decoder.blocks[0]
    ids = tables.ids_N.tolist()
    assert sorted(ids) == list(range(40))
    rows = torch.stack([decoder.embedding.weight[token] for token in ids])
    after = torch.stack([row + block.ff(block.ff_norm(row)) for row in rows])
    torch.testing.assert_close(tables.input_ND(0), rows - rows.mean(dim=0))
    for layer in (1, 2, 7):
        torch.testing.assert_close(tables.input_ND(layer), after - after.mean(dim=0))


@torch.no_grad()
def test_copied_tokens_are_those_that_few_others_beat():
    decoder = make(ALL["rotary"])
    tables = TokenTables(decoder, range(40))
    found_LH, top = copied_scores(decoder, tables), 1  # 2 % of 40
    for layer in range(2):
        weights = head_weights(decoder, layer)
        for head in range(4):
            score = 0
            for token in range(40):
                read_D = tables.input_ND(layer)[token]
                logits_V = tables.output_ND @ (weights.out_HDd[head] @ (weights.value_HdD[head] @ read_D))
                place = sorted(range(40), key=lambda other: -logits_V[other]).index(token)
                score += (place < top) - (place >= 40 - top)
            assert found_LH[layer, head].item() == pytest.approx(score / 40)


@torch.no_grad()
def test_composition_is_the_ratio_of_whole_norms():
    decoder = make(ALL["query and key norms"])
    early, late = head_weights(decoder, 0), head_weights(decoder, 1)
    found = {(link.kind, link.source, link.target): link.score for link in compositions(decoder, [(1, 2), (0, 1)])}
    assert len(found) == 3 * 4  # a head of layer 0 reads no other
    for source in range(4):
        written_DD = early.out_HDd[source] @ early.value_HdD[source]
        qk_DD = late.query_HdD[2].T @ late.key_HdD[2]
        ov_DD = late.out_HDd[2] @ late.value_HdD[2]
        for kind, circuit_DD in (("K", qk_DD), ("Q", qk_DD.T), ("V", ov_DD)):
            expected = (circuit_DD @ written_DD).norm() / (circuit_DD.norm() * written_DD.norm())
            assert found[kind, (0, source), (1, 2)] == pytest.approx(expected.item(), rel=1e-9)


def test_random_composition_is_one_over_the_root_of_the_width():
    mean, high = random_composition(256, 16)
    assert mean == pytest.approx(1 / 16, rel=0.1)
    assert mean < high < 1.2 * mean


def test_a_head_that_writes_nothing_has_no_copying_score():
    decoder = planted()
    with torch.no_grad():
        decoder.blocks[1].attention.out.weight.zero_()
    heads = [head for head in inspect_plainly(decoder).heads if head.layer == 1]
    assert all(head.copying is None and head.copied == 0 for head in heads)


def test_packed_and_rounded_weights_have_the_circuits_of_their_numbers():
    torch.manual_seed(0)
    config = replace(ALL["rotary"], dim=64, head_dim=16)
    decoder = Decoder(config).eval()
    plain = copying_scores(decoder, TokenTables(decoder, range(40)))
    decoder.pack(bits=8)
    torch.testing.assert_close(copying_scores(decoder, TokenTables(decoder, range(40))), plain, atol=0.05, rtol=0)


def test_the_head_that_writes_tokens_elsewhere_copies_nothing():
    heads = {head.id: head for head in inspect_plainly(planted()).heads}
    assert heads[PREVIOUS].copied == 0
