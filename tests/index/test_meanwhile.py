"""While somebody adds to a store or compacts it, others delete and tune: what they committed stands."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crashes import crash_at_every_step
from random_stores import DEFAULTS, IVF, Corpus, add, build, fill, spec

from memlm.errors import Locked
from memlm.index.store import lock
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import commit_lock
from memlm.index.store.manifest import KnnDefaults
from memlm.index.store.writer import StoreWriter

DOCS, MORE = Corpus(1), Corpus(2, prefix="more")
TUNED = KnnDefaults(k=3, lam=0.5, temperature=2.0, tuned_on="text")


def two_segments(path: Path) -> Path:
    build(path, DOCS, IVF).close()
    add(path, MORE)
    return path


def delete(path: Path, *names: str) -> None:
    with Datastore.open(path) as store:
        store.delete(names)


def before_the_commit(patch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Has something done by others when all is written and nothing is committed."""
    commit = StoreWriter.commit

    def late(self: StoreWriter, *args: object, **options: object) -> Datastore:
        work()
        return commit(self, *args, **options)  # type: ignore[arg-type]

    patch.setattr(StoreWriter, "commit", late)


def check_gone(path: Path, corpus: Corpus, *names: str) -> None:
    """Those documents are not there, by no list and by no search; and all is sound."""
    with Datastore.open(path) as store:
        assert not {document.id for document in store.snapshot.documents()} & set(names)
        gone_N = np.isin(corpus.owner_N, [corpus.names.index(name) for name in names])
        found = store.search(corpus.keys_ND[gone_N], 8, nprobe=4)
        assert not {place.document_id for row in found.ids_QK for place in store.snapshot.locate(row[row >= 0])} & set(
            names
        )
        assert store.snapshot.verify() == []


def test_what_is_deleted_while_documents_are_added_stays_deleted(tmp_path: Path) -> None:
    build(tmp_path, DOCS, IVF).close()
    with StoreWriter.extend(tmp_path, spec(IVF)) as writer:
        fill(writer, MORE)
        delete(tmp_path, "doc-2", "doc-5")
        with pytest.raises(Locked):
            StoreWriter.extend(tmp_path, spec(IVF))
        with writer.commit(defaults=DEFAULTS) as store:
            assert (store.snapshot.num_documents, store.snapshot.num_deleted_documents) == (22, 2)
            assert {document.id for document in store.snapshot.documents()} >= set(MORE.names)
    check_gone(tmp_path, DOCS, "doc-2", "doc-5")


def test_what_is_replaced_may_be_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, DOCS, IVF).close()
    before_the_commit(monkeypatch, lambda: delete(tmp_path, "doc-1", "doc-7"))
    new = Corpus(9, num_documents=3)
    add(tmp_path, new, replace=True)
    with Datastore.open(tmp_path) as store:
        assert (store.snapshot.num_documents, store.snapshot.num_deleted_documents) == (11, 4)
        assert store.snapshot.tokens("doc-1").tolist() == new.values_N[new.owner_N == 1].tolist()
        assert not store.snapshot.has_document("doc-7")
        assert store.snapshot.verify() == []


def test_what_is_deleted_while_all_is_compacted_stays_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_segments(tmp_path / "s")
    delete(tmp_path / "s", "doc-0")
    with monkeypatch.context() as patch:
        before_the_commit(patch, lambda: delete(tmp_path / "s", "doc-3", "more-4"))
        compact(tmp_path / "s")
    with Datastore.open(tmp_path / "s") as store:
        assert len(store.snapshot.segments) == 1
        assert (store.snapshot.num_documents, store.snapshot.num_deleted_documents) == (21, 2)
    check_gone(tmp_path / "s", DOCS, "doc-0", "doc-3")
    check_gone(tmp_path / "s", MORE, "more-4")
    assert compact(tmp_path / "s").deleted_documents == 2
    with Datastore.open(tmp_path / "s") as store:
        assert (store.snapshot.num_documents, store.snapshot.num_deleted_documents) == (21, 0)


def test_all_may_be_deleted_while_it_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_segments(tmp_path)
    before_the_commit(monkeypatch, lambda: delete(tmp_path, *DOCS.names, *MORE.names))
    compact(tmp_path)
    with Datastore.open(tmp_path) as store:
        assert store.snapshot.num_documents == store.snapshot.num_entries == 0
        assert (store.search(DOCS.keys_ND[:2], 3, nprobe=4).ids_QK == -1).all()


@pytest.mark.parametrize("work", [lambda path: add(path, Corpus(3, prefix="late")), compact])
def test_what_is_tuned_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], object]
) -> None:
    two_segments(tmp_path)

    def tune() -> None:
        with Datastore.open(tmp_path) as store:
            store.save_defaults(TUNED)

    before_the_commit(monkeypatch, tune)
    work(tmp_path)
    with Datastore.open(tmp_path) as store:
        assert store.snapshot.defaults == TUNED


@pytest.mark.crash
def test_a_crash_at_every_step_beside_a_deletion_brings_nothing_back(tmp_path: Path) -> None:
    """And the next run ends what was begun."""
    original = two_segments(tmp_path / "s")

    def work(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            before_the_commit(patch, lambda: delete(path, "doc-3"))
            compact(path)

    late = step = 0
    for step, path in crash_at_every_step(work, original, tmp_path):
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            is_deleted = not store.snapshot.has_document("doc-3")
        compact(path)
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            names = {*DOCS.names, *MORE.names} - ({"doc-3"} if is_deleted else set())
            assert {document.id for document in store.snapshot.documents()} == names, f"step {step}"
        late += is_deleted
    assert 10 < late < step


def test_who_deletes_waits_for_a_commit_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, DOCS, IVF).close()
    with commit_lock(tmp_path):
        waiting = threading.Thread(target=delete, args=(tmp_path, "doc-1"))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        with Datastore.open(tmp_path) as store:
            assert store.snapshot.has_document("doc-1")
        monkeypatch.setattr(lock, "COMMIT_S", 0.1)
        with pytest.raises(Locked, match="has been committing"):
            delete(tmp_path, "doc-2")
    waiting.join(5)
    check_gone(tmp_path, DOCS, "doc-1")
