"""What is known of all jobs of a server. Each is a file in the folder for datastores (`jobs/<id>.json`), written whole
at each turn of its life, so that a restart knows all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from memlm.index.durable import remove, write_whole
from memlm.index.manifest import signed
from memlm.operations import JobState
from memlm.server.job import Job

KEPT_S, KEPT = 7 * 86_400.0, 1000  # how long, and how many, that have ended

log = logging.getLogger("memlm.server")


class JobRecords:
    """What is known of each job, here and on the disk."""

    def __init__(self, folder: Path | None) -> None:
        """Reads what an earlier server wrote down, with what had not ended waiting again; without a folder there are
        no jobs.
        """
        self.folder, self._jobs = folder, dict[str, Job]()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._read(folder)

    def __iter__(self) -> Iterator[Job]:
        """All of them, also while some come and go."""
        return iter(tuple(self._jobs.values()))

    @property
    def num_open(self) -> int:
        """Jobs that wait or run."""
        return sum(job.is_open for job in self)

    def get(self, id_: str) -> Job | None:
        """One, if it is there."""
        return self._jobs.get(id_)

    async def add(self, job: Job) -> None:
        """One more; once this returns it is written down."""
        self._jobs[job.id] = job
        try:
            await self.write(job)
        except BaseException:
            del self._jobs[job.id]
            raise

    async def write(self, job: Job) -> None:
        """Writes down where a job stands."""
        await asyncio.to_thread(write_whole, self._file(job), job.encode())

    def forget(self, job: Job) -> None:
        """Leaves no trace of one that has ended."""
        del self._jobs[job.id]
        remove(self._file(job))

    def forget_old(self) -> None:
        """Leaves no trace of what ended long ago, nor of more than so many."""
        ended = sorted((job for job in self if not job.is_open), key=lambda job: -(job.ended_s or 0))
        for place, job in enumerate(ended):
            if place >= KEPT or (job.ended_s or 0) < time.time() - KEPT_S:
                self.forget(job)

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

    def _file(self, job: Job) -> Path:
        assert self.folder is not None  # there is a job
        return self.folder / f"{job.id}.json"
