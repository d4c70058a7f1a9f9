"""The grid of the Decision Transformer's effect."""

import pytest
import torch

from memlm.bench import grid
from memlm.bench.grid import GOAL, START, Grid, bench_decisions, random_walks, rank_correlation


def test_walks_pay_one_a_move_until_the_goal_and_stop_at_walls():
    world = Grid(2)
    down, right = 2, 0
    there = [down] * (GOAL[0] - START[0]) + [right] * (GOAL[1] - START[1])
    for step, action in enumerate([*there, right]):
        rewards_B, is_over_B = world.step(torch.tensor([action, down]))
        assert rewards_B.tolist() == [-1.0 if step < len(there) else 0.0, -1.0]
        assert is_over_B.tolist() == [step >= len(there) - 1, False]
    assert world.place_B2.tolist() == [[*GOAL], [5, START[1]]]
    assert world.states()[1].nonzero()[:, 0].tolist() == [5, 6 + START[1]]


def test_random_walks_are_real_until_they_are_over():
    walks = random_walks(64, torch.Generator().manual_seed(0))
    assert torch.equal(walks.rewards_BT, -walks.is_real_BT.float())
    assert walks.is_real_BT[:, :3].all()
    assert (walks.is_real_BT.sum(dim=1) < 16).any()


@pytest.mark.parametrize(("got", "expected"), [((1, 2, 3, 4, 9), 1.0), ((9, 4, 3, 2, 1), -1.0), ((2, 1, 3, 4, 5), 0.9)])
def test_ranks_are_compared(got, expected):
    assert rank_correlation((1, 2, 3, 4, 5), got) == pytest.approx(expected)


def test_equal_numbers_share_their_mean_rank():
    asked, got = (4.0, 1.0, 3.0, 2.0), (2.0, 1.0, 2.0, 1.0)  # ranks 4 1 3 2 and 3.5 1.5 3.5 1.5
    assert rank_correlation(asked, got) == pytest.approx(2 / 5**0.5)
    assert rank_correlation(got, got) == pytest.approx(1)
    assert rank_correlation(asked, (3.0,) * 4) == rank_correlation((3.0,) * 4, asked) == 0.0


def test_the_rows_are_compared_on_the_same_figures(monkeypatch):
    for name, value in (("NUM_WALKS", 32), ("BATCH", 4), ("LEARNING_STEPS", 2), ("PLAYED", 4)):
        monkeypatch.setattr(grid, name, value)
    figures = bench_decisions(0)
    assert [*figures] == ["decisions", "without returns", "random walks"]
    assert figures["decisions"].keys() == figures["without returns"].keys()
    assert figures["decisions"].keys() - figures["random walks"].keys() == {"rank_correlation"}
