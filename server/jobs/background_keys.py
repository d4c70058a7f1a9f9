"""Keys in the background: while no job waits, documents without get theirs, a piece of one datastore at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

from memlm.api.operations import JobState
from memlm.errors import MemlmError
from memlm.index.store.manifest import Pointer, read_manifest, read_pointer
from memlm.server.jobs.job import Job
from memlm.server.jobs.records import JobRecords
from memlm.server.jobs.worker import KEYS
from memlm.server.registry import DatastoreRegistry

POLL_S = 2.0

log = logging.getLogger("memlm.server")


async def make_keys_when_idle(records: JobRecords, stores: DatastoreRegistry, wake: Callable[[], None]) -> None:
    """Runs until it is cancelled. Each piece is a job of no owner, so that jobs of clients come between two pieces. A
    datastore whose keys could not be made is left alone until it changes.
    """
    failed = dict[Path, Pointer]()
    while True:
        await asyncio.sleep(POLL_S)
        if any(job.is_open for job in records):
            continue
        found = await asyncio.to_thread(_first_without_keys, dict(stores.paths), failed)
        if found is None:
            continue
        name, path, pointer = found
        job = Job(token_hex(8), "", KEYS, name, str(path), {}, "")
        await records.add(job)
        wake()
        await job.ended.wait()
        if await asyncio.to_thread(_is_at, path, pointer):  # it failed, or found nothing but deleted documents
            failed[path] = pointer
        if job.state != JobState.DONE:
            log.warning(
                "%r stays without some of its keys until it changes: %s", name, (job.error or {}).get("message")
            )
        await records.forget(job)


def _is_at(path: Path, pointer: Pointer) -> bool:
    try:
        return read_pointer(path) == pointer
    except (MemlmError, OSError):
        return False


def _first_without_keys(paths: dict[str, Path], failed: dict[Path, Pointer]) -> tuple[str, Path, Pointer] | None:
    for name, path in paths.items():
        try:
            manifest = read_manifest(path)
        except (MemlmError, OSError):
            continue
        if failed.get(path) != manifest.pointer and not all(each.is_keyed for each in manifest.segments):
            return name, path, manifest.pointer
    return None
