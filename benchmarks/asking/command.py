"""`python -m benchmarks asking`: how often a model answers right, in each way of asking, and from the right source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.printed import print_report
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, print_table, table

SHARES = ("right", "sentence_right", "source_right", "named", "as_alone", "exact")


def asking(
    path: Annotated[Path, typer.Argument(metavar="QUESTIONS", help="JSON Lines of question, answers, and files.")],
    model: options.Model,
    store: Annotated[list[Path], typer.Option("--store", "-s", metavar="STORE", help="Datastore folder. Repeatable.")],
    rows: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON Lines of each answer. A run goes on behind those that are there.")
    ],
    way: Annotated[list[str] | None, typer.Option(help="Way of asking (default: all). Repeatable.")] = None,
    words: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask in the words of these JSON Lines of id and question.")
    ] = None,
    by: Annotated[str, typer.Option(help="Way of searching.", metavar="auto|words|meaning")] = "auto",
    limit: Annotated[int | None, typer.Option(help="Questions, at most (default: all).", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal questions.", min=0)] = 0,
    encoder: options.Encoder = "auto",
    json: options.Json = False,
) -> None:
    """Right answers, sentences and sources of each way of asking. An answer takes seconds."""
    from benchmarks.asking.bench import bench_asking
    from benchmarks.asking.ways import WAYS
    from benchmarks.questions import questions_of
    from memlm.language_model import load

    with load(model, store, passage_encoder=encoder) as lm, ConsoleProgress() as progress:
        figures = bench_asking(
            lm, questions_of(path, words), rows, ways=way or tuple(WAYS), by=by, limit=limit, seed=seed,
            progress=progress,
        )  # fmt: skip
    if json:
        print_report({"rows": figures}, repeats=1)
        return
    names = [name.replace("_", " ") for name in SHARES]
    shown = table("way", "questions", *names, "F1", "log-probability", "first token, ms", "of the processor")
    for row in figures:
        shares = (f"{row[name]:.0%}" if name in row else "-" for name in SHARES)
        means = (f"{row[name]:.2f}" if name in row else "-" for name in ("f1", "logprob"))
        times = (f"{row[name]:.0f}" for name in ("first_token_ms", "processor_ms"))
        shown.add_row(row["way"], str(row["questions"]), *shares, *means, *times)
    print_table(shown)
