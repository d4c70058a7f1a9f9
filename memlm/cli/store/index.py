"""`memlm index`: build, change, check and search a datastore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.api.answers import FindPassagesRequest
from memlm.api.datastores import SearchRequest
from memlm.base.figures import counted
from memlm.base.options import RESEARCH
from memlm.base.printable import one_line
from memlm.base.progress import LOADING
from memlm.cli.store.build import add, build, keys
from memlm.cli.store.render import (
    print_compaction,
    print_copy,
    print_delete_preview,
    print_info,
    print_neighbors,
    print_passages,
    print_tuning,
)
from memlm.cli.store.sync import sync
from memlm.cli.store.vectors import tell_missing_encoder, vectors
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out
from memlm.cli.terminal.fields import with_fields
from memlm.cli.terminal.interruption import on_interrupt, this_command

if TYPE_CHECKING:
    pass

app = typer.Typer(help="Build, change, check and search a datastore.", no_args_is_help=True)


app.command(epilog="Example: memlm index build docs/ --model model --out store")(build)
app.command(epilog="Example: memlm index add store more/ --model model")(add)
app.command(epilog="Example: memlm index keys store --model model")(keys)
app.command(epilog="Example: memlm index sync store docs/ --model model")(sync)


@app.command(epilog="Example: memlm index delete store --where license=unknown")
def delete(
    store: options.StoreArgument,
    document_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids of documents.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Documents with this metadata. Repeatable: all must hold."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
    json: options.Json = False,
) -> None:
    """Delete documents by id or metadata. They no longer influence any answer afterwards."""
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
    if json:
        emit_json({"documents": deleted.num_documents, "entries": deleted.num_entries, "manifest": number})
    else:
        documents, entries = counted(deleted.num_documents, "document"), counted(deleted.num_entries, "entry")
        out.print(f"deleted {documents}, {entries} (manifest {number})")


@app.command(epilog="Example: memlm index compact store --model model")
def compact(
    store: options.StoreArgument,
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
    json: options.Json = False,
) -> None:
    """Merge all segments without the deleted documents, while readers keep reading."""
    from memlm.indexing.build import compact_index

    with on_interrupt(lambda: f"{store} is complete; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        done = compact_index(store, model, purge=purge, check=check, dtype=dtype, device=device, progress=progress)
    print_compaction(done, json=json)


@app.command(epilog="Example: memlm index verify store --model model")
def verify(
    store: options.StoreArgument,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "-m", metavar="MODEL",
            help="Also encode documents again and compare the keys. Finish an interrupted measurement.",
        ),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="First restore a lost or damaged CURRENT from the newest manifest.")
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:  # fmt: skip
    """Check every checksum and count, and that entries find themselves. Exits 1 on a problem."""
    from memlm.index.store.datastore import Datastore

    finished = False
    if repair:
        from memlm.index.store.repair import repair as run_repair

        manifest, written = run_repair(store)
        if written and not json:
            out.print(f"CURRENT was restored to manifest {manifest.number}")
    with Datastore.open(store) as datastore:
        problems = datastore.snapshot.verify()
        if model and not problems:
            problems = _key_problems(datastore, model, dtype, device)
    if model and not problems:
        from memlm.indexing.build import finish_build

        with ConsoleProgress() as progress:
            finished = finish_build(store, model, dtype=dtype, device=device, progress=progress)
    if json:
        emit_json({"ok": not problems, "problems": problems, "finished": finished})
    else:
        for problem in problems:
            err.print(one_line(problem), markup=False)
        out.print(counted(len(problems), "problem") if problems else "every file matches its manifest")
        if finished:
            out.print("the interrupted checks are now done: see `memlm index info`")
    raise typer.Exit(1 if problems else 0)


@app.command(epilog="Example: memlm index snapshot store backups/monday")
def snapshot(
    store: options.StoreArgument,
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="The copy's new folder.")],
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy all bytes, in place of hard links on the same file system.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Compare linked files with their checksums.")] = True,
    json: options.Json = False,
) -> None:
    """Copy a datastore at its newest commit, while others read and write it. A copy is a datastore too."""
    from memlm.index.store.backup import copy_store

    with ConsoleProgress() as progress:
        report = copy_store(store, destination, progress, hard_links=not copy, verify=verify)
    print_copy(report, json=json)


@app.command(epilog="Example: memlm index info store")
def info(store: options.StoreArgument, json: options.Json = False) -> None:
    """Show the size, origin and defaults of a datastore."""
    from memlm.index.store.datastore import Datastore

    with Datastore.open(store) as datastore:
        print_info(datastore.snapshot, json=json)


@app.command(epilog="Example: memlm index spalm store heldout/ --model model")
def spalm(
    store: options.StoreArgument,
    texts: options.Texts,
    model: options.Model,
    k: Annotated[int, typer.Option("--k", help="Neighbors of each position.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to train on.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal gates.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Train a gate between model and datastore on held-out text, and save it with the model."""
    from memlm.index.store.manifest import read_manifest

    documents = options.corpus_of(texts, glob, on_error, hidden=hidden)
    read_manifest(store)  # before what takes long to import
    from memlm.indexing.train_gate import train_spalm as run
    from memlm.model.files.checkpoint import load_checkpoint

    with ConsoleProgress() as progress:
        checkpoint = load_checkpoint(model, dtype=dtype, device=device)
        report = run(checkpoint, store, documents, k=k, max_tokens=max_tokens, seed=seed, progress=progress)
    if json:
        emit_json(report)
        return
    out.print(
        f"{report.base_nats:.4f} nats per token alone, {report.gated_nats:.4f} gated, {report.share:.1%} from p_kNN"
    )
    if report.gated_nats >= report.base_nats:
        out.print("The gate does not help. Nothing was saved.")


@app.command(epilog="Example: memlm index search store 'import os' --model model --by words")
@with_fields(leave_out=("store",))
def search(
    store: options.StoreArgument,
    request: SearchRequest,
    model: options.Model,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Find the places where the model was in the same state as at the end of a text, or where words stand."""
    from memlm.base.steps import run_steps
    from memlm.language_model import load

    with load(model, [store], dtype=dtype, device=device) as lm:
        print_neighbors(run_steps(lm.engine.search(request)), request, json=json)


@app.command(epilog="Example: memlm index passages store 'Which port does the gateway use?' --model model")
@with_fields(leave_out=("store",))
def passages(
    store: options.StoreArgument,
    request: FindPassagesRequest,
    model: options.Model,
    encoder: options.Encoder = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Find the passages that are likeliest to answer a question, to put them into a prompt."""
    from memlm.base.steps import run_steps
    from memlm.language_model import load

    tell_missing_encoder(encoder, request.by)
    with load(model, [store], dtype=dtype, device=device, passage_encoder=encoder) as lm:
        print_passages(run_steps(lm.engine.find_passages(request)), json=json)


app.command(epilog="Example: memlm index vectors store --model model")(vectors)


@app.command(epilog="Example: memlm index tune store heldout/ --model model")
@with_fields()
def tune(
    store: options.StoreArgument,
    texts: options.Texts,
    model: options.Model,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to tune on.")] = 50_000,
    keep_gain: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=RESEARCH,
            metavar="SHARE",
            help="Leave to the model alone the positions of small lam, as long as this share of the gain stays.",
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Tune k, lam and temperature on held-out text, and save them as the datastore's defaults."""
    from memlm.index.store.manifest import read_manifest

    documents = options.corpus_of(texts, glob, on_error, hidden=hidden)
    read_manifest(store)
    left = f"{store} keeps the defaults that it had"
    with on_interrupt(lambda: f"{left}; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        progress(LOADING, 0, 1)
        from memlm.indexing.tune import tune as run
        from memlm.model.files.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(model, dtype=dtype, device=device)
        report = run(checkpoint, store, documents, max_tokens=max_tokens, keep_gain=keep_gain, progress=progress)
    print_tuning(report, json=json)
    if keep_gain is not None and not report.threshold:
        err.print(f"--keep-gain {keep_gain:g} has no effect: {_why_no_threshold(report)}", markup=False)


def _why_no_threshold(report: Any) -> str:
    if report.adaptive_kept:
        return "no threshold of lam leaves positions to the model alone and keeps this share of the gain"
    return (
        "a threshold is of a lam that adapts, and none is kept. On text that it was not fitted to, it takes"
        f" {report.adaptive_nats:.4f} nats per token, the model alone {report.base_nats:.4f}, and one lam"
        f" {report.knn_nats:.4f}"
    )


def _key_problems(datastore: Any, model: Path, dtype: str, device: str) -> list[str]:
    from memlm.indexing.quality import check_keys
    from memlm.model.files.checkpoint import load_checkpoint
    from memlm.retrieval.store import ModelStore

    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    ModelStore(datastore, checkpoint)
    with ConsoleProgress() as progress:
        return check_keys(datastore.snapshot, checkpoint, progress=progress).problems(str(datastore.path))
