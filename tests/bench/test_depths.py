"""Loss by depth: the cut model is what tokens that leave there read, and rules cost what they say."""

import math

import numpy as np
import pytest
import torch

from memlm.bench.depths import bits_by_depth
from memlm.bench.learning import TEST_STEP, config_for, learn
from memlm.bench.tasks import LibraryText
from memlm.model.early_exit import ExitRule, forward_early_exit
from memlm.training.validation import PADDING


def forced(decoder, inputs_T, layer):
    """Scores (T, V) of a text whose tokens leave behind a layer."""
    state, hidden = decoder.new_state(), []
    for token_1 in inputs_T.split(1):
        hidden_11D, used = forward_early_exit(decoder, token_1[None], state, ExitRule("state", 0.0, layer))
        assert used == layer
        hidden.append(hidden_11D[0])
    return decoder.logits(torch.cat(hidden))


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
    held_out, generator = task.held_out, np.random.default_rng([learned.seed, TEST_STEP])
    inputs_BT, targets_BT = map(torch.from_numpy, held_out.draw(generator, 2, held_out.stages[-1]))
    with torch.inference_mode():
        for layer in (1, 2, 3):
            rows = [forced(learned.decoder, inputs_T, layer) for inputs_T in inputs_BT]
            nats = torch.nn.functional.cross_entropy(torch.cat(rows), targets_BT.flatten(), ignore_index=PADDING)
            assert figures[f"bits_{layer}"] == pytest.approx(float(nats) / math.log(2), abs=1e-4)
    assert len({round(figures[f"bits_{layer}"], 3) for layer in (1, 2, 3)}) == 3
    assert all(1 <= figures[f"{rule}_layers"] <= 3 for rule in rules)
