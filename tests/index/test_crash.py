"""Kills, crashes and full disks: the last committed state stands, and the next run goes on."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from crashes import crash_at_every_step, fill_disk_at_every_step
from random_stores import DEFAULTS, IVF, Corpus, add, build, fill, spec

from memlm.base import files as base_files
from memlm.errors import Incompatible, StorageFull
from memlm.index import arrays
from memlm.index.factory import NO_INDEX
from memlm.index.store import writer as writer_module
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import KnnDefaults
from memlm.index.store.writer import StoreWriter


def finish(path: Path, corpus: Corpus, index: str = IVF) -> Datastore:
    with StoreWriter.create(path, spec(index), keyed=index != NO_INDEX) as writer:
        fill(writer, corpus)
        return writer.commit(defaults=DEFAULTS)


def content_of(store: Datastore) -> tuple[list[bytes], list]:
    folder = store.path / "segments" / "000001"
    names = ("keys.npy", "values.npy", "suffixes.bin")
    return [(folder / name).read_bytes() for name in names if (folder / name).exists()], list(
        store.snapshot.documents()
    )


@pytest.mark.parametrize("index", [IVF, NO_INDEX])
@pytest.mark.parametrize("stop_after", [0, 1, 5, 12])
def test_a_resumed_build_equals_an_uninterrupted_one_entry_for_entry(corpus, tmp_path, stop_after, index):
    whole = build(tmp_path / "whole", corpus, index)
    with StoreWriter.create(tmp_path / "cut", spec(index), keyed=index != NO_INDEX) as writer:
        fill(writer, corpus, stop_after=stop_after)
        writer.begin_document("not checkpointed")
        writer.append(None if index == NO_INDEX else np.ones((3, 12), np.float32), np.arange(3))
    with StoreWriter.create(tmp_path / "cut", spec(index), keyed=index != NO_INDEX) as writer:
        assert writer.num_resumed_entries == corpus.sizes[:stop_after].sum()
        fill(writer, corpus)
        resumed = writer.commit(defaults=DEFAULTS)
    assert content_of(resumed) == content_of(whole)
    assert resumed.snapshot.verify() == []


def test_a_kill_while_a_lost_work_folder_is_made_anew_leaves_an_addition_that_can_begin(corpus, tmp_path, monkeypatch):
    """The journal of an addition that lost its folder, as to a kill in a rollback, counts entries that are gone."""
    build(tmp_path / "s", corpus, IVF).close()
    with StoreWriter.extend(tmp_path / "s", spec(IVF)) as writer:
        writer.begin_document("more")
        writer.append(np.ones((3, 12), np.float32), np.arange(3))
        writer.checkpoint()
    shutil.rmtree(tmp_path / "s" / "building")

    def killed(*arguments, **options):
        (tmp_path / "s" / "building" / "values.npy").write_bytes(b"a header")
        raise KeyboardInterrupt

    monkeypatch.setattr(writer_module, "SegmentWriter", killed)
    with pytest.raises(KeyboardInterrupt):
        StoreWriter.extend(tmp_path / "s", spec(IVF))
    monkeypatch.undo()
    with StoreWriter.extend(tmp_path / "s", spec(IVF)) as writer:
        assert writer.num_resumed_entries == 0


def test_an_interrupted_build_may_go_on_to_another_index(corpus, tmp_path):
    with StoreWriter.create(tmp_path / "s", spec(IVF)) as writer:
        fill(writer, corpus, stop_after=5)
    with StoreWriter.create(tmp_path / "s", spec("IVF8,SQ8", target=0.5)) as writer:
        assert writer.num_resumed_entries == corpus.sizes[:5].sum()
        fill(writer, corpus)
        store = writer.commit(defaults=DEFAULTS)
    assert store.snapshot.index_kind == "IVF8,SQ8"
    assert store.manifest.spec.target == 0.5


def test_a_changed_corpus_is_refused_on_resume(corpus, tmp_path):
    with StoreWriter.create(tmp_path / "s", spec()) as writer:
        fill(writer, corpus, stop_after=5)
    other = Corpus(1)
    other.values_N = other.values_N + 1
    with StoreWriter.create(tmp_path / "s", spec()) as writer, pytest.raises(Incompatible, match="'doc-0' differs"):
        fill(writer, other)
    with StoreWriter.create(tmp_path / "s", spec()) as writer:
        fill(writer, corpus, stop_after=2)
        with pytest.raises(Incompatible, match="ended before") as caught:
            writer.commit(defaults=DEFAULTS)
    with pytest.raises(Incompatible, match="stride"):
        StoreWriter.create(tmp_path / "s", spec(stride=3))
    run_advice(caught.value)
    with StoreWriter.create(tmp_path / "s", spec()) as writer:
        fill(writer, other)
        store = writer.commit(defaults=DEFAULTS)
    assert store.snapshot.tokens("doc-0").tolist() == other.values_N[: other.sizes[0]].tolist()


def test_an_addition_of_a_changed_corpus_begins_anew_as_its_error_says(corpus, tmp_path):
    build(tmp_path / "s", corpus, IVF).close()
    add(tmp_path / "s", Corpus(2, prefix="new"), stop_after=5)
    with (
        StoreWriter.extend(tmp_path / "s", spec(IVF)) as writer,
        pytest.raises(Incompatible, match=r"interrupted addition to .* differs") as caught,
    ):
        fill(writer, Corpus(3, prefix="new"))
    run_advice(caught.value)
    add(tmp_path / "s", Corpus(3, prefix="new"))
    with Datastore.open(tmp_path / "s") as store:
        assert store.snapshot.num_documents == 24
        assert store.snapshot.tokens("new-0").tolist() == next(Corpus(3).blocks())[2].tolist()


def run_advice(error: Exception) -> None:
    """Runs the command at the end of a message."""
    subprocess.run(shlex.split(str(error).rpartition("after: ")[2]), check=True)


@pytest.mark.crash
@pytest.mark.parametrize("index", [IVF, NO_INDEX])
def test_a_crash_at_every_step_of_a_build_leaves_it_resumable(corpus, tmp_path, index):
    whole = content_of(build(tmp_path / "whole", corpus, index))
    step = 0
    for step, path in crash_at_every_step(lambda path: finish(path, corpus, index).close(), None, tmp_path):
        store = Datastore.open(path) if (path / "CURRENT").exists() else finish(path, corpus, index)
        assert content_of(store) == whole, f"step {step}"
        store.delete(["doc-0"])
        store.close()
    assert step > 20


@pytest.mark.crash
def test_a_crash_at_every_step_of_a_change_leaves_the_old_state_or_the_new(corpus, tmp_path):
    def change(path: Path) -> None:
        with Datastore.open(path) as store:
            store.delete(["doc-1"])
            store.save_defaults(KnnDefaults(5, 0.5, 3.0, "x"))

    build(tmp_path / "built", corpus, IVF).close()
    seen = set()
    for _, path in crash_at_every_step(change, tmp_path / "built", tmp_path):
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            state = store.manifest.number
            assert store.snapshot.has_document("doc-1") == (state == 1)
            assert store.snapshot.defaults.k == (5 if state == 3 else DEFAULTS.k)
            seen.add(state)
            store.delete(["doc-2"])
            assert not store.snapshot.has_document("doc-2")
    assert seen == {1, 2, 3}


@pytest.mark.crash
def test_a_crash_at_every_step_of_new_keys_leaves_each_document_once_and_a_store_that_goes_on(corpus, tmp_path):
    def give_keys(path: Path) -> None:
        """To the first half of the documents."""
        with StoreWriter.keying(path, spec(), {1: range(6)}) as writer:
            fill(writer, corpus, stop_after=6)
            writer.commit(defaults=DEFAULTS).close()

    build(tmp_path / "text", corpus, NO_INDEX).close()
    seen = set()
    for step, path in crash_at_every_step(give_keys, tmp_path / "text", tmp_path):
        with Datastore.open(path) as store:
            seen.add(store.snapshot.keyed.num_documents)
            if not store.snapshot.is_keyed:
                give_keys(path)
                store.refresh()
            snapshot = store.snapshot
            assert [document.id for document in snapshot.documents()] == corpus.names, f"step {step}"
            assert (snapshot.keyed.num_documents, snapshot.defaults) == (6, DEFAULTS)
            assert snapshot.verify() == []
            found = snapshot.search(corpus.keys_ND[:1], 3).ids_QK
            assert {place.document_id for place in snapshot.locate(found[0])} <= set(corpus.names[:6])
    assert seen == {0, 6}


@pytest.mark.crash
@pytest.mark.parametrize("index", ["auto", NO_INDEX])
def test_a_crash_at_every_step_of_adding_leaves_the_old_documents_or_all(corpus, tmp_path, index):
    more = Corpus(2, num_documents=3, prefix="more")

    def add(path: Path) -> None:
        with StoreWriter.extend(path, spec(index), keyed=index != NO_INDEX) as writer:
            fill(writer, more)
            writer.commit(defaults=DEFAULTS).close()

    build(tmp_path / "built", corpus, index).close()
    for _, path in crash_at_every_step(add, tmp_path / "built", tmp_path):
        with Datastore.open(path) as store:
            added = store.snapshot.num_documents > len(corpus.names)
            assert store.snapshot.num_documents == len(corpus.names) + (len(more.names) if added else 0)
        if not added:
            add(path)
        with Datastore.open(path) as store:
            assert [d.id for d in store.snapshot.documents()] == corpus.names + more.names
            assert store.snapshot.verify() == []


@pytest.mark.crash
def test_a_disk_that_fills_at_any_write_is_reported_and_harms_nothing(corpus, tmp_path):
    more = Corpus(2, num_documents=3, prefix="more")

    def add(path: Path) -> None:
        with StoreWriter.extend(path, spec()) as writer:
            fill(writer, more)
            writer.commit(defaults=DEFAULTS).close()

    build(tmp_path / "built", corpus).close()
    reported = 0
    for _, path, error in fill_disk_at_every_step(add, tmp_path / "built", tmp_path):
        assert isinstance(error, StorageFull | OSError)
        reported += isinstance(error, StorageFull) and "make room" in str(error)
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            added = store.snapshot.num_documents > len(corpus.names)
        if not added:
            add(path)
        with Datastore.open(path) as store:
            assert store.snapshot.num_documents == len(corpus.names) + len(more.names)
    assert reported > 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_array_tells_of_a_full_disk(tmp_path):
    array = arrays.GrowingArray(tmp_path / "a.npy", "<f2", 4)
    array._file.close()
    array._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(StorageFull):
        array.append(np.zeros((100_000, 4)))
    array.close()


def test_a_killed_process_leaves_what_was_checkpointed_and_no_lock(corpus, tmp_path):
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from random_stores import *\n"
        "writer = StoreWriter.create(sys.argv[1], spec('IVF4,SQfp16'))\n"
        "fill(writer, Corpus(1), stop_after=6)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "s", Path(__file__).parents[1] / "support"], cwd=tmp_path
    )
    assert done.returncode == -signal.SIGKILL
    with StoreWriter.create(tmp_path / "s", spec(IVF)) as writer:
        assert writer.num_resumed_entries == corpus.sizes[:6].sum()
        fill(writer, corpus)
        store = writer.commit(defaults=DEFAULTS)
    assert content_of(store) == content_of(build(tmp_path / "whole", corpus, IVF))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see which file is synced")
def test_nothing_is_given_its_name_before_its_bytes_are_on_the_disk(corpus, tmp_path, monkeypatch):
    synced: set[str] = set()
    moved: list[Path] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> Path:
        files = [source] if source.is_file() else [source, *source.iterdir()]
        if target.name == "building.json":
            files += [target.with_name("building"), *target.with_name("building").glob("*.npy")]
        assert {str(file) for file in files} <= synced, f"{source} is moved before it is synced"
        moved.append(target)
        synced.discard(str(target.parent))
        return replace(source, target)

    monkeypatch.setattr(base_files.os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    store = finish(tmp_path / "deep" / "s", corpus)
    assert {str(tmp_path), str(tmp_path / "deep"), str(tmp_path / "deep" / "s")} <= synced, "names of new folders"
    store.delete(["doc-0"])
    assert {"CURRENT", "000001", "building.json"} <= {target.name for target in moved}
    assert all(str(target.parent) in synced for target in moved)
