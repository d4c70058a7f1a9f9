"""`memlm bench`: speed and RAM of this machine. Compare ratios within one run, because machines are noisy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, print_table, table
from memlm.errors import InvalidInput

app = typer.Typer(help="Measure speed and RAM.", no_args_is_help=True)

Repeats = Annotated[int, typer.Option(help="Repeats. Medians are reported.")]
SomeModel = Annotated[
    Path | None,
    typer.Option("--model", "-m", metavar="MODEL", help="Model folder (default: the demo's shape, untrained)."),
]


@app.command(epilog="Example: memlm bench build docs/ --model model --entries 1000000 --json")
def build(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT...]", help="A corpus (default: some of the standard library).")
    ] = None,
    model: SomeModel = None,
    entries: Annotated[
        int | None, typer.Option(help="Use the first documents with this many tokens (default: all).")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    repeats: Repeats = 3,
    json: options.Json = False,
) -> None:
    """Tokens/s of a whole build relative to bare passes of the model. Without TEXT, also peak RAM at 1x and 4x."""
    from memlm.bench.build import bench_build
    from memlm.data.corpus import Corpus

    if entries is not None and not texts:
        raise InvalidInput("entries needs a corpus; give TEXT", field="entries")
    with ConsoleProgress() as progress:
        figures = bench_build(
            model,
            Corpus(texts) if texts else None,
            entries=entries,
            dtype=dtype,
            device=device,
            repeats=repeats,
            progress=progress,
        )
    print_figures("bench build", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench generate --json")
def generate(
    model: SomeModel = None,
    entries: Annotated[int, typer.Option(help="Entries of the datastore.")] = 1_000_000,
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Time per token with a datastore relative to without, at batch 1."""
    from memlm.bench.generate import bench_generate

    with ConsoleProgress() as progress:
        figures = bench_generate(model, entries=entries, repeats=repeats, progress=progress)
    print_figures("bench generate", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench serve --json")
def serve(model: SomeModel = None, repeats: Repeats = 7, json: options.Json = False) -> None:
    """Time per token through gRPC relative to in process, and the front end's time at 32 streams."""
    from memlm.bench.serve import bench_serve

    with ConsoleProgress() as progress:
        figures = bench_serve(model, repeats=repeats, progress=progress)
    print_figures("bench serve", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench versus --model smollm2 --json")
def versus(
    model: Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help="A GGUF file.")] = "smollm2",
    store: Annotated[
        Path | None, typer.Option("--store", "-s", metavar="STORE", help="A datastore, to measure too.")
    ] = None,
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Tokens/s relative to llama.cpp, on the weights of one GGUF file."""
    from memlm.bench.versus_llama_cpp import bench_versus_llama_cpp

    with ConsoleProgress() as progress:
        figures = bench_versus_llama_cpp(model, store, repeats=repeats, progress=progress)
    print_figures("bench versus", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench load --model model --store store --json")
def load(
    model: SomeModel = None,
    store: options.Stores = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams. Repeatable (default: 1, 8 and 32).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 8.0,
    workers: Annotated[int, typer.Option(help="Inference workers.")] = 1,
    repeats: Repeats = 3,
    json: options.Json = False,
) -> None:
    """Tokens/s, time to the first token and between tokens of many streams, and refusals of a full server."""
    from memlm.bench.load import bench_load
    from memlm.bench.texts import library_texts, model_for, workplace

    with ConsoleProgress() as progress, workplace() as folder:
        path = model or model_for(None, folder / "model", library_texts(folder / "texts", 900_000))
        counts = streams or (1, 8, 32)
        figures = bench_load(
            path, store or (), streams=counts, seconds=seconds, repeats=repeats, workers=workers, progress=progress
        )
    print_figures("bench load", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench model --part decode --json")
def model(
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="decode|prefill|training", help="Part to measure. Repeatable (default: all)."),
    ] = None,
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Decoding, prefill and training, against physical bounds and other libraries."""
    from memlm.bench.model import PARTS, bench_model

    if unknown := sorted({*(part or ())} - {*PARTS}):
        raise InvalidInput(f"part is {unknown[0]!r}; expected one of {', '.join(PARTS)}", field="part")
    with ConsoleProgress() as progress:
        figures = bench_model(tuple(part or PARTS), repeats=repeats, progress=progress)
    print_figures("bench model", figures, repeats, json=json)


def print_figures(
    title: str, figures: dict[str, Any], repeats: int | None, *, json: bool, program: str = "memlm"
) -> None:
    """Prints figures as a table, or with `json` as a report of `program`."""
    if json:
        from memlm.bench.report import report

        emit_json(report(figures, repeats=repeats, program=program))
        return
    shown = table("", "", title=title)
    shown.show_header = False
    for name, value in figures.items():
        shown.add_row(
            name.replace("_", " "),
            f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value),
        )
    print_table(shown)
