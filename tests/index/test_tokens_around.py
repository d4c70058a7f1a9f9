"""The tokens beside entries are those of their documents, read one by one."""

import numpy as np
import pytest
from random_stores import Corpus, add

from memlm.index.store.datastore import Datastore
from memlm.index.store.snapshot import Snapshot

MISSING = 7 << 40


def by_loop(snapshot: Snapshot, entry_id: int, steps: range) -> list[int]:
    """The tokens at some steps from an entry, each looked up in its document."""
    if entry_id in (-1, MISSING):
        return [-1] * len(steps)
    (place,) = snapshot.locate(np.array([entry_id]))
    tokens = snapshot.tokens(place.document_id).tolist()
    offsets = [place.token_offset + step for step in steps]
    return [tokens[offset] if 0 <= offset < len(tokens) else -1 for offset in offsets]


@pytest.mark.parametrize("count", [1, 4, 70])
def test_tokens_before_and_after_entries_are_those_of_a_loop(make, corpus, tmp_path, count):
    make(corpus).close()
    add(tmp_path / "store", Corpus(2, num_documents=5, prefix="more"), index="auto")
    with Datastore.open(tmp_path / "store") as store:
        snapshot = store.snapshot
        assert len(snapshot.segments) == 2
        every = [segment.base_id + np.arange(segment.record.entries) for segment in snapshot.segments]
        ids = np.random.default_rng(0).permutation(np.concatenate([*every, [-1, MISSING]]))
        after, before = snapshot.tokens_after(ids, count), snapshot.tokens_before(ids, count)
        assert after.tolist() == [by_loop(snapshot, each, range(1, count + 1)) for each in ids.tolist()]
        assert before.tolist() == [by_loop(snapshot, each, range(-count, 0)) for each in ids.tolist()]
        assert snapshot.tokens_after(ids[:0], count).shape == (0, count)
