"""Crashes of one change to a store during another: no document is lost, and no deleted document returns.

Every test counts the durable steps (sync, move, removal) of a change and crashes it at some of them: every eighth step
in the crash tier, all steps in the slow tier. A crashed deletion may have been committed or not: the tests read which
from the store right after the crash, and the store must stay at that answer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from crashes import Crash, count_of, crash_at_every_step, failing_at
from random_stores import DEFAULTS, spec
from store_history import INDEX, Content, check_holds, entries_of

from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.journal import rollback
from memlm.index.store.writer import StoreWriter

pytestmark = pytest.mark.crash
SAMPLED = 8
STRIDES = pytest.mark.parametrize("stride", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
BASE: Content = {f"base-{number}": 1 for number in range(8)}
NEW: Content = {f"new-{number}": 2 for number in range(3)}
REPLACING: Content = {"base-0": 3, "base-1": 3, "base-2": 3}


def write(writer: StoreWriter, content: Content) -> None:
    """Streams versions of documents into a writer; those of version 3 replace earlier ones."""
    for name, version in content.items():
        keys_ND, values_N = entries_of(name, version)
        writer.begin_document(name, replace=version == 3)
        if writer.is_resumed(len(values_N)):
            writer.verify_resumed(values_N)
        else:
            writer.append(keys_ND, values_N)
            writer.checkpoint()


def add(path: Path, content: Content) -> None:
    with StoreWriter.extend(path, spec(INDEX)) as writer:
        write(writer, content)
        writer.commit(defaults=DEFAULTS).close()


def delete(path: Path, *names: str) -> None:
    with Datastore.open(path) as store:
        store.delete(names)


def crashed(step: int, work: Callable[[], object]) -> None:
    with pytest.raises(Crash), failing_at(step, Crash()):
        work()


def has(path: Path, name: str) -> bool:
    with Datastore.open(path) as store:
        return store.snapshot.has_document(name)


def check(path: Path, *contents: Content) -> None:
    """The store is sound and holds one of these contents."""
    with Datastore.open(path) as store:
        assert store.snapshot.verify() == []
        names = {document.id: int(store.snapshot.tokens(document.id).sum()) for document in store.snapshot.documents()}
        sums = [{name: int(entries_of(name, version)[1].sum()) for name, version in each.items()} for each in contents]
        assert names in sums, f"{sorted(names)} at {store.manifest.number}"
        check_holds(store, contents[sums.index(names)])


def without(content: Content, *names: str) -> Content:
    return {name: version for name, version in content.items() if name not in names}


class Ground:
    """Copies of one store, and the steps at which a change of it is crashed."""

    def __init__(self, folder: Path, original: Path, stride: int) -> None:
        self.folder, self.original, self.stride, self.copies = folder, original, stride, 0

    def copy(self) -> Path:
        self.copies += 1
        return Path(shutil.copytree(self.original, self.folder / f"copy-{self.copies}"))

    def steps(self, count: int) -> range:
        """Each step with a stride of 1, else every few; the last one is always among them."""
        assert count > 3
        return range((count - 1) % self.stride + 1, count + 1, self.stride)

    def crashes(self, work: Callable[[Path], object]) -> Iterator[tuple[int, Path]]:
        """A copy of the store for each step of a change, crashed there."""
        return crash_at_every_step(work, self.original, self.folder, every=self.stride)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two segments, one of which has a deleted document."""
    path = tmp_path_factory.mktemp("original") / "store"
    first = dict(list(BASE.items())[:5])
    with StoreWriter.create(path, spec(INDEX)) as writer:
        write(writer, {**first, "early": 1})
        writer.commit(defaults=DEFAULTS).close()
    add(path, without(BASE, *first))
    delete(path, "early")
    check(path, BASE)
    return path


@pytest.fixture
def ground(tmp_path: Path, original: Path, stride: int) -> Ground:
    return Ground(tmp_path, original, stride)


@STRIDES
def test_a_deletion_that_crashes_during_an_addition_harms_neither(ground: Ground) -> None:
    seen = set()
    counted = ground.copy()
    for step in ground.steps(count_of(lambda: delete(counted, "base-3"))):
        path = ground.copy()
        with StoreWriter.extend(path, spec(INDEX)) as writer:
            write(writer, dict(list(NEW.items())[:2]))
            crashed(step, lambda path=path: delete(path, "base-3"))  # type: ignore[misc]
            stayed = has(path, "base-3")
            write(writer, dict(list(NEW.items())[2:]))
            writer.commit(defaults=DEFAULTS).close()
        check(path, without(BASE | NEW, *["base-3"] * (not stayed)))
        seen.add(stayed)
    assert seen == {True, False}


@STRIDES
@pytest.mark.parametrize("added", [NEW, REPLACING], ids=["adding", "replacing"])
def test_an_addition_that_crashes_among_deletions_loses_nothing_and_brings_nothing_back(
    ground: Ground, added: Content
) -> None:
    """One deletion comes before the commit that crashes, another between the crash and the resume."""

    def work(path: Path, step: int | None = None) -> int:
        with StoreWriter.extend(path, spec(INDEX)) as writer:
            write(writer, added)
            delete(path, "base-1", "base-6")  # a replacement of base-1 is no deleted document
            if step is None:
                return count_of(lambda: writer.commit(defaults=DEFAULTS).close())
            crashed(step, lambda: writer.commit(defaults=DEFAULTS).close())
        return step

    seen = set()
    for step in ground.steps(work(ground.copy())):
        path = ground.copy()
        work(path, step)
        old = without(BASE, "base-1", "base-6")
        check(path, old, old | added)
        with Datastore.open(path) as store:
            committed = store.snapshot.num_documents == len(old | added)
        delete(path, "base-4")
        check(path, without(old, "base-4"), without(old | added, "base-4"))
        if not committed:
            add(path, added)
        check(path, without(old | added, "base-4"))
        seen.add(committed)
    assert seen == {True, False}


@STRIDES
def test_a_replacement_that_crashes_beside_a_crashed_deletion_keeps_one_version_of_each(ground: Ground) -> None:
    def replacing(path: Path) -> None:
        add(path, REPLACING)

    counted = ground.copy()
    deletion_steps = list(ground.steps(count_of(lambda: delete(counted, "base-0"))))
    for number, (_, path) in enumerate(ground.crashes(replacing)):
        with Datastore.open(path) as store:
            new = len(entries_of("base-0", 3)[1]) == len(store.snapshot.tokens("base-0"))
        content = BASE | REPLACING if new else BASE
        check(path, content)
        crashed(deletion_steps[number % len(deletion_steps)], lambda path=path: delete(path, "base-0"))  # type: ignore[misc]
        content = content if has(path, "base-0") else without(content, "base-0")
        check(path, content)
        add(path, REPLACING)
        check(path, content | REPLACING)


@STRIDES
def test_giving_up_an_addition_that_crashed_leaves_the_committed_documents(ground: Ground) -> None:
    """Also where giving up crashes, and is done again."""
    most = 0
    for number, (_, path) in enumerate(ground.crashes(lambda path: add(path, NEW))):
        content = BASE | NEW if has(path, "new-0") else BASE
        delete(path, "base-5")
        content = without(content, "base-5")
        with suppress(Crash), failing_at(1 + number % 7, Crash()) as count:
            rollback(path)
        most = max(most, count[0])
        check(path, content)
        rollback(path)
        check(path, content)
        assert not (path / "building").exists()
        assert not (path / "building.json").exists()
        if content.keys().isdisjoint(NEW):
            add(path, NEW)
        check(path, content | NEW)
    assert most > 1


@STRIDES
def test_dropping_keys_beside_an_open_reader_and_a_deletion(ground: Ground) -> None:
    """The reader keeps the answers of the manifest that it opened, and finds the same documents after a refresh."""

    def drop(path: Path) -> None:
        with Datastore.open(path) as store:
            store.drop_keys()

    query_QD = entries_of("base-2", 1)[0][:3]
    counted = ground.copy()
    for step in ground.steps(count_of(lambda: drop(counted))):
        path = ground.copy()
        with Datastore.open(path) as reader:
            before = reader.search(query_QD, 5, nprobe=4)
            crashed(step, lambda path=path: drop(path))  # type: ignore[misc]
            assert reader.search(query_QD, 5, nprobe=4).ids_QK.tolist() == before.ids_QK.tolist()
            reader.delete(["base-7"])
            check(path, without(BASE, "base-7"))
            drop(path)
            assert reader.search(query_QD, 5, nprobe=4).values_QK[:, 0].tolist() == before.values_QK[:, 0].tolist()
            reader.refresh()
            assert not reader.snapshot.has_keys
            check(path, without(BASE, "base-7"))


@STRIDES
def test_a_deletion_that_crashes_during_a_compaction_harms_neither(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    commit = StoreWriter.commit
    counted = ground.copy()
    for step in ground.steps(count_of(lambda: delete(counted, "base-3"))):
        path = ground.copy()
        stayed = list[bool]()

        def late(self: StoreWriter, *args: object, **options: object) -> Datastore:
            crashed(step, lambda: delete(path, "base-3"))  # noqa: B023
            stayed.append(has(path, "base-3"))  # noqa: B023
            return commit(self, *args, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(StoreWriter, "commit", late)
            compact(path)
        check(path, BASE if stayed[0] else without(BASE, "base-3"))
        delete(path, "base-4")
        compact(path)
        check(path, without(BASE, "base-4", *["base-3"] * (not stayed[0])))
        seen.add(stayed[0])
    assert seen == {True, False}


@STRIDES
def test_a_compaction_that_crashes_between_deletions_brings_nothing_back(ground: Ground) -> None:
    for _, path in ground.crashes(compact):
        check(path, BASE)
        delete(path, "base-2")
        check(path, without(BASE, "base-2"))
        add(path, NEW)
        compact(path)
        check(path, without(BASE, "base-2") | NEW)
