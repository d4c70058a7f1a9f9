"""Token ids of a document -> overlapping windows that a model of limited context reads.

A document t_0 .. t_{n-1} is read as <start> t_0 .. t_{n-2}, and each position predicts the token that follows: n
predictions for n tokens, the first from <start> alone. Each token is predicted exactly once, with the left context of
its window: at first all of its document's past, later at least `context - stride` positions besides its own. No window
holds tokens of two documents. Building, scoring and tuning all use these windows, so that equal texts give equal keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64

from memlm.errors import InvalidInput

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Window:
    """T inputs, and the targets that their last N positions predict (N <= T).

    A window that `continues` begins where the one before it ended, and needs the model's memory of that one.
    """

    inputs_T: Int64[np.ndarray, " T"]
    targets_N: Int64[np.ndarray, " N"]
    continues: bool = False


class WindowSize(NamedTuple):
    """The length of a window, and the number of tokens that each window but the first predicts."""

    window: int
    stride: int


def windows_of(tokens_n: Int64[np.ndarray, " n"], *, start_id: int, context: int, stride: int) -> Iterator[Window]:
    """Cuts one document. The first window predicts `context` tokens, each further one `stride`, the last the rest.

    >>> windows = windows_of(np.arange(1, 7), start_id=0, context=4, stride=2)
    >>> [(window.inputs_T.tolist(), window.targets_N.tolist()) for window in windows]
    [([0, 1, 2, 3], [1, 2, 3, 4]), ([2, 3, 4, 5], [5, 6])]
    """
    check_stride(context, stride)
    inputs = np.concatenate([[start_id], tokens_n[:-1]])
    begin, end = 0, min(context, len(tokens_n))
    while begin < len(tokens_n):
        yield Window(inputs[max(0, end - context) : end], tokens_n[begin:end])
        begin, end = end, min(end + stride, len(tokens_n))


def segments_of(tokens_n: Int64[np.ndarray, " n"], *, start_id: int, segment: int) -> Iterator[Window]:
    """Cuts one document for a segmented model, which encodes nothing twice.

    >>> windows = segments_of(np.arange(1, 7), start_id=0, segment=4)
    >>> [(window.inputs_T.tolist(), window.targets_N.tolist(), window.continues) for window in windows]
    [([0, 1, 2, 3], [1, 2, 3, 4], False), ([4, 5], [5, 6], True)]
    """
    inputs = np.concatenate([[start_id], tokens_n[:-1]])
    for begin in range(0, len(tokens_n), segment):
        yield Window(inputs[begin : begin + segment], tokens_n[begin : begin + segment], continues=begin > 0)


def check_stride(context: int, stride: int) -> None:
    """Raises InvalidInput unless 1 <= stride <= context."""
    if not 1 <= stride <= context:
        raise InvalidInput(f"stride is {stride}; expected between 1 and the window of {context}", field="stride")


def blocks_of(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yields lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while block := list(islice(iterator, size)):
        yield block
