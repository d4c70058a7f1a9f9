"""The end of one text -> where it stands in sorted documents, and the continuation that most of these places have.

The search of `SuffixArray` for one query takes a millisecond, nearly all of it in the calls of numpy. This one compares
tokens in Python, some twenty times for a million suffixes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from memlm.index import suffix_array
from memlm.index.suffix_array import SuffixArray

LONGEST = 16  # tokens of a text's end that are looked for
MOST_ROWS = 16  # places of a match that are compared
MOST_CHECKED = 256  # places of a match that are looked at for one in a document that is not deleted
BLOCK = LONGEST  # the tokens of a suffix that are compared reach into the next block
AGREED = 8  # tokens that places are compared by


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens of a text, which stand before `row` in its document."""

    row: int
    length: int


class SuffixLookup:
    """Finds the ends of texts in the documents of a suffix array. Any thread may call it."""

    def __init__(self, array: SuffixArray) -> None:
        self._array = array
        self._tokens, self._starts = np.asarray(array.tokens_N).data, array.starts.data
        self._orders = [np.asarray(order).data for order in array.orders]
        has_border = np.zeros(len(array.tokens_N) // BLOCK + 2, np.uint8)  # spares most searches for a document's end
        has_border[array.starts // BLOCK] = 1
        self._has_border = has_border.data

    def longest(
        self, text: Sequence[int], least: int, deleted: Bool[np.ndarray, " docs"] | None = None
    ) -> Match | None:
        """Finds the longest end of a text that a token follows in a document, of at least `least` and at most `LONGEST`
        tokens. Returns None if there is no such end.

        Of several places, the one counts that goes on as the most of them do, token after token. At most `MOST_ROWS`
        are compared, of the first piece with a match of that length. Documents that are `deleted` do not count: a match
        that stands in hardly any other is missed where it is none of `MOST_CHECKED` places. One across the border of
        two pieces may be missed, or found with fewer tokens.
        """
        text = list(text[-min(LONGEST, suffix_array.DEPTH - 1) :])
        best = None
        for piece in range(len(self._orders)):
            shortest = least if best is None else best.length + 1
            best = self._longest_in(piece, text, shortest, deleted) or best
        return best

    def _longest_in(
        self, piece: int, text: list[int], least: int, deleted: Bool[np.ndarray, " docs"] | None
    ) -> Match | None:
        """Bisects the length: where an end stands, each shorter one stands, in the same piece but at its end.
        Few places are compared backward instead.
        """
        length, too_long = least, len(text) + 1
        known, rows, are_all = 0, list[int](), False
        while length < too_long and not are_all:
            found, of_all = self._rows_after(piece, text[-length:], deleted)
            if found:
                known, rows, are_all = length, found, of_all
            elif known:
                too_long = length
            else:
                return None
            length = max(known + 1, min(2 * known, (known + too_long) // 2))
        lengths = [self._common_before(row, text) for row in rows]
        if not rows or (longest := max(lengths)) < least:  # a short text, or a damaged order
            return None
        return Match(self._agreed([row for row, each in zip(rows, lengths, strict=True) if each == longest]), longest)

    def _rows_after(
        self, piece: int, passage: list[int], deleted: Bool[np.ndarray, " docs"] | None
    ) -> tuple[list[int], bool]:
        """The rows behind some places of a passage in the order of their continuations, and whether these are all."""
        order, first = self._orders[piece], self._first_place(piece, passage, len(passage) + 1, 0)
        begin = piece * suffix_array.PIECE_TOKENS + len(passage)
        last = self._first_place(piece, passage, len(passage), first)
        if deleted is None:
            return [begin + order[place] for place in _spread(range(first, last), MOST_ROWS)], last - first <= MOST_ROWS
        rows = begin + np.array([order[place] for place in _spread(range(first, last), MOST_CHECKED)], np.int64)
        documents = np.searchsorted(self._array.starts, rows - 1, side="right") - 1
        live: list[int] = rows[~deleted[np.minimum(documents, len(deleted) - 1)]].tolist()
        return _spread(live, MOST_ROWS), last - first <= MOST_CHECKED and len(live) <= MOST_ROWS

    def _first_place(self, piece: int, passage: list[int], width: int, least: int) -> int:
        """The first place from `least` on whose suffix, cut to `width` tokens, comes behind the passage. With one token
        more than the passage has, these are the suffixes that go on behind it.
        """
        tokens, starts, has_border = self._tokens, self._starts, self._has_border
        order, begin = self._orders[piece], piece * suffix_array.PIECE_TOKENS

        def suffix_at(row: int) -> list[int]:  # `_within`, without the time of a call
            at = begin + row
            suffix: list[int] = tokens[at : at + width].tolist()
            if suffix and (has_border[at // BLOCK] or has_border[at // BLOCK + 1]):
                return suffix[: starts[bisect_right(starts, at)] - at]
            return suffix

        most, reach = len(order), MOST_ROWS
        while least and least + reach < most:  # most passages stand in few places
            if passage < suffix_at(order[least + reach]):
                most = least + reach
            reach *= 8
        return bisect_right(order, passage, least, most, key=suffix_at)

    def _common_before(self, row: int, text: list[int]) -> int:
        """How many of a text's last tokens stand before a row, which is in the same document."""
        if row >= len(self._tokens):
            return 0
        start = self._starts[bisect_right(self._starts, row) - 1]
        before = self._tokens[max(start, row - len(text)) : row].tolist()
        length = 0
        for one, other in zip(reversed(before), reversed(text), strict=False):
            if one != other:
                break
            length += 1
        return length

    def _agreed(self, rows: list[int]) -> int:
        """The row that goes on as the most of them do, by the first token, then by the next one."""
        left = [(row, self._within(row, self._tokens[row : row + AGREED].tolist())) for row in rows]
        for ahead in range(AGREED):
            if all(following == left[0][1] for _, following in left):
                break
            left = [each for each in left if len(each[1]) > ahead]
            nexts = [following[ahead] for _, following in left]
            most = max(nexts, key=nexts.count)
            left = [each for each in left if each[1][ahead] == most]
        return left[0][0]

    def _within(self, row: int, suffix: list[int]) -> list[int]:
        """Cuts the tokens from a row on, at most `BLOCK` + 1, at the end of its document."""
        if self._has_border[row // BLOCK] or self._has_border[row // BLOCK + 1]:
            return suffix[: self._starts[bisect_right(self._starts, row)] - row]
        return suffix


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most some of the values, at even distances."""
    if len(values) <= most:
        return list(values)
    return [values[number * len(values) // most] for number in range(most)]
