"""The wall clock orders nothing in a store: a manifest says when it was made, and only its number counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from random_stores import IVF, Corpus, add, build

from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore


def test_a_clock_that_goes_back_between_commits_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hours = tmp_path / "s", iter((50, 3, 0, -7, -2, 4))
    now_s, created = time.time(), list[float]()

    def turn_clock() -> None:
        hour = next(hours)
        monkeypatch.setattr(time, "time", lambda: now_s + 3600 * hour)

    turn_clock()
    build(path, Corpus(1), IVF).close()
    with Datastore.open(path) as reader:
        turn_clock()
        with Datastore.open(path) as store:
            store.delete(["doc-0"])
        assert reader.refresh()
        created.append(reader.manifest.created)
        assert not reader.snapshot.has_document("doc-0")
        turn_clock()
        add(path, Corpus(2, prefix="more"))
        turn_clock()
        compact(path)
        turn_clock()
        assert reader.refresh()
        reader.delete(["more-0"])
        created.append(reader.manifest.created)
        assert (reader.snapshot.num_documents, len(reader.snapshot.segments), reader.manifest.number) == (22, 1, 5)
    assert created[1] < created[0] - 3600
    with Datastore.open(path) as store:
        assert not store.snapshot.has_document("more-0")
        assert store.snapshot.verify() == []
