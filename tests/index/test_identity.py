"""Which store is at a path, and at which snapshot: folders that are replaced, rolled back, copied and hard-linked."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crashes import crash_at_every_step, failing_at
from random_stores import DEFAULTS, IVF, Corpus, add, build, fill, spec

from memlm.base.files import checksum_of, read_signed, sign, write_atomic
from memlm.errors import AlreadyExists, Corrupt, Incompatible, Locked, MemlmError, NotFound, NotWritable
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import commit_lock, write_lock
from memlm.index.store.manifest import MAX_SEGMENTS, commit_manifest, read_manifest
from memlm.index.store.repair import repair
from memlm.index.store.writer import StoreWriter

A, B = Corpus(1), Corpus(2, prefix="other")


def names(path: Path) -> set[str]:
    with Datastore.open(path) as store:
        assert store.snapshot.verify() == []
        return {document.id for document in store.snapshot.documents()}


def two_stores(tmp_path: Path) -> tuple[Path, Path]:
    build(tmp_path / "live", A, IVF).close()
    build(tmp_path / "other", B, IVF).close()
    return tmp_path / "live", tmp_path / "other"


def hard_linked(source: Path, target: Path) -> Path:
    """As `cp -al`."""
    return Path(shutil.copytree(source, target, copy_function=os.link))


def rewritten(path: Path, change: Callable[[dict], None]) -> None:
    """Changes the manifest that counts, with right checksums: what another version of memlm would have written."""
    manifest = read_manifest(path)
    body = read_signed((path / manifest.name).read_bytes())
    change(body)
    content = sign(body)
    (path / manifest.name).write_bytes(content)
    pointer = f"{manifest.name} {checksum_of(content)} {body.get('store_id', '')}".strip()
    (path / "CURRENT").write_text(pointer + "\n")


def as_format_1(path: Path) -> None:
    def change(body: dict) -> None:
        body["format_version"] = 1
        body.pop("store_id", None)

    rewritten(path, change)


def test_a_store_has_an_id_that_stays_and_that_current_names(tmp_path: Path) -> None:
    live, other = two_stores(tmp_path)
    first, strange = read_manifest(live), read_manifest(other)
    assert (first.number, len(first.store_id)) == (strange.number, 32)
    assert first.store_id != strange.store_id
    with Datastore.open(live) as store:
        store.delete(["doc-1"])
    add(live, B)
    compact(live)
    assert read_manifest(live).store_id == first.store_id
    assert (live / "CURRENT").read_text().split()[2] == first.store_id


def test_settings_of_earlier_versions_are_left_behind(tmp_path: Path) -> None:
    """Each version before wrote them into every store, and some were tuned."""
    live, _ = two_stores(tmp_path)
    kept = read_manifest(live).defaults
    for skip_retrieval_above, min_pointers in ((None, None), (-0.25, 4)):
        earlier = {"skip_retrieval_above": skip_retrieval_above, "min_pointers": min_pointers}
        rewritten(live, lambda body, earlier=earlier: body["defaults"].update(earlier))
        with Datastore.open(live) as store:
            assert store.snapshot.defaults == kept
            assert store.search(A.keys_ND[:1], 1, nprobe=4).ids_QK.min() >= 0
    add(live, B)
    assert not {*earlier} & {*read_signed((live / read_manifest(live).name).read_bytes())["defaults"]}


def put_in_its_place(live: Path, other: Path) -> None:
    live.rename(live.with_name("old"))
    shutil.copytree(other, live)


def link_anew(live: Path, other: Path) -> None:
    live.rename(live.with_name("old"))
    live.symlink_to(other)


def build_anew(live: Path, other: Path) -> None:
    shutil.rmtree(live)
    build(live, B, IVF).close()


def copy_over(live: Path, other: Path) -> None:
    shutil.rmtree(live / "segments")
    shutil.copytree(other, live, dirs_exist_ok=True)


REPLACED = [put_in_its_place, link_anew, build_anew, copy_over]


@pytest.mark.parametrize("replace", REPLACED)
def test_a_reader_moves_to_the_store_that_took_the_place_of_its_own(
    tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    live, other = two_stores(tmp_path)
    with Datastore.open(live) as reader:
        replace(live, other)
        assert reader.refresh()
        assert not reader.refresh()
        assert {document.id for document in reader.snapshot.documents()} == set(B.names)
        found = reader.search(B.keys_ND, 1, nprobe=4)
        assert found.values_QK[:, 0].tolist() == B.values_N.tolist()


@pytest.mark.parametrize("replace", REPLACED)
def test_a_deletion_is_from_the_store_that_is_there_now(tmp_path: Path, replace: Callable[[Path, Path], None]) -> None:
    live, other = two_stores(tmp_path)
    with Datastore.open(live) as reader:
        replace(live, other)
        with pytest.raises(NotFound, match="doc-1"):
            reader.delete(["doc-1"])
        assert names(live) == set(B.names)
        reader.delete(["other-1"])
        assert not reader.snapshot.has_document("other-1")
    assert names(live) == set(B.names) - {"other-1"}


def test_what_is_tuned_is_for_the_store_that_is_there_now(tmp_path: Path) -> None:
    live, other = two_stores(tmp_path)
    with Datastore.open(live) as reader:
        put_in_its_place(live, other)
        reader.save_quality({"recall": 0.5})
    assert names(live) == set(B.names)
    assert read_manifest(live).quality == {"recall": 0.5}


def test_a_reader_goes_back_with_a_store_that_is_rolled_back(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    with Datastore.open(live) as store:
        store.delete(["doc-1"])
    backup = Path(shutil.copytree(live, tmp_path / "backup"))
    with Datastore.open(live) as reader:
        reader.delete(["doc-2"])
        reader.delete(["doc-3"])
        put_in_its_place(live, backup)
        assert reader.refresh()
        assert reader.snapshot.has_document("doc-2")
        reader.delete(["doc-2"])
        assert not reader.snapshot.has_document("doc-2")
        assert reader.manifest.number == 3
    assert names(live) == set(A.names) - {"doc-1", "doc-2"}


def test_a_view_that_was_read_before_a_commit_is_not_gone_back_to(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    with Datastore.open(live) as reader:
        with Datastore.open(live) as another:
            another.delete(["doc-1"])
        early = reader.open_latest()
        assert early is not None
        reader.delete(["doc-2"])
        assert not reader.switch_to(early)
        assert not reader.snapshot.has_document("doc-2")


def test_segments_that_stay_the_same_files_are_not_opened_again(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    add(live, B)
    with Datastore.open(live) as reader:
        first, second = reader.snapshot.segments
        reader.delete(["doc-1"])
        assert reader.snapshot.segments[0] is not first
        assert reader.snapshot.segments[1] is second
        put_in_its_place(live, Path(shutil.copytree(live, tmp_path / "copy")))
        add(live, Corpus(3, prefix="late"))
        reader.refresh()
        assert second not in reader.snapshot.segments


def test_no_commit_is_made_on_another_snapshot_than_the_one_it_follows(tmp_path: Path) -> None:
    live, other = two_stores(tmp_path)
    before = read_manifest(live)
    with commit_lock(live) as lock:
        put_in_its_place(live, other)
        with pytest.raises(Locked, match="replaced"):
            commit_manifest(live, before.next(), after=before, lock=lock)
    with commit_lock(live) as lock, pytest.raises(Locked, match="replaced"):
        commit_manifest(live, before.next(), after=before, lock=lock)
    assert names(live) == set(B.names)


@pytest.mark.parametrize("replace", [put_in_its_place, link_anew, copy_over])
@pytest.mark.parametrize("work", ["add", "compact"])
def test_a_writer_leaves_alone_what_took_the_place_of_its_store(
    tmp_path: Path, replace: Callable[[Path, Path], None], work: str
) -> None:
    live, other = two_stores(tmp_path)
    make = StoreWriter.compacting(live) if work == "compact" else StoreWriter.extend(live, spec(IVF))
    with make as writer:
        fill(writer, Corpus(3, prefix="late"))
        replace(live, other)
        with pytest.raises(Locked, match="run the same command again"):
            writer.commit(defaults=DEFAULTS)
    assert names(live) == set(B.names)
    assert names(tmp_path / "other") == set(B.names)
    add(live, Corpus(3, prefix="late"))
    assert names(live) == {*B.names, *Corpus(3, prefix="late").names}


def test_a_compaction_does_not_lose_what_a_roll_back_brought_back(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    backup = Path(shutil.copytree(live, tmp_path / "backup"))
    with Datastore.open(live) as store:
        store.delete(["doc-1"])
    with StoreWriter.compacting(live) as writer:
        fill(writer, Corpus(3))
        shutil.copy(backup / "manifest-000001.json", live)
        shutil.copy(backup / "CURRENT", live)
        with pytest.raises(Locked, match="earlier state"):
            writer.commit(defaults=DEFAULTS)
    assert names(live) == set(A.names)


@pytest.mark.crash
def test_hard_links_do_not_join_two_stores_whenever_the_copy_is_made(tmp_path: Path) -> None:
    """A deletion is killed at each of its steps, the folder is linked as `cp -al` does, and both go on."""
    build(tmp_path / "built", A, IVF).close()

    def delete(path: Path, *documents: str) -> None:
        with Datastore.open(path) as store:
            store.delete(documents)

    for step, path in crash_at_every_step(lambda path: delete(path, "doc-1"), tmp_path / "built", tmp_path):
        linked = hard_linked(path, tmp_path / f"linked-{step}")
        begun = names(path)
        delete(path, "doc-2")
        assert names(path) == begun - {"doc-2"}
        delete(linked, "doc-3")
        assert names(path) == begun - {"doc-2"}, f"step {step}"
        assert names(linked) == begun - {"doc-3"}, f"step {step}"


@pytest.mark.parametrize("file", ["CURRENT", "manifest"])
def test_a_file_under_way_may_be_linked_and_its_name_written_again(tmp_path: Path, file: str) -> None:
    """What `cp -al` sees of a commit under way: a temporary file, which then gets its name in the original."""
    build(tmp_path / "live", A, IVF).close()
    replaced = Path.replace

    def linking(source: Path, target: Path) -> Path:
        if file in target.name and not (tmp_path / "copy").exists():
            hard_linked(tmp_path / "live", tmp_path / "copy")
        return replaced(source, target)

    with pytest.MonkeyPatch.context() as patch, Datastore.open(tmp_path / "live") as store:
        patch.setattr(Path, "replace", linking)
        store.delete(["doc-1"])
    with Datastore.open(tmp_path / "copy") as copy:
        copy.delete(["doc-2"])
    assert names(tmp_path / "live") == set(A.names) - {"doc-1"}
    assert names(tmp_path / "copy") == set(A.names) - {"doc-2"}


def test_an_unfinished_build_and_its_hard_links_go_on_apart(tmp_path: Path) -> None:
    with StoreWriter.create(tmp_path / "s", spec(IVF)) as writer:
        fill(writer, A, stop_after=5)
    hard_linked(tmp_path / "s", tmp_path / "linked")
    for name, seed in (("s", 4), ("linked", 5)):
        rest = Corpus(seed, prefix=name)
        with StoreWriter.create(tmp_path / name, spec(IVF)) as writer:
            fill(writer, A, stop_after=5)
            fill(writer, rest)
            writer.commit(defaults=DEFAULTS).close()
    assert names(tmp_path / "s") == {*A.names[:5], *Corpus(4, prefix="s").names}
    assert names(tmp_path / "linked") == {*A.names[:5], *Corpus(5, prefix="linked").names}


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    for step in range(1, 5):
        with failing_at(step, OSError(28, "No space left on device")), pytest.raises((OSError, MemlmError)):
            write_atomic(tmp_path / "file", b"content")
    with Datastore.open(build(tmp_path / "s", A).path) as store:
        for left in ("CURRENT.0123abcd.tmp", "manifest-000002.json.0123abcd.tmp", "segments/000001/deleted-000002.npy"):
            (tmp_path / "s" / left).write_text("left by a kill")
        store.delete(["doc-1"])
    assert not list((tmp_path / "s").rglob("*.tmp"))
    assert names(tmp_path / "s") == set(A.names) - {"doc-1"}


def test_a_store_of_format_1_is_read_and_gets_an_id_at_its_next_commit(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    as_format_1(live)
    assert len((live / "CURRENT").read_text().split()) == 2
    with Datastore.open(live) as reader:
        assert reader.manifest.store_id == ""
        assert not reader.refresh()
        with Datastore.open(live) as writer:
            writer.delete(["doc-1"])
        assert reader.refresh()
        assert len(reader.manifest.store_id) == 32
    assert json.loads((live / read_manifest(live).name).read_bytes())["format_version"] == 3
    as_format_1(live)
    add(live, B)
    assert names(live) == {*A.names, *B.names} - {"doc-1"}


def unknown_field(body: dict) -> None:
    body["shards"] = 3


def unknown_segment_field(body: dict) -> None:
    body["segments"][0]["compressed"] = True


def no_spec(body: dict) -> None:
    del body["spec"]


def no_version(body: dict) -> None:
    del body["format_version"]


def another_metric(body: dict) -> None:
    body["metric"] = "cosine"


def no_list(body: dict) -> None:
    body["segments"] = 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (unknown_field, "shards"),
        (unknown_segment_field, "compressed"),
        (no_spec, "spec"),
        (no_version, "format None"),
        (another_metric, "cosine"),
        (no_list, "int"),
    ],
)
def test_a_manifest_of_another_version_is_refused_by_what_it_has(
    tmp_path: Path, change: Callable[[dict], None], named: str
) -> None:
    live, _ = two_stores(tmp_path)
    with Datastore.open(live) as reader:
        rewritten(live, change)
        for work in (
            lambda: Datastore.open(live),
            reader.refresh,
            lambda: reader.delete(["doc-1"]),
            lambda: StoreWriter.extend(live, spec(IVF)),
            lambda: StoreWriter.create(live, spec(IVF)),
            lambda: compact(live),
        ):
            with pytest.raises(Incompatible, match=named) as refused:
                work()
        assert "install" in str(refused.value)
        assert reader.snapshot.has_document("doc-1")


def test_a_store_without_current_is_named_and_left_whole(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    add(live, B)
    (live / "CURRENT").unlink()
    before = sorted(live.rglob("*"))
    for work in (
        lambda: Datastore.open(live),
        lambda: StoreWriter.extend(live, spec(IVF)),
        lambda: StoreWriter.create(live, spec(IVF)),
        lambda: compact(live),
    ):
        with pytest.raises(Corrupt, match=r"manifest-000002\.json.*--repair"):
            work()
    assert sorted(live.rglob("*")) == before
    manifest, written = repair(live)
    assert (manifest.number, written) == (2, True)
    assert repair(live) == (manifest, False)
    assert names(live) == {*A.names, *B.names}


@pytest.mark.parametrize("content", ["", "manifest-000001.json", "not a pointer at all\n"])
def test_a_damaged_current_is_repaired(tmp_path: Path, content: str) -> None:
    live, _ = two_stores(tmp_path)
    (live / "CURRENT").write_text(content)
    with pytest.raises(Corrupt, match="--repair"):
        Datastore.open(live)
    assert repair(live)[1]
    assert names(live) == set(A.names)


def test_a_repair_neither_goes_back_nor_trusts_damaged_files(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    first = (live / "manifest-000001.json").read_bytes()
    with Datastore.open(live) as store:
        store.delete(["doc-1"])
    (live / "manifest-000002.json").unlink()
    (live / "manifest-000001.json").write_bytes(first)
    with pytest.raises(Corrupt, match=r"names manifest-000002\.json"):
        repair(live)
    with pytest.raises(NotFound):
        repair(tmp_path / "nowhere")
    other = tmp_path / "other"
    (other / "CURRENT").unlink()
    keys = other / "segments" / "000001" / "keys.npy"
    keys.write_bytes(keys.read_bytes()[:-1] + b"?")
    with pytest.raises(Corrupt, match=r"keys\.npy"):
        repair(other)


def test_segments_alone_are_not_built_over(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    (live / "CURRENT").unlink()
    (live / "manifest-000001.json").unlink()
    with pytest.raises((Corrupt, AlreadyExists), match="1 segments"):
        StoreWriter.create(live, spec(IVF))
    assert (live / "segments" / "000001" / "keys.npy").exists()


def test_a_lock_whose_file_is_removed_still_holds(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    with StoreWriter.extend(live, spec(IVF)) as writer:
        fill(writer, B)
        (live / "lock").unlink()
        with pytest.raises(Locked, match="another process is writing"):
            StoreWriter.extend(live, spec(IVF))
        writer.commit(defaults=DEFAULTS).close()
    with commit_lock(live):
        (live / "commit.lock").unlink()
        with pytest.MonkeyPatch.context() as patch, Datastore.open(live) as store:
            patch.setattr("memlm.index.store.lock.COMMIT_S", 0.1)
            with pytest.raises(Locked):
                store.delete(["doc-1"])
    assert names(live) == {*A.names, *B.names}


def test_a_lock_creates_no_folder(tmp_path: Path) -> None:
    for lock in (write_lock, commit_lock):
        with pytest.raises(NotFound), lock(tmp_path / "gone"):
            pass
    live, _ = two_stores(tmp_path)
    with Datastore.open(live) as store:
        live.rename(tmp_path / "moved")
        with pytest.raises(NotFound):
            store.delete(["doc-1"])
    assert not live.exists()


def test_segments_never_run_out_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlm.index.store.journal.MAX_SEGMENTS", 4)
    build(tmp_path / "s", A, IVF).close()
    add(tmp_path / "s", B)
    compact(tmp_path / "s")
    late = Corpus(3, prefix="late")
    add(tmp_path / "s", late)
    assert {segment.number for segment in read_manifest(tmp_path / "s").segments} == {3, 1}
    assert names(tmp_path / "s") == {*A.names, *B.names, *late.names}


def test_the_highest_number_of_a_segment_can_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlm.index.store.writer.next_segment", lambda path, manifest: MAX_SEGMENTS - 1)
    build(tmp_path / "s", A, IVF).close()
    add(tmp_path / "s", B)
    monkeypatch.undo()
    assert compact(tmp_path / "s").segments_before == 2
    with Datastore.open(tmp_path / "s") as store:
        assert [segment.record.number for segment in store.snapshot.segments] == [2]
        assert store.search(B.keys_ND, 1, nprobe=4).values_QK[:, 0].tolist() == B.values_N.tolist()


def test_a_document_of_no_tokens_is_sound(tmp_path: Path) -> None:
    with StoreWriter.create(tmp_path / "s", spec()) as writer:
        writer.begin_document("empty first")
        fill(writer, A)
        writer.begin_document("empty last")
        writer.commit(defaults=DEFAULTS).close()
    assert names(tmp_path / "s") == {*A.names, "empty first", "empty last"}
    with Datastore.open(tmp_path / "s") as store:
        found = store.search(A.keys_ND, 1)
        owners = [place.document_id for place in store.snapshot.locate(found.ids_QK[:, 0])]
        assert owners == [A.names[owner] for owner in A.owner_N]
        store.delete(["empty first", "doc-1"])
        assert len(store.snapshot.sample(10**6, 0)) == len(A.values_N) - A.sizes[1]
    compact(tmp_path / "s")
    assert names(tmp_path / "s") == {*A.names, "empty last"} - {"doc-1"}


def test_a_compaction_with_nothing_to_do_leaves_nothing(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    assert compact(live).segments_before == 1
    assert not (live / "building").exists()
    assert not (live / "building.json").exists()


READ_ONLY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from random_stores import *
from memlm.index.store.compaction import compact
from memlm.errors import NotWritable
from memlm.index.store.repair import repair
path = Path(sys.argv[1])
with Datastore.open(path) as store:
    assert store.snapshot.verify() == []
    for work in (
        lambda: store.delete(["doc-1"]), lambda: store.delete_where({"number": "1"}), lambda: compact(path),
        lambda: store.save_defaults(DEFAULTS), store.drop_keys, lambda: add(path, Corpus(2, prefix="more")),
        lambda: StoreWriter.create(path / "new", spec()), lambda: repair(path),
    ):
        try:
            work()
        except NotWritable as error:
            assert "mount its file system for writing" in str(error)
        else:
            raise AssertionError("was written")
print("refused")
"""


def test_a_read_only_file_system_is_named_with_what_to_do(tmp_path: Path) -> None:
    live, _ = two_stores(tmp_path)
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
    in_namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*in_namespace, mount, live], capture_output=True).returncode:
        pytest.skip("needs the right to mount in a namespace of its own")
    command = [*in_namespace, f'{mount} && exec "$@"', live, sys.executable, "-c", READ_ONLY, live]
    done = subprocess.run(
        [*command, Path(__file__).parents[1] / "support"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("refused\n", "")
    assert issubclass(NotWritable, MemlmError)
    assert np.array_equal(sorted(names(live)), sorted(A.names))
