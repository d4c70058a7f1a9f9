"""Span corruption cuts what T5's paper says, and loses nothing."""

import numpy as np
import pytest

from memlm.errors import InvalidInput
from memlm.zoo.shapes.span_corruption import corrupt_spans

SENTINELS = list(range(1000, 900, -1))


def corrupted_twin(tokens, is_cut):
    """One token at a time: a sentinel for each run of cut tokens, and the runs behind their sentinels."""
    source, target, number = [], [], 0
    for place, token in enumerate(tokens):
        if not is_cut[place]:
            source.append(token)
            continue
        if place == 0 or not is_cut[place - 1]:
            source.append(SENTINELS[number])
            target.append(SENTINELS[number])
            number += 1
        target.append(token)
    return source, target


def restored(source, target):
    """The text, and which of its tokens were cut."""
    spans, tokens, is_cut = {}, [], []
    for token in target:
        if token in SENTINELS:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    for token in source:
        tokens += spans.get(token, [token])
        is_cut += [token in spans] * len(spans.get(token, [token]))
    return tokens, is_cut


@pytest.mark.parametrize("length", [2, 3, 7, 20, 100, 512])
def test_the_spans_are_those_of_a_slow_twin_and_put_back_make_the_text(length):
    for seed in range(20):
        tokens = np.random.default_rng(seed).integers(900, size=length).tolist()
        source, target = corrupt_spans(tokens, np.random.default_rng(seed), SENTINELS)
        text, is_cut = restored(source, target)
        assert text == tokens
        assert (source, target) == corrupted_twin(tokens, is_cut)
        assert sum(is_cut) == max(1, round(0.15 * length))
        assert len(target) - sum(is_cut) == max(1, round(sum(is_cut) / 3))
        assert not is_cut[0]
        assert is_cut[-1]


def test_every_place_is_cut_about_as_often_and_runs_differ_in_length():
    generator, cut_T, lengths = np.random.default_rng(0), np.zeros(100), set()
    for _ in range(400):
        source, target = corrupt_spans(range(100), generator, SENTINELS)
        cut_T += restored(source, target)[1]
        ends = [place for place, token in enumerate(target) if token in SENTINELS] + [len(target)]
        lengths |= set(np.diff(ends) - 1)
    assert lengths >= {1, 2, 3, 4, 5, 6, 7}
    assert np.abs(cut_T[20:80] / 400 - 0.15).max() < 0.08


def test_rate_and_length_of_spans_are_options_and_draws_follow_the_generator():
    twice = [corrupt_spans(range(60), np.random.default_rng(3), SENTINELS, rate=0.5, mean_length=5) for _ in range(2)]
    assert twice[0] == twice[1]
    assert sum(restored(*twice[0])[1]) == 30
    assert len([token for token in twice[0].target if token in SENTINELS]) == 6


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (1, {}, "1 tokens has no span to cut"),
        (600, {"sentinel_ids": SENTINELS[:3]}, "30 spans need as many sentinels; got 3"),
        (9, {"rate": 0.0}, "rate is 0"),
        (9, {"mean_length": 0.5}, "mean_length is 0.5"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(length, options, message):
    with pytest.raises(InvalidInput, match=message):
        corrupt_spans(range(length), np.random.default_rng(0), **{"sentinel_ids": SENTINELS, **options})
