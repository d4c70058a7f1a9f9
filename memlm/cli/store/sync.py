"""`memlm index sync`: a folder and its datastore stay the same."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.api.datastores import CHECKS
from memlm.base.figures import counted
from memlm.base.printable import one_line
from memlm.base.progress import LOADING
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out
from memlm.cli.terminal.corpus_files import CorpusFiles
from memlm.cli.terminal.interruption import describe_build, on_interrupt
from memlm.errors import AlreadyExists, InvalidInput, Locked, check_choice

if TYPE_CHECKING:
    from memlm.data.corpus import Corpus
    from memlm.indexing.sync import SyncPlan

SHOWN = 10  # documents of each kind
WATCH_S = 2.0  # between two looks at the files


def sync(
    store: options.StoreArgument,
    corpus: options.Corpora,
    model: options.Model,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C, whenever a file changes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would change.")] = False,
    check: options.Check = "quick",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    report: options.Report = None,
    json: options.Json = False,
) -> None:
    """Add new documents, replace changed ones, and delete those that are gone. Others in the store stay."""
    from memlm.indexing.sync import plan_sync, signature_of, sync_index
    from memlm.model.files.checkpoint import load_checkpoint

    check_choice("check", check, CHECKS)
    files = CorpusFiles()
    documents = options.corpus_of(corpus, glob, on_error, hidden=hidden, files=files)
    with on_interrupt(partial(describe_build, store, model)):
        with ConsoleProgress() as progress:
            progress(LOADING, 0, 1)
            checkpoint = load_checkpoint(model, dtype=dtype, device=device)
            progress(LOADING, 1, 1)
        seen: dict[str, tuple[int, int]] | None = None
        while seen is None or watch:
            if seen is not None:
                seen = _changed(documents, seen)
            seen = signature_of(documents)
            try:
                plan = plan_sync(checkpoint.tokenizer, documents, store)
                if not dry_run and not (plan.is_empty and (store / "CURRENT").exists() and watch):
                    with ConsoleProgress() as progress:
                        plan = sync_index(checkpoint, documents, store, check=check, progress=progress, plan=plan).plan
            except (AlreadyExists, InvalidInput, Locked) as error:
                if not watch:
                    raise
                err.print(f"memlm: {one_line(str(error))}", markup=False)
                if isinstance(error, Locked):
                    seen = {}  # no file changes once the lock is free
                continue
            _print(plan, json=json)
    files.finish(report)


def _changed(corpus: Corpus, seen: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Waits until a file differs and none is written any more."""
    from memlm.indexing.sync import signature_of

    before = seen
    while True:
        time.sleep(WATCH_S)
        now = signature_of(corpus)
        if now == before != seen:
            return now
        before = now


def _print(plan: SyncPlan, *, json: bool) -> None:
    kinds = {"added": plan.added, "replaced": plan.replaced, "deleted": plan.deleted, "kept": plan.kept}
    if json:
        emit_json({**kinds, "unchanged": len(plan.unchanged)})
        return
    for kind, ids in kinds.items():
        why = " (not found, and not known to be gone)" if kind == "kept" else ""
        for id_ in ids[:SHOWN]:
            out.print(one_line(f"{kind} {id_}{why}"), markup=False, highlight=False)
        if len(ids) > SHOWN:
            out.print(f"{kind} {len(ids) - SHOWN:,} more")
    total = len(plan.added) + len(plan.replaced) + len(plan.unchanged)
    out.print(f"{counted(total, 'document')}, {len(plan.unchanged):,} of them unchanged")
