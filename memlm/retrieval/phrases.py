"""A phrase -> the places of a datastore's texts where its words follow each other."""

from __future__ import annotations

from functools import partial

import numpy as np
from jaxtyping import Int64

from memlm.base.phrases import MOST_WORDS, phrase_places, words_of
from memlm.base.steps import Offload, Steps
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.words import PIECE_TOKENS, SegmentWords
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.segment import Segment
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.segment_cache import SegmentCache


class Phrases:
    """Finds phrases in one datastore. The first search indexes the words of each segment, a piece at a time: one that
    is cancelled leaves its pieces to the next. `words` are those of the segments.
    """

    def __init__(self, datastore: Datastore, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.words = tokenizer, SegmentCache[SegmentWords](datastore)

    def find(self, snapshot: Snapshot, text: str, k: int, only: DocumentFilter) -> Steps[Int64[np.ndarray, " K"]]:
        """Returns the ids of the first k entries, in the order of the documents, whose token begins the phrase.

        Case, punctuation and line ends do not count. A text without a letter or a digit is nowhere. Raises InvalidInput
        for one of more than `MOST_WORDS` words.
        """
        phrase = words_of(text)
        if len(phrase) > MOST_WORDS:
            raise InvalidInput(
                f"text has {len(phrase)} words; a phrase has at most {MOST_WORDS}: give a part of it", field="text"
            )
        if not phrase:
            return np.empty(0, np.int64)
        segments = [(segment, self._words_of(snapshot, segment)) for segment in snapshot.segments]
        for _, words in segments:
            while not words.is_complete:
                yield Offload(words.build, is_long=True)
        return (yield Offload(partial(self._places, segments, phrase, k, only)))

    def _words_of(self, snapshot: Snapshot, segment: Segment) -> SegmentWords:
        path, decode_bytes = snapshot.path, self._tokenizer.decode_bytes
        return self.words.get(segment, lambda: SegmentWords(path, segment, decode_bytes))

    def _places(
        self, segments: list[tuple[Segment, SegmentWords]], phrase: list[str], k: int, only: DocumentFilter
    ) -> Int64[np.ndarray, " K"]:
        ids = list[int]()
        for segment, words in segments:
            wanted = ~segment.deleted_mask
            if only:
                wanted &= segment.chosen(only)
            last = -1  # pieces overlap
            for document, piece in words.pieces(phrase):
                if not wanted[document]:
                    continue
                text, begin, cut = words.text(piece)
                tokens = segment.values_N[begin : begin + PIECE_TOKENS]
                ends = self._tokenizer.characters[tokens].cumsum()
                for character, _ in phrase_places(text, phrase):
                    row = begin + int(np.searchsorted(ends, cut + character, side="right"))
                    if row > last:
                        ids.append(segment.base_id + row)
                        last = row
                        if len(ids) == k:
                            return np.array(ids)
        return np.array(ids, np.int64)
