"""A datastore -> the vectors of its passages, by which they are found by meaning."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from memlm.base.progress import Progress, silent
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Incompatible
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.passage_vectors import PassageEncoder, SegmentVectors
from memlm.index.store.segment import Segment

AT_ONCE = 256  # passages: of similar length they are read together
SAMPLE = 64  # passages, after which the time of the others is foretold


@dataclass(frozen=True, slots=True)
class MadeVectors:
    """What `make_vectors` did: of all `passages`, `made` are new, `missing` have no vector yet, which takes `missing_s`
    seconds.
    """

    passages: int
    made: int
    missing: int
    missing_s: float


def make_vectors(
    store: str | Path,
    tokenizer: Tokenizer,
    encoder: PassageEncoder,
    *,
    within_s: float | None = None,
    progress: Progress = silent,
) -> MadeVectors:
    """Makes the vectors that passages of a datastore lack. They are kept as they are made: after an interruption or a
    kill, the next call goes on from there, and searches use those that are there. With `within_s`, it stops as soon as
    the rest is foretold to take longer. Where another process makes those of a segment, they are left to it. Deleted
    documents have vectors until their segment is compacted. Raises Incompatible for another tokenizer than the store's.
    """
    with closing(Datastore.open(store)) as datastore:
        snapshot = datastore.snapshot
        if snapshot.manifest.spec.tokenizer_fingerprint != tokenizer.fingerprint:
            raise Incompatible(f"the datastore {store} was built with another tokenizer; give the model that built it")
        parts = [_vectors(snapshot.path, each, tokenizer, encoder) for each in snapshot.segments]
        total, before = sum(map(len, parts)), sum(len(part.vectors_PD) for part in parts)
        begin_s, made, missing_s = time.monotonic(), 0, 0.0
        for part in parts:
            while part.build(AT_ONCE if made else SAMPLE):
                made = sum(len(each.vectors_PD) for each in parts) - before
                progress("make vectors", before + made, total)
                missing_s = (total - before - made) * (time.monotonic() - begin_s) / max(1, made)
                if within_s is not None and missing_s > within_s:
                    return MadeVectors(total, made, total - before - made, missing_s)
        return MadeVectors(total, made, total - sum(len(part.vectors_PD) for part in parts), 0.0)


def _vectors(store: Path, segment: Segment, tokenizer: Tokenizer, encoder: PassageEncoder) -> SegmentVectors:
    cuts = SegmentCuts(store, segment, tokenizer.decode_bytes)
    while not cuts.is_complete:
        cuts.build()
    return SegmentVectors(store, segment, cuts, encoder)
