"""`memlm index sync`: a folder and its datastore stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from memlm.api.datastores import CHECKS
from memlm.api.operations import SYNC_KINDS, SyncOutcome
from memlm.api.params import SERVER
from memlm.base.figures import counted
from memlm.base.printable import one_line
from memlm.base.progress import LOADING
from memlm.cli.served.operations import follow_to_end
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import UPLOAD_S, Target, client_of, is_served, model_of
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out
from memlm.cli.terminal.corpus_files import CorpusFiles
from memlm.cli.terminal.interruption import describe_build, on_interrupt
from memlm.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidInput,
    Locked,
    MemlmError,
    Overloaded,
    Unavailable,
    check_choice,
)

if TYPE_CHECKING:
    from memlm.data.corpus import Corpus

SHOWN = 10  # documents of each kind
WATCH_S, LATEST_S = 2.0, 10.0  # between two looks at the files, and until a change is taken in any case
_Look: TypeAlias = "dict[str, tuple[int, int]] | str"
_PASSING = (Locked, Unavailable, Overloaded, DeadlineExceeded)  # while no file changes


def sync(
    context: typer.Context,
    store: options.AnyStore,
    corpus: options.Corpora,
    model: options.ModelOrTarget = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C, whenever a file changes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would change.")] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Also replace documents that other folders brought. They are this folder's then."
        ),
    ] = False,
    keys: options.Keys = "auto",
    check: options.Check = "quick",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    target: Target = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", rich_help_panel=SERVER,
            help="The folder's name on a server (default: its place on this machine).",
        ),
    ] = None,
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    report: options.Report = None,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Add new documents, replace changed ones, and delete those that are gone. Others in the store stay."""
    check_choice("check", check, CHECKS)
    files, settings = CorpusFiles(), dict[str, Any](replace=replace, keys=keys, check=check)
    read = partial(options.corpus_of, corpus, glob, on_error, hidden=hidden, files=files)
    if is_served(context, target, there=("folder",)):
        assert target is not None
        settings |= {"name": folder, "dry_run": dry_run}
        _sync_on_server(target, str(store), read(), settings, watch=watch, json=json)
    else:
        loading = dict[str, Any](dtype=dtype, device=device)
        _sync_here(model_of(model), store, read(), loading, settings, watch=watch, dry_run=dry_run, json=json)
    files.finish(report)


def _sync_on_server(
    target: str, store: str, documents: Corpus, settings: dict[str, Any], *, watch: bool, json: bool
) -> None:
    with client_of(target, UPLOAD_S) as client:

        def sync_once() -> None:
            info = follow_to_end(client.datastores.sync(store, documents, **settings))
            if done := info.outcome().sync:
                _print(done, json=json, operation=info.name)

        at_each_change(documents, sync_once, watch=watch)


def _sync_here(
    model: Path,
    store: Path,
    documents: Corpus,
    loading: dict[str, Any],
    settings: dict[str, Any],
    *,
    watch: bool,
    dry_run: bool,
    json: bool,
) -> None:
    from memlm.indexing.sync import plan_sync, sync_index
    from memlm.model.files.checkpoint import load_checkpoint

    with on_interrupt(partial(describe_build, store, model)):
        with ConsoleProgress() as progress:
            progress(LOADING, 0, 1)
            checkpoint = load_checkpoint(model, weights=False, **loading)
            progress(LOADING, 1, 1)

        def sync_once() -> None:
            plan = plan_sync(checkpoint.tokenizer, documents, store, replace=settings["replace"])
            if not dry_run and not (plan.is_empty and (store / "CURRENT").exists() and watch):
                with ConsoleProgress() as progress:
                    done = sync_index(checkpoint, documents, store, progress=progress, plan=plan, **settings)
                plan = done.plan
            _print(plan.outcome, json=json)

        at_each_change(documents, sync_once, watch=watch)


def at_each_change(corpus: Corpus, do: Callable[[], None], *, watch: bool) -> None:
    """Does something at once and, to `watch`, again whenever a file has changed. Then its errors are told, and those
    that pass by themselves are another reason to do it again.
    """
    while True:
        seen = _look_at(corpus) if watch else None
        try:
            do()
        except (AlreadyExists, InvalidInput, *_PASSING) as error:
            if not watch:
                raise
            err.print(f"memlm: {one_line(str(error))}", markup=False)
            if isinstance(error, _PASSING):
                seen = None
        if not watch:
            return
        _wait_for_change(corpus, seen)


def _wait_for_change(corpus: Corpus, seen: _Look | None) -> None:
    """Waits until a file differs and none is written any more, or LATEST_S since the last look at which none did."""
    before, same_s = seen, time.monotonic()
    while True:
        time.sleep(WATCH_S)
        now = _look_at(corpus)
        if now == seen:
            same_s = time.monotonic()
        elif now == before or time.monotonic() - same_s >= LATEST_S:
            return
        before = now


def _look_at(corpus: Corpus) -> _Look:
    """The signature of the files, or what hinders a look at them, which then hinders the synchronization and is told by
    that.
    """
    from memlm.data.synced_folder import signature_of

    try:
        return signature_of(corpus)
    except MemlmError as error:
        return str(error)


def _print(done: SyncOutcome, *, json: bool, operation: str | None = None) -> None:
    """Prints the outcome, of which a server names the first documents of each kind and has an `operation`."""
    named = {kind: getattr(done, kind) for kind in SYNC_KINDS}
    counts = {kind: getattr(done, f"num_{kind}") for kind in SYNC_KINDS}
    if json:
        numbers = {f"num_{kind}": count for kind, count in counts.items()}
        emit_json(
            {**named, "unchanged": done.num_unchanged, **numbers, **({"operation": operation} if operation else {})}
        )
        return
    for kind, ids in named.items():
        _print_kind(kind, ids[:SHOWN], counts[kind])
    total = done.num_added + done.num_replaced + done.num_unchanged
    out.print(f"{counted(total, 'document')}, {done.num_unchanged:,} of them unchanged")


def _print_kind(kind: str, shown: Sequence[str], count: int) -> None:
    """Prints the documents of one kind, of which some are shown."""
    for id_ in shown:
        out.print(one_line(f"{kind} {id_}"), markup=False, highlight=False)
    if rest := count - len(shown):
        out.print(f"{kind} {rest:,}{' more' if shown else ''}")
    if kind == "kept" and count:
        out.print(
            "kept: not found, and not known to be gone, as in a file that cannot be read or is left out, or an empty"
            " folder, or because another folder has it too; or changed by others since this folder brought it. Remove"
            " the empty folder, replace what is in the folder (--replace), or delete the documents by their ids"
        )
