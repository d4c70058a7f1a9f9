"""Long texts are tokenized in pieces, so that any length needs little RAM: the library takes 130 bytes a character.

A text is cut where that changes no token: before a space or a line end behind a word, or behind a sentence without one.
Whether a place will do is asked of the tokenizer itself, since some join signs and line ends, and some put a space
before every text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64

Ids: TypeAlias = Int64[np.ndarray, " n"]
Encode: TypeAlias = Callable[[Sequence[str]], list[Ids]]

PIECE_CHARACTERS = 1 << 17
PIECES_AT_ONCE = 4  # on as many cores
AROUND = 128  # characters to each side of a place, which decide how it is tokenized
MOST_TRIED = 16
_PLACES = re.compile(r"(?<=\S)(?=\s)|(?<=[。！？])(?=\S)")


def encode_in_pieces(text: str, encode: Encode, *, drops_space: bool) -> Ids:
    """The tokens of a text, as `encode` gives them. With `drops_space`, `encode` puts a space before every text, so
    that a piece has to begin without its own.
    """
    bounds = [*_bounds_of(text, encode, drops_space=drops_space), len(text)]
    pieces = [_piece(text, begin, end, drops_space=drops_space) for begin, end in pairwise(bounds)]
    batches = (pieces[begin : begin + PIECES_AT_ONCE] for begin in range(0, len(pieces), PIECES_AT_ONCE))
    return np.concatenate([ids for batch in batches for ids in encode(batch)])


def _bounds_of(text: str, encode: Encode, *, drops_space: bool) -> Iterator[int]:
    """Yields where the pieces begin."""
    begin, end = 0, PIECE_CHARACTERS
    yield begin
    while end < len(text):
        places = (found.start() for found in _PLACES.finditer(text, end, end + PIECE_CHARACTERS))
        tried = islice(places, MOST_TRIED)
        begin = next((place for place in tried if _is_seam(text, place, encode, drops_space=drops_space)), 0)
        if begin:
            yield begin
        end = (begin or end) + PIECE_CHARACTERS


def _is_seam(text: str, place: int, encode: Encode, *, drops_space: bool) -> bool:
    """Whether the text around a place has the same tokens in two pieces."""
    begin, end = max(0, place - AROUND), place + AROUND
    whole, before, after = encode(
        [text[begin:end], text[begin:place], _piece(text, place, end, drops_space=drops_space)]
    )
    return np.array_equal(whole, np.concatenate([before, after]))


def _piece(text: str, begin: int, end: int, *, drops_space: bool) -> str:
    return text[begin + (begin > 0 and drops_space and text[begin] == " ") : end]
