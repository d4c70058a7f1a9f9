"""MEGABYTE beside the plain decoder: figures at the first check with as few bits."""

import pytest

from memlm.bench import patches
from memlm.bench.patches import Check, bench_patches


@pytest.fixture
def short(monkeypatch):
    """Texts, models and runs that take a moment."""
    for name, value in (("STEPS", 2), ("STEPS_OF_PATCHES", 4), ("CHECK_EVERY", 2), ("SCORED", 1), ("DECODED", 4)):
        monkeypatch.setattr(patches, name, value)


def test_both_models_have_all_figures(short):
    figures = bench_patches(0)
    plain, megabyte = figures["plain"], figures["megabyte"]
    assert plain.keys() == megabyte.keys()
    assert plain["learned_bytes"] == 2 * 8 * 512
    assert plain["kib_a_session"] == 4 * 2 * 8192 * 128 * 4 / 1024
    assert megabyte["kib_a_session"] < plain["kib_a_session"] / 3
    for row in figures.values():
        assert row["learned_bytes_per_s"] == pytest.approx(row["learned_bytes"] / row["learning_seconds"])


def test_megabyte_counts_to_the_first_check_that_is_as_good_or_the_last(monkeypatch, short):
    curves = iter([[Check(3.0, 2, 1.0)], [Check(4.0, 2, 1.0), Check(3.0, 4, 2.0), Check(2.0, 6, 3.0)]])
    monkeypatch.setattr(patches, "_learn", lambda *_: next(curves))
    assert bench_patches(0)["megabyte"]["learned_bytes"] == 4 * 8 * 512
    curves = iter([[Check(3.0, 2, 1.0)], [Check(4.0, 2, 1.0), Check(3.5, 4, 2.0)]])
    assert bench_patches(0)["megabyte"]["bits_a_byte"] == 3.5


def test_checks_take_no_seconds_of_learning(short):
    checks = patches._learn(patches.Decoder(patches.PLAIN), lambda bytes_BT: _uniform(bytes_BT), 0, 0)
    assert checks[-1].steps == 0
    assert checks[-1].seconds < 0.05
    assert checks[-1].bits == pytest.approx(8)


def _uniform(bytes_BT):
    return bytes_BT.new_zeros(len(bytes_BT), bytes_BT.shape[1] - 1, 256).float()
