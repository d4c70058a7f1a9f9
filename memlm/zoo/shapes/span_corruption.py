"""Span corruption: a text -> the text with spans cut out, and the spans (T5, arXiv 1910.10683, section 3.1.4).

A sentinel token stands for each span in the source, and before each span in the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from memlm.errors import InvalidInput, check_range


class Corrupted(NamedTuple):
    """Token ids to read and to write, both without the token that ends them."""

    source: list[int]
    target: list[int]


def corrupt_spans(
    tokens: Sequence[int],
    generator: np.random.Generator,
    sentinel_ids: Sequence[int],
    *,
    rate: float = 0.15,
    mean_length: float = 3.0,
) -> Corrupted:
    """Cuts spans out of a text of at least two tokens: `rate` of its tokens, `mean_length` of them a span.

    Cut and kept runs have random lengths, each way to divide them equally likely, and take turns. The first is kept,
    and the last is cut, as in T5's own code. Both numbers are rounded, and are at least 1. Raises InvalidInput for a
    shorter text, and for fewer sentinels than spans.
    """
    check_range("rate", rate, above=0, most=1)
    check_range("mean_length", mean_length, least=1)
    if len(tokens) < 2:
        raise InvalidInput(f"a text of {len(tokens)} tokens has no span to cut; expected at least 2", field="tokens")
    num_cut = min(max(round(rate * len(tokens)), 1), len(tokens) - 1)
    num_kept = len(tokens) - num_cut
    num_spans = min(max(round(num_cut / mean_length), 1), num_kept)
    if num_spans > len(sentinel_ids):
        raise InvalidInput(
            f"{num_spans} spans need as many sentinels; got {len(sentinel_ids)}: shorten the text",
            field="sentinel_ids",
        )
    kept_S, cut_S = (_divided(total, num_spans, generator) for total in (num_kept, num_cut))
    source, target, begin = list[int](), list[int](), 0
    for kept, cut, sentinel in zip(kept_S.tolist(), cut_S.tolist(), sentinel_ids, strict=False):
        source += [*tokens[begin : begin + kept], sentinel]
        target += [sentinel, *tokens[begin + kept : begin + kept + cut]]
        begin += kept + cut
    return Corrupted(source, target)


def _divided(total: int, count: int, generator: np.random.Generator) -> Int64[np.ndarray, " S"]:
    """Lengths of `count` runs, none of them empty, that make `total`."""
    ends = np.sort(generator.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(ends, prepend=0, append=total)
