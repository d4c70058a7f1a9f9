"""Differential attention, as its papers describe it: shares, cancellation, norms and pairs."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from zoo.weights import Weights

from memlm.errors import InvalidInput
from memlm.model import Decoder, Memorizing
from memlm.model.forward import ForwardContext

PLAIN = replace(SHAPE, context_length=40)


def attention_of(kind: str, layer: int = 0, **changes):
    config = replace(PLAIN, layers=[{"mixer": kind}], **changes)
    return make(config).blocks[layer].attention


def test_the_first_share_grows_by_layers_as_in_the_paper():
    config = replace(PLAIN, num_layers=4, layers=[{"mixer": "differential"}])
    shares = [block.attention.first_share for block in make(config).blocks]
    assert shares == pytest.approx([0.2, 0.35551, 0.47071, 0.55606], abs=1e-5)


def test_a_fresh_share_is_near_its_first_value():
    torch.manual_seed(0)
    attention = Decoder(replace(PLAIN, head_dim=256, layers=[{"mixer": "differential"}])).blocks[1].attention
    assert attention.share.item() == pytest.approx(attention.first_share, abs=0.5)
    assert attention.first_query_d.std().item() == pytest.approx(0.1, rel=0.2)


def test_without_a_share_pairs_are_normed_plain_heads():
    attention = attention_of("differential")
    mixed_BHTe = torch.randn(2, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for vector_d in (attention.first_query_d, attention.first_key_d, attention.second_key_d):
            vector_d.zero_()
        attention.first_share = 0.0
        attention.pair_norm.weight.fill_(1)
    assert attention.share == 0
    got = attention.combine(mixed_BHTe, None)
    first = mixed_BHTe[:, :2]
    normed = first / (first.square().mean(dim=3, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(torch.cat([got[:, :2], got[:, 2:]], dim=3), normed)


def test_equal_maps_cancel_at_a_share_of_one():
    attention = attention_of("differential")
    one_BPTe = torch.randn(1, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    other_BPTe = torch.randn(1, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for vector_d in (attention.first_query_d, attention.second_query_d):
            vector_d.zero_()
        attention.first_share = 1.0 - 1e-9  # at 1 the factor behind the norm would hide the result
    assert attention.combine(torch.cat([one_BPTe, one_BPTe], dim=1), None).abs().max() < 1e-9
    # What both maps read in addition changes nothing.
    shifted = torch.cat([one_BPTe + other_BPTe, other_BPTe], dim=1)
    alone = torch.cat([one_BPTe, torch.zeros_like(one_BPTe)], dim=1)
    got, expected = (1e9 * attention.combine(mixed, None) for mixed in (shifted, alone))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_a_gate_of_the_second_version_takes_all_or_nothing_of_the_second_head():
    attention = attention_of("differential_v2")
    mixed_BHTd = torch.randn(1, 4, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context = ForwardContext(mask=None, new_B=[3], dtype=torch.float64)
    for share, expected in ((0.0, mixed_BHTd[:, 0::2]), (1.0, mixed_BHTd[:, 0::2] - mixed_BHTd[:, 1::2])):
        context.shared[attention] = torch.full((1, 2, 3, 1), share, dtype=torch.float64)
        assert torch.equal(attention.combine(mixed_BHTd, context), expected)


@pytest.mark.parametrize("kind", ["differential", "differential_v2"])
def test_the_fused_kernel_and_spelled_out_scores_agree(kind):
    decoder, watch = make(replace(PLAIN, layers=[{"mixer": kind}])), Weights()
    tokens = tokens_of(20)
    with torch.inference_mode():
        watched = decoder.logits(decoder(torch.tensor([tokens]), watch=watch)[0][0])
    torch.testing.assert_close(watched, logits(decoder, tokens), atol=1e-11, rtol=0)
    assert watch.of_layer[1].shape == (1, 4, 20, 20)
    torch.testing.assert_close(watch.of_layer[1].sum(dim=3), torch.ones(1, 4, 20, dtype=torch.float64))


def test_a_pair_of_the_first_version_reads_both_value_heads_and_of_the_second_one():
    first, second = attention_of("differential"), attention_of("differential_v2")
    assert first.out.weight.shape == (16, 16)
    assert second.out.weight.shape == (16, 8)
    assert first.qkv.weight.shape == second.qkv.weight.shape == (32, 16)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("differential", {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4}, "1 heads and 1 kv heads"),
        ("differential", {"num_heads": 2, "num_kv_heads": 1}, "2 heads and 1 kv heads"),
        ("differential", {"positions": "shaw"}, "values of one head"),
        ("differential", {"memorizing": Memorizing(layers=(1,))}, "does not go with memorizing"),
        ("differential_v2", {"num_kv_heads": 4}, "expected an even number on each"),
        ("differential_v2", {"memorizing": Memorizing(layers=(0,))}, "does not go with memorizing"),
    ],
)
def test_what_pairs_cannot_do_is_refused_in_words(kind, changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(PLAIN, layers=[{"mixer": kind}], **changes)


def test_knn_attention_of_other_layers_is_allowed():
    layers = [{"mixer": "differential"}, {"mixer": "attention"}]
    assert replace(PLAIN, layers=layers, memorizing=Memorizing(layers=(1,))).memorizes(1)
