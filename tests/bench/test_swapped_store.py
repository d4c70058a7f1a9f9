"""The effect of RETRO: its task, and the rows of its result."""

import numpy as np
import torch

from memlm.bench import swapped_store
from memlm.bench.learning import config_for
from memlm.bench.swapped_store import KeyedValues
from memlm.model import Decoder
from memlm.training.validation import PADDING

TASK = KeyedValues(np.arange(12).reshape(3, 4), 16 + np.arange(12).reshape(3, 4))


def test_a_text_has_keys_with_their_values_and_asks_for_the_values():
    drawn = TASK.draw(np.random.default_rng(0), 5, 0)
    assert drawn.inputs_BT.shape == (5, TASK.num_tokens)
    for inputs, targets in zip(drawn.inputs_BT.tolist(), drawn.targets_BT.tolist(), strict=True):
        text = [*inputs, targets[-1]]
        for begin in range(0, len(text), 8):
            key, value = text[begin : begin + 4], text[begin + 4 : begin + 8]
            assert value == [16 + token for token in key]
            assert [PADDING, PADDING, PADDING, PADDING, *targets][begin + 7 : begin + 11] == value


def test_a_decoder_finds_the_pair_of_a_key():
    decoder = Decoder(config_for(TASK, cross={"kind": "retro", "chunk": 4, "neighbors": 1}))
    TASK.prepare(decoder)
    found = decoder.cross.neighbors(torch.tensor([[4, 5, 6, 7], [0, 1, 2, 3]]))
    assert found.tolist() == [[[4, 5, 6, 7, 20, 21, 22, 23]], [[0, 1, 2, 3, 16, 17, 18, 19]]]


def test_both_models_are_scored_with_each_store(monkeypatch):
    monkeypatch.setattr(swapped_store, "STEPS", 1)
    monkeypatch.setattr(swapped_store, "PAIRS", 50)
    figures = swapped_store.swapped_store(0)
    assert list(figures) == ["plain", "retro"]
    for row in figures.values():
        assert row.keys() == {"accuracy", "accuracy_swapped", "accuracy_shuffled", "steps", "seconds"}
