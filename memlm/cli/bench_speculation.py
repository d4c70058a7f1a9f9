"""`memlm bench speculation`: what guesses before slow searches save."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memlm.cli import options
from memlm.cli.console import ConsoleProgress, emit_json, print_table, table


def speculation(
    texts: options.Texts,
    model: options.Model,
    store: Annotated[Path, typer.Option("--store", "-s", metavar="STORE", help="Datastore folder.")],
    prompts: Annotated[int, typer.Option(help="Prompts, continued one after another.", min=1)] = 6,
    delay_ms: Annotated[
        list[float] | None,
        typer.Option(help="Delay of each search (default: 0, 5, 20 and 50). Repeatable.", metavar="MS", min=0),
    ] = None,
    dtype: options.Dtype = "auto",
    repeats: Annotated[int, typer.Option(help="Repeats. Medians are reported.", min=1)] = 5,
    json: options.Json = False,
) -> None:
    """Tokens/s with speculative retrieval over without, by the delay of a search. TEXT is not in the datastore."""
    from memlm.bench.report import report
    from memlm.bench.speculation import bench_speculation
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_speculation(
            Path(model), store, Corpus(texts), prompts=prompts, delays_ms=delay_ms or (0, 5, 20, 50), dtype=dtype,
            repeats=repeats, progress=progress,
        )  # fmt: skip
    if json:
        emit_json(report(figures, repeats=repeats))
        return
    shown = table("prompts", "delay", "over copies", "over none", "searches a token", "accepted", "same text")
    for row in figures["rows"]:
        shown.add_row(
            row["prompts"], f"{row['delay_ms']:g} ms", f"{row['speculation_over_copies']:.2f}",
            f"{row['speculation_over_none']:.2f}", f"{row['searches_per_token_speculation']:.2f}",
            f"{row['accepted']}/{row['drafted']}", f"{row['identical']:.0%}",
        )  # fmt: skip
    print_table(shown)
