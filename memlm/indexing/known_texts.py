"""Texts that a datastore has more than once: which of them have keys already, so that the model reads each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np

from memlm.index.store.segment import Segment


class StoredText(NamedTuple):
    """The text of a document, in a row of a segment."""

    segment: Segment
    row: int

    @property
    def num_tokens(self) -> int:
        """Tokens of it, each of which is an entry."""
        return int(self.segment.starts[self.row + 1] - self.segment.starts[self.row])

    @property
    def digest(self) -> bytes:
        """Equal for equal tokens, and for others only by an accident that cannot be brought about."""
        begin, end = self.segment.starts[self.row : self.row + 2]
        return blake2b(self.segment.values_N[begin:end].tobytes(), digest_size=16).digest()


Source: TypeAlias = StoredText | int  # a document with keys, or the number of an earlier text


def sources_of(texts: Sequence[StoredText], segments: Sequence[Segment]) -> list[Source | None]:
    """Where the keys of each text can be taken from: a document of the same tokens in one of the segments, if that has
    keys, or else the first such of `texts`, by its number. None for a text to be read by the model.

    A deleted document is as good as another one, because keys follow from the tokens alone. Texts whose number of
    tokens is their own are not read.
    """
    sizes = np.array([text.num_tokens for text in texts], np.int64)
    stored = [*_stored(segments, sizes)]
    values, counts = np.unique([*sizes, *(text.num_tokens for text in stored)], return_counts=True)
    shared_sizes = {*values[counts > 1].tolist()}
    digests = [text.digest if size in shared_sizes else None for text, size in zip(texts, sizes.tolist(), strict=True)]
    wanted, known = {*digests}, dict[bytes, Source]()
    for text in stored:
        if (stored_digest := text.digest) in wanted:
            known.setdefault(stored_digest, text)
    found = list[Source | None]()
    for number, digest in enumerate(digests):
        found.append(None if digest is None else known.get(digest))
        if digest is not None:
            known.setdefault(digest, number)
    return found


def _stored(segments: Sequence[Segment], sizes: np.ndarray) -> Iterator[StoredText]:
    """The documents with keys that have as many tokens as some text."""
    for segment in segments:
        if segment.record.is_keyed and segment.has_keys:
            rows = np.flatnonzero(np.isin(np.diff(segment.starts), sizes))
            yield from (StoredText(segment, row) for row in rows.tolist())
