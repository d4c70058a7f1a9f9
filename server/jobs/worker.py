"""The index worker: a process that builds, extends, synchronizes or compacts datastores at low priority.

One that stays loads the model and then forks a child for each task. The child reads the task, does it and exits, so
that no text, lock or file of a datastore is ever in the process that stays. Any other worker does one task and exits.
Both may be killed at any time. The next attempt continues from the last sync.

The messages of a task: `Ready` to the front end, the `Task` from it, `Begun`, progress, `Committed` where there is text
to serve, `Ended`.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from memlm.api.operations import JobReport, SyncOutcome
from memlm.base.machine import die_with_parent
from memlm.base.progress import LOADING
from memlm.errors import InternalError, MemlmError
from memlm.server.processes import is_single_threaded, lower_priority
from memlm.server.telemetry.logs import start_logging

if TYPE_CHECKING:
    from memlm.model.files.checkpoint import Checkpoint

REPORT_INTERVAL_S = 0.2
BUILD, ADD, SYNC, COMPACT, DELETE, KEYS = "build", "add", "sync", "compact", "delete", "keys"

log = logging.getLogger("memlm.server.index_worker")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What an index worker is started with. One that `stays` loads the model before its first task."""

    model: Path
    dtype: str = "auto"
    device: str = "auto"
    nice: int | str = 10
    log_level: str = "warning"
    log_format: str = "text"
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A job as its process gets it. `origin` tells one synchronized folder from others, and `creates` that there may be
    no datastore yet. `since` is the newest segment before an addition. `is_resumed` says that an earlier attempt may
    have begun, or even committed, and `is_published` that its text is in service.
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
    keys: str = "auto"
    document_ids: tuple[str, ...] = ()
    origin: str = ""
    creates: bool = False
    dry_run: bool = False
    since: int = 0
    is_resumed: bool = False
    is_published: bool = False
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker takes a task."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The process that got the task."""

    pid: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """Progress of a phase."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The text is in the datastore and can be served, while its keys are made."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The work that a synchronization found."""

    outcome: SyncOutcome


@dataclass(frozen=True, slots=True)
class Skipped:
    """A document that cannot be used."""

    problem: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message: the report, or the error."""

    report: JobReport | None
    error: MemlmError | None = None


FromTask: TypeAlias = Progressed | Committed | Planned | Skipped  # while it is done
FromIndexWorker: TypeAlias = Ready | Begun | FromTask | Ended


def run_index_worker(pipe: Connection, settings: WorkerSettings) -> None:
    """Runs an index worker process, until its task has ended or, if it stays, the front end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the whole group; only the front end acts on it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_logging(settings.log_level, settings.log_format)
    lower_priority(settings.nice)
    with suppress(OSError):  # the front end is gone
        checkpoint = None
        if settings.stays:
            checkpoint = _load(pipe, settings)
            if checkpoint is not None and _may_fork(checkpoint):
                _run_in_children(pipe, checkpoint)
                return
        pipe.send(Ready())
        _run_next(pipe, checkpoint)


def _load(pipe: Connection, settings: WorkerSettings) -> Checkpoint | None:
    """Loads the model with one thread, because OpenMP's threads do not survive a fork. Returns None for a model that
    cannot be loaded: a task that needs it gets the error.
    """
    import torch

    from memlm.model.files.checkpoint import load_checkpoint

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _exiting_with_front_end(pipe):
            pipe.send(Progressed(LOADING, 0, 1))
            checkpoint = load_checkpoint(settings.model, dtype=settings.dtype, device=settings.device)
            log.debug("loaded %s", checkpoint.fingerprint)  # which is computed once, before there are children
            pipe.send(Progressed(LOADING, 1, 1))
            return checkpoint
    except Exception as error:
        log.warning("the model could not be loaded before the first task: %s", error)
        return None
    finally:
        torch.set_num_threads(num_threads)


def _may_fork(checkpoint: Checkpoint) -> bool:
    """Whether children can use the model: neither CUDA's nor OpenMP's state survives a fork."""
    on_cpu = checkpoint.decoder.device.type == "cpu"
    return sys.platform == "linux" and on_cpu and is_single_threaded()


def _run_in_children(pipe: Connection, checkpoint: Checkpoint) -> None:
    """Does one task after another, each in a child, until the front end closes the pipe, a child fails, or the model's
    files change. This process never reads a task.
    """
    import torch

    gc.freeze()  # the children share the objects' pages
    num_threads, pid, failed = torch.get_num_threads(), os.getpid(), 0
    torch.set_num_threads(1)
    while not failed:
        pipe.send(Ready())
        if not _has_message(pipe) or not checkpoint.is_current:
            return
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                die_with_parent(pid)
                torch.set_num_threads(num_threads)
                _run_next(pipe, checkpoint)
                failed = 0
            finally:
                os._exit(failed)
        _, failed = os.waitpid(child, 0)


def _has_message(pipe: Connection) -> bool:
    """Waits for a message and leaves it in the pipe. Returns False when the front end is gone."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    ((_, event),) = poll.poll()
    return not event & (select.POLLHUP | select.POLLERR)


def _run_next(pipe: Connection, checkpoint: Checkpoint | None) -> None:
    """Receives a task and does it. The last message is `Ended`."""
    try:
        task: Task = pipe.recv()
    except EOFError:
        return
    pipe.send(Begun(os.getpid()))
    with _exiting_with_front_end(pipe):
        try:
            ended = Ended(_run(task, ProgressReporter(pipe), checkpoint))
        except MemlmError as error:
            ended = Ended(None, error)
        except Exception:
            log.exception("%s of %s failed", task.kind, task.path)
            ended = Ended(
                None, InternalError(f"a bug in the server; its log has the details under {task.kind} of {task.store}")
            )
        pipe.send(ended)


def _run(task: Task, reporter: ProgressReporter, checkpoint: Checkpoint | None = None) -> JobReport:
    """Does the task, unless an earlier attempt has committed it. Loads the model if there is no `checkpoint`."""
    import torch

    from memlm.data.corpus import Corpus
    from memlm.index.factory import NO_INDEX
    from memlm.index.store.datastore import Datastore
    from memlm.index.store.manifest import CURRENT
    from memlm.indexing.build import add_to_index, build_index, compact_index, finish_build, index_keys
    from memlm.server.jobs.syncing import sync_upload

    begin_s, model = time.monotonic(), checkpoint or task.model
    torch.set_num_threads(task.num_threads or torch.get_num_threads())
    common: dict[str, Any] = {
        "check": task.check, "dtype": task.dtype, "device": task.device, "progress": reporter.progress
    }  # fmt: skip
    if task.kind == COMPACT:
        done = compact_index(task.path, model, purge=task.purge, **common)
        if done.rolled_back_addition:
            log.warning("the purge of %s gave up an interrupted addition", task.store)
        if done.linked_files:
            log.warning("%d files with deleted documents of %s live on in copies of it", done.linked_files, task.store)
    elif task.kind == DELETE:
        _delete(task)
    elif task.kind == KEYS:
        index_keys(task.path, model, most_pieces=1, **common)
    elif task.kind == SYNC:
        sync_upload(task, model, reporter)
    else:
        common["keys"] = task.keys
        corpus = Corpus(
            task.corpus, glob=task.glob or "**/*", on_problem=reporter.problem, roots=task.roots, hidden=task.hidden
        )
        if task.kind == ADD:
            if task.is_published or (task.is_resumed and _was_added(task, corpus)):
                finish_build(task.path, model, is_addition=True, **common)
            else:
                add_to_index(model, corpus, task.path, replace=task.replace, on_text=reporter.committed, **common)
        elif not (
            task.path / CURRENT
        ).exists():  # the folder is this job's own, so a committed datastore in it is its result
            build_index(model, corpus, task.path, on_text=reporter.committed, **common, **task.options)
        else:
            finish_build(task.path, model, **common)
    if task.dry_run and not (task.path / CURRENT).exists():  # which a synchronization would make
        return JobReport(task.store, 0, 0, 0, NO_INDEX, 0.0, time.monotonic() - begin_s)
    with Datastore.open(task.path) as store:
        snapshot = store.snapshot
        if snapshot.outgrown:
            log.warning("the tuning of %s is outgrown: %s", task.store, snapshot.outgrown)
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
    """Deletes those documents of a task that its datastore has, and purges them unless its keys were dropped."""
    from memlm.index.store.compaction import compact
    from memlm.index.store.datastore import Datastore

    with Datastore.open(task.path) as store:
        can_compact = store.snapshot.has_keys or not store.snapshot.is_keyed
        present = [id_ for id_ in task.document_ids if store.snapshot.has_document(id_)]
        if present:
            store.delete(present)
    if present and can_compact:
        compact(task.path, purge=True)


def _was_added(task: Task, corpus: Any) -> bool:
    """Whether an earlier attempt has committed the addition: newer segments have all its documents. Returns False after
    a compaction has merged all segments; a replacement is then repeated.
    """
    from memlm.index.store.datastore import Datastore

    with Datastore.open(task.path) as store:
        newer = [segment for segment in store.snapshot.segments if segment.record.number > task.since]
        if task.replace and len(newer) == len(store.snapshot.segments):
            return False
        names = [document.id for document in corpus] if newer else []
        return bool(newer) and all(
            any(segment.documents.row_of(name) is not None for segment in newer) for name in names
        )


class ProgressReporter:
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

    def committed(self) -> None:
        """Reports that the text is in the datastore."""
        self._pipe.send(Committed())

    def planned(self, outcome: SyncOutcome) -> None:
        """Reports the work that a synchronization found."""
        self._pipe.send(Planned(outcome))

    def problem(self, problem: object) -> None:
        """Reports a document that is skipped."""
        self._pipe.send(Skipped(str(problem)))


@contextmanager
def _exiting_with_front_end(pipe: Connection) -> Iterator[None]:
    """Exits the process if the front end goes before the block ends. Meanwhile the front end sends nothing, so that a
    pipe with something to read is a closed one.
    """
    ended, end = Pipe()

    def watch() -> None:
        if pipe in wait([pipe, ended]):
            os._exit(1)

    thread = threading.Thread(target=watch, name="front", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.close()
        thread.join()
        ended.close()
