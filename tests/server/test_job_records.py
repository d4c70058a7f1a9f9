"""The records of operations: one is on the disk before anything can act on it, and one writer at a time writes it."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlm.api.datastores import AddDocumentsRequest, BuildDatastoreRequest, NewDocument
from memlm.api.operations import JobState
from memlm.base import files
from memlm.base.clock import Clock
from memlm.base.files import read_signed
from memlm.errors import AlreadyExists, Overloaded
from memlm.server.config import ServerConfig
from memlm.server.inference.pool import WorkerPool
from memlm.server.jobs.job import Job
from memlm.server.jobs.records import KEEP_S, JobRecords
from memlm.server.jobs.service import JobService
from memlm.server.jobs.uploads import Upload
from memlm.server.jobs.worker import BUILD
from memlm.server.registry import DatastoreRegistry
from memlm.server.telemetry.metrics import Metrics


class SlowDisk:
    """A disk whose syncs wait until they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.syncing, self.go_on, self._fsync = threading.Event(), threading.Event(), os.fsync
        patch.setattr(files.os, "fsync", self._wait)

    def hold(self) -> None:
        """Has the syncs from here on wait."""
        self.go_on.clear()
        self.syncing.clear()

    def _wait(self, descriptor: int) -> None:
        self.syncing.set()
        assert self.go_on.wait(30)
        self._fsync(descriptor)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go_on.set()


def job(id_: str = "one") -> Job:
    return Job(id_, "ann", BUILD, "docs", "stores/docs-one", {}, "digest")


def on_disk(records: JobRecords, id_: str = "one") -> dict:
    assert records.folder is not None
    return read_signed((records.folder / f"{id_}.json").read_bytes())


def jobs_of(folder: Path) -> JobService:
    config = ServerConfig(model=folder / "model", store_dir=folder / "stores", corpus_roots=(folder,))
    stores = DatastoreRegistry((), config.store_dir)
    return JobService(config, stores, Metrics(), WorkerPool(config, lambda: stores.paths))


async def test_a_job_is_found_once_its_record_is_on_the_disk(tmp_path: Path, slow_disk: SlowDisk) -> None:
    records = JobRecords(tmp_path)
    adding = asyncio.create_task(records.add(job()))
    await asyncio.to_thread(slow_disk.syncing.wait, 30)
    assert list(records) == []
    slow_disk.go_on.set()
    await adding
    assert [each.id for each in records] == ["one"]
    assert on_disk(records)["state"] == JobState.QUEUED


async def test_writes_of_one_record_take_turns_and_the_last_state_stays(tmp_path: Path, slow_disk: SlowDisk) -> None:
    records, one = JobRecords(tmp_path), job()
    slow_disk.go_on.set()
    await records.add(one)
    slow_disk.hold()
    one.state = JobState.RUNNING
    first = asyncio.create_task(records.write(one))
    await asyncio.to_thread(slow_disk.syncing.wait, 30)
    one.state = JobState.DONE
    second = asyncio.create_task(records.write(one))
    slow_disk.go_on.set()
    await asyncio.gather(first, second)
    assert on_disk(records)["state"] == JobState.DONE
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


async def test_a_forgotten_record_is_not_written_again(tmp_path: Path, slow_disk: SlowDisk) -> None:
    records, one = JobRecords(tmp_path), job()
    slow_disk.go_on.set()
    await records.add(one)
    slow_disk.hold()
    writing = asyncio.create_task(records.write(one))
    await asyncio.to_thread(slow_disk.syncing.wait, 30)
    forgetting = asyncio.create_task(records.forget(one))
    slow_disk.go_on.set()
    await asyncio.gather(writing, forgetting)
    await records.write(one)
    assert list(tmp_path.iterdir()) == []


async def test_a_job_whose_caller_left_while_it_was_recorded_is_in_the_records(
    tmp_path: Path, slow_disk: SlowDisk
) -> None:
    records = JobRecords(tmp_path)
    adding = asyncio.create_task(records.add(job()))
    await asyncio.to_thread(slow_disk.syncing.wait, 30)
    adding.cancel()
    slow_disk.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert [each.id for each in records] == ["one"]
    assert on_disk(records)["id"] == "one"


async def test_submissions_take_turns_so_that_one_request_id_is_one_operation(
    tmp_path: Path, slow_disk: SlowDisk
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    slow_disk.go_on.set()
    jobs = jobs_of(tmp_path)
    slow_disk.hold()
    request = BuildDatastoreRequest("docs", (str(tmp_path / "text.txt"),), request_id="mine")
    first = asyncio.create_task(jobs.submit(request, "ann"))
    await asyncio.to_thread(slow_disk.syncing.wait, 30)
    second = asyncio.create_task(jobs.submit(request, "ann"))
    other = asyncio.create_task(jobs.submit(BuildDatastoreRequest("docs", request.corpus), "ann"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done()
    slow_disk.go_on.set()
    assert (await first).name == (await second).name
    with pytest.raises(AlreadyExists, match="is being built"):
        await other


async def test_a_name_is_taken_by_what_will_be_served_and_by_no_dry_run(tmp_path: Path) -> None:
    """A synchronization is to come again, since there will be a datastore for it; a build is not."""
    (tmp_path / "text.txt").write_text("some text")
    jobs = jobs_of(tmp_path)

    async def sync(*, dry_run: bool = False) -> str:
        request = AddDocumentsRequest("docs", sync="notes", dry_run=dry_run)
        jobs.check_before_upload(request, "ann")
        with Upload(tmp_path / "stores" / "jobs", 1 << 20, is_sync=True) as upload:
            upload.take(AddDocumentsRequest(documents=(NewDocument("a", "a text"),)))
            upload.finish(1)
            return (await jobs.submit(request, "ann", upload)).name

    names = [await sync(dry_run=True), await sync(dry_run=True), await sync()]
    assert len(set(names)) == 3
    for dry_run in (False, True):
        with pytest.raises(Overloaded, match="synchronize again once it is there") as refused:
            await sync(dry_run=dry_run)
        assert refused.value.retry_after_s > 0
    with pytest.raises(AlreadyExists, match="is being built"):
        await jobs.submit(BuildDatastoreRequest("docs", (str(tmp_path / "text.txt"),)), "ann")
    assert jobs.num_open == 3


async def test_owners_take_turns(tmp_path: Path) -> None:
    """One that submits ten jobs does not keep another waiting for all of them."""
    jobs = jobs_of(tmp_path)
    records, runner = jobs._records, jobs._runner
    for number, owner in enumerate(("ann", "ann", "ann", "bob", "eve", "bob")):
        path = str(tmp_path / str(number))
        await records.add(Job(str(number), owner, BUILD, str(number), path, {}, "digest", created_s=float(number)))
    order = list[str]()
    while (following := runner._next()) is not None:
        await runner._begin(following)
        following.state = JobState.DONE
        order.append(following.id)
    assert order == ["0", "3", "4", "1", "5", "2"]


async def test_operations_on_one_datastore_keep_their_order(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path)
    records, runner = jobs._records, jobs._runner
    path = str(tmp_path / "s")
    for number, owner in enumerate(("ann", "bob")):
        await records.add(Job(str(number), owner, BUILD, "s", path, {}, "digest", created_s=float(number)))
    runner._turns["ann"] = 9  # bob's turn comes first, but not on this datastore
    assert runner._next().id == "0"


async def test_an_upload_outlives_a_caller_that_left_while_its_job_was_recorded(
    tmp_path: Path, slow_disk: SlowDisk
) -> None:
    """A job on the disk without its documents would fail at each start of the server."""
    slow_disk.go_on.set()
    given = tmp_path / "docs"
    given.mkdir()
    config = ServerConfig(model=tmp_path / "model", store_dir=tmp_path / "stores")
    stores = DatastoreRegistry((given,), config.store_dir)
    jobs = JobService(config, stores, Metrics(), WorkerPool(config, lambda: stores.paths))

    async def add() -> None:
        with jobs.upload("ann") as upload:
            upload.add((NewDocument("a", "text"),))
            upload.finish()
            slow_disk.hold()
            await jobs.submit(AddDocumentsRequest("docs"), "ann", upload)

    adding = asyncio.create_task(add())
    await asyncio.to_thread(slow_disk.syncing.wait, 30)
    adding.cancel()
    slow_disk.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await adding
    (info,) = jobs.list("ann", 0, "").operations
    assert info.state == JobState.QUEUED
    assert len(list((tmp_path / "stores" / "jobs").glob("*.jsonl"))) == 1


def test_a_restart_keeps_the_uploads_of_open_jobs_however_the_folder_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = JobRecords(Path("jobs"))
    with Upload(Path("jobs"), 100) as upload:
        upload.is_kept = True
    one = job()
    one.documents = str(upload.path)
    asyncio.run(records.add(one))
    for kind in ("jsonl", "ways"):
        (tmp_path / "jobs" / f"left.{kind}").touch()
    (again,) = JobRecords(tmp_path / "jobs")
    assert Path(again.documents).is_file()
    assert len(list((tmp_path / "jobs").glob("*.jsonl"))) == 1
    assert not list((tmp_path / "jobs").glob("*.ways"))


def test_writers_of_one_file_do_not_share_a_temporary_file(tmp_path: Path, slow_disk: SlowDisk) -> None:
    threads = [threading.Thread(target=files.write_atomic, args=(tmp_path / "f", bytes([n]) * 9)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 30
    while len(list(tmp_path.glob("f*tmp"))) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    slow_disk.go_on.set()
    for thread in threads:
        thread.join()
    assert (tmp_path / "f").read_bytes() in (b"\1" * 9, b"\2" * 9)
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_atomic(tmp_path / "f", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("f", b"old")]


class SetClock(Clock):
    """A monotonic clock that a test moves, of a machine that a test restarts."""

    def __init__(self, at_s: float, boot: str = "first") -> None:
        self.at_s, self._boot = at_s, boot

    def now_s(self) -> float:
        return self.at_s


async def ended_job(records: JobRecords, id_: str) -> None:
    one = job(id_)
    await records.add(one)
    one.state, one.ended_s = JobState.DONE, time.time()
    await records.write(one)


async def test_a_step_of_the_wall_clock_forgets_no_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = JobRecords(tmp_path)
    await ended_job(records, "one")
    monkeypatch.setattr(time, "time", lambda: 1e10)
    await records.forget_old()
    assert records.get("one") is not None
    again = JobRecords(tmp_path)
    await again.forget_old()
    assert again.get("one") is not None


async def test_operations_are_kept_a_week_by_the_monotonic_clock(tmp_path: Path) -> None:
    """Across restarts of the server; a reboot of the machine starts the week anew."""
    await ended_job(JobRecords(tmp_path, SetClock(1000.0)), "one")
    for clock, is_kept in (
        (SetClock(1000.0 + KEEP_S - 1), True),
        (SetClock(2 * KEEP_S, boot="second"), True),
        (SetClock(1000.0 + KEEP_S + 1), False),
    ):
        records = JobRecords(tmp_path, clock)
        await records.forget_old()
        assert (records.get("one") is not None) is is_kept
    assert not list(tmp_path.glob("*.json"))
