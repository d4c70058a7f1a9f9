"""The index worker: a process that builds, extends or compacts one datastore at low priority, and exits.

It may be killed at any time. The next attempt continues from the last sync.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from memlm.api.operations import JobReport
from memlm.errors import InternalError, MemlmError
from memlm.server.processes import lower_priority
from memlm.server.telemetry.logs import start_logging

REPORT_INTERVAL_S = 0.2
BUILD, ADD, COMPACT, DELETE = "build", "add", "compact", "delete"

log = logging.getLogger("memlm.server.index_worker")


@dataclass(frozen=True, slots=True)
class Task:
    """A job as its process gets it. `since` is the newest segment before an addition. `is_resumed` says that an earlier
    attempt may have begun, or even committed.
    """

    kind: str
    store: str
    path: Path
    model: Path
    dtype: str = "auto"
    device: str = "auto"
    corpus: tuple[Path, ...] = ()
    glob: str | None = None
    hidden: bool = False
    roots: tuple[Path, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    replace: bool = False
    purge: bool = False
    check: str = "quick"
    document_ids: tuple[str, ...] = ()
    since: int = 0
    is_resumed: bool = False
    num_threads: int = 0
    nice: int | str = 10
    log_level: str = "warning"
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class Progressed:
    """Progress of a phase."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A document that cannot be used."""

    problem: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message: the report, or the error."""

    report: JobReport | None
    error: MemlmError | None = None


FromIndexWorker: TypeAlias = Progressed | Skipped | Ended


def run_task(pipe: Connection, task: Task) -> None:
    """Runs an index worker process. Its last message is `Ended`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the whole group; only the front end acts on it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_logging(task.log_level, task.log_format)
    lower_priority(task.nice)
    threading.Thread(target=_exit_with_front_end, args=(pipe,), name="front", daemon=True).start()
    try:
        ended = Ended(_run(task, _ProgressReporter(pipe)))
    except MemlmError as error:
        ended = Ended(None, error)
    except Exception:
        log.exception("%s of %s failed", task.kind, task.path)
        ended = Ended(
            None, InternalError(f"a bug in the server; its log has the details under {task.kind} of {task.store}")
        )
    with suppress(OSError):
        pipe.send(ended)


def _run(task: Task, reporter: _ProgressReporter) -> JobReport:
    """Does the task, unless an earlier attempt has committed it."""
    import torch

    from memlm.data.corpus import Corpus
    from memlm.index.store.datastore import Datastore
    from memlm.index.store.manifest import CURRENT
    from memlm.indexing.build import add_to_index, build_index, compact_index, finish_build

    begin_s = time.monotonic()
    torch.set_num_threads(task.num_threads or torch.get_num_threads())
    common: dict[str, Any] = {
        "check": task.check, "dtype": task.dtype, "device": task.device, "progress": reporter.progress
    }  # fmt: skip
    if task.kind == COMPACT:
        done = compact_index(task.path, task.model, purge=task.purge, **common)
        if done.rolled_back_addition:
            log.warning("the purge of %s gave up an interrupted addition", task.store)
    elif task.kind == DELETE:
        _delete(task)
    else:
        corpus = Corpus(
            task.corpus, glob=task.glob or "**/*", on_problem=reporter.problem, roots=task.roots, hidden=task.hidden
        )
        if task.kind == ADD:
            if task.is_resumed and _was_added(task, corpus):
                finish_build(task.path, task.model, **common)
            else:
                add_to_index(task.model, corpus, task.path, replace=task.replace, **common)
        elif not (
            task.path / CURRENT
        ).exists():  # the folder is this job's own, so a committed datastore in it is its result
            build_index(task.model, corpus, task.path, **common, **task.options)
        else:
            finish_build(task.path, task.model, **common)
    with Datastore.open(task.path) as store:
        snapshot = store.snapshot
        return JobReport(
            store=task.store,
            manifest=snapshot.manifest.number,
            num_documents=snapshot.num_documents,
            num_entries=snapshot.num_entries,
            index=snapshot.index_kind,
            bytes_per_entry=snapshot.bytes_on_disk / max(1, snapshot.num_entries),
            seconds=time.monotonic() - begin_s,
            num_deleted_documents=snapshot.num_deleted_documents,
        )


def _delete(task: Task) -> None:
    """Deletes those documents of a task that its datastore has, and purges them from its files if it has keys."""
    from memlm.index.store.compaction import compact
    from memlm.index.store.datastore import Datastore

    with Datastore.open(task.path) as store:
        has_keys = store.snapshot.has_keys
        present = [id_ for id_ in task.document_ids if store.snapshot.has_document(id_)]
        if present:
            store.delete(present)
    if present and has_keys:
        compact(task.path, purge=True)


def _was_added(task: Task, corpus: Any) -> bool:
    """Whether an earlier attempt has committed the addition: a newer segment has all its documents. Returns False after
    a compaction has merged all segments; a replacement is then repeated.
    """
    from memlm.index.store.datastore import Datastore

    with Datastore.open(task.path) as store:
        newer = [segment for segment in store.snapshot.segments if segment.record.number > task.since]
        if task.replace and len(newer) == len(store.snapshot.segments):
            return False
        names = [document.id for document in corpus] if newer else []
        return any(all(segment.documents.row_of(name) is not None for name in names) for segment in newer)


class _ProgressReporter:
    """Sends progress to the front end a few times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._reported_s, self._phase = pipe, 0.0, ""

    def progress(self, phase: str, done: int, total: int | None, note: str = "") -> None:
        """See `memlm.base.progress.Progress`."""
        now_s = time.monotonic()
        if phase == self._phase and done != total and now_s - self._reported_s < REPORT_INTERVAL_S:
            return
        self._phase, self._reported_s = phase, now_s
        self._pipe.send(Progressed(phase, int(done), int(total or 0)))

    def problem(self, problem: object) -> None:
        """Reports a document that is skipped."""
        self._pipe.send(Skipped(str(problem)))


def _exit_with_front_end(pipe: Connection) -> None:
    """Thread: exits the process when the front end is gone. The front end sends nothing."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)
