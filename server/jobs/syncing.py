"""Does a synchronization in an index worker: an upload and a datastore become the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlm.api.operations import SYNC_KINDS, SyncOutcome
from memlm.base.progress import DELETING, LOADING
from memlm.index.store.manifest import read_manifest
from memlm.indexing.build import finish_build
from memlm.indexing.sync import SyncPlan, plan_sync, sync_index
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.server.jobs.uploads import UploadedFolder, note_deletions

if TYPE_CHECKING:
    from memlm.server.jobs.worker import ProgressReporter, Task

MOST_NAMED, MOST_CHARACTERS = 10, 1000  # ids of each kind that are reported, and the longest


def sync_upload(task: Task, model: Path | Checkpoint, reporter: ProgressReporter) -> None:
    """Raises as `memlm.indexing.sync.sync_index`, and NotFound for a datastore that is not there any more."""
    if not task.creates:
        read_manifest(task.path)
    (documents,) = task.corpus
    source = UploadedFolder(documents, task.origin, reporter.problem)
    checkpoint = model if isinstance(model, Checkpoint) else _loaded(task, reporter)
    plan = plan_sync(checkpoint.tokenizer, source, task.path, replace=task.replace, progress=reporter.progress)
    reporter.planned(outcome_of(plan))
    if task.dry_run:
        return

    def progress(phase: str, done: int, total: int | None, note: str = "") -> None:
        if phase == DELETING:  # begins: a commit that nobody has heard of must not bring the text back
            note_deletions(documents, plan.deleted)
        reporter.progress(phase, done, total, note)

    options: dict[str, Any] = {"check": task.check, "keys": task.keys, "progress": progress}
    sync_index(
        checkpoint,
        source,
        task.path,
        replace=task.replace,
        plan=plan,
        on_text=reporter.committed,
        **options,
    )
    if task.is_resumed:  # the attempt before may have left text without keys
        finish_build(task.path, checkpoint, is_addition=True, **options)


def outcome_of(plan: SyncPlan) -> SyncOutcome:
    """The counts of a plan, and its first ids."""
    done = plan.outcome
    named: dict[str, Any] = {kind: _first(getattr(done, kind)) for kind in SYNC_KINDS}
    return replace(done, **named)


def _first(document_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(id_ for id_ in document_ids[:MOST_NAMED] if len(id_) <= MOST_CHARACTERS)


def _loaded(task: Task, reporter: ProgressReporter) -> Checkpoint:
    reporter.progress(LOADING, 0, 1)
    checkpoint = load_checkpoint(task.model, dtype=task.dtype, device=task.device, weights=False)
    reporter.progress(LOADING, 1, 1)
    return checkpoint
