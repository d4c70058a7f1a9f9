"""A Decision Transformer on a grid: it learns from random walks, and acts for the return that is asked for.

As the illustration of arXiv 2106.01345 (section 1): a step costs 1 until the goal is reached, so the greatest return is
that of the shortest path. No walk was made for a return.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from memlm.model import ModelConfig
from memlm.zoo.decisions import DecisionConfig, DecisionTransformer, Episodes
from memlm.zoo.fitting import fit

SIDE, NUM_STEPS = 6, 16
START, GOAL = (2, 2), (4, 3)
ASKED = (-3.0, -5.0, -7.0, -11.0, -16.0)
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
NUM_WALKS, BATCH, LEARNING_STEPS, PLAYED = 4096, 64, 300, 128


class Grid:
    """Episodes that walk from `START` to `GOAL`. Walls stop a move. A state is the row and the column, one-hot."""

    def __init__(self, rows: int) -> None:
        self.place_B2 = torch.tensor(START).repeat(rows, 1)
        self.is_over_B = torch.zeros(rows, dtype=torch.bool)

    def states(self) -> Float[Tensor, "B S"]:
        """Returns the places of all episodes."""
        return torch.nn.functional.one_hot(self.place_B2, SIDE).flatten(1).float()

    def step(self, actions_B: Int[Tensor, " B"]) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """Moves the episodes that are not over, for a reward of -1."""
        moved_B2 = (self.place_B2 + MOVES[actions_B]).clamp(0, SIDE - 1)
        rewards_B = -(~self.is_over_B).float()
        self.place_B2 = torch.where(self.is_over_B[:, None], self.place_B2, moved_B2)
        self.is_over_B = (self.place_B2 == torch.tensor(GOAL)).all(dim=1)
        return rewards_B, self.is_over_B


def random_walks(rows: int, generator: torch.Generator) -> Episodes:
    """Returns episodes of random actions."""
    grid, states, actions, rewards, is_real = Grid(rows), [], [], [], []
    for _ in range(NUM_STEPS):
        is_real.append(~grid.is_over_B)
        states.append(grid.states())
        actions.append(torch.randint(len(MOVES), (rows,), generator=generator))
        rewards.append(grid.step(actions[-1])[0])
    return Episodes(*(torch.stack(each, dim=1) for each in (states, actions, rewards, is_real)))


def bench_decisions(seed: int) -> dict[str, dict[str, float]]:
    """Returns the mean return got for each that was asked for (`got_for_3_steps`: -3), and their rank correlation.

    The rows are a Decision Transformer, one that sees no returns (behaviour cloning), and random walks.
    """
    generator = torch.Generator().manual_seed(seed)
    walks = random_walks(NUM_WALKS, generator)
    figures = dict[str, dict[str, float]]()
    for name, return_scale in (("decisions", float(NUM_STEPS)), ("without returns", 1e9)):
        model = _learn(walks, return_scale, seed, generator)
        got = [
            float(model.play(Grid(PLAYED), torch.full((PLAYED,), each), generator=generator).mean()) for each in ASKED
        ]
        figures[name] = {**_by_target(got), "rank_correlation": rank_correlation(ASKED, got)}
    return figures | {"random walks": _by_target([float(walks.returns_BT[:, 0].mean())] * len(ASKED))}


def rank_correlation(asked: Sequence[float], got: Sequence[float]) -> float:
    """Returns Spearman's correlation, and 0 where all numbers of a side are equal. Equal numbers share the mean of
    their ranks.
    """
    ranks = [_ranks(each) for each in (asked, got)]
    if not all(np.ptp(each) for each in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(numbers: Sequence[float]) -> np.ndarray:
    _, place_N, count_U = np.unique(numbers, return_inverse=True, return_counts=True)
    mean_rank_U = count_U.cumsum() - (count_U - 1) / 2
    return mean_rank_U[place_N]


def _by_target(got: Sequence[float]) -> dict[str, float]:
    return {f"got_for_{-asked:.0f}_steps": mean for asked, mean in zip(ASKED, got, strict=True)}


def _learn(walks: Episodes, return_scale: float, seed: int, generator: torch.Generator) -> DecisionTransformer:
    torch.manual_seed(seed)
    shape = ModelConfig(
        vocab_size=len(MOVES), dim=64, num_layers=2, num_heads=2, num_kv_heads=2, ff_dim=128,
        context_length=3 * NUM_STEPS, positions="none", tied_embeddings=False,
    )  # fmt: skip
    model = DecisionTransformer(DecisionConfig(shape, 2 * SIDE, NUM_STEPS, return_scale))

    def loss_at(step: int) -> Tensor:
        return model.loss(walks.rows(torch.randint(NUM_WALKS, (BATCH,), generator=generator)))

    fit(model, loss_at, steps=LEARNING_STEPS, learning_rate=1e-3)
    return model
