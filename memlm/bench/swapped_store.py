"""Whether a model reads the store of its neighbors, or remembers it: RETRO (arXiv 2112.04426) on keys and values.

A text names keys, each followed by its value, which the store has and the text does not. After learning, the store is
swapped for one with other values of the same keys. A model that reads it says the new ones.

Shapes: B rows, T positions, P pairs, K tokens of a key or value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlm.bench.learning import config_for, learn, score
from memlm.bench.tasks import Drawn, Task
from memlm.training.validation import PADDING
from memlm.zoo.chunk_store import ChunkStore
from memlm.zoo.retro import Neighbors

SYMBOLS, TOKENS, PAIRS, ASKED = 16, 4, 2000, 4
STEPS, SECONDS = 600, 60.0


@dataclass(frozen=True, eq=False)
class KeyedValues(Task):
    """Some keys of a table, each with its value behind it. All tokens of values are asked for."""

    key_PK: np.ndarray
    value_PK: np.ndarray

    @property
    def vocab_size(self) -> int:
        return 2 * SYMBOLS

    @property
    def num_tokens(self) -> int:
        return 2 * TOKENS * ASKED - 1

    @property
    def chance(self) -> float:
        return 1 / SYMBOLS

    def prepare(self, decoder: Any) -> None:
        """Lets a decoder that has neighbors read the pairs."""
        if decoder.cross is not None:
            decoder.cross.neighbors = _neighbors(self)

    def draw(self, generator: np.random.Generator, rows: int, stage: int) -> Drawn:
        which_BN = generator.integers(len(self.key_PK), size=(rows, ASKED))
        pair_BN2K = np.stack([self.key_PK[which_BN], self.value_PK[which_BN]], axis=2)
        asked_BN2K = np.stack([np.full_like(self.key_PK[which_BN], PADDING), self.value_PK[which_BN]], axis=2)
        return Drawn(pair_BN2K.reshape(rows, -1)[:, :-1], asked_BN2K.reshape(rows, -1)[:, 1:])


def swapped_store(seed: int) -> Mapping[str, dict[str, float]]:
    """Trains the plain decoder and RETRO on one store. Returns their accuracy with that store, with the swapped one,
    and with values of other keys. The plain decoder reads none.
    """
    generator = np.random.default_rng(seed)
    numbers = generator.choice(SYMBOLS**TOKENS, size=PAIRS, replace=False)
    key_PK = np.stack(np.unravel_index(numbers, (SYMBOLS,) * TOKENS), axis=1)
    values = [SYMBOLS + generator.integers(SYMBOLS, size=(PAIRS, TOKENS)) for _ in range(2)]
    task, swapped = (KeyedValues(key_PK, value_PK) for value_PK in values)
    shuffled = replace(task, value_PK=generator.permutation(task.value_PK))
    cross = {"kind": "retro", "chunk": TOKENS, "neighbors": 1, "encoder_layers": 1}
    figures = {}
    for row, config in (("plain", config_for(task)), ("retro", config_for(task, cross=cross))):
        learned = learn(config, task, steps=STEPS, seconds=SECONDS, seed=seed)
        figures[row] = {"accuracy": learned.accuracy, "steps": float(learned.steps), "seconds": learned.seconds}
        for name, store, asked in (("swapped", swapped, swapped), ("shuffled", shuffled, task)):
            store.prepare(learned.decoder)
            figures[row][f"accuracy_{name}"] = score(learned.decoder, asked, seed=seed)[0]
    return figures


def _neighbors(task: KeyedValues) -> Neighbors:
    """Returns a search among the pairs of a task. It looks each chunk up once."""
    table_VE = np.random.default_rng(0).normal(size=(2 * SYMBOLS, 8))
    store = ChunkStore(
        np.concatenate([task.key_PK, task.value_PK], axis=1).tolist(),
        # Keys are other orders of the same symbols. Means would not tell them apart.
        lambda chunks_NK: table_VE[chunks_NK].reshape(len(chunks_NK), -1),
        chunk=TOKENS,
        neighbors=1,
    )
    found = dict[bytes, Tensor]()

    def neighbors(chunk_Nm: Tensor) -> Tensor:
        keys = [chunk.numpy().tobytes() for chunk in chunk_Nm.cpu()]
        new = [number for number, key in enumerate(keys) if key not in found]
        if new:
            found.update({keys[number]: each for number, each in zip(new, store(chunk_Nm[new]), strict=True)})
        return torch.stack([found[key] for key in keys])

    return neighbors
