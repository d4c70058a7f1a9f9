"""Runs jobs, each in an index worker. The result goes into service in one step; until then the old datastore
serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

from memlm.api.datastores import GetDatastoreRequest, LoadDatastoreRequest, RememberRequest
from memlm.api.operations import JobReport, JobState
from memlm.base.progress import COMPARING, LOADING
from memlm.errors import (
    AlreadyExists,
    Cancelled,
    InternalError,
    InvalidInput,
    Locked,
    MemlmError,
    Unavailable,
)
from memlm.index.store.journal import rollback
from memlm.index.store.manifest import read_manifest
from memlm.server.config import ServerConfig
from memlm.server.inference.pool import EnginePool
from memlm.server.jobs.background_keys import make_keys_when_idle
from memlm.server.jobs.job import Job
from memlm.server.jobs.process import IndexWorkers
from memlm.server.jobs.records import JobRecords
from memlm.server.jobs.short import documents_of, may_overtake
from memlm.server.jobs.tasks import task_of
from memlm.server.jobs.uploads import noted_deletions, remove_upload
from memlm.server.jobs.worker import (
    ADD,
    DELETE,
    SYNC,
    Committed,
    Ended,
    FromTask,
    Planned,
    Skipped,
    Task,
)
from memlm.server.registry import DatastoreRegistry
from memlm.wire.status import kind_of

ATTEMPTS = 3  # of a job whose process dies; a restart of the server does not count
LOCK_RETRY_S = 1.0  # until another attempt, where another process holds the datastore's write lock
WRITE_RETRY_S = 1.0  # until another attempt to write the end of a job down
POLL_S, SERVED_TIMEOUT_S = 0.05, 30.0
PUBLISHING = "take into service"  # the last phase, in which it is too late for a cancel
WAITING = "wait for another operation"
SHORT_POLL_S = 0.5

log = logging.getLogger("memlm.server")


class JobRunner:
    """Runs jobs from the event loop."""

    def __init__(
        self, config: ServerConfig, records: JobRecords, stores: DatastoreRegistry, workers: EnginePool
    ) -> None:
        self._config, self._records, self._stores, self._workers = config, records, stores, workers
        self._index_workers = IndexWorkers(config)
        self._job_available, self._runners = asyncio.Event(), list[asyncio.Task[None]]()
        self.replacing = asyncio.Lock()  # held while a datastore takes another's place, or documents are deleted
        self._turns, self._turn = dict[str, int](), 0  # the latest turn of each owner
        self._num_writing, self._idle = 0, asyncio.Event()  # set while nothing is remembered
        self._idle.set()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Keeps datastores in their places while documents are written to one, beside other writes."""
        async with self.replacing:  # until one that takes another's place is there
            self._num_writing += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._num_writing -= 1
            if not self._num_writing:
                self._idle.set()

    def start(self) -> None:
        """Starts to run jobs, as many at a time as there are index workers."""
        self._runners = [asyncio.create_task(self._work()) for _ in range(self._config.index_workers)]
        self._runners += [asyncio.create_task(self._write_missed_ends()), asyncio.create_task(self._work_beside())]
        if self._config.background_keys:
            self._runners.append(asyncio.create_task(make_keys_when_idle(self._records, self._stores, self.wake)))
        self._prepare_ahead()

    async def stop(self) -> None:
        """Kills the index workers. The next server continues their jobs."""
        for runner in self._runners:
            runner.cancel()
        await self._index_workers.stop()
        await asyncio.gather(*self._runners, return_exceptions=True)

    def prepare(self) -> None:
        """Loads the model for a job that is to come."""
        self._index_workers.prepare()

    def _prepare_ahead(self) -> None:
        """Replaces a worker that ended, after the job at which it did: a job whose workers die must come to an end."""
        if self._config.index_ahead:
            self.prepare()

    def drain(self) -> None:
        """Ends idle index workers, and keeps none from now on."""
        self._index_workers.drain()

    def wake(self) -> None:
        """Looks for a job that can run."""
        self._job_available.set()

    async def _work(self) -> None:
        """Task: runs one job after another."""
        while True:
            job = self._next()
            if job is None:
                self._job_available.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._job_available.wait(), LOCK_RETRY_S)
                continue
            await self._end_on_error(job, self._attempt(job))
            self._prepare_ahead()
            self.wake()  # for a job that waits for this datastore

    async def _end_on_error(self, job: Job, attempt: Awaitable[None]) -> None:
        try:
            await attempt
        except MemlmError as error:
            await self._fail(job, error)
        except Exception:
            log.exception("%s failed", job.name)
            bug = InternalError(f"a bug in the server; its log has the details under {job.name}")
            await self.end(job, JobState.FAILED, error=bug)

    async def _work_beside(self) -> None:
        """Task: while all index workers are at work, has short additions read by an inference worker, one after the
        other, as texts that are to be remembered. So they need neither another model in RAM nor the end of a long job.
        """
        while True:
            await asyncio.sleep(SHORT_POLL_S)
            if sum(job.state == JobState.RUNNING for job in self._records) < self._config.index_workers:
                continue
            queued = [job for job in self._records if job.state == JobState.QUEUED]
            for job in queued:
                job.phase = job.phase or WAITING
            short = self._first(job for job in queued if may_overtake(job, self._records))
            if short is not None:
                await self._end_on_error(short, self._remember(short))
                self.wake()

    async def _remember(self, job: Job) -> None:
        """Adds the documents of a short job by an inference worker. Where that is not possible now, the job waits on
        for an index worker, which adds them unless they are there.
        """
        begin_s, job.phase = time.monotonic(), PUBLISHING
        await self._begin(job)
        try:
            documents = await asyncio.to_thread(documents_of, job)
            request = RememberRequest(documents, job.store, replace=job.request["replace"])
            async with self.writing():
                await self._workers.ask(request, caller=job.owner, owner=job.owner)
            info = await self._workers.ask(GetDatastoreRequest(job.store), internal=True)
        except (AlreadyExists, InvalidInput):
            raise
        except MemlmError as error:
            log.info("%s waits for an index worker: %s", job.name, error)
            job.state, job.phase = JobState.QUEUED, WAITING
            await self._records.write(job)
        else:
            facts = {each.name: getattr(info, each.name) for each in fields(JobReport) if hasattr(info, each.name)}
            report = JobReport(**facts, store=job.store, seconds=time.monotonic() - begin_s)
            await self.end(job, JobState.DONE, report=report)

    async def _write_missed_ends(self) -> None:
        """Task: writes the ends of jobs down that a full disk had no room for."""
        while True:
            await asyncio.sleep(WRITE_RETRY_S)
            await self._records.write_missed()

    def _next(self) -> Job | None:
        """A waiting job whose datastore no other job changes."""
        taken = {Path(job.path).resolve() for job in self._records if job.state == JobState.RUNNING}
        waiting = (job for job in self._records if job.state == JobState.QUEUED)
        ready, now_s = list[Job](), time.monotonic()
        for job in sorted(waiting, key=lambda job: job.created_s):
            path = Path(job.path).resolve()
            if path not in taken and job.not_before_s <= now_s:
                ready.append(job)
            taken.add(path)  # operations on one datastore keep their order
        return self._first(ready)

    def _first(self, jobs: Iterable[Job]) -> Job | None:
        """The oldest job of the owner whose latest turn was the longest ago."""
        return min(jobs, key=lambda job: (self._turns.get(job.owner, 0), job.created_s), default=None)

    async def _begin(self, job: Job) -> None:
        self._turn += 1
        self._turns[job.owner] = self._turn
        job.state, job.started_s = JobState.RUNNING, job.started_s or time.time()
        job.attempts += 1
        if job.kind == ADD and job.attempts == 1:  # a later attempt has to see what this one added
            job.since = await asyncio.to_thread(lambda: read_manifest(Path(job.path)).last_segment)
        await self._records.write(job)

    async def _attempt(self, job: Job) -> None:
        job.phase = "" if job.phase == WAITING else job.phase
        await self._begin(job)
        await self._handle_outcome(job, None if job.is_cancelled else await self._run(job, task_of(job, self._config)))

    async def _handle_outcome(self, job: Job, ended: Ended | None) -> None:
        """Ends or requeues a job after an attempt. `ended` is None for a process that died, was killed or never
        started.
        """
        if ended is not None and ended.report is not None:
            try:
                job.phase = PUBLISHING
                await self._publish(job, ended.report)
            except MemlmError as error:
                await self._fail(job, error)
            else:
                await self.end(job, JobState.DONE, report=ended.report)
        elif job.is_cancelled:
            if await self._clean(job) or job.is_published:
                await self.end(job, JobState.CANCELLED, error=cancelled_error(job))
            else:  # committed before the kill: another attempt reports it
                job.is_cancelled, job.state = False, JobState.QUEUED
                await self._records.write(job)
        elif ended is not None and isinstance(ended.error, Locked):
            job.state, job.phase, job.attempts = JobState.QUEUED, "wait for another writer", job.attempts - 1
            job.not_before_s = time.monotonic() + LOCK_RETRY_S
            await self._records.write(job)
        elif ended is not None and ended.error is not None:
            await self._fail(job, ended.error)
        else:
            job.deaths += 1
            log.error("the index worker of %s died; %d of %d attempts", job.name, job.deaths, ATTEMPTS)
            if job.deaths >= ATTEMPTS:
                died = Unavailable(
                    f"the index worker died {job.deaths} times at {job.name}; the server's log has the details"
                )
                await self._fail(job, died)
            else:
                job.state = JobState.QUEUED
                await self._records.write(job)

    async def _run(self, job: Job, task: Task) -> Ended | None:
        """Runs a task in an index worker. Returns None if it died at the task or was killed. A kept one may have died
        before: then another gets the task, in the end a new one, whose death is the job's.
        """
        while True:
            async with self._index_workers.take(task) as worker:
                job.worker = worker
                try:
                    if job.is_cancelled:
                        worker.kill()
                    ended = await worker.run(task, lambda message: self._note(job, message))
                finally:
                    job.worker = None
            if ended is not None or worker.is_new or worker.has_begun or job.is_cancelled:
                return ended
            log.info("a kept index worker was gone; another does %s", job.name)

    async def _note(self, job: Job, message: FromTask) -> None:
        if isinstance(message, Committed):
            await self._publish_text(job)
            return
        if isinstance(message, Planned):
            job.note_found(message.outcome)
            await self._records.write(job)
            return
        if isinstance(message, Skipped):
            job.skipped += 1
            log.warning("%s: %s is left out", job.name, message.problem)
            return
        job.update_progress(message)
        if not job.has_begun and message.phase not in (LOADING, COMPARING):
            job.has_begun = True
            await self._records.write(job)

    async def _publish(self, job: Job, report: JobReport) -> None:
        """Puts the result of a job in service. Without a worker at present, the next one loads it."""
        if job.creates and not job.publishes:
            return
        if not job.creates or self._stores.paths.get(job.store) == Path(job.path):
            await self._wait_until_served(job.store)
            if not job.is_published:
                await self._delete_from_what_replaced(job)
            if job.kind != SYNC and job.request.get("replace"):
                self._workers.mark_deleted(job.store)
            if job.request.get("purge"):
                for other in self._records:
                    if other.store == job.store and not other.is_open and other.redact():
                        await self._records.write(other)
            return
        async with self.replacing:
            await self._idle.wait()
            if deleted := await self._records.deleted_meanwhile(job):
                await self._delete_from_replacement(job, deleted, Path(job.path))
            await self._put_in_service(job)

    async def _publish_text(self, job: Job) -> None:
        """Puts text in service whose keys are made next. What replaces a datastore waits for them: that one may have
        some.
        """
        if job.creates:
            async with self.replacing:
                await self._idle.wait()
                if job.store in self._stores.paths or await self._records.deleted_meanwhile(job):
                    return
                await self._put_in_service(job)
                job.is_published = True
        else:
            await self._wait_until_served(job.store)
            job.is_published = await self._forget_deleted(job) is None
        await self._records.write(job)

    async def _forget_deleted(self, job: Job) -> Path | None:
        """Has other jobs forget the documents that a synchronization has deleted. Returns the datastore that has taken
        the place of its own before, having looked for deletions before these were committed.
        """
        if job.kind != SYNC or not (deleted := await asyncio.to_thread(noted_deletions, Path(job.documents))):
            return None
        async with self.replacing:
            await self._records.forget_documents(job.store, deleted, by=job)
            path = self._stores.paths.get(job.store)
            return path if path is not None and self._records.is_replacement(path, job) else None

    async def _delete_from_what_replaced(self, job: Job) -> None:
        """Has other jobs, and the one that has taken the place of its datastore, forget the documents that a
        synchronization has deleted.
        """
        if (path := await self._forget_deleted(job)) is not None:
            deleted = await asyncio.to_thread(noted_deletions, Path(job.documents))
            async with self.replacing:
                await self._delete_from_replacement(job, deleted, path)
            await self._wait_until_served(job.store)

    async def _delete_from_replacement(self, job: Job, document_ids: tuple[str, ...], path: Path) -> None:
        """Deletes from a new datastore the documents that were deleted meanwhile from the old one."""
        for _ in range(ATTEMPTS):
            task = replace(task_of(job, self._config), kind=DELETE, document_ids=document_ids, path=path)
            ended = await self._run(job, task)
            if ended is not None and ended.error is not None:
                raise ended.error
            if ended is not None:
                return
        raise Unavailable(f"the process that deletes documents from the replacement of {job.store!r} died")

    async def _put_in_service(self, job: Job) -> None:
        """Puts a new datastore in service, for a job that `replaces` in place of the old one of its name. Raises
        AlreadyExists for another job where one was loaded meanwhile, which stays.
        """
        before, path = self._stores.paths.get(job.store), Path(job.path)
        if before is not None and not job.replaces:
            raise _taken_error(job)
        self._stores.put(job.store, path)
        try:
            with suppress(Unavailable):
                load = LoadDatastoreRequest(job.path, job.store, replace=job.replaces)
                await self._workers.broadcast(load, lambda _: None, internal=True)
            self._workers.mark_deleted(job.store)
        except MemlmError as error:
            if self._stores.paths.get(job.store) == path:  # else a load that the workers did first has put its own
                if before is None:
                    self._stores.remove(job.store)
                else:
                    self._stores.put(job.store, before)
            if isinstance(error, AlreadyExists):
                raise _taken_error(job) from error
            raise
        if before is not None and before.resolve() != path.resolve():
            await asyncio.to_thread(self._stores.discard, before)

    async def _wait_until_served(self, store: str) -> None:
        """Waits until all workers have switched to the latest version."""
        deadline_s = time.monotonic() + SERVED_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with suppress(MemlmError):
                await self._workers.refresh(store)
                return
            await asyncio.sleep(POLL_S)
        log.error("what was committed to %s is not served yet", store)

    async def _fail(self, job: Job, error: MemlmError) -> None:
        log.error("%s failed: %s", job.name, error)
        await self._clean(job)
        await self.end(job, JobState.FAILED, error=error)

    async def _clean(self, job: Job) -> bool:
        """Removes the unfinished work of a job. Returns False if the job had committed, and stays. A job that has not
        begun may not touch the folder, which another writer may be using.
        """
        if job.creates and not job.is_published:
            await asyncio.to_thread(self._stores.discard, Path(job.path))
            return True
        try:
            return not job.has_begun or await asyncio.to_thread(rollback, Path(job.path))
        except MemlmError as error:
            log.error("what %s left in %s could not be removed: %s", job.name, job.path, error)
            return True

    async def end(
        self, job: Job, state: JobState, *, report: JobReport | None = None, error: MemlmError | None = None
    ) -> None:
        """Records how a job ended, and removes its upload. From then on no server begins the job again."""
        try:
            # Those of an earlier attempt, or of one that failed behind them. One that is done has told them.
            if not job.is_published and state != JobState.DONE:
                await self._delete_from_what_replaced(job)
        except (MemlmError, OSError) as trouble:
            log.error("what %s deleted may still be in %s: %s", job.name, job.store, trouble)
        job.state, job.ended_s = state, time.time()
        job.report = None if report is None else asdict(report)
        is_served = job.is_published and self._stores.paths.get(job.store) == Path(job.path)
        served = f"; the documents are in {job.store!r}, and not all of their keys"
        message = f"{error}{served if is_served and state == JobState.FAILED else ''}"
        job.error = None if error is None else {"kind": kind_of(error).__name__, "message": message}
        job.request, job.deleted = {}, []  # they may name documents; the digest tells whether a request is the same
        try:
            await self._records.write_end(job)
        except OSError as trouble:
            log.error("the record of %s stays, and a restart will begin it again: %s", job.name, trouble)
        try:
            if job.documents:
                await asyncio.to_thread(remove_upload, Path(job.documents))
        except OSError as trouble:
            log.error("the upload of %s could not be removed: %s", job.name, trouble)
        job.ended.set()


def cancelled_error(job: Job) -> Cancelled:
    if job.is_published:
        return Cancelled(f"{job.name} was cancelled; {job.store!r} has its documents, and not all of their keys")
    return Cancelled(f"{job.name} was cancelled; {job.store!r} is as it was before")


def _taken_error(job: Job) -> AlreadyExists:
    return AlreadyExists(
        f"another datastore {job.store!r} was loaded while {job.name} made one, and stays; unload it and try again, or"
        " choose another name"
    )
