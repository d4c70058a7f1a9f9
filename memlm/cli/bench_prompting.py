"""`memlm bench proposals`: text of a repository in the prompt of a hole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memlm.cli import options
from memlm.cli.console import ConsoleProgress, emit_json, out, print_table, table


def proposals(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A repository of Python files.", exists=True)],
    model: options.Model,
    minutes: Annotated[float, typer.Option(help="Time to read holes.")] = 10.0,
    budget: Annotated[int, typer.Option(help="Tokens of a prompt.", min=2)] = 256,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal holes.", min=0)] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Loss on holes in a repository's files, with proposals for the prompt and without (RLPG)."""
    from memlm.bench.proposals import bench_proposals
    from memlm.bench.report import report

    with ConsoleProgress() as progress:
        figures = bench_proposals(
            model, folder, minutes=minutes, budget=budget, seed=seed, dtype=dtype, device=device, progress=progress
        )
    if json:
        emit_json(report(figures, repeats=None))
        return
    shown = table("prompt", "nats a token", "less than behind the text before", title="bench proposals")
    for row in figures["rows"]:
        shown.add_row(
            row["way"],
            f"{row['nats_per_token']:.3f} ± {row['nats_per_token_error']:.3f}",
            f"{row['nats_less']:.3f} ± {row['nats_less_error']:.3f}",
        )
    print_table(shown)
    out.print(
        f"{figures['holes']:,} holes of {figures['tokens']:,} tokens in {figures['files']:,} files."
        f" {figures['share_that_helps']:.0%} of {figures['proposals']:,} proposals lower the loss of their hole."
    )
