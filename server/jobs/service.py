"""Jobs as their owners see them: submit, get, list, wait, cancel, delete."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any

from memlm.api.datastores import (
    AddDocumentsRequest,
    BuildDatastoreRequest,
    DeleteDocumentsRequest,
    DeleteReport,
    JobRequest,
    RememberReport,
    RememberRequest,
    check_store_name,
)
from memlm.api.operations import JobState, OperationInfo, OperationPage
from memlm.api.paging import MAX_PAGE, page_of
from memlm.base.files import is_under
from memlm.data.folders import check_glob
from memlm.data.synced_folder import hash_of
from memlm.errors import AlreadyExists, Incompatible, NotFound, Overloaded, PermissionDenied
from memlm.server.config import ServerConfig
from memlm.server.inference.pool import EnginePool, run_to_end
from memlm.server.jobs.job import PREFIX, Job
from memlm.server.jobs.records import JobRecords
from memlm.server.jobs.runner import PUBLISHING, JobRunner, cancelled_error
from memlm.server.jobs.uploads import Upload
from memlm.server.jobs.worker import ADD, BUILD, COMPACT, SYNC
from memlm.server.quota import Quota, share_of
from memlm.server.registry import DatastoreRegistry
from memlm.server.telemetry.metrics import Metrics

JOBS = "jobs"
RETRY_AFTER_S = 5.0


class JobService:
    """All jobs of a server. A restart continues unfinished ones. Everything runs on the event loop."""

    def __init__(self, config: ServerConfig, stores: DatastoreRegistry, metrics: Metrics, workers: EnginePool) -> None:
        """Reads the records of earlier servers."""
        self._config, self._stores, self._workers = config, stores, workers
        self._records = JobRecords(None if stores.folder is None else stores.folder / JOBS)
        self._uploads = Quota("uploads under way", config.max_jobs, share_of(config.max_jobs))
        self._runner = JobRunner(config, self._records, stores, workers)
        self._submitting = asyncio.Lock()
        metrics.observe_jobs(lambda: [job.info() for job in self._records])

    def start(self) -> None:
        """Starts to run jobs, on a server with a datastore folder."""
        if self._records.folder is not None:
            self._runner.start()

    def drain(self) -> None:
        """Ends idle index workers, and keeps none from now on."""
        self._runner.drain()

    async def stop(self) -> None:
        """Kills the index workers. The next server continues their jobs."""
        await self._runner.stop()

    @property
    def num_open(self) -> int:
        """Jobs that wait or run."""
        return self._records.num_open

    def check_before_upload(self, request: AddDocumentsRequest, owner: str) -> None:
        """Raises as `submit` will, as far as that is known before the documents come. A request with the id of an
        earlier one begins nothing, and waits for nothing.
        """
        if self._earlier(owner, request.request_id) is None:
            self._check(request)

    def _check(self, request: JobRequest, *, is_uploaded: bool = False, may_create: bool = True) -> None:
        """Raises as `submit` does, before an upload and again when its documents have been `is_uploaded`."""
        if self._records.folder is None or not self._config.index_workers:
            raise Incompatible(
                "this server neither builds nor extends datastores; start it with --store-dir, or use `memlm index`"
            )
        if self.num_open + self._uploads.taken >= self._config.max_jobs + is_uploaded:
            raise Overloaded(
                f"{self.num_open} operations run or wait and {self._uploads.taken} are being sent, which is all that"
                " this server takes; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        if isinstance(request, BuildDatastoreRequest):
            self._check_corpus(request.corpus)
            if request.glob is not None:
                check_glob(request.glob)
            self._check_new(request.store, replaces=request.replace)
        elif may_create and self._creates(request):
            self._check_new(str(request.store), is_sync=True)
        else:
            self._stores.path_of(request.store)

    def _check_new(self, store: str, *, replaces: bool = False, is_sync: bool = False) -> None:
        check_store_name(store)
        assert self._records.folder is not None  # `_check` has seen to it
        self._stores.check_put(store, self._records.folder)
        is_coming = any(job.is_open and job.publishes and job.store == store for job in self._records)
        if is_sync and is_coming:  # it may wait, as it would for another synchronization of one that is there
            raise Overloaded(
                f"a datastore {store!r} is being made by another operation; synchronize again once it is there",
                retry_after_s=RETRY_AFTER_S,
            )
        if not replaces and (is_coming or store in self._stores.paths):
            raise AlreadyExists(
                f"there is a datastore {store!r} already, or one is being built; wait for it, ask for its replacement"
                " (replace), or choose another name"
            )

    def _creates(self, request: JobRequest) -> bool:
        """Whether a request is a synchronization of a datastore that is not there, which makes it."""
        named = isinstance(request, AddDocumentsRequest) and request.sync and request.store is not None
        return bool(named) and request.store not in self._stores.paths

    @contextmanager
    def upload(self, caller: str, *, is_sync: bool = False) -> Iterator[Upload]:
        """Opens a file for documents, after `check_before_upload`. An index worker loads the model while they arrive.
        Raises Overloaded for a caller with too many uploads.
        """
        assert self._records.folder is not None  # `_check` has seen to it
        config = self._config
        with (
            self._uploads.hold(caller, 1),
            Upload(
                self._records.folder, config.max_upload_bytes, config.max_upload_documents, is_sync=is_sync
            ) as upload,
        ):
            self._runner.prepare()
            yield upload

    async def submit(
        self, request: JobRequest, owner: str, upload: Upload | None = None, *, may_create: bool = True
    ) -> OperationInfo:
        """Starts a job, and returns once its record is on disk. A synchronization makes a datastore that is not there,
        or was unloaded during the upload, if it `may_create` one.

        Raises Incompatible on a server without jobs, Overloaded if too many jobs wait, NotFound, AlreadyExists or
        PermissionDenied for datastores and paths, and AlreadyExists if another request had the same request id.
        """
        digest = _digest(request, upload)
        async with self._submitting:  # so that no two pass `_check` for one name, or begin one request twice
            if earlier := self._earlier(owner, request.request_id):
                if earlier.digest != digest:
                    raise AlreadyExists(
                        f"request_id {request.request_id!r} was {earlier.name}, which was another request; choose"
                        " another"
                    )
                return earlier.info()
            self._check(request, is_uploaded=upload is not None, may_create=may_create)
            job = self._job_of(request, owner, digest, upload)
            await self._record(job, upload)
        self._runner.wake()
        await self._records.forget_old()
        return job.info()

    async def _record(self, job: Job, upload: Upload | None) -> None:
        """Records a job. From then on it owns its upload, even if the caller has left."""
        try:
            await self._records.add(job)
        finally:
            if upload is not None:
                upload.is_kept = self._records.get(job.id) is not None

    def get(self, name: str, owner: str) -> OperationInfo:
        """Raises NotFound for an operation that is not the owner's."""
        return self._owned(name, owner).info()

    def list(self, owner: str, page_size: int, page_token: str) -> OperationPage:
        """The owner's operations, the latest first."""
        owned = [job for job in self._records if job.owner == owner]
        jobs, token = page_of(owned, lambda job: (-job.created_s, job.id), page_size, page_token, default=MAX_PAGE)
        return OperationPage(tuple(job.info(names=False) for job in jobs), token)

    async def wait(self, name: str, owner: str, timeout_s: float) -> OperationInfo:
        """Waits for the end of an operation, at most `timeout_s`, and returns its state."""
        job = self._owned(name, owner)
        with suppress(TimeoutError):
            await asyncio.wait_for(job.ended.wait(), max(0.0, timeout_s))
        return job.info()

    async def cancel(self, name: str, owner: str) -> None:
        """Stops a job and removes its work. Has no effect on a job that has ended or is going into service."""
        job = self._owned(name, owner)
        if job.state == JobState.QUEUED:
            await self._runner.end(job, JobState.CANCELLED, error=cancelled_error(job))
        elif job.is_open and job.phase != PUBLISHING:
            job.is_cancelled = True
            if job.worker is not None:
                job.worker.kill()
            await job.ended.wait()

    async def delete_documents(
        self, request: DeleteDocumentsRequest, time_left_s: float | None, **origin: Any
    ) -> DeleteReport:
        """Deletes documents from a datastore in service, and from its replacement if one is being built.

        The deletion runs to its end even if the caller leaves.
        """
        return await run_to_end(self._delete_documents(request, time_left_s, **origin))

    async def _delete_documents(
        self, request: DeleteDocumentsRequest, time_left_s: float | None, **origin: Any
    ) -> DeleteReport:
        begin_s = time.monotonic()
        async with self._runner.replacing:
            left_s = None if time_left_s is None else time_left_s - (time.monotonic() - begin_s)
            report: DeleteReport = await self._workers.ask(request, left_s, **origin)
            await self._records.forget_documents(report.store, request.document_ids)
        return report

    async def remember(self, request: RememberRequest, time_left_s: float | None, **origin: Any) -> RememberReport:
        """Adds documents to a datastore in service. The change runs to its end even if the caller leaves."""
        return await run_to_end(self._remember(request, time_left_s, **origin))

    async def _remember(self, request: RememberRequest, time_left_s: float | None, **origin: Any) -> RememberReport:
        begin_s = time.monotonic()
        async with self._runner.writing():
            left_s = None if time_left_s is None else time_left_s - (time.monotonic() - begin_s)
            return await self._workers.ask(request, left_s, **origin)

    async def delete(self, name: str, owner: str) -> None:
        """Removes the record of a job that has ended. Raises Incompatible for an open one."""
        job = self._owned(name, owner)
        if job.is_open:
            raise Incompatible(f"{job.name} has not ended; cancel it first")
        await self._records.forget(job)

    def _owned(self, name: str, owner: str) -> Job:
        job = self._records.get(name.removeprefix(PREFIX))
        if job is None or job.owner != owner:
            raise NotFound(f"no operation {name!r}", kind="operation", name=name)
        return job

    def _earlier(self, owner: str, request_id: str) -> Job | None:
        same = (job for job in self._records if job.owner == owner and job.request_id == request_id)
        return next(same, None) if request_id else None

    def _check_corpus(self, corpus: tuple[str, ...]) -> None:
        for path in corpus:
            if not is_under(Path(path), self._config.corpus_roots):
                raise PermissionDenied(
                    f"{path} is under none of the folders that this server may read from (--corpus-root); where they"
                    " lie on another machine, `memlm index sync STORE FOLDER --target HOST:PORT` there uploads them"
                )
            if not os.path.exists(path):  # Path's would raise for a name that is too long
                raise NotFound(f"no file or folder at {path} on the server", kind="corpus", name=path)

    def _job_of(self, request: JobRequest, owner: str, digest: str, upload: Upload | None) -> Job:
        id_, creates = token_hex(8), self._creates(request)
        assert self._stores.folder is not None  # `_check` has seen to it
        new = self._stores.folder / f"{request.store}-{id_}"
        if isinstance(request, BuildDatastoreRequest):
            return Job(id_, owner, BUILD, request.store, str(new), asdict(request), digest, request.request_id)
        name, path = (str(request.store), new) if creates else self._stores.path_of(request.store)
        if isinstance(request, AddDocumentsRequest):
            kind, options = ADD, {"replace": request.replace, "check": request.check, "keys": request.keys}
            if request.sync:  # callers may have different folders of one name
                kind, folder = SYNC, hash_of(f"{owner}\n{request.sync}")
                options |= {"origin": folder, "dry_run": request.dry_run, "creates": creates}
        else:
            kind, options = COMPACT, {"purge": request.purge, "check": request.check}
        documents = "" if upload is None else str(upload.path)
        return Job(id_, owner, kind, name, str(path), options, digest, request.request_id, documents)


def _digest(request: JobRequest, upload: Upload | None) -> str:
    options = {**asdict(request), "kind": type(request).__name__, "upload": "" if upload is None else upload.digest}
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
