"""Bytes that autograd keeps: those of a small graph by hand, and at any depth the same for reversible layers."""

import pytest
import torch
from torch import nn

from memlm.bench import kept_bytes
from memlm.bench.kept_bytes import bits_and_bytes, step_cost
from memlm.bench.learning import config_for, learn
from memlm.bench.tasks import LibraryText

TASK = LibraryText(length=16)


class TwoProducts(nn.Module):
    """y = w (w x): keeps x and w x, and the parameter, which does not count."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.weight * (self.weight * x), None

    def loss(self, hidden, targets):
        return hidden.sum()


def test_a_graph_keeps_each_storage_once_and_no_parameters():
    model = TwoProducts()
    x_3 = torch.arange(3.0)
    cost = step_cost(model, x_3, x_3)
    assert cost.kept_bytes == 2 * 3 * 4
    assert cost.peak_bytes == cost.kept_bytes
    assert cost.seconds > 0
    assert model.weight.grad is None


@pytest.mark.parametrize("stack", [None, "reversible"])
def test_reversible_layers_keep_as_much_at_any_depth(stack, monkeypatch):
    monkeypatch.setattr(kept_bytes, "TURNS", 1)
    # Wide layers, beside which the scores of the vocabulary are few.
    figures = bits_and_bytes(learn(config_for(TASK, num_layers=4, stack=stack), TASK, steps=1))
    once, twice = figures["kept_bytes_a_token"], figures["kept_bytes_a_token_at_twice_the_depth"]
    if stack:
        assert twice == once
        assert once < figures["peak_bytes_a_token"] < 2 * once
    else:
        assert 1.7 * once < twice < 2 * once  # the scores of the vocabulary are kept once
        assert figures["peak_bytes_a_token"] == once
