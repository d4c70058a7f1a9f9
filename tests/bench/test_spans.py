"""Spans by task: both copies have texts of one length, and a head's span is in tokens."""

import numpy as np
import pytest

from memlm.bench import spans
from memlm.bench.spans import Copies, learned_spans
from memlm.training.validation import PADDING


@pytest.mark.parametrize(("length", "copies"), [(3, 2), (6, 1)])
def test_each_second_half_asks_for_the_symbols_of_the_first(length, copies):
    task = Copies(symbols=9, length=length, copies=copies)
    inputs_BT, targets_BT = task.draw(np.random.default_rng(0), 4, 0)
    assert inputs_BT.shape == targets_BT.shape == (4, task.num_tokens) == (4, 11)
    for inputs, targets in zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True):
        asked = [place for place, answer in enumerate(targets) if answer != PADDING]
        assert asked == [place for place in range(11) if (place + 1) // length % 2]
        assert all(targets[place] == inputs[place - length + 1] for place in asked)


def test_spans_begin_at_the_whole_text_and_shrink(monkeypatch):
    monkeypatch.setattr(spans, "STEPS", 1)
    monkeypatch.setattr(spans, "PENALTY", 1.0)
    figures = learned_spans(0)
    assert list(figures) == ["copy from 7 back", "copy from 47 back"]
    for row in figures.values():
        assert row["mean_span"] == pytest.approx(95 * 0.99, abs=0.1)  # one step of AdamW is as long as the rate
        assert row["widest_span"] >= row["mean_span"]
