"""`memlm client datastore` and `memlm client operation`: the datastores of a server, and its jobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.api.datastores import BuildDatastoreRequest, parse_fields
from memlm.base.figures import counted, figure
from memlm.base.printable import one_line
from memlm.cli.remote.connection import HERE, Target, Timeout, client_of
from memlm.cli.store.sync import Replace, Watch, at_each_change, print_kind, print_total
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, cell, emit_json, err, jsonable, out, print_table, table
from memlm.cli.terminal.corpus_files import CorpusFiles
from memlm.cli.terminal.fields import Overrides, with_fields

if TYPE_CHECKING:
    from memlm.api.handles import Operation
    from memlm.api.operations import OperationInfo
    from memlm.base.progress import Progress

datastore = typer.Typer(help="Datastores of a server.", no_args_is_help=True)
operation = typer.Typer(help="Jobs of a server: building, adding, synchronizing, compacting.", no_args_is_help=True)

FOLLOW_S = 0.5
Name = Annotated[str, typer.Argument(metavar="NAME", help="A datastore's name.")]
OperationName = Annotated[str, typer.Argument(metavar="NAME", help="An operation's name.")]
LocalCorpora = Annotated[list[Path], typer.Argument(metavar="CORPUS...", help="Local files and folders to upload.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end, or only print its name.")]
RequestId = Annotated[str | None, typer.Option(help="Repeating a request with its id returns the first operation.")]


@datastore.command("list", epilog="Example: memlm client datastore list --target localhost:50051")
def list_datastores(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """List the loaded datastores."""
    with client_of(target, timeout) as client:
        loaded = client.datastores.list()
    if json:
        emit_json({"datastores": loaded})
        return
    shown = table("name", "entries", "documents", "index", "k", "lam", "temperature")
    for store in loaded:
        counts = (f"{store.num_entries:,}", f"{store.num_documents:,}")
        shown.add_row(
            cell(store.name),
            *counts,
            cell(store.index),
            str(store.k),
            f"{store.lam:.3f}",
            figure(store.knn_temperature),
        )
    print_table(shown)
    for store in loaded:
        if store.problem:
            err.print(one_line(f"{store.name} cannot be used: {store.problem}"), markup=False)


@datastore.command("delete", epilog="Example: memlm client datastore delete store chapter-3.txt")
def delete_documents(
    store: Annotated[str, typer.Argument(metavar="NAME", help="Name of a loaded datastore.")],
    document_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of documents.")],
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Delete documents. They no longer influence any answer afterwards."""
    with client_of(target, timeout) as client:
        deleted = client.datastores.delete_documents(store, document_ids)
    if json:
        emit_json(deleted)
    else:
        documents, entries = counted(deleted.num_documents, "document"), counted(deleted.num_entries, "entry")
        summary = f"deleted {documents}, {entries} from {deleted.store}"
        out.print(one_line(summary), markup=False)


@datastore.command("info", epilog="Example: memlm client datastore info docs --target localhost:50051")
def get_datastore(name: Name, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Describe a loaded datastore."""
    with client_of(target, timeout) as client:
        _print_store(client.datastores.get(name), json=json)


@datastore.command("build", epilog="Example: memlm client datastore build docs /srv/texts --target localhost:50051")
@with_fields()
def build(
    request: Annotated[dict[str, Any], Overrides(BuildDatastoreRequest)],
    wait: Wait = True,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Build a datastore from texts on the server. A datastore that it replaces answers until it is complete."""
    with client_of(target, timeout) as client:
        _show(client.datastores.build(**request), wait=wait, json=json)


@datastore.command("add", epilog="Example: memlm client datastore add docs notes.jsonl --target localhost:50051")
def add(
    name: Name,
    corpus: LocalCorpora,
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    replace: Annotated[bool, typer.Option("--replace", help="Replace documents whose ids exist.")] = False,
    keys: options.Keys = "auto",
    check: options.Check = "quick",
    request_id: RequestId = None,
    wait: Wait = True,
    target: Target = HERE,
    timeout: Timeout = 3600.0,
    report: options.Report = None,
    json: options.Json = False,
) -> None:
    """Upload documents and add them to a datastore."""
    with client_of(target, timeout) as client:
        files = CorpusFiles()
        documents = options.corpus_of(corpus, glob, on_error, hidden=hidden, files=files)
        job = client.datastores.add(name, documents, replace=replace, keys=keys, check=check, request_id=request_id)
        files.finish(report)
        _show(job, wait=wait, json=json)


@datastore.command("sync", epilog="Example: memlm client datastore sync docs notes/ --target localhost:50051")
def sync(
    name: Name,
    corpus: LocalCorpora,
    folder: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Its name on the server (default: its place on this machine)."),
    ] = None,
    watch: Watch = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would change.")] = False,
    replace: Replace = False,
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    keys: options.Keys = "auto",
    check: options.Check = "quick",
    target: Target = HERE,
    timeout: Timeout = 3600.0,
    report: options.Report = None,
    json: options.Json = False,
) -> None:
    """Upload a folder and make a datastore the same: add, replace and delete. Others in it stay."""
    with client_of(target, timeout) as client:
        files = CorpusFiles()
        documents = options.corpus_of(corpus, glob, on_error, hidden=hidden, files=files)

        def sync_once() -> None:
            job = client.datastores.sync(
                name, documents, name=folder, replace=replace, dry_run=dry_run, keys=keys, check=check
            )
            _print_sync(_follow(job), json=json)

        at_each_change(documents, sync_once, watch=watch)
        files.finish(report)


@datastore.command("remember", epilog="Example: memlm client datastore remember docs 'The port is 7443.'")
def remember(
    name: Name,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text, or - for standard input.")],
    document_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The document's id (default: a hash of the text).")
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Its title.")] = "",
    where: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="FIELD=VALUE", help="Its metadata. Repeatable.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a document of this id.")] = False,
    target: Target = HERE,
    timeout: Timeout = 600.0,
    json: options.Json = False,
) -> None:
    """Add a text at once. Answers use it when the command ends."""
    metadata = parse_fields(where) if where else None
    text = options.read_text(Path("-")) if text == "-" else text
    with client_of(target, timeout) as client:
        report = client.datastores.remember(
            name, text, document_id=document_id, title=title, metadata=metadata, replace=replace
        )
    if json:
        emit_json(report)
    else:
        summary = f"remembered as {report.document_ids[0]} in {report.store}, {counted(report.num_entries, 'entry')}"
        out.print(one_line(summary), markup=False)


@datastore.command("compact", epilog="Example: memlm client datastore compact docs --target localhost:50051")
def compact(
    name: Name,
    purge: options.Purge = False,
    check: options.Check = "quick",
    request_id: RequestId = None,
    wait: Wait = True,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Merge the segments of a datastore without its deleted documents."""
    with client_of(target, timeout) as client:
        job = client.datastores.compact(name, purge=purge, check=check, request_id=request_id)
        _show(job, wait=wait, json=json)


@datastore.command("load", epilog="Example: memlm client datastore load docs --target localhost:50051")
def load(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Absolute, or as `info` shows it.")],
    name: Annotated[str | None, typer.Option("--name", help="Its name (default: the folder's).")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a datastore of this name.")] = False,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Load a datastore on the server's disk."""
    with client_of(target, timeout) as client:
        _print_store(client.datastores.load(path, name, replace=replace), json=json)


@datastore.command("unload", epilog="Example: memlm client datastore unload docs --target localhost:50051")
def unload(name: Name, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Unload a datastore. Its files stay."""
    with client_of(target, timeout) as client:
        _print_store(client.datastores.unload(name), json=json)


@operation.command("list", epilog="Example: memlm client operation list --target localhost:50051")
def list_operations(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """List your operations, latest first."""
    with client_of(target, timeout) as client:
        found = client.operations.list()
    if json:
        emit_json({"operations": [_jsonable(info) for info in found]})
        return
    shown = table("name", "kind", "datastore", "state", "phase", "done")
    for info in found:
        share = f"{info.done / info.total:.0%}" if info.total else ""
        shown.add_row(*map(cell, (info.name, info.kind, info.store, info.state, info.phase)), share)
    print_table(shown)


@operation.command("get", epilog="Example: memlm client operation get operations/0123 --target localhost:50051")
def get_operation(
    name: OperationName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Show the progress of an operation."""
    with client_of(target, timeout) as client:
        _print_operation(client.operations.get(name), json=json)


@operation.command("wait", epilog="Example: memlm client operation wait operations/0123 --target localhost:50051")
def wait_operation(
    name: OperationName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Wait for the end of an operation. Fails if the operation fails."""
    with client_of(target, timeout) as client:
        _show(client.operations.open(name), wait=True, json=json)


@operation.command("cancel", epilog="Example: memlm client operation cancel operations/0123")
def cancel_operation(
    name: OperationName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Cancel an operation and remove its unfinished work."""
    with client_of(target, timeout) as client:
        client.operations.cancel(name)
        _print_operation(client.operations.get(name), json=json)


@operation.command("delete", epilog="Example: memlm client operation delete operations/0123")
def delete_operation(
    name: OperationName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Delete the record of an operation that has ended."""
    with client_of(target, timeout) as client:
        info = client.operations.get(name)
        client.operations.delete(name)
    _print_operation(info, json=json)


def follow(job: Operation, progress: Progress) -> OperationInfo:
    """Reports the progress of an operation until it has ended, and returns its end."""
    while not (info := job.progress(FOLLOW_S)).has_ended:
        if info.phase:
            progress(info.phase, info.done, info.total or None)
    return info


def _show(job: Operation, *, wait: bool, json: bool) -> None:
    """Shows an operation, or its progress to its end. Raises its error."""
    _print_operation(_follow(job) if wait else job.progress(), json=json)


def _follow(job: Operation) -> OperationInfo:
    """Shows the progress of an operation to its end. Raises its error."""
    try:
        with ConsoleProgress() as progress:
            info = follow(job, progress)
    except KeyboardInterrupt:
        err.print(f"{job.name} is still running; `memlm client operation cancel {job.name}` stops it", markup=False)
        raise
    info.outcome()
    return info


def _print_sync(info: OperationInfo, *, json: bool) -> None:
    """Prints the outcome of a synchronization as `memlm index sync` does."""
    if json:
        emit_json(_jsonable(info))
    elif done := info.outcome().sync:
        for kind in ("added", "replaced", "deleted", "kept"):
            print_kind(kind, getattr(done, kind), getattr(done, f"num_{kind}"))
        print_total(done.num_added, done.num_replaced, done.num_unchanged)


def _print_operation(info: OperationInfo, *, json: bool) -> None:
    if json:
        emit_json(_jsonable(info))
        return
    share = f", {info.phase}: {info.done:,} of {info.total:,}" if info.phase and info.total else ""
    left = f", {info.left_s:,.0f} s left" if info.left_s is not None else ""
    out.print(one_line(f"{info.name}: {info.kind} {info.store}, {info.state}{share}{left}"), markup=False)
    if report := info.report:
        summary = (
            f"{counted(report.num_entries, 'entry')} of {counted(report.num_documents, 'document')}, {report.index},"
            f" {report.bytes_per_entry:,.0f} bytes an entry, {report.seconds:,.1f} s"
        )
        out.print(one_line(summary), markup=False)
        if report.num_deleted_documents:
            deleted = counted(report.num_deleted_documents, "deleted document")
            out.print(f"still in its files: {deleted}; compact it with --purge")
    if info.skipped:
        err.print(f"{counted(info.skipped, 'document')} could not be used; the server's log says which", markup=False)
    if info.error:
        err.print(one_line(str(info.error)), markup=False)


def _jsonable(info: OperationInfo) -> dict[str, Any]:
    return {**jsonable(info), "error": None if info.error is None else str(info.error)}


def _print_store(info: Any, *, json: bool) -> None:
    if json:
        emit_json(info)
        return
    shown = table("", "", title=info.name)
    shown.show_header = False
    for name in info.__slots__[1:]:
        shown.add_row(name.replace("_", " "), cell(str(getattr(info, name))))
    print_table(shown)
