"""`memlm index build`, `add` and `keys`: documents into a datastore, and their keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.api.datastores import CHECKS, BuildDatastoreRequest
from memlm.base.progress import LOADING
from memlm.cli.served.operations import show
from memlm.cli.store.build_report import print_build, print_keys
from memlm.cli.store.engine import keys_of, reader_of
from memlm.cli.store.forecast import PlannedBuild, foretell_addition, foretell_build
from memlm.cli.store.vectors import make_vectors_at_once
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import UPLOAD_S, Target, Wait, client_of, is_served, model_of
from memlm.cli.terminal.console import ConsoleProgress
from memlm.cli.terminal.corpus_files import CorpusFiles
from memlm.cli.terminal.fields import Overrides, with_fields
from memlm.cli.terminal.interruption import describe_build, on_interrupt, this_command
from memlm.errors import check_choice

if TYPE_CHECKING:
    from memlm.indexing.encoding import BlockEncoder
    from memlm.model.files.checkpoint import Checkpoint

CHECKED = ("keys", "index", "target", "prune", "check")  # before anything is read


@with_fields(leave_out=("store", "corpus", "request_id"))
def build(
    context: typer.Context,
    corpus: options.Corpora,
    out_folder: Annotated[
        Path, typer.Option("--out", "-o", metavar="STORE", help="The datastore's new folder, or its name on a server.")
    ],
    settings: Annotated[dict[str, Any], Overrides(BuildDatastoreRequest)],
    model: options.ModelOrTarget = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "local",
    target: Target = None,
    wait: Wait = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the files, and the expected size and time.")
    ] = False,
    on_error: options.OnError = "skip",
    yes: options.Yes = False,
    report: options.Report = None,
    json: options.Json = False,
) -> None:
    """Build a datastore: of text, which answers in seconds, and of keys. An interrupted build resumes.

    A server builds from files and folders of its own, and a datastore that it replaces answers until then.
    """
    if is_served(context, target, here=("dry_run", "on_error", "report"), there=("replace",)):
        assert target is not None
        with client_of(target) as client:
            show(client.datastores.build(str(out_folder), corpus, **settings), wait=wait, json=json)
        return
    model = model_of(model)
    settings = {"index": "auto", "target": None, "prune": None, "check": "quick", **settings}
    files = CorpusFiles()
    glob, hidden = settings.pop("glob", "**/*"), settings.pop("hidden", False)
    documents = options.corpus_of(corpus, glob, on_error, hidden=hidden, files=files)
    planned = PlannedBuild(
        model, documents, out_folder, settings["index"], settings.get("window"), settings.get("stride"),
        dtype, device,
    )  # fmt: skip
    if dry_run:
        planned.print(json=json)
        return
    settings |= {
        "keep_keys": not settings.pop("drop_keys", False),
        "keys": keys_of(engine, settings.get("keys", "auto")),
    }
    with on_interrupt(partial(describe_build, out_folder, model)):
        from memlm.indexing.build import build_index, check_build

        check_build(out_folder, **{name: settings[name] for name in CHECKED})
        is_foretold = engine == "local" and settings["keys"] == "now"
        given = foretell_build(planned, asks=not (yes or json)) if is_foretold else model
        with _reading(engine, given, dtype, device, settings["keys"]) as (loaded, encoder, progress):
            built = build_index(
                loaded, documents, out_folder, encoder=encoder, dtype=dtype, device=device, progress=progress,
                **settings,
            )  # fmt: skip
    files.finish(report)
    print_build(built, model, json=json)
    make_vectors_at_once(out_folder, model)


def add(
    context: typer.Context,
    store: options.AnyStore,
    corpus: options.Corpora,
    model: options.ModelOrTarget = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace documents whose ids exist.")] = False,
    keys: options.Keys = "auto",
    check: options.Check = "quick",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "local",
    target: Target = None,
    wait: Wait = True,
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    yes: options.Yes = False,
    report: options.Report = None,
    json: options.Json = False,
) -> None:
    """Add documents as a new segment, while readers keep reading. To a server they are uploaded."""
    check_choice("check", check, CHECKS)
    files = CorpusFiles()
    read = partial(options.corpus_of, corpus, glob, on_error, hidden=hidden, files=files)
    if is_served(context, target):
        assert target is not None
        with client_of(target, UPLOAD_S) as client:
            job = client.datastores.add(str(store), read(), replace=replace, keys=keys, check=check)
            files.finish(report)
            show(job, wait=wait, json=json)
        return
    model, documents = model_of(model), read()
    with on_interrupt(partial(describe_build, store, model)):
        given: Path | Checkpoint = model
        keys = keys_of(engine, keys)
        if engine == "local" and keys == "now":
            given = foretell_addition(model, documents, store, dtype=dtype, device=device, asks=not (yes or json))
        with _reading(engine, given, dtype, device, keys) as (loaded, encoder, progress):
            from memlm.indexing.build import add_to_index

            built = add_to_index(
                loaded, documents, store, replace=replace, keys=keys, check=check, dtype=dtype, device=device,
                encoder=encoder, progress=progress,
            )  # fmt: skip
    files.finish(report)
    print_build(built, model, json=json)
    make_vectors_at_once(store, model)


def keys(
    store: options.StoreArgument,
    model: options.Model,
    documents: Annotated[
        list[str] | None, typer.Option("--document", metavar="ID|FOLDER|GLOB", help="Only these documents. Repeatable.")
    ] = None,
    check: options.Check = "quick",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "local",
    json: options.Json = False,
) -> None:
    """Make the keys of documents without, by which generation finds neighbors. An interrupted run goes on."""
    from memlm.api.datastores import document_filter

    check_choice("check", check, CHECKS)
    only = document_filter(tuple(documents or ()), ())
    with (
        on_interrupt(lambda: f"what has keys keeps them; to go on: {this_command()}"),
        _reading(engine, model, dtype, device, "now") as (loaded, encoder, progress),
    ):
        from memlm.indexing.build import index_keys

        report = index_keys(
            store, loaded, only=only, check=check, dtype=dtype, device=device, encoder=encoder, progress=progress
        )
    print_keys(report, json=json)


@contextmanager
def _reading(
    engine: str, given: Path | Checkpoint, dtype: str, device: str, keys: str
) -> Iterator[tuple[Path | Checkpoint, BlockEncoder | None, ConsoleProgress]]:
    """The model and the encoder of an engine as `reader_of`, and the progress of the work, which loads a model that is
    still a path.
    """
    with (
        ConsoleProgress() as progress,
        reader_of(engine, given, dtype=dtype, device=device, keys=keys) as (loaded, encoder),
    ):
        if isinstance(loaded, Path):
            progress(LOADING, 0, 1)
        yield loaded, encoder, progress
