"""Whether one sequence searches at a position, or uses a shortcut. Without shortcuts, every position is searched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from memlm.index.neighbors import Neighbors


@runtime_checkable
class Shortcut(Protocol):
    """A way to do without a search. One that `is_sequential` depends on the tokens before a position."""

    is_sequential: bool

    def neighbors(self, key_1D: Float32[np.ndarray, "1 D"], max_logprob: float) -> Neighbors | None:
        """Returns the neighbors of one key, possibly none at all, or None if the position must be searched.

        `max_logprob` is the largest log-probability that the model gives any next token.
        """

    def observe(self, neighbors: Neighbors, token_id: int) -> None:
        """Records the neighbors of one key and the token that followed."""


class RetrievalPolicy:
    """The shortcuts of one sequence, tried in their order."""

    def __init__(self, shortcuts: Sequence[Shortcut] = ()) -> None:
        self.shortcuts = tuple(shortcuts)

    @property
    def is_sequential(self) -> bool:
        """Whether positions must be retrieved one by one, each followed by `observe`."""
        return any(shortcut.is_sequential for shortcut in self.shortcuts)

    def without_search(self, key_1D: Float32[np.ndarray, "1 D"], max_logprob: float) -> Neighbors | None:
        """Returns the neighbors of the first shortcut that applies, or None if the position must be searched."""
        for shortcut in self.shortcuts:
            if (neighbors := shortcut.neighbors(key_1D, max_logprob)) is not None:
                return neighbors
        return None

    def observe(self, neighbors: Neighbors, token_id: int) -> None:
        """Records the neighbors of one key and the token that followed."""
        for shortcut in self.shortcuts:
            shortcut.observe(neighbors, token_id)
