"""Models with layers that are no attention: their other heads are inspected, and they are said to have none."""

import random

import pytest
import torch
from planted_heads import VOCABULARY, inspect_plainly, planted
from zoo import seam_parts  # its kinds become known

from memlm.errors import InvalidInput
from memlm.inspect import report_html
from memlm.inspect.circuits import TokenTables, compositions, copying_scores, has_head_weights
from memlm.inspect.findings import Role
from memlm.inspect.inspection import matched_heads
from memlm.model import Decoder, ModelConfig

assert seam_parts
SHAPE = {"vocab_size": 40, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 24, "context_length": 64}


def decoder_of(*layers: dict, **options) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(**SHAPE, num_layers=len(layers), layers=layers, **options)).eval()


@pytest.fixture(scope="module")
def mixed() -> Decoder:
    return decoder_of({"mixer": "attention"}, {"mixer": "decay"}, {"mixer": "attention"}, positions="learned")


def test_layers_without_attention_have_no_heads_and_the_others_have_theirs(mixed):
    found = inspect_plainly(mixed)
    assert found.layers_without_heads == (1,)
    assert {head.id for head in found.heads} == {(layer, head) for layer in (0, 2) for head in range(4)}
    assert all(head.copying is not None and head.copied is not None for head in found.heads)
    page = report_html(found)
    assert "No attention weights, and so no heads, in layers 1" in page
    assert "nan" not in page.lower()
    alone = inspect_plainly(decoder_of({"mixer": "decay"}, positions="learned"))
    assert (alone.heads, alone.layers_without_heads, alone.advice.layers) == ((), (0,), ())
    assert "No head reaches the threshold of a role" in report_html(alone)


def test_scores_of_a_mixed_model_are_nan_where_there_are_no_heads(mixed):
    scores_LH = copying_scores(mixed, TokenTables(mixed, range(40)))
    assert scores_LH.isnan().all(dim=1).tolist() == [False, True, False]
    assert [has_head_weights(mixed, layer) for layer in range(3)] == [True, False, True]


def test_heads_compose_across_a_layer_without_heads():
    plain = decoder_of(*[{"mixer": "attention"}] * 3, positions="learned")
    mixed = decoder_of({"mixer": "decay"}, *[{"mixer": "attention"}] * 3, positions="learned")
    with torch.no_grad():
        for layer in range(3):
            plain.blocks[layer].load_state_dict(mixed.blocks[layer + 1].state_dict())
    expected = [(link.kind, link.source, link.score) for link in compositions(plain, [(2, 3)])]
    found = [(link.kind, link.source, link.score) for link in compositions(mixed, [(3, 3)])]
    assert found == [(kind, (layer + 1, head), score) for kind, (layer, head), score in expected]
    assert {source for _, source, _ in found} == {(layer, head) for layer in (1, 2) for head in range(4)}


def test_heads_that_are_left_out_for_comparison_are_heads():
    drawn = matched_heads([(0, head) for head in range(4)], [0, 2], 4, random.Random(0))
    assert sorted(drawn) == [(2, head) for head in range(4)]


def test_planted_heads_are_found_beside_a_layer_without_heads():
    """The planted model, with a layer between its two that reads nothing and writes nothing."""
    config = planted().config.as_dict() | {"num_layers": 3}
    layers = ({"mixer": "attention"}, {"mixer": "decay"}, {"mixer": "attention"})
    decoder = Decoder(ModelConfig.from_dict(config | {"layers": layers})).double().eval()
    with torch.no_grad():
        for ours, theirs in ((0, 0), (2, 1)):
            decoder.blocks[ours].load_state_dict(planted().blocks[theirs].state_dict())
        for name in ("embedding", "positions", "norm"):
            getattr(decoder, name).load_state_dict(getattr(planted(), name).state_dict())
        for parameter in decoder.blocks[1].parameters():
            parameter.zero_()
    found = inspect_plainly(decoder)
    assert [head.id for head in found.with_role(Role.INDUCTION)] == [(2, 2)]
    assert (0, 0) in {head.id for head in found.with_role(Role.PREVIOUS)}
    assert found.layers_without_heads == (1,)
    assert found.period == VOCABULARY


def test_tokens_behind_hash_experts_are_those_of_their_own_expert():
    decoder = decoder_of({"channel": {"kind": "hash", "experts": 4}}, {"mixer": "attention"}, positions="learned")
    assert inspect_plainly(decoder).layers_without_heads == ()
    tables, block = TokenTables(decoder, range(40)), decoder.blocks[0]
    with torch.inference_mode():
        rows = []
        for token in tables.ids_N.tolist():
            row_D = decoder.embedding.weight[token]
            expert = block.ff.experts[int(block.ff.table_V[token])]
            rows.append(row_D + expert(block.ff_norm(row_D)))
        expected_ND = torch.stack(rows)
    torch.testing.assert_close(tables.input_ND(1), expected_ND - expected_ND.mean(dim=0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stack": {"kind": "looped", "blocks": 1}}, "stack"),
        ({"border": {"kind": "recurrent_memory", "memories": 2}}, "border"),
        ({"layers": [{"mixer": {"kind": "differential"}}]}, "layers"),
    ],
)
def test_models_whose_heads_do_not_write_by_themselves_are_refused(changes, field):
    decoder = Decoder(ModelConfig(**SHAPE, num_layers=2, **changes)).eval()
    with pytest.raises(InvalidInput) as refused:
        inspect_plainly(decoder)
    assert refused.value.field == field
