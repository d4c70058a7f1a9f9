"""Loss by depth: the cut model is what tokens that leave there read, and rules cost what they say."""

import pytest
import torch

from memlm.bench.depths import bits_by_depth, cut_behind
from memlm.bench.learning import config_for, learn
from memlm.bench.tasks import LibraryText
from memlm.model.early_exit import ExitRule, forward_early_exit


@pytest.mark.parametrize("stack", [None, {"kind": "exits", "halt": "geometric"}])
def test_bits_by_depth_are_those_of_tokens_that_leave_there(stack, monkeypatch):
    monkeypatch.setattr("memlm.bench.depths.TEXTS", 2)
    task = LibraryText(length=12)
    learned = learn(config_for(task, dim=16, ff_dim=16, num_layers=3, stack=stack), task, steps=2)
    figures = bits_by_depth(learned)
    rules = {"softmax_0.8", "softmax_0.4", "softmax_0.15"} | ({"halt_0.7", "halt_0.5"} if stack else set())
    assert figures.keys() == {
        *(f"bits_{n}" for n in (1, 2, 3)), *(f"{rule}_{name}" for rule in rules for name in ("layers", "more_bits")),
    }  # fmt: skip
    cut, state, tokens = cut_behind(learned.decoder, 2), learned.decoder.new_state(), torch.arange(9)[None]
    with torch.inference_mode():
        forced = [
            forward_early_exit(learned.decoder, t, state, ExitRule("state", 0.0, 2))[0] for t in tokens.split(1, 1)
        ]
        torch.testing.assert_close(torch.cat(forced, dim=1), cut(tokens)[0], atol=1e-5, rtol=1e-5)
    assert all(1 <= figures[f"{rule}_layers"] <= 3 for rule in rules)
