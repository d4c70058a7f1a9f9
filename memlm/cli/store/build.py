"""`memlm index build`, `add` and `keys`: documents into a datastore, and their keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.api.datastores import CHECKS, INDEX
from memlm.base.progress import LOADING
from memlm.cli.store.build_report import print_build, print_keys
from memlm.cli.store.engine import keys_of, reader_of
from memlm.cli.store.forecast import PlannedBuild, foretell_addition, foretell_build
from memlm.cli.store.vectors import make_vectors_at_once
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress
from memlm.cli.terminal.corpus_files import CorpusFiles
from memlm.cli.terminal.fields import with_fields
from memlm.cli.terminal.interruption import describe_build, on_interrupt, this_command
from memlm.errors import check_choice

if TYPE_CHECKING:
    from memlm.indexing.encoding import BlockEncoder
    from memlm.model.files.checkpoint import Checkpoint


@with_fields()
def build(
    corpus: options.Corpora,
    model: options.Model,
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="STORE", help="The datastore's new folder.")],
    keys: options.Keys = "auto",
    index: Annotated[
        str, typer.Option(metavar="auto|FACTORY", help="Index of the keys, as Faiss names it.", rich_help_panel=INDEX)
    ] = "auto",
    target: Annotated[
        float | None,
        typer.Option(
            "--share",
            help="Share of the softmax mass to find (default: 0.95; with --max-ram 0.99).",
            rich_help_panel=INDEX,
        ),
    ] = None,
    max_ram: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Limit the RAM of a search, as 500M or 2GiB.", rich_help_panel=INDEX),
    ] = None,
    keep_keys: Annotated[
        bool, typer.Option(help="Keep the keys, to re-rank by and to compact from.", rich_help_panel=INDEX)
    ] = True,
    prune: Annotated[
        float | None,
        typer.Option(
            metavar="P", help="Leave out entries that the model predicts with this probability.", rich_help_panel=INDEX
        ),
    ] = None,
    window: options.Window = None,
    stride: options.Stride = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal indexes.")] = 0,
    check: options.Check = "quick",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "local",
    address: options.Address = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the files, and the expected size and time.")
    ] = False,
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    yes: options.Yes = False,
    report: options.Report = None,
    json: options.Json = False,
) -> None:
    """Build a datastore: of text, which answers in seconds, and of keys. An interrupted build resumes."""
    files = CorpusFiles()
    documents = options.corpus_of(corpus, glob, on_error, hidden=hidden, files=files)
    planned = PlannedBuild(model, documents, out_folder, index, window, stride, dtype, device)
    if dry_run:
        planned.print(json=json)
        return
    max_ram_bytes = options.num_bytes(max_ram)
    with on_interrupt(partial(describe_build, out_folder, model)):
        from memlm.indexing.build import build_index, check_build

        keys = keys_of(engine, keys)
        check_build(out_folder, keys=keys, index=index, target=target, prune=prune, check=check)
        is_foretold = engine == "local" and keys == "now"
        given = foretell_build(planned, asks=not (yes or json)) if is_foretold else model
        with _reading(engine, given, dtype, device, address, keys) as (loaded, encoder, progress):
            built = build_index(
                loaded, documents, out_folder, keys=keys, index=index, target=target, encoder=encoder,
                max_ram_bytes=max_ram_bytes, keep_keys=keep_keys, prune=prune, window=window,
                stride=stride, seed=seed, check=check, dtype=dtype, device=device, progress=progress,
            )  # fmt: skip
    files.finish(report)
    print_build(built, model, json=json)
    make_vectors_at_once(out_folder, model)


def add(
    store: options.StoreArgument,
    corpus: options.Corpora,
    model: options.Model,
    replace: Annotated[bool, typer.Option(help="Replace documents whose ids exist.")] = False,
    keys: options.Keys = "auto",
    check: options.Check = "quick",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "local",
    address: options.Address = None,
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    yes: options.Yes = False,
    report: options.Report = None,
    json: options.Json = False,
) -> None:
    """Add documents as a new segment, while readers keep reading."""
    check_choice("check", check, CHECKS)
    files = CorpusFiles()
    documents = options.corpus_of(corpus, glob, on_error, hidden=hidden, files=files)
    with on_interrupt(partial(describe_build, store, model)):
        given: Path | Checkpoint = model
        keys = keys_of(engine, keys)
        if engine == "local" and keys == "now":
            given = foretell_addition(model, documents, store, dtype=dtype, device=device, asks=not (yes or json))
        with _reading(engine, given, dtype, device, address, keys) as (loaded, encoder, progress):
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
    address: options.Address = None,
    json: options.Json = False,
) -> None:
    """Make the keys of documents without, by which generation finds neighbors. An interrupted run goes on."""
    from memlm.api.datastores import document_filter

    check_choice("check", check, CHECKS)
    only = document_filter(tuple(documents or ()), ())
    with (
        on_interrupt(lambda: f"what has keys keeps them; to go on: {this_command()}"),
        _reading(engine, model, dtype, device, address, "now") as (loaded, encoder, progress),
    ):
        from memlm.indexing.build import index_keys

        report = index_keys(
            store, loaded, only=only, check=check, dtype=dtype, device=device, encoder=encoder, progress=progress
        )
    print_keys(report, json=json)


@contextmanager
def _reading(
    engine: str, given: Path | Checkpoint, dtype: str, device: str, address: str | None, keys: str
) -> Iterator[tuple[Path | Checkpoint, BlockEncoder | None, ConsoleProgress]]:
    """The model and the encoder of an engine as `reader_of`, and the progress of the work, which loads a model that is
    still a path.
    """
    with (
        ConsoleProgress() as progress,
        reader_of(engine, given, dtype=dtype, device=device, address=address, keys=keys) as (loaded, encoder),
    ):
        if isinstance(loaded, Path):
            progress(LOADING, 0, 1)
        yield loaded, encoder, progress
