"""`python -m benchmarks shards`: what a datastore in several processes costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.printed import print_report
from memlm.base.cpu import spin_briefly
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, out, print_table, table


def shards(
    store: options.StoreArgument,
    model: options.Model,
    number: Annotated[int, typer.Option("--shards", help="Processes.", min=1, max=64)] = 4,
    repeats: Annotated[int, typer.Option(help="Repeats. Medians are reported.", min=1)] = 5,
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """Time of a token with a datastore in several processes over one, and of one hop between processes."""
    spin_briefly()  # as the processes of a server do
    from benchmarks.shards import bench_shards

    with ConsoleProgress() as progress:
        figures = bench_shards(Path(model), store, shards=number, repeats=repeats, dtype=dtype, progress=progress)
    if json:
        print_report(figures, repeats=repeats)
        return
    shown = table(
        "", "ms a token", "in one process", "ratio (least to most)", title=f"bench shards: {number} processes"
    )
    for row in figures["rows"]:
        ratio, least, most = (row[f"sharded_over_alone{part}"] for part in ("", "_least", "_most"))
        times = (f"{row[name]:.2f}" for name in ("ms_per_token_sharded", "ms_per_token"))
        shown.add_row(row["way"], *times, f"{ratio:.2f} ({least:.2f} to {most:.2f})")
    print_table(shown)
    for name, hop in figures["hops"].items():
        out.print(
            f"one hop by {name}, 8 queries: {hop['p50_ms']:.2f} ms (99 %: {hop['p99_ms']:.2f}), the same search here"
            f" {hop['here_p50_ms']:.2f} ms"
        )
    same = "the same texts" if figures["identical"] else "OTHER TEXTS"
    out.print(f"{figures['entries']:,} entries in {figures['segments']} segments; {same}", markup=False)
