"""Long work on datastores: taken in, written down, done by index workers one after another, and told about.

A job is a file in the folder for datastores (`jobs/<id>.json`), written whole at each turn of its life, so that a
restart knows all of them and goes on with those that had not ended. What it makes goes into service in one step at its
end: until then the old datastore answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from secrets import token_hex
from typing import Any

from memlm.corpus import lies_under
from memlm.errors import (
    AlreadyExists,
    Cancelled,
    Incompatible,
    InternalError,
    InvalidInput,
    Locked,
    MemlmError,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unavailable,
)
from memlm.index.durable import remove, write_whole
from memlm.index.journal import give_up
from memlm.index.manifest import read_manifest, signed
from memlm.operations import JobReport, JobState, OperationInfo, OperationPage
from memlm.questions import (
    AddDocumentsRequest,
    BuildDatastoreRequest,
    GetDatastoreRequest,
    JobRequest,
    LoadDatastoreRequest,
    check_store_name,
)
from memlm.server.config import ServerConfig
from memlm.server.index_worker import ADD, BUILD, COMPACT, Ended, FromIndexWorker, Skipped, Task, run_task
from memlm.server.job import PREFIX, Job, Upload
from memlm.server.metrics import Metrics
from memlm.server.processes import forking
from memlm.server.stores import Stores
from memlm.server.workers import Workers
from memlm.status import kind_of

JOBS = "jobs"
ATTEMPTS = 3  # of one whose process dies; a restart of the server is none of its faults, and does not count
KEPT_S, KEPT = 7 * 86_400.0, 1000  # how long, and how many, that have ended
MAX_PAGE = 1000
RETRY_AFTER_S = 5.0
JOIN_S = 5.0
LOCKED_S = 1.0  # until another try, where somebody else writes to the datastore
POLL_S, SERVED_S = 0.05, 30.0
PUBLISHING = "take into service"  # the last phase, in which it is too late for a cancel

log = logging.getLogger("memlm.server")


class Jobs:
    """All jobs of a server. Everything happens on the event loop; only the processes are elsewhere."""

    def __init__(
        self,
        config: ServerConfig,
        stores: Stores,
        metrics: Metrics,
        workers: Workers,
    ) -> None:
        """Reads what an earlier server wrote down; starts nothing yet."""
        self._config, self._stores, self._workers = config, stores, workers
        self._jobs: dict[str, Job] = {}
        self._news, self._runners = asyncio.Event(), list[asyncio.Task[None]]()
        self._folder = None if config.store_dir is None else config.store_dir / JOBS
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._read(self._folder)
        metrics.watch_jobs(lambda: [job.info() for job in self._jobs.values()])

    def start(self) -> None:
        """Begins to work, where the server keeps datastores at all."""
        if self._folder is not None:
            self._runners = [asyncio.create_task(self._work()) for _ in range(self._config.index_workers)]

    async def stop(self) -> None:
        """Stops working: what runs is killed, and gone on with by the next server."""
        for runner in self._runners:
            runner.cancel()
        for job in self._jobs.values():
            if job.process is not None:
                job.process.kill()
        await asyncio.gather(*self._runners, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Jobs that wait or run."""
        return sum(job.is_open for job in self._jobs.values())

    def check(self, question: JobRequest) -> None:
        """Raises what is to be said before anything is uploaded: Incompatible where the server builds nothing,
        Overloaded where enough waits, NotFound, AlreadyExists and PermissionDenied for stores and paths.
        """
        if self._folder is None or not self._config.index_workers:
            raise Incompatible(
                "this server neither builds nor extends datastores; start it with --store-dir, or use `memlm index`"
            )
        if self.num_open >= self._config.max_jobs:
            raise Overloaded(
                f"{self.num_open} operations run or wait, which is all that this server takes; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        if isinstance(question, BuildDatastoreRequest):
            check_store_name(question.store)
            self._check_corpus(question.corpus)
            self._stores.check_put(question.store, self._folder)
            if question.replace:
                return
            if question.store in self._stores.paths or any(
                job.is_open and job.kind == BUILD and job.store == question.store for job in self._jobs.values()
            ):
                raise AlreadyExists(
                    f"there is a datastore {question.store!r} already, or one is being built; ask for its replacement"
                    " (replace), or choose another name"
                )
        else:
            self._stores.path_of(question.store)

    def upload(self) -> Upload:
        """Where documents go that are being sent, after `check`."""
        assert self._folder is not None  # `check` has seen to it
        return Upload(self._folder, self._config.max_upload_bytes)

    async def submit(self, question: JobRequest, owner: str, upload: Upload | None = None) -> OperationInfo:
        """Takes a job in; once this returns it is written down. Raises what `check` raises, and AlreadyExists where
        another request came under the same id.
        """
        digest = _digest(question, upload)
        if earlier := self._earlier(owner, question.request_id):
            if earlier.digest != digest:
                raise AlreadyExists(
                    f"request_id {question.request_id!r} was {earlier.name}, which was another request; choose another"
                )
            return earlier.info()
        self.check(question)
        job = self._job_of(question, owner, digest, upload)
        self._jobs[job.id] = job
        try:
            await self._write(job)
        except BaseException:
            del self._jobs[job.id]
            raise
        if upload is not None:
            upload.is_kept = True
        self._news.set()
        self._forget_old()
        return job.info()

    def get(self, name: str, owner: str) -> OperationInfo:
        """How far one is. Raises NotFound where it is not the owner's."""
        return self._own(name, owner).info()

    def list(self, owner: str, page_size: int, page_token: str) -> OperationPage:
        """The owner's, the latest first."""
        own = sorted((job for job in self._jobs.values() if job.owner == owner), key=lambda job: -job.created_s)
        begin = next((place for place, job in enumerate(own) if job.id == page_token), 0) if page_token else 0
        if page_token and (not own or own[begin].id != page_token):
            raise InvalidInput("page_token is none that this server gave; begin anew", field="page_token")
        end = begin + min(page_size or MAX_PAGE, MAX_PAGE)
        told = tuple(job.info() for job in own[begin:end])
        return OperationPage(told, own[end].id if end < len(own) else "")

    async def wait(self, name: str, owner: str, timeout_s: float) -> OperationInfo:
        """The same, once it has ended or the time is over."""
        job = self._own(name, owner)
        with suppress(TimeoutError):
            await asyncio.wait_for(job.ended.wait(), max(0.0, timeout_s))
        return job.info()

    async def cancel(self, name: str, owner: str) -> None:
        """Stops one, and removes what it had done. One that has ended, or is just going into service, stays."""
        job = self._own(name, owner)
        if job.state == JobState.QUEUED:
            await self._end(job, JobState.CANCELLED, error=_cancelled(job))
        elif job.is_open and job.phase != PUBLISHING:
            job.is_cancelled = True
            if job.process is not None:
                job.process.kill()
            await job.ended.wait()

    async def delete(self, name: str, owner: str) -> None:
        """Forgets one that has ended. Raises Incompatible for one that has not."""
        job = self._own(name, owner)
        if job.is_open:
            raise Incompatible(f"{job.name} has not ended; cancel it first")
        self._forget(job)

    def _own(self, name: str, owner: str) -> Job:
        job = self._jobs.get(name.removeprefix(PREFIX))
        if job is None or job.owner != owner:
            raise NotFound(f"no operation {name!r}", kind="operation", name=name)
        return job

    def _earlier(self, owner: str, request_id: str) -> Job | None:
        same = (job for job in self._jobs.values() if job.owner == owner and job.request_id == request_id)
        return next(same, None) if request_id else None

    def _check_corpus(self, corpus: tuple[str, ...]) -> None:
        for path in corpus:
            if not lies_under(Path(path), self._config.corpus_roots):
                raise PermissionDenied(
                    f"{path} is under none of the folders that this server may read from (--corpus-root); upload the"
                    " documents instead"
                )
            if not os.path.exists(path):  # Path's would raise for a name that is too long
                raise NotFound(f"no file or folder at {path} on the server", kind="corpus", name=path)

    def _job_of(self, question: JobRequest, owner: str, digest: str, upload: Upload | None) -> Job:
        id_ = token_hex(8)
        if isinstance(question, BuildDatastoreRequest):
            assert self._config.store_dir is not None  # `check` has seen to it
            path = self._config.store_dir / f"{question.store}-{id_}"
            return Job(id_, owner, BUILD, question.store, str(path), asdict(question), digest, question.request_id)
        name, path = self._stores.path_of(question.store)
        told = {"replace": question.replace} if isinstance(question, AddDocumentsRequest) else {}
        kind = ADD if isinstance(question, AddDocumentsRequest) else COMPACT
        documents = "" if upload is None else str(upload.path)
        return Job(id_, owner, kind, name, str(path), told, digest, question.request_id, documents)

    async def _work(self) -> None:
        """One index worker after another, as long as the server runs."""
        while True:
            job = self._next()
            if job is None:
                self._news.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOCKED_S)
                continue
            try:
                await self._attempt(job)
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("%s failed", job.name)
                error = InternalError(f"a bug in the server; its log tells more under {job.name}")
                await self._end(job, JobState.FAILED, error=error)
            self._news.set()  # what waited for this one's datastore may go on

    def _next(self) -> Job | None:
        """The oldest that waits and whose datastore nobody works on: there is one writer at a time."""
        taken = {job.path for job in self._jobs.values() if job.state == JobState.RUNNING}
        now_s, waiting = time.monotonic(), (job for job in self._jobs.values() if job.state == JobState.QUEUED)
        ready = (job for job in waiting if job.path not in taken and job.not_before_s <= now_s)
        return min(ready, key=lambda job: job.created_s, default=None)

    async def _attempt(self, job: Job) -> None:
        job.state, job.started_s = JobState.RUNNING, job.started_s or time.time()
        job.attempts += 1
        if job.kind == ADD and not job.has_begun:
            job.since = await asyncio.to_thread(lambda: read_manifest(Path(job.path)).number)
        await self._write(job)
        if job.is_cancelled:
            ended: Ended | None = None
        else:
            ended = await self._run(job)
        if ended is not None and ended.report is not None:
            try:
                job.phase = PUBLISHING
                await self._publish(job, ended.report)
            except MemlmError as error:
                await self._fail(job, error)
                return
            await self._end(job, JobState.DONE, report=ended.report)
        elif job.is_cancelled:
            if await self._clean(job):
                await self._end(job, JobState.CANCELLED, error=_cancelled(job))
            else:  # the commit was before the kill: what is left is to say so
                job.is_cancelled, job.state = False, JobState.QUEUED
                await self._write(job)
        elif ended is not None and isinstance(ended.error, Locked):
            job.state, job.phase, job.attempts = JobState.QUEUED, "wait for another writer", job.attempts - 1
            job.not_before_s = time.monotonic() + LOCKED_S
            await self._write(job)
        elif ended is not None and ended.error is not None:
            await self._fail(job, ended.error)
        else:
            job.deaths += 1
            log.error("the index worker of %s died; %d of %d attempts", job.name, job.deaths, ATTEMPTS)
            if job.deaths >= ATTEMPTS:
                died = Unavailable(
                    f"the index worker died {job.deaths} times at {job.name}; the server's log tells more"
                )
                await self._fail(job, died)
            else:
                job.state = JobState.QUEUED
                await self._write(job)

    async def _run(self, job: Job) -> Ended | None:
        """One process, from its start to its end; None where it died or was killed."""
        context = forking()
        ours, theirs = context.Pipe()
        process = context.Process(target=run_task, args=(theirs, self._task(job)), name="index worker", daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        job.process = process
        try:
            with ours:
                if job.is_cancelled:
                    process.kill()
                while (message := await asyncio.to_thread(_receive, ours)) is not None:
                    if isinstance(message, Ended):
                        return message
                    if isinstance(message, Skipped):
                        job.skipped += 1
                        log.warning("%s: %s is left out", job.name, message.problem)
                        continue
                    job.hear(message)
                    if not job.has_begun:
                        job.has_begun = True
                        await self._write(job)
                return None
        finally:
            job.process = None
            await asyncio.shield(asyncio.to_thread(_reap, process))

    def _task(self, job: Job) -> Task:
        config, request = self._config, job.request
        common: dict[str, Any] = {
            "kind": job.kind,
            "store": job.store,
            "path": Path(job.path),
            "model": config.model,
            "dtype": config.dtype,
            "num_threads": config.index_threads,
            "log_level": config.log_level,
            "log_format": config.log_format,
            "is_resumed": job.attempts > 1,
        }
        if job.kind == ADD:
            return Task(**common, corpus=(Path(job.documents),), replace=request["replace"], since=job.since)
        if job.kind == COMPACT:
            return Task(**common)
        options = {
            name: request[name]
            for name in ("index", "target", "max_memory", "prune", "stride", "seed")
            if request[name] is not None
        }
        return Task(
            **common,
            corpus=tuple(Path(path).absolute() for path in request["corpus"]),  # a "-" is a file of that name here
            glob=request["glob"],
            roots=config.corpus_roots,
            options={**options, "keep_keys": not request["drop_keys"]},
        )

    async def _publish(self, job: Job, report: JobReport) -> None:
        """Takes into service what a job has made. Where there is no worker now, the next one will have it."""
        if job.kind != BUILD:
            await self._until_served(job.store, report.manifest)
            return
        before, path = self._stores.paths.get(job.store), Path(job.path)
        self._stores.put(job.store, path)
        try:
            with suppress(Unavailable):
                load = LoadDatastoreRequest(job.path, job.store, replace=True)
                await self._workers.everywhere(load, lambda _: None, ours=True)
        except MemlmError:
            if before is None:
                self._stores.take_out(job.store)
            else:
                self._stores.put(job.store, before)
            raise
        if before is not None and before != path:
            await asyncio.to_thread(self._stores.discard, before)

    async def _until_served(self, store: str, manifest: int) -> None:
        """The workers look for what was committed at every beat."""
        deadline_s = time.monotonic() + SERVED_S
        while time.monotonic() < deadline_s:
            with suppress(Unavailable, NotFound):
                if await self._workers.manifest(GetDatastoreRequest(store)) >= manifest:
                    return
            await asyncio.sleep(POLL_S)
        log.error("what was committed to %s is not served yet", store)

    async def _fail(self, job: Job, error: MemlmError) -> None:
        log.error("%s failed: %s", job.name, error)
        await self._clean(job)
        await self._end(job, JobState.FAILED, error=error)

    async def _clean(self, job: Job) -> bool:
        """Removes what a job had done; False where it was committed before, and stays. What it never laid a hand on may
        be somebody else's.
        """
        if job.kind == BUILD:
            await asyncio.to_thread(self._stores.discard, Path(job.path))
            return True
        try:
            return not job.has_begun or await asyncio.to_thread(give_up, Path(job.path))
        except MemlmError as error:
            log.error("what %s left in %s could not be removed: %s", job.name, job.path, error)
            return True

    async def _end(
        self, job: Job, state: JobState, *, report: JobReport | None = None, error: MemlmError | None = None
    ) -> None:
        job.state, job.ended_s = state, time.time()
        job.report = None if report is None else asdict(report)
        job.error = None if error is None else {"kind": kind_of(error).__name__, "message": str(error)}
        try:
            await self._write(job)
            if job.documents:
                await asyncio.to_thread(remove, Path(job.documents))
        except (MemlmError, OSError) as trouble:
            log.error("the end of %s could not be written down; a restart will begin it again: %s", job.name, trouble)
        job.ended.set()

    async def _write(self, job: Job) -> None:
        await asyncio.to_thread(write_whole, self._file(job), job.encode())

    def _file(self, job: Job) -> Path:
        assert self._folder is not None  # there is a job
        return self._folder / f"{job.id}.json"

    def _read(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.json")):
            try:
                job = Job(**signed(file.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                log.error("%s is no record of an operation and is left alone: %s", file, error)
                continue
            if job.is_open:
                job.state = JobState.QUEUED
            else:
                job.ended.set()
            self._jobs[job.id] = job
        kept = {job.documents for job in self._jobs.values() if job.is_open}
        for left in (*folder.glob("*.jsonl"), *folder.glob("*.tmp")):
            if str(left) not in kept:
                remove(left)

    def _forget_old(self) -> None:
        ended = sorted((job for job in self._jobs.values() if not job.is_open), key=lambda job: -(job.ended_s or 0))
        for place, job in enumerate(ended):
            if place >= KEPT or (job.ended_s or 0) < time.time() - KEPT_S:
                self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.id]
        remove(self._file(job))


def _digest(question: JobRequest, upload: Upload | None) -> str:
    told = {**asdict(question), "kind": type(question).__name__, "upload": "" if upload is None else upload.digest}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _cancelled(job: Job) -> Cancelled:
    return Cancelled(f"{job.name} was cancelled; {job.store!r} is as it was before")


def _receive(pipe: Connection) -> FromIndexWorker | None:
    try:
        message: FromIndexWorker = pipe.recv()
        return message
    except (EOFError, OSError):
        return None


def _reap(process: BaseProcess) -> None:
    process.join(JOIN_S)
    if process.is_alive():
        process.kill()
        process.join(JOIN_S)
