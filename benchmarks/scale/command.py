"""`python -m benchmarks scale`: how bytes and times grow with the entries, and predictions for larger stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.printed import print_report
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, out, print_table, table
from memlm.errors import InvalidInput

BATCHES = (1, 8, 64)
UNITS = {"bytes": "bytes", "build_s": "s of a build", **{f"ms_per_query_batch{b}": f"ms, batch {b}" for b in BATCHES}}


def scale(
    texts: options.Texts,
    held_out: Annotated[Path, typer.Option(metavar="PATH", help="Queries: text that is not in TEXT.")],
    model: options.Model,
    work: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder that keeps keys and indexes, so that another run measures times."),
    ] = None,
    entries: Annotated[
        str, typer.Option(metavar="N,...", help="Ascending sizes. The last is predicted from the others.")
    ] = "100000,1000000,10000000",
    index: Annotated[
        list[str] | None,
        typer.Option(metavar="FACTORY", help="Index types, * for the number of lists (default: fp16 and PQ codes)."),
    ] = None,
    predict: Annotated[str, typer.Option(metavar="N,...", help="Larger stores to predict, such as 1e8,1e12.")] = "",
    target: Annotated[float, typer.Option(help="Share of the findable softmax mass that a search finds.")] = 0.95,
    shard_ram: Annotated[
        float | None, typer.Option(metavar="GB", help="RAM of a machine. Larger predicted stores are divided.")
    ] = None,
    hop_ms: Annotated[float, typer.Option(help="Milliseconds of a round trip to a shard.")] = 0.5,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    repeats: Annotated[int, typer.Option(help="Repeats. Medians are reported.")] = 5,
    json: options.Json = False,
) -> None:
    """Bytes and times of stores of several sizes, the error of predicting the largest, and larger ones predicted.

    Where TEXT has too few tokens, its keys are repeated under random rotations.
    """
    from benchmarks.scale.sizes import Machine, Plan, bench_scale
    from memlm.data.corpus import Corpus
    from memlm.model.files.checkpoint import load_checkpoint

    machine = Machine(None if shard_ram is None else shard_ram * 1e9, hop_ms)
    plan = Plan(
        numbers_in(entries, "entries"), tuple(index or ()), numbers_in(predict, "predict"), target, machine, repeats
    )
    plan.check()  # before the model is loaded
    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    with ConsoleProgress() as progress, _folder(work) as folder:
        figures = bench_scale(checkpoint, Corpus(texts), Corpus([held_out]), folder, plan, progress=progress)
    if json:
        print_report(figures, repeats=repeats)
        return
    print_scale(figures)


@contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    from memlm.bench.texts import workplace

    if work is not None:
        yield work
        return
    with workplace() as folder:
        yield folder


def numbers_in(text: str, name: str) -> list[int]:
    """The whole numbers of a list with commas, as 100000 or as 1e5. Raises InvalidInput for anything else."""
    numbers = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = float(word)
            whole = int(number)
        except (ValueError, OverflowError):
            whole, number = 0, 0.5
        if whole != number:
            raise InvalidInput(f"{name} has {word!r}; expected whole numbers such as 100000 or 1e5", field=name)
        numbers.append(whole)
    return numbers


def print_scale(figures: dict[str, Any]) -> None:
    """Prints the measured sizes, the error of the prediction of the largest, and the predicted sizes."""
    measured = table("entries", "index", "lists probed", "bytes an entry", "mass", "built/s", *list(UNITS.values())[2:])
    compared = table("entries", "index", "figure", "predicted", "measured", "error", title="held out")
    predicted = table("entries", "index", "shards", "network bytes a query", *UNITS.values(), title="predicted")
    for row in figures["rows"]:
        first = f"{row['entries']:,}", row["index"]
        if "bytes" in row:
            measured.add_row(
                *first, str(row["nprobe"]), f"{row['bytes_per_entry']:.1f}", f"{row['softmax_mass']:.3f}",
                f"{row['built_per_s']:,.0f}", *(f"{row[name]:.3g}" for name in list(UNITS)[2:]),
            )  # fmt: skip
            for name, unit in {**UNITS, "nprobe": "lists probed"}.items():
                if f"{name}_off" in row:
                    values = f"{row[f'{name}_predicted']:,.4g}", f"{row[name]:,.4g}", f"{row[f'{name}_off']:+.1%}"
                    compared.add_row(*first, unit, *values)
        else:
            ranges = (
                f"{row[f'{name}_predicted']:.3g} ({row[f'{name}_predicted_least']:.3g} to"
                f" {row[f'{name}_predicted_most']:.3g})"
                for name in UNITS
            )
            predicted.add_row(*first, f"{row['shards']:,}", f"{row['network_bytes_per_query']:,}", *ranges)
    for shown in (measured, compared, predicted):
        if shown.rows:
            print_table(shown)
    out.print(f"{figures['real_keys']:,} of the keys are of the texts. The others are rotated copies.", markup=False)
