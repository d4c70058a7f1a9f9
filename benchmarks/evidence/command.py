"""`python -m benchmarks evidence`: tables of what memory is worth, and where it does harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.printed import print_report
from memlm.base.printable import one_line
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, err, print_table, table


def evidence(
    domains: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DOMAIN...]", help="library, or NAME=STORED,HELD_OUT with two corpora (default: library)."
        ),
    ] = None,
    model: options.Model = Path("smollm2"),
    only: Annotated[str, typer.Option(metavar="TABLE,...", help="Tables (default: all).")] = "",
    work: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder that keeps the datastores for another table.")
    ] = None,
    entries: Annotated[int, typer.Option(help="Tokens in the datastore of each domain.", min=100)] = 100_000,
    documents: Annotated[
        int, typer.Option(help="Held-out documents of each domain. Every other one tunes.", min=8)
    ] = 32,
    document_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of one of them.", min=8)] = 1024,
    document_start: Annotated[
        int,
        typer.Option(
            metavar="TOKENS", help="Leave out so many at the beginning of each document, as front matter.", min=0
        ),
    ] = 0,
    questions: Annotated[
        int, typer.Option(help="Questions about the stored documents, at most. 500 take minutes.", min=1)
    ] = 100,
    minutes: Annotated[
        float, typer.Option(help="Training of the smallest model of the table `training`.", min=0.01)
    ] = 1.0,
    tasks: Annotated[
        str, typer.Option(metavar="NAME,...", help="Tasks of the lm-evaluation-harness, for the table of tasks.")
    ] = "",
    include: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Take tasks from this folder, in place of the harness's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each task (default: all).", min=1)] = None,
    keep_gain: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Of the gain on text, for the threshold of lam in the table of tasks."),
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal documents.", min=0)] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Tables of what memory is worth, by domain. Each figure has a standard error over held-out documents."""
    from benchmarks.evidence.tables import bench_evidence, check_tables
    from benchmarks.evidence.tasks import AskedTasks
    from benchmarks.evidence.texts import LIBRARY, Sizes
    from memlm.model.files.checkpoint import load_checkpoint

    names, task_names = ([name for name in given.split(",") if name] for given in (only, tasks))
    asked = AskedTasks(tuple(task_names), include, limit, keep_gain) if task_names else None
    check_tables(names, asked)  # before the model is loaded
    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    sizes = Sizes(entries, documents, document_tokens, questions, minutes, document_start)
    figures: dict[str, Any] = {}
    try:
        with ConsoleProgress() as progress, _folder(work) as folder:
            for so_far in bench_evidence(
                checkpoint, domains or [LIBRARY], folder, names, sizes, asked=asked, seed=seed, progress=progress
            ):
                if not figures:
                    _print_left_out(so_far.get("left_out", {}))
                figures = so_far
    finally:  # tables that are finished are not lost by an error in a later one
        if json and figures.get("rows"):
            print_report(figures, repeats=None)
        for name, rows in groupby([] if json else figures.get("rows", []), key=lambda row: row["table"]):
            _print(name, list(rows))


def _print_left_out(left_out: dict[str, dict[str, str]]) -> None:
    for domain, reasons in left_out.items():
        for name, reason in reasons.items():
            err.print(one_line(f"the table {name} of {domain} is left out: {reason}"), markup=False)


@contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    from memlm.bench.texts import workplace

    if work is not None:
        yield work
        return
    with workplace() as folder:
        yield folder


def _print(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of one table: words first, each figure with its standard error."""
    given = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in given if name != "table" and not name.endswith(("_error", "_least", "_most", "_n"))]
    shown = table(*(name.replace("_", " ") for name in names), title=title)
    for row in rows:
        shown.add_row(*(_cell(row.get(name, "-"), row.get(f"{name}_error")) for name in names))
    print_table(shown)


def _cell(value: Any, error: float | None) -> str:
    if error is not None:
        return f"{value:.4g} ± {error:.2g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
