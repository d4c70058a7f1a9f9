"""Blocks without values, projections and skips (arXiv 2311.01906)."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.zoo.simplified import Skipless

PLAIN = replace(SHAPE, context_length=40, num_kv_heads=4)
SAS = replace(PLAIN, layers=[{"mixer": "shaped"}], join="skipless")


def fresh(config) -> Decoder:
    torch.manual_seed(2)
    return Decoder(config).double().eval()


class Weights:
    """A watch that keeps the weights of each layer."""

    def __init__(self):
        self.heads_read = []

    def weights(self, layer, weights_BHTE, mask):
        self.heads_read.append(weights_BHTE)

    def gate(self, layer, share_BHT):
        raise AssertionError

    def heads(self, layer, mixed_BHTd):
        return mixed_BHTd


def watched(decoder: Decoder, tokens: list[int]) -> list[torch.Tensor]:
    watch = Weights()
    with torch.inference_mode():
        decoder(torch.tensor([tokens]), watch=watch)
    return watch.heads_read


@pytest.mark.parametrize("windows", [(), (5, 5)])
def test_a_fresh_mixer_returns_its_input(windows):
    decoder = fresh(replace(SAS, windows=windows))
    for weights_BHTS in watched(decoder, tokens_of(20)):
        identity = torch.eye(20, dtype=torch.float64).expand_as(weights_BHTS)
        torch.testing.assert_close(weights_BHTS, identity, atol=1e-12, rtol=0)


def test_weights_of_a_token_sum_to_alpha_where_beta_is_gamma():
    decoder = make(SAS)
    with torch.no_grad():
        for block in decoder.blocks:
            block.attention.gamma_H.copy_(block.attention.beta_H)
    for block, weights_BHTS in zip(decoder.blocks, watched(decoder, tokens_of(20)), strict=True):
        expected = block.attention.alpha_H[None, :, None].expand(1, 4, 20)
        torch.testing.assert_close(weights_BHTS.sum(3), expected, atol=1e-12, rtol=0)
        assert (weights_BHTS < 0).any()


def test_no_weights_make_values_or_project_them():
    D, L, H = PLAIN.dim, PLAIN.num_layers, PLAIN.num_heads
    gains = 3 * H + 3  # of the heads, and of both sums
    assert make(SAS).num_parameters == make(PLAIN).num_parameters - L * 2 * D * D + L * gains


@pytest.mark.parametrize("parallel", [False, True])
def test_the_stream_before_attention_reaches_only_the_sublayers(parallel):
    """With attention's gain at 0, nothing of the token is left but what a parallel feed-forward makes of it."""
    decoder = fresh(replace(SAS, num_layers=1, parallel_residual=parallel))
    block, tokens = decoder.blocks[0], torch.tensor([tokens_of(9)])
    assert (block.ff_join.skip_1 is None) == parallel
    assert block.ff_join.gain_1.item() == pytest.approx(0.1)
    with torch.no_grad():
        block.attention_join.gain_1.zero_()
        read = decoder.embedding(tokens) if parallel else torch.zeros(1, 9, PLAIN.dim, dtype=torch.float64)
        expected = decoder.logits(decoder.norm(0.1 * block.ff(block.ff_norm(read))))
    torch.testing.assert_close(logits(decoder, tokens[0].tolist()), expected[0], atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "got 2 of width 4"),
        ({"head_dim": 6}, "got 4 of width 6"),
        ({"norm_order": "post"}, "skipless joins need norm_order pre"),
        (
            {"windows": (4, 4), "num_sinks": 2, "extended_attention": 3},
            "no weights for the pairs of extended_attention",
        ),
        ({"join": {"kind": "skipless", "gain": float("inf")}}, "gain"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(SAS, **changes)
    assert Skipless().gain == 0.1
