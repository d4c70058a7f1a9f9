"""The records of all jobs: a file each in the datastore folder (`jobs/<id>.json`), replaced at every change of state,
so that a restart continues the jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from memlm.api.operations import JobState
from memlm.base.clock import Clock
from memlm.base.files import make_folder, read_signed, remove, write_atomic
from memlm.errors import MemlmError
from memlm.server.jobs.job import Job
from memlm.server.jobs.uploads import noted_deletions
from memlm.server.jobs.worker import BUILD, SYNC

KEEP_S, KEEP_COUNT = 7 * 86_400.0, 1000  # how long, and how many, that have ended

log = logging.getLogger("memlm.server")


class JobRecords:
    """All jobs of a server, in RAM and on disk."""

    def __init__(self, folder: Path | None, clock: Clock | None = None) -> None:
        """Reads the records of earlier servers. Unfinished jobs wait again. Without a folder there are no jobs."""
        self.folder, self._jobs, self._clock = folder, dict[str, Job](), clock or Clock()
        self._unwritten = set[Job]()  # that have ended, and whose records could not be written
        if folder is not None:
            make_folder(folder)
            self._read(folder)

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._jobs.values()))

    @property
    def num_open(self) -> int:
        """Jobs that wait or run."""
        return sum(job.is_open for job in self)

    def get(self, id_: str) -> Job | None:
        return self._jobs.get(id_)

    async def add(self, job: Job) -> None:
        """Adds a job, and returns once its record is on disk. Only then can the job be found, so that nothing acts on a
        job that a restart would lose. A cancelled call still adds the job.
        """

        async def add() -> None:
            await self._write_file(job)
            self._jobs[job.id] = job

        await run_to_completion(add())

    async def write(self, job: Job) -> None:
        """Records the job's present state, after earlier writes of its record."""
        await run_to_completion(self._write(job))

    async def write_end(self, job: Job) -> None:
        """Records how a job ended. Where that cannot be written, removes its record, or the next server would begin the
        job again. `write_missed` tries again.
        """
        try:
            await self.write(job)
        except (MemlmError, OSError) as trouble:
            log.error("the end of %s could not be written down, and will be tried again: %s", job.name, trouble)
            self._unwritten.add(job)
            async with job.writing:
                remove(self._file(job))

    async def write_missed(self) -> None:
        """Records the ends that could not be written before, if that is possible now."""
        for job in tuple(self._unwritten):
            with suppress(MemlmError, OSError):
                await self.write(job)
                self._unwritten.discard(job)

    async def forget(self, job: Job) -> None:
        """Removes a job that has ended, and its record."""
        del self._jobs[job.id]
        async with job.writing:
            remove(self._file(job))

    async def forget_documents(self, store: str, document_ids: Collection[str], *, by: Job | None = None) -> None:
        """Names documents of a datastore that were deleted no more, and deletes them from a replacement that is being
        built. The job that deleted them names them on.
        """
        for job in self:
            if job.store != store or job is by:
                continue
            if job.is_open and job.creates and not job.is_published:
                job.deleted = sorted({*job.deleted, *document_ids})
                await self.write(job)
            elif job.redact(document_ids):
                await self.write(job)

    async def deleted_meanwhile(self, job: Job) -> tuple[str, ...]:
        """The documents that were deleted while a datastore is built, also by synchronizations that have not told it:
        their process may have died right behind the commit, or this one.
        """
        syncs = [other for other in self if other.is_open and other.kind == SYNC and other.store == job.store]
        noted = [await asyncio.to_thread(noted_deletions, Path(other.documents)) for other in syncs]
        return tuple(sorted({*job.deleted, *chain.from_iterable(noted)}))

    def is_replacement(self, path: Path, job: Job) -> bool:
        """Whether a folder was built, while a job was under way, to take the place of the datastore of that."""
        begun_s, built = job.started_s or job.created_s, path.resolve()
        builds = [other for other in self if other.kind == BUILD and Path(other.path).resolve() == built]
        return built != Path(job.path).resolve() and any((each.ended_s or begun_s) >= begun_s for each in builds)

    async def forget_old(self) -> None:
        """Removes jobs that ended KEEP_S ago by the monotonic clock, and the oldest of more than KEEP_COUNT."""
        ages = {job: self._clock.since_s(job.ended_stamp) for job in self if job.ended_stamp is not None}
        for place, job in enumerate(sorted(ages, key=lambda job: ages[job])):
            if place >= KEEP_COUNT or ages[job] > KEEP_S:
                await self.forget(job)

    async def _write(self, job: Job) -> None:
        async with job.writing:
            if job.id in self._jobs:  # else it was forgotten meanwhile
                await self._write_file(job)

    async def _write_file(self, job: Job) -> None:
        if not job.is_open and job.ended_stamp is None:
            job.ended_stamp = self._clock.stamp(self._clock.now_s())
        await asyncio.to_thread(write_atomic, self._file(job), job.encode())

    def _read(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.json")):
            try:
                job = Job(**read_signed(file.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                log.error("%s is no record of an operation and is left alone: %s", file, error)
                continue
            if job.is_open:
                job.state = JobState.QUEUED
            else:
                job.ended.set()
                age_s = 0.0 if job.ended_stamp is None else self._clock.since_s(job.ended_stamp)
                job.ended_stamp = self._clock.stamp(self._clock.now_s() - age_s)  # after a reboot it starts anew
            # An earlier server may have spelled the folder otherwise.
            if job.documents:
                job.documents = str(folder / Path(job.documents).name)
            if job.creates:
                job.path = str(folder.parent / Path(job.path).name)
            self._jobs[job.id] = job
        kept = {Path(job.documents).stem for job in self._jobs.values() if job.is_open and job.documents}
        for stray in (each for kind in ("jsonl", "ways", "deleted", "tmp") for each in folder.glob(f"*.{kind}")):
            if stray.suffix == ".tmp" or stray.stem not in kept:
                remove(stray)

    def _file(self, job: Job) -> Path:
        assert self.folder is not None  # there is a job
        return self.folder / f"{job.id}.json"


async def run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Awaits work that must not be interrupted: a cancellation takes effect after its end."""
    task, was_cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            was_cancelled = True
    error = task.exception()
    if was_cancelled:
        raise asyncio.CancelledError from error
    if error is not None:
        raise error
