"""`memlm index remember`, `delete`, `compact`, `info`, `load` and `unload`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memlm.base.figures import counted
from memlm.base.printable import one_line
from memlm.cli.served.info import print_store
from memlm.cli.served.operations import show
from memlm.cli.store.render import print_compaction, print_delete_preview, print_info
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import (
    HERE,
    UPLOAD_S,
    ServerTarget,
    Target,
    Wait,
    client_of,
    is_served,
    model_of,
)
from memlm.cli.terminal.console import ConsoleProgress, emit_json, out
from memlm.cli.terminal.interruption import on_interrupt, this_command


def remember(
    context: typer.Context,
    store: options.AnyStore,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text, or - for standard input.")],
    document_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The document's id (default: a hash of the text).")
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Its title.")] = "",
    where: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="FIELD=VALUE", help="Its metadata. Repeatable.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a document of this id.")] = False,
    model: options.ModelOrTarget = None,
    target: Target = None,
    json: options.Json = False,
) -> None:
    """Add a text at once. Answers use it when the command ends."""
    metadata = options.metadata_fields(where, "metadata") if where else None
    text = options.read_text(Path("-")) if text == "-" else text
    if is_served(context, target):
        assert target is not None
        with client_of(target, UPLOAD_S) as client:
            report = client.datastores.remember(
                str(store), text, document_id=document_id, title=title, metadata=metadata, replace=replace
            )
    else:
        model = model_of(model)
        from memlm.language_model import load

        with load(model, [store]) as lm:
            report = lm.remember(text, document_id=document_id, title=title, metadata=metadata, replace=replace)
    if json:
        emit_json(report)
    else:
        summary = f"remembered as {report.document_ids[0]} in {report.store}, {counted(report.num_entries, 'entry')}"
        out.print(one_line(summary), markup=False)


def delete(
    context: typer.Context,
    store: options.AnyStore,
    document_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids of documents.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Documents with this metadata. Repeatable: all must hold."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
    target: Target = None,
    json: options.Json = False,
) -> None:
    """Delete documents by id or metadata. They no longer influence any answer afterwards."""
    if is_served(context, target, here=("where", "dry_run")):
        assert target is not None
        if not document_ids:
            raise typer.BadParameter("give ids of documents")
        with client_of(target) as client:
            done = client.datastores.delete_documents(str(store), document_ids)
        _print_deletion(done.num_documents, done.num_entries, done.manifest, json=json)
        return
    from memlm.index.store.datastore import Datastore

    if bool(document_ids) == bool(where):
        raise typer.BadParameter("give ids of documents, or --where FIELD=VALUE")
    fields = options.metadata_fields(where or ())
    with Datastore.open(store) as datastore:
        if dry_run:
            print_delete_preview(datastore.snapshot.matching(fields) if fields else list(document_ids or ()), json=json)
            return
        deleted = datastore.delete_where(fields) if fields else datastore.delete(document_ids or ())
        number = datastore.manifest.number
    _print_deletion(deleted.num_documents, deleted.num_entries, number, json=json)


def _print_deletion(num_documents: int, num_entries: int, manifest: int, *, json: bool) -> None:
    if json:
        emit_json({"documents": num_documents, "entries": num_entries, "manifest": manifest})
        return
    documents, entries = counted(num_documents, "document"), counted(num_entries, "entry")
    out.print(f"deleted {documents}, {entries} (manifest {manifest})")


def compact(
    context: typer.Context,
    store: options.AnyStore,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Measure the new index with this model, and tune an outgrown datastore.",
        ),
    ] = None,
    purge: options.Purge = False,
    check: options.Check = "quick",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    target: Target = None,
    wait: Wait = True,
    json: options.Json = False,
) -> None:
    """Merge all segments without the deleted documents, while readers keep reading."""
    if is_served(context, target):
        assert target is not None
        with client_of(target) as client:
            job = client.datastores.compact(str(store), purge=purge, check=check)
            show(job, wait=wait, json=json)
        return
    from memlm.indexing.build import compact_index

    with on_interrupt(lambda: f"{store} is complete; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        done = compact_index(store, model, purge=purge, check=check, dtype=dtype, device=device, progress=progress)
    print_compaction(done, json=json)


def info(context: typer.Context, store: options.AnyStore, target: Target = None, json: options.Json = False) -> None:
    """Show the size, origin and defaults of a datastore."""
    if is_served(context, target):
        assert target is not None
        with client_of(target) as client:
            print_store(client.datastores.get(str(store)), json=json)
        return
    from memlm.index.store.datastore import Datastore

    with Datastore.open(store) as datastore:
        print_info(datastore.snapshot, json=json)


def load(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Absolute, or as `info` shows it.")],
    name: Annotated[str | None, typer.Option("--name", help="Its name (default: the folder's).")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a datastore of this name.")] = False,
    target: ServerTarget = HERE,
    json: options.Json = False,
) -> None:
    """Let a server load a datastore from its disk."""
    with client_of(target) as client:
        print_store(client.datastores.load(path, name, replace=replace), json=json)


def unload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A datastore's name.")],
    target: ServerTarget = HERE,
    json: options.Json = False,
) -> None:
    """Let a server unload a datastore. Its files stay."""
    with client_of(target) as client:
        print_store(client.datastores.unload(name), json=json)
