"""Gated residuals (GTrXL, arXiv 1910.06764)."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.zoo.gated import Gated, GatedResidual

PLAIN = replace(SHAPE, context_length=40)


def fresh(start: float, dim: int = 24) -> GatedResidual:
    torch.manual_seed(3)
    join = GatedResidual(dim, start).double()
    for weight in (join.change.weight, join.stream.weight, join.reset.weight):
        torch.nn.init.normal_(weight, std=0.02)
    join.initialize()
    return join


def test_a_high_bias_lets_the_stream_pass_and_a_low_one_replaces_it():
    stream_BTD, change_BTD = torch.randn(2, 2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(fresh(40.0)(stream_BTD, change_BTD), stream_BTD, atol=1e-12, rtol=0)
    replaced_BTD = fresh(-40.0)(stream_BTD, change_BTD)
    assert replaced_BTD.abs().max() < 1  # a tanh
    torch.testing.assert_close(
        fresh(-40.0)(stream_BTD, -change_BTD.abs()), fresh(-40.0)(stream_BTD, 0 * change_BTD), atol=1e-12, rtol=0
    )  # negative changes end at the ReLU


def test_a_fresh_model_keeps_most_of_its_stream():
    torch.manual_seed(0)
    decoder, shares = Decoder(replace(PLAIN, dim=32, join="gated")).double().eval(), []
    for block in decoder.blocks:
        for join in (block.attention_join, block.ff_join):
            join.register_forward_hook(
                lambda _, given, out: shares.append(((out - given[0]).norm() / given[0].norm()).item())
            )
            assert join.bias_D.tolist() == [2.0] * 32
    logits(decoder, tokens_of(20))
    assert len(shares) == 4
    assert max(shares) < 0.15
    assert min(shares) > 0.05


def test_a_join_has_six_matrices_and_a_bias():
    plain, gated = make(PLAIN), make(replace(PLAIN, join="gated"))
    D = PLAIN.dim
    assert gated.num_parameters - plain.num_parameters == 2 * PLAIN.num_layers * (6 * D * D + D)


@pytest.mark.parametrize("changes", [{"norm_order": "post"}, {"parallel_residual": True}])
def test_other_orders_of_norms_are_refused(changes):
    with pytest.raises(InvalidInput, match="gated joins need norm_order pre"):
        replace(PLAIN, join=Gated(), **changes)


def test_a_start_that_is_no_number_is_refused():
    with pytest.raises(InvalidInput, match="start"):
        Gated(start=float("nan"))
