"""A text's end that stands in a document, and how the document goes on: a draft of the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memlm.index.store.segment import Segment
from memlm.index.suffix_lookup import Match

SHORTEST_PASSAGE = 3  # tokens; shorter ends stand in most documents by chance


@dataclass(frozen=True, slots=True)
class Passage:
    """The last `length` tokens of a text, which stand before `row` of a segment. Their document ends at row `end`."""

    segment: Segment
    row: int
    end: int
    length: int

    @classmethod
    def of(cls, segment: Segment, match: Match) -> Passage:
        """The passage of a match in a segment's documents."""
        end = segment.starts[segment.document_at(np.array(match.row)) + 1]
        return cls(segment, match.row, int(end), match.length)

    def tokens(self, count: int) -> list[int]:
        """At most `count` tokens that follow in the document. Fewer at its end."""
        following: list[int] = self.segment.values_N[self.row : min(self.row + count, self.end)].tolist()
        return following

    def after(self, tokens: Sequence[int]) -> Passage | None:
        """The passage with further tokens of the text. None if the document goes on with others."""
        if self.tokens(len(tokens)) != list(tokens):
            return None
        return replace(self, row=self.row + len(tokens), length=self.length + len(tokens))
