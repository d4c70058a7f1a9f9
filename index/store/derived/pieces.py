"""The documents of a segment, cut into overlapping pieces of text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64

from memlm.index.store.segment import Segment

DecodeBytes: TypeAlias = Callable[[list[int]], bytes]

_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))


class Pieces:
    """Pieces of at most `num_tokens` tokens, each of which begins with the last `overlap` tokens of the one before it
    in its document. They are numbered in the order of the documents. A document without tokens has none.
    """

    def __init__(self, segment: Segment, decode_bytes: DecodeBytes, num_tokens: int, overlap: int) -> None:
        self._segment, self._decode_bytes = segment, decode_bytes
        self._num_tokens, self._step = num_tokens, num_tokens - overlap
        sizes = np.diff(segment.starts)
        counts = np.where(sizes > 0, np.maximum(1, -(-(sizes - overlap) // self._step)), 0)
        self._first_pieces: Int64[np.ndarray, " docs+1"] = np.concatenate([[0], counts.cumsum()])

    def __len__(self) -> int:
        return int(self._first_pieces[-1])

    def documents(self, pieces: Int64[np.ndarray, " P"]) -> Int64[np.ndarray, " P"]:
        """The row of the document of each piece."""
        return np.searchsorted(self._first_pieces, pieces, side="right") - 1

    def rows(self, piece: int) -> tuple[int, int]:
        """The first entry row of a piece, and the end of its rows."""
        document = int(self.documents(np.array(piece)))
        first, last = self._segment.starts[document : document + 2].tolist()
        begin = first + (piece - int(self._first_pieces[document])) * self._step
        return begin, min(begin + self._num_tokens, last)

    def text(self, piece: int) -> tuple[str, int, int]:
        """The text of a piece without the words that its ends cut, the first entry row of the piece, and how many
        characters were left out before the text.
        """
        begin, end = self.rows(piece)
        document = int(self.documents(np.array(piece)))
        first, last = self._segment.starts[document : document + 2].tolist()
        content = self._decode_bytes(self._segment.values_N[begin:end].tolist())
        text = content.lstrip(_CONTINUATION_BYTES).decode(errors="replace")  # no character begins with them
        cut = 0
        if begin > first and (space := re.search(r"\s", text[: len(text) // 8])):
            cut = space.start()
        if end < last and (space := re.search(r"\s\S*\Z", text[-len(text) // 8 :])):
            text = text[: len(text) - len(space.group())]
        return text[cut:], begin, cut
