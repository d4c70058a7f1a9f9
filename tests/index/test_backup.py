"""Copies of a store at one commit, made while others write: each equals a copy of the store at rest, and stays so."""

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import store_history
from crashes import count_of, fill_disk_at_every_step, is_killed_at
from random_stores import DEFAULTS, IVF, Corpus, add, build

from memlm.base.files import checksum
from memlm.errors import AlreadyExists, Corrupt, InvalidInput, NotFound, StorageFull
from memlm.index.store import segment
from memlm.index.store.backup import copy_store
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import SUFFIXES


def contents(path: Path) -> dict[str, bytes]:
    """The files of a store: those that a commit names, or that name it."""
    with Datastore.open(path) as store:
        named = [f"{record.folder}/{name}" for record in store.manifest.segments for name in record.files]
    return {name: (path / name).read_bytes() for name in ["CURRENT", store.manifest.name, *named]}


def whole(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def step_by_step(path: Path, steps: range) -> None:
    for number in steps:
        store_history.take(path, number)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store after six commits: additions, a deletion, a compaction."""
    path = tmp_path_factory.mktemp("original") / "store"
    step_by_step(path, range(1, 7))
    return path


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "store"))


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_copy_has_every_byte_of_the_commit_and_nothing_else(store: Path, tmp_path: Path, hard_links: bool) -> None:
    next((store / "segments").iterdir()).joinpath("words.sqlite").write_text("derived from deleted documents too")
    report = copy_store(store, tmp_path / "new" / "copy", hard_links=hard_links)
    assert whole(tmp_path / "new" / "copy") == contents(store)
    with Datastore.open(report.path) as copy:
        assert copy.snapshot.verify() == []
        assert (report.manifest, report.entries, report.documents, report.deleted_documents, report.bytes) == (
            copy.manifest.number, copy.snapshot.num_entries, copy.snapshot.num_documents,
            copy.snapshot.num_deleted_documents, copy.snapshot.bytes_on_disk,
        )  # fmt: skip
    is_linked = [file.stat().st_nlink > 1 for file in (tmp_path / "new" / "copy" / "segments").rglob("*.*")]
    assert is_linked == [hard_links] * report.num_files
    assert (report.num_linked, report.copied_bytes) == ((len(is_linked), 0) if hard_links else (0, report.bytes))
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["copy"]


def segments_of(path: Path) -> dict[str, bytes]:
    """The files of a store's segments that a commit names. The rest has the time of the commit, and the store's id."""
    return {name: content for name, content in contents(path).items() if name.startswith("segments")}


def test_a_copy_beside_commits_equals_a_copy_of_the_store_at_rest(tmp_path: Path) -> None:
    live, rest, twins = tmp_path / "live", tmp_path / "rest", dict[int, dict[str, bytes]]()
    for number in range(1, 17):
        store_history.take(rest, number)
        twins[number] = segments_of(rest)
    step_by_step(live, range(1, 5))
    commits, copied, calls = 4, set[int](), 0

    def commit_sometimes(phase: str, done: int, total: int | None, note: str = "") -> None:
        nonlocal commits, calls
        calls += 1
        if calls in (number + 1, number + 9) and commits < 16:
            commits += 1
            store_history.take(live, commits)

    for number in range(8):
        calls = 0
        report = copy_store(live, tmp_path / f"copy-{number}", commit_sometimes, hard_links=bool(number % 2))
        assert segments_of(Path(report.path)) == twins[report.manifest]
        assert len(whole(Path(report.path))) == len(twins[report.manifest]) + 2
        with Datastore.open(report.path) as copy:
            store_history.check(copy)
            assert copy.snapshot.verify() == []
        copied.add(report.manifest)
    assert commits == 16
    assert len(copied) > 4


def change_in_every_way(path: Path) -> None:
    """Adds, replaces, deletes, tunes, drops keys and compacts, with an interrupted addition between."""
    add(path, Corpus(5, prefix="later"))
    add(path, Corpus(6, prefix="cut"), stop_after=3)
    add(path, Corpus(6, prefix="cut"))
    with Datastore.open(path) as store:
        store.save_defaults(replace(DEFAULTS, k=3))
        store.save_quality({"recall": 1.0})
        store.delete([document.id for document in list(store.snapshot.documents())[:4]])
    compact(path, purge=True)
    add(path, Corpus(7, prefix="last"))
    with Datastore.open(path) as store:
        store.drop_keys()


def test_no_change_of_the_store_reaches_a_hard_linked_copy_and_none_of_the_copy_the_store(tmp_path: Path) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    build(path, Corpus(1), IVF).close()
    with Datastore.open(path) as store:
        store.delete(["doc-2"])
    assert copy_store(path, copy).num_linked > 0
    for changed, untouched in ((path, copy), (copy, path)):
        before = {file: checksum(untouched / file) for file in whole(untouched) if "lock" not in file}
        change_in_every_way(changed)
        assert {file: checksum(untouched / file) for file in before} == before
        with Datastore.open(untouched) as store:
            assert store.snapshot.verify() == []


def test_a_purge_of_the_store_leaves_deleted_text_in_the_copy_until_that_is_purged_too(tmp_path: Path) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    build(path, Corpus(1, prefix="secret-plan"), IVF).close()
    with Datastore.open(path) as store:
        store.delete(["secret-plan-2"])
    assert copy_store(path, copy).deleted_documents == 1
    assert compact(path, purge=True).linked_files > 0

    def is_left(folder: Path) -> bool:
        return any(b"secret-plan-2" in content for content in whole(folder).values())

    assert (is_left(path), is_left(copy)) == (False, True)
    assert compact(copy, purge=True).linked_files == 0
    assert not is_left(copy)
    # A copy without anything deleted shares files too, which hold nothing that was to go.
    copy_store(path, tmp_path / "later")
    add(path, Corpus(2, prefix="more"))
    assert compact(path, purge=True).linked_files == 0


@pytest.mark.crash
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_step_leaves_no_half_copy_and_none_for_the_next_call(store: Path, tmp_path: Path) -> None:
    expected = contents(store)
    for hard_links in (True, False):
        folder = tmp_path / f"links-{hard_links}"
        folder.mkdir()
        steps = count_of(lambda: copy_store(store, folder / "counted", hard_links=hard_links))  # noqa: B023
        assert steps > 20
        for step in range(1, steps + 1, 1 if hard_links else 3):
            to = folder / f"step-{step}"
            assert is_killed_at(step, lambda: copy_store(store, to, hard_links=hard_links))  # noqa: B023
            for left in [each for each in folder.iterdir() if each.name.startswith(to.name + ".")]:
                with suppress(NotFound, Corrupt), Datastore.open(left):
                    assert whole(left) == expected  # it only lacks its name
            if to.exists():
                assert whole(to) == expected
                shutil.rmtree(to)
            copy_store(store, to, hard_links=hard_links)
            assert whole(to) == expected
            assert [each.name for each in folder.iterdir() if each.name.startswith(f"{to.name}.")] == []
            shutil.rmtree(to)
    left_out = {Path(name).name for name in whole(store).keys() - expected.keys()}
    assert left_out <= {"lock", "commit.lock", SUFFIXES}


@pytest.mark.crash
def test_a_disk_that_fills_is_reported_and_leaves_no_copy(store: Path, tmp_path: Path) -> None:
    expected, reported = contents(store), 0

    def copy(path: Path) -> None:
        copy_store(path, path.with_name(f"{path.name}-copy"), hard_links=False)

    for step, path, error in fill_disk_at_every_step(copy, store, tmp_path):
        reported += isinstance(error, StorageFull)
        assert contents(path) == expected, step
        assert not [each for each in tmp_path.iterdir() if each.name.endswith(".tmp")]
    assert reported > 5


def test_a_destination_must_be_new_and_outside_the_store(store: Path, tmp_path: Path) -> None:
    before = whole(store)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for taken in (tmp_path / "empty", tmp_path / "file", tmp_path / "dangling", store):
        with pytest.raises(AlreadyExists, match="choose a new folder"):
            copy_store(store, taken)
    (tmp_path / "to-store").symlink_to(store)
    for inside in (store / "copy", store / "segments" / "copy", tmp_path / "to-store" / "copy"):
        with pytest.raises(InvalidInput, match="outside"):
            copy_store(store, inside)
    with pytest.raises(NotFound):
        copy_store(tmp_path / "nowhere", tmp_path / "copy")
    assert whole(store) == before
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "copy").exists()


def test_a_damaged_store_is_not_copied(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "SMALL_BYTES", 0)  # of large files, opening looks at the size only
    with Datastore.open(store) as opened:
        keys = store / opened.manifest.segments[0].folder / "keys.npy"
    content = bytearray(keys.read_bytes())
    content[-1] ^= 1
    keys.write_bytes(content)
    for hard_links in (True, False):
        with pytest.raises(Corrupt, match=r"keys\.npy was changed"):
            copy_store(store, tmp_path / "copy", hard_links=hard_links)
    keys.unlink()
    with pytest.raises(Corrupt, match=r"keys\.npy is missing"):
        copy_store(store, tmp_path / "copy")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["store"]


@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_a_file_system_without_hard_links_gets_copies(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", refuse)
    report = copy_store(store, tmp_path / "copy")
    assert report.num_linked == 0
    assert whole(tmp_path / "copy") == contents(store)


def test_two_copies_to_one_destination_at_a_time_do_not_harm_each_other(store: Path, tmp_path: Path) -> None:
    def copy_too(phase: str, done: int, total: int | None, note: str = "") -> None:
        if not (tmp_path / "copy").exists():
            copy_store(store, tmp_path / "copy")

    with pytest.raises(AlreadyExists):
        copy_store(store, tmp_path / "copy", copy_too)
    assert whole(tmp_path / "copy") == contents(store)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy", "store"]
