"""`memlm bench variants`: the parts of the decoder side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memlm.base.printable import one_line
from memlm.cli import options
from memlm.cli.console import ConsoleProgress, emit_json, err, out, print_table, table
from memlm.errors import InvalidInput, check_range


def variants(
    effects: Annotated[bool, typer.Option("--effects", help="Train each part on the task that shows its effect.")],
    only: Annotated[str, typer.Option(metavar="NAME,...", help="Parts (default: all).")] = "",
    jobs: Annotated[int, typer.Option(help="Runs side by side, each on one thread.")] = 1,
    device: options.Device = "cpu",
    json: options.Json = False,
) -> None:
    """The effect of each part of the decoder on a synthetic task, beside the plain decoder (docs/zoo.md)."""
    from memlm.bench.effects import bench_effects
    from memlm.bench.report import report

    if not effects:
        raise InvalidInput("give --effects", field="effects")
    check_range("jobs", jobs, least=1)
    with ConsoleProgress() as progress:
        figures = bench_effects(names_in(only), jobs=jobs, device=device, progress=progress)
    if json:
        emit_json(report(figures, repeats=None))
    else:
        print_effects(figures)


def names_in(only: str) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in only.split(",") if name.strip()]


def print_effects(figures: dict[str, Any]) -> None:
    """Prints a table of configs for each effect."""
    for effect, expects in figures["expects"].items():
        rows = [row for row in figures["rows"] if row["effect"] == effect]
        names = [name for name in (rows[0] if rows else ()) if f"{name}_least" in rows[0]]
        shown = table("config", "seeds", *(name.replace("_", " ") for name in names), title=effect)
        for row in rows:
            values = (f"{row[n]:.3g} ({row[f'{n}_least']:.3g} to {row[f'{n}_most']:.3g})" for n in names if n in row)
            shown.add_row(row["config"], str(row["seeds"]), *values)
        print_table(shown)
        out.print(one_line(f"expected: {expects}"), markup=False)
        if effect in figures["no_result"]:
            out.print("no result: the plain decoder did not learn the task")
    for job, error in figures["errors"].items():
        err.print(one_line(f"{job}: {error}"), markup=False)
