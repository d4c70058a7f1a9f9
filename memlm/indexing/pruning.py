"""Entries that the model predicts without retrieval are left out of the index (after arXiv 2211.04052).

Experimental: the index gets smaller, and predictions hardly worse (docs/reports/datastore.md). Off unless a build is
given `prune`. A build with it takes a whole forward pass, where the keys alone would take a cheaper one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from memlm.data.windows import Window, blocks_of
from memlm.errors import InvalidInput
from memlm.retrieval.encoder import Encoder

PART_WINDOWS = 16  # encoded between two reports of progress


class EncodedWindow(NamedTuple):
    """The keys of a window's new positions, and a mask of those that are pruned. Each is None if there is none."""

    keys_ND: Float[np.ndarray, "N D"] | None
    pruned_N: Bool[np.ndarray, " N"] | None = None


def check_prune(prune: float | None) -> None:
    """Raises InvalidInput unless `prune` is None or a probability between 0 and 1."""
    if prune is not None and not 0 < prune < 1:
        raise InvalidInput(f"prune is {prune}; expected a probability between 0 and 1", field="prune")


def encode_and_prune(
    encoder: Encoder, blocks: Iterable[Sequence[Window]], prune: float, on_window: Callable[[int], None]
) -> Iterator[list[EncodedWindow]]:
    """Encodes blocks of windows. Prunes entries if the model gives their token the probability `prune` or more. Tells
    `on_window` the place of each window that is done.
    """
    threshold = np.float32(math.log(prune))
    for block in blocks:
        encoded = list[EncodedWindow]()
        for part in blocks_of(block, PART_WINDOWS):
            for each in encoder.predictions(part):
                on_window(len(encoded))
                encoded.append(EncodedWindow(each.keys_ND, each.logprobs_N >= threshold))
        yield encoded
