"""Passages of a segment that stand in it more than once, as those of a document under two names."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from jaxtyping import Int64

from memlm.index.store.derived.cuts import DOCUMENTS_AT_ONCE, SegmentCuts
from memlm.index.store.derived.text_blocks import is_markdown
from memlm.index.store.segment import Segment


def twins_of(segment: Segment, cuts: SegmentCuts) -> Int64[np.ndarray, " P"]:
    """For each passage, the one of the same number in the first document of the same title and tokens that is cut as
    its own is, which is likely to have the same text. -1 where none is earlier. Documents with a number of tokens of
    their own are not read.
    """
    first_D = np.searchsorted(cuts.documents_P, np.arange(len(segment.starts)))  # passage of each document, and the end
    twin_D, firsts = np.full(len(segment.starts) - 1, -1), dict[bytes, int]()
    sizes_D = np.diff(segment.starts)
    sizes, counts = np.unique(sizes_D, return_counts=True)
    shared = np.flatnonzero(np.isin(sizes_D, sizes[counts > 1])).tolist()
    for begin in range(0, len(shared), DOCUMENTS_AT_ONCE):
        for row, document in sorted(segment.documents.at_each(shared[begin : begin + DOCUMENTS_AT_ONCE]).items()):
            values_N = segment.values_N[segment.starts[row] : segment.starts[row + 1]]
            about = document.title, is_markdown(document.id, document.metadata), len(values_N)
            content = repr(about).encode() + values_N.tobytes()
            first = firsts.setdefault(blake2b(content, digest_size=16).digest(), row)
            twin_D[row] = first if first < row else -1
    document_P = cuts.documents_P
    number_P, twin_P = np.arange(len(document_P)) - first_D[document_P], twin_D[document_P]
    found_P = first_D[twin_P] + number_P
    return np.where((twin_P >= 0) & (found_P < first_D[twin_P + 1]), found_P, -1)
