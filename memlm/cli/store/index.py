"""`memlm index`: build, change, check and search a datastore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.base.figures import counted
from memlm.base.printable import one_line
from memlm.cli.store.build import add, build, keys
from memlm.cli.store.change import compact, delete, info, load, remember, unload
from memlm.cli.store.render import (
    print_copy,
)
from memlm.cli.store.search import passages, search
from memlm.cli.store.sync import sync
from memlm.cli.store.vectors import vectors
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out

app = typer.Typer(help="Build, change, check and search a datastore.", no_args_is_help=True)


app.command(epilog="Example: memlm index build docs/ --model model --out store")(build)
app.command(epilog="Example: memlm index add store more/ --model model")(add)
app.command(epilog="Example: memlm index keys store --model model")(keys)
app.command(epilog="Example: memlm index sync store docs/ --model model")(sync)
app.command(epilog="Example: memlm index remember store 'The port is 7443.' --model model")(remember)
app.command(epilog="Example: memlm index delete store --where license=unknown")(delete)
app.command(epilog="Example: memlm index compact store --model model")(compact)
app.command(epilog="Example: memlm index info store")(info)
app.command(epilog="Example: memlm index load notes --target localhost:50051")(load)
app.command(epilog="Example: memlm index unload notes --target localhost:50051")(unload)
app.command(epilog="Example: memlm index search store 'import os' --model model --by words")(search)
app.command(epilog="Example: memlm index passages store 'Which port does the gateway use?' --model model")(passages)


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


app.command(epilog="Example: memlm index vectors store --model model")(vectors)


def _key_problems(datastore: Any, model: Path, dtype: str, device: str) -> list[str]:
    from memlm.indexing.quality import check_keys
    from memlm.model.files.checkpoint import load_checkpoint
    from memlm.retrieval.store import ModelStore

    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    ModelStore(datastore, checkpoint)
    with ConsoleProgress() as progress:
        return check_keys(datastore.snapshot, checkpoint, progress=progress).problems(str(datastore.path))
