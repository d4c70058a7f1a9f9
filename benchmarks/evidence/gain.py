"""Evidence: what memory gains on text, by domain."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.evidence.domains import (
    ADAPTIVE,
    BOTH,
    CACHE,
    ONE_LAM,
    WAYS,
    Prepared,
    differences,
    nats_less,
    nats_of,
    read_test,
)
from benchmarks.evidence.texts import overlap
from benchmarks.per_token import per_token
from memlm.base.progress import Progress
from memlm.index.store.datastore import Datastore
from memlm.model.files.checkpoint import Checkpoint

PAIRS = ((ADAPTIVE, ONE_LAM), (BOTH, ADAPTIVE), (BOTH, CACHE))


def gain_by_domain(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each way: nats fewer than the model alone, and the overlap of the test documents with the store. The
    rows of `gain-by-domain-differences` compare two ways.
    """
    texts = read_test(checkpoint, prepared, progress)
    shares = overlap([text.document.text for text in texts], [each.text for each in prepared.domain.stored])
    mean, error = per_token(np.array(shares), np.ones(len(shares)))
    tokens = sum(len(text.read.targets_N) for text in texts)
    with Datastore.open(prepared.store) as datastore:
        entries = datastore.snapshot.num_entries
    words = {"text": prepared.domain.name, "entries": entries, "tokens": tokens}
    same = {"documents": len(texts), "overlap_share": mean, "overlap_share_error": error}
    rows = [{**words, "way": way, **nats_less(texts, way), **same} for way in WAYS]
    sums, sizes_D = {way: nats_of(texts, way) for way in WAYS}, np.array([len(text.read.targets_N) for text in texts])
    return rows + differences("gain-by-domain", prepared.domain.name, sums, sizes_D, PAIRS)
