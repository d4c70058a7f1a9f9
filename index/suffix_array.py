"""Documents' suffixes in lexicographic order, in which verbatim passages are found by binary search.

A suffix array (Manber and Myers 1993) of the tokens of many documents, sorted by the first `DEPTH` tokens of each
suffix. A suffix ends with its document. Tokens are sorted in pieces, each with an order of its own, so that neither
many tokens nor a long document need more memory than one piece.

Every passage that is found was compared with the tokens themselves: a damaged order hides passages, and makes none up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt32

Order: TypeAlias = UInt32[np.ndarray, " N"]
Tokens: TypeAlias = Integer[np.ndarray, " N"]
Wanted: TypeAlias = Bool[np.ndarray, " docs"]

PIECE_TOKENS = 1 << 22  # sorted in some 150 MB
DEPTH = 64
SHALLOW = 8  # tokens that decide most comparisons
MOST_TIED = 1024  # suffixes of a piece that share DEPTH tokens, of which the longest common passage is looked for
ROWS_AT_ONCE = 1 << 14
END, PAST_TEXT = -1, -2  # behind a document's last token, and behind the text that is looked for: in this order


def sorted_piece(tokens_N: Tokens, starts: Int64[np.ndarray, " docs+1"], piece: int) -> Order:
    """Sorts the suffixes that begin in one piece. Returns their rows within it, in order, equal ones by their rows.

    Prefix doubling: suffixes that are ranked by their first h tokens are ranked by 2h with the ranks h tokens further.
    Only those that are still equal to others take part (Larsson and Sadakane 1999): of text a half after 4 tokens. The
    next piece's first tokens are ranked as well, to which the last suffixes go on.
    """
    begin = piece * PIECE_TOKENS
    num_rows = min(PIECE_TOKENS, len(tokens_N) - begin)
    tokens_R = tokens_N[begin : begin + PIECE_TOKENS + DEPTH].astype(np.uint64) + np.uint64(1)  # 0: behind the end
    bounds = np.clip(starts - begin, 0, len(tokens_R)).astype(np.int32)
    ends_R = np.repeat(bounds[1:], np.diff(bounds))
    bits = int(tokens_R.max()).bit_length()
    length = min(4 if 4 * bits <= 64 else 2, DEPTH)
    key_R = tokens_R.copy()
    for further in range(1, length):
        key_R <<= np.uint64(bits)
        key_R[:-further] |= np.where(np.arange(further, len(key_R)) < ends_R[:-further], tokens_R[further:], 0)
    del tokens_R
    tied = rows = np.arange(len(key_R), dtype=np.int32)
    order, rank_R = np.empty_like(rows), np.empty_like(rows)
    while True:
        sorted_ = np.argsort(key_R)
        key_R, rows = key_R[sorted_], rows[sorted_]
        is_first = np.concatenate([[True], key_R[1:] != key_R[:-1]])
        firsts = np.flatnonzero(is_first)
        order[tied] = rows
        rank_R[rows] = np.repeat(tied[firsts] + 1, np.diff(firsts, append=len(rows)))
        tied = tied[~(is_first & np.append(is_first[1:], True))]
        rows = order[tied]
        if length >= DEPTH or not len(tied):
            break
        key_R = rank_R[rows].astype(np.uint64) << np.uint64(32)
        further = rows + length
        goes_on = further < ends_R[rows]
        key_R[goes_on] |= rank_R[further[goes_on]].astype(np.uint64)
        length *= 2
    order[tied] = rows[np.lexsort((rows, rank_R[rows]))]
    return order[order < num_rows].astype(np.uint32)


class SuffixArray:
    """Sorted documents. `tokens_N` are those of all, and `starts` their first rows and the number of all rows.

    `wanted` marks the documents in which a method looks.
    """

    def __init__(self, tokens_N: Tokens, starts: Int64[np.ndarray, " docs+1"], orders: Sequence[Order]) -> None:
        """Takes the order of each piece."""
        self.tokens_N, self.starts, self.orders = tokens_N, starts, tuple(orders)

    def longest(self, text_T: Int64[np.ndarray, " T"], wanted: Wanted, least: int) -> Int64[np.ndarray, " T"]:
        """Returns how many tokens the longest passage has that begins at each position of a text and stands in a
        document. It is 0 for less than `least`, and never above `DEPTH`.
        """
        lengths_T = np.zeros(len(text_T), np.int64)
        begins_T, depths_T = np.arange(len(text_T)), np.full(len(text_T), DEPTH)
        for piece in range(len(self.orders)):
            places_T = self._bounds(piece, text_T, begins_T, depths_T, after=False)
            before_T = self._common_at(piece, places_T - 1, text_T, begins_T)
            here_T = self._common_at(piece, places_T, text_T, begins_T)
            found_T = np.maximum(before_T, here_T)
            found_T[found_T < least] = 0
            if not wanted.all():
                nearest_T = np.where(here_T >= before_T, places_T, places_T - 1)
                unsure_T = (found_T > 0) & (found_T > lengths_T)
                unsure_T[unsure_T] = ~self._is_wanted(piece, nearest_T[unsure_T], wanted)
                for begin in np.flatnonzero(unsure_T).tolist():
                    found_T[begin] = self._longest_wanted(piece, text_T, begin, int(places_T[begin]), wanted, least)
            np.maximum(lengths_T, found_T, out=lengths_T)
        return lengths_T

    def rows(
        self,
        text_T: Int64[np.ndarray, " T"],
        begins_Q: Int64[np.ndarray, " Q"],
        lengths_Q: Int64[np.ndarray, " Q"],
        wanted: Wanted,
    ) -> list[Iterator[Int64[np.ndarray, " R"]]]:
        """For each of some passages of a text, an iterator of the rows where it begins, some at a time."""
        depths_Q = np.minimum(lengths_Q, DEPTH)
        ranges = list[list[tuple[int, int]]]()
        for piece in range(len(self.orders)):
            lows, highs = (self._bounds(piece, text_T, begins_Q, depths_Q, after=after) for after in (False, True))
            ranges.append(list(zip(lows.tolist(), highs.tolist(), strict=True)))
        passages = [text_T[begin : begin + length] for begin, length in zip(begins_Q, lengths_Q, strict=True)]
        return [
            self._rows_between(passage, [piece[number] for piece in ranges], wanted)
            for number, passage in enumerate(passages)
        ]

    def _rows_between(
        self, passage_L: Int64[np.ndarray, " L"], ranges: list[tuple[int, int]], wanted: Wanted
    ) -> Iterator[Int64[np.ndarray, " R"]]:
        """Yields the rows of a passage, given the places of its first `DEPTH` tokens in each piece."""
        for piece, (low, high) in enumerate(ranges):
            for place in range(low, high, ROWS_AT_ONCE):
                rows = self._rows(piece, np.arange(place, min(place + ROWS_AT_ONCE, high)))
                rows = rows[wanted[self._documents(rows)]]
                if len(passage_L) > DEPTH:
                    rows = rows[self.common(rows, passage_L) == len(passage_L)]
                if len(rows):
                    yield rows

    def extended(self, text_T: Int64[np.ndarray, " T"], begin: int, wanted: Wanted) -> tuple[int, int]:
        """Extends a passage of `DEPTH` tokens to the right, and then to the left. Returns its begin and end."""
        first, last = begin, begin + DEPTH
        (places,) = self.rows(text_T, np.array([begin]), np.array([DEPTH]), wanted)
        for rows in places:
            after_R = self.common(rows[:MOST_TIED], text_T[begin:])
            row, end = int(rows[after_R.argmax()]), begin + int(after_R.max())
            if end > last:
                first, last = begin, end
                start = int(self.starts[self._documents(np.array([row]))[0]])
                while first > 0 and row - begin + first > start:
                    if self.tokens_N[row - begin + first - 1] != text_T[first - 1]:
                        break
                    first -= 1
        return first, last

    def common(self, rows: Int64[np.ndarray, " R"], passage_L: Int64[np.ndarray, " L"]) -> Int64[np.ndarray, " R"]:
        """How many tokens of a passage stand at each row, within its document."""
        common_R, places = np.zeros(len(rows), np.int64), np.arange(len(rows))
        while len(places):
            begins = common_R[places]
            more = self._common(rows[places], begins, passage_L, begins, DEPTH)
            common_R[places] += more
            places = places[more == DEPTH]
        return common_R

    def _longest_wanted(
        self, piece: int, text_T: Int64[np.ndarray, " T"], begin: int, place: int, wanted: Wanted, least: int
    ) -> int:
        """The longest passage from a begin in a wanted document, given the place where the text from there would stand.
        The nearest suffix to each side has it, because the farther one is, the less it has in common.
        """
        longest = 0
        for side in (-1, 1):
            first = place - 1 if side < 0 else place
            chunk, num_places = 16, len(self.orders[piece])
            while 0 <= first < num_places:
                places = np.arange(first, first + side * chunk, side)
                places = places[(places >= 0) & (places < num_places)]
                found = np.flatnonzero(self._is_wanted(piece, places, wanted))
                last = places[found[:1]] if len(found) else places[-1:]
                common = int(self._common_at(piece, last, text_T, np.array([begin]))[0])
                if len(found) or common < least:
                    longest = max(longest, common if len(found) else 0)
                    break
                first, chunk = int(places[-1]) + side, min(2 * chunk, ROWS_AT_ONCE)
        return longest if longest >= least else 0

    def _bounds(
        self,
        piece: int,
        text_T: Int64[np.ndarray, " T"],
        begins_Q: Int64[np.ndarray, " Q"],
        depths_Q: Int64[np.ndarray, " Q"],
        *,
        after: bool,
    ) -> Int64[np.ndarray, " Q"]:
        """The first place whose suffix is not before the passage of `depths_Q` tokens from each begin, or with `after`
        the first one whose suffix comes behind all that begin with it.
        """
        low_Q, high_Q = np.zeros(len(begins_Q), np.int64), np.full(len(begins_Q), len(self.orders[piece]))
        while (is_open := low_Q < high_Q).any():
            middle_Q = (low_Q + high_Q) // 2
            rows, begins, depths = self._rows(piece, middle_Q[is_open]), begins_Q[is_open], depths_Q[is_open]
            common = self._common(rows, 0, text_T, begins, SHALLOW)
            if (deep := (common == SHALLOW) & (depths > SHALLOW)).any():
                common[deep] = self._common(rows[deep], 0, text_T, begins[deep], DEPTH)
            goes_right = self._tokens(rows, common) < _at(text_T, begins + common)
            goes_right[common >= depths] = after
            low_Q[is_open] = np.where(goes_right, middle_Q[is_open] + 1, low_Q[is_open])
            high_Q[is_open] = np.where(goes_right, high_Q[is_open], middle_Q[is_open])
        return low_Q

    def _common_at(
        self,
        piece: int,
        places_Q: Int64[np.ndarray, " Q"],
        text_T: Int64[np.ndarray, " T"],
        begins_Q: Int64[np.ndarray, " Q"],
    ) -> Int64[np.ndarray, " Q"]:
        """How many tokens of the text the suffixes at some places begin with, at most `DEPTH`. 0 outside the piece."""
        inside_Q = (places_Q >= 0) & (places_Q < len(self.orders[piece]))
        rows = self._rows(piece, np.where(inside_Q, places_Q, 0))
        return np.where(inside_Q, self._common(rows, 0, text_T, begins_Q, DEPTH), 0)

    def _common(
        self,
        rows_Q: Int64[np.ndarray, " Q"],
        offsets_Q: Int64[np.ndarray, " Q"] | int,
        text_T: Int64[np.ndarray, " T"],
        begins_Q: Int64[np.ndarray, " Q"],
        width: int,
    ) -> Int64[np.ndarray, " Q"]:
        """How many of `width` tokens agree, of the suffixes from an offset on and of the text from a begin on."""
        steps_1W = np.arange(width)[None]
        offsets_QW = np.asarray(offsets_Q).reshape(-1, 1) + steps_1W
        differ_QW = self._tokens(rows_Q[:, None], offsets_QW) != _at(text_T, begins_Q[:, None] + steps_1W)
        return np.where(differ_QW.any(axis=1), differ_QW.argmax(axis=1), width)

    def _tokens(self, rows: Int64[np.ndarray, "*S"], offsets: Int64[np.ndarray, "*S"]) -> Int64[np.ndarray, "*S"]:
        """The tokens of suffixes at some offsets, `END` behind their documents."""
        ends = self.starts[self._documents(rows) + 1]
        places = rows + offsets
        return np.where(places < ends, self.tokens_N[np.minimum(places, len(self.tokens_N) - 1)], END)

    def _rows(self, piece: int, places: Int64[np.ndarray, " Q"]) -> Int64[np.ndarray, " Q"]:
        order = self.orders[piece]
        return piece * PIECE_TOKENS + np.minimum(order[places].astype(np.int64), len(order) - 1)

    def _is_wanted(self, piece: int, places: Int64[np.ndarray, " Q"], wanted: Wanted) -> Bool[np.ndarray, " Q"]:
        return wanted[self._documents(self._rows(piece, places))]

    def _documents(self, rows: Int64[np.ndarray, "*S"]) -> Int64[np.ndarray, "*S"]:
        return np.searchsorted(self.starts, rows, side="right") - 1


def _at(text_T: Int64[np.ndarray, " T"], places: Int64[np.ndarray, "*S"]) -> Int64[np.ndarray, "*S"]:
    """The tokens of a text, `PAST_TEXT` behind its end."""
    return np.where(places < len(text_T), text_T[np.minimum(places, len(text_T) - 1)], PAST_TEXT)
