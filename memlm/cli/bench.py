"""`memlm bench`: speed and RAM of this machine. Compare ratios within one run, because machines are noisy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.cli import options
from memlm.cli.bench_evidence import evidence
from memlm.cli.bench_prompting import proposals
from memlm.cli.bench_scale import scale
from memlm.cli.bench_shards import shards
from memlm.cli.bench_speculation import speculation
from memlm.cli.bench_variants import variants
from memlm.cli.console import ConsoleProgress, emit_json, print_table, table
from memlm.errors import InvalidInput, check_choice

app = typer.Typer(help="Measure speed and RAM.", no_args_is_help=True)

app.command(epilog="Example: memlm bench variants --effects --only patterns --jobs 2")(variants)
app.command(epilog="Example: memlm bench evidence library --only gain-by-domain --model smollm2")(evidence)
app.command(epilog="Example: memlm bench shards store --model smollm2 --shards 4")(shards)
app.command(epilog="Example: memlm bench speculation held-out/ --model smollm2 --store store")(speculation)
app.command(epilog="Example: memlm bench proposals src/ --model smollm2 --minutes 10")(proposals)
app.command(epilog="Example: memlm bench scale docs/ --held-out more/ --model model --work stores --predict 1e8")(scale)

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
    _print_figures("bench build", figures, repeats, json=json)


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
    _print_figures("bench generate", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench serve --json")
def serve(model: SomeModel = None, repeats: Repeats = 7, json: options.Json = False) -> None:
    """Time per token through gRPC relative to in process, and the front end's time at 32 streams."""
    from memlm.bench.serve import bench_serve

    with ConsoleProgress() as progress:
        figures = bench_serve(model, repeats=repeats, progress=progress)
    _print_figures("bench serve", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench versus llama.cpp --model smollm2 --json")
def versus(
    other: Annotated[str, typer.Argument(metavar="llama.cpp|transformers", help="The program to compare with.")],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="For llama.cpp: a GGUF file.")
    ] = "smollm2",
    store: Annotated[
        Path | None,
        typer.Option("--store", "-s", metavar="STORE", help="For llama.cpp: a datastore, to measure too."),
    ] = None,
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Tokens/s relative to llama.cpp on a GGUF file, or of a server to transformers' generate on GPT-2's shape."""
    check_choice("other", other, ("llama.cpp", "transformers"))
    with ConsoleProgress() as progress:
        if other == "transformers":
            from memlm.bench.versus_transformers import bench_versus_transformers

            figures = bench_versus_transformers(repeats=repeats, progress=progress)
        else:
            from memlm.bench.versus_llama_cpp import bench_versus_llama_cpp

            figures = bench_versus_llama_cpp(model, store, repeats=repeats, progress=progress)
    _print_figures(f"bench versus {other}", figures, repeats, json=json)


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
    _print_figures("bench load", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench model --part decode --json")
def model(
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="decode|prefill|memorizing|training|session", help="Part to measure. Repeatable (default: all)."
        ),
    ] = None,
    largest: Annotated[int, typer.Option(help="Pairs of kNN attention to grow to.")] = 262_144,
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Decoding, prefill, kNN attention, training and session bytes, against physical bounds and other libraries."""
    from memlm.bench.model import PARTS, bench_model

    if unknown := sorted({*(part or ())} - {*PARTS}):
        raise InvalidInput(f"part is {unknown[0]!r}; expected one of {', '.join(PARTS)}", field="part")
    with ConsoleProgress() as progress:
        figures = bench_model(tuple(part or PARTS), repeats=repeats, largest=largest, progress=progress)
    _print_figures("bench model", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench memory held-out/ --model model --json")
def memory(
    texts: options.Texts,
    model: options.Model,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to read.")] = 200_000,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Nats of a model with its kNN attention, without it, and with another document's pairs. Faiss against exact."""
    from memlm.bench.memory import bench_memory
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_memory(
            model, Corpus(texts), max_tokens=max_tokens, dtype=dtype, device=device, progress=progress
        )
    _print_figures("bench memory", figures, None, json=json)


@app.command(epilog="Example: memlm bench loops held-out/ --model smollm2 --store store --json")
def loops(
    texts: options.Texts,
    model: options.Model,
    store: Annotated[Path, typer.Option("--store", "-s", metavar="STORE", help="Datastore folder.")],
    prompts: Annotated[int, typer.Option(help="Prompts of each kind.")] = 100,
    lam: Annotated[float | None, typer.Option(help="Weight of p_kNN (default: as tuned).")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Neighbors (default: as tuned).")] = None,
    knn_temperature: Annotated[float | None, typer.Option(help="Temperature (default: as tuned).")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Distinct runs of greedy text and verbatim continuations: the model alone, with memory, with the loop guard."""
    from memlm.bench.loops import bench_loops
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_loops(
            model, store, Corpus(texts), settings={"lam": lam, "k": k, "knn_temperature": knn_temperature},
            prompts=prompts, dtype=dtype, device=device, progress=progress,
        )  # fmt: skip
    _print_figures("bench loops", figures, None, json=json)


@app.command(epilog="Example: memlm bench drafts held-out/ --model smollm2 --store store --json")
def drafts(
    texts: options.Texts,
    model: options.Model,
    store: Annotated[Path, typer.Option("--store", "-s", metavar="STORE", help="Datastore folder.")],
    prompts: Annotated[int, typer.Option(help="Prompts of each kind.")] = 16,
    streams: Annotated[
        list[int] | None, typer.Option(help="Prompts continued side by side (default: 1 and 16). Repeatable.")
    ] = None,
    dtype: options.Dtype = "auto",
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Tokens/s with drafts relative to without, by kind of prompt. TEXT is not in the datastore."""
    from memlm.api.generation import DraftSource
    from memlm.bench.drafts import bench_drafts
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_drafts(
            model, store, Corpus(texts), prompts=prompts, streams=streams or (1, 16), dtype=dtype, repeats=repeats,
            progress=progress,
        )  # fmt: skip
    if json:
        _print_report(figures, repeats)
        return
    shown = table("prompts", "streams", "over none", "with memory over alone", "tokens a step", "accepted", "same text")
    for row in figures["rows"]:
        sources = (
            f"{name} {row[f'accepted_from_{name}']}/{row[f'drafted_from_{name}']}"
            for name in DraftSource
            if f"drafted_from_{name}" in row
        )
        shown.add_row(
            row["prompts"], str(row["streams"]), f"{row['drafts_over_none']:.2f}",
            f"{row['with_store_and_drafts_over_alone']:.2f}", f"{row['tokens_a_step']:.2f}", ", ".join(sources),
            f"{row['identical']:.0%}",
        )  # fmt: skip
    print_table(shown)


@app.command(epilog="Example: memlm bench context held-out/ --model smollm2 --store store --json")
def context(
    texts: options.Texts,
    model: options.Model,
    store: Annotated[Path | None, typer.Option("--store", "-s", metavar="STORE", help="Datastore folder.")] = None,
    window: Annotated[int, typer.Option(help="Tokens that the model reads at once.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to read.")] = 60_000,
    document_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of one document.", min=2)] = 8192,
    needles: Annotated[int, typer.Option(help="Also hide keys in so many texts of eight windows, and ask.", min=0)] = 0,
    extended_attention: Annotated[int, typer.Option(help="Tokens beyond the window that find the keys.", min=1)] = 16,
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Gain and cost of a context cache, beside those of a datastore. TEXT is not in the datastore."""
    from memlm.bench.context import bench_context
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_context(
            model, Corpus(texts), store, window=window, max_tokens=max_tokens, document_tokens=document_tokens,
            needles=needles, extended_attention=extended_attention, repeats=repeats, progress=progress,
        )  # fmt: skip
    rows = [] if json else figures.pop("rows", [])
    _print_figures("bench context", figures, repeats, json=json)
    if rows:
        shown = table("way", "keys", "windows", "answers", "right", "nats of an answer")
        for row in rows:
            shown.add_row(
                row["way"].replace("_", " "), str(row["keys"]), str(row["windows"]), str(row["answers"]),
                f"{row['right']:.0%}", f"{row['nats_of_answer']:.2f}",
            )  # fmt: skip
        print_table(shown)


@app.command(epilog="Example: memlm bench passkeys books/ --model smollm2 --tokens 2000 --tokens 30000 --json")
def passkeys(
    texts: options.Texts,
    model: options.Model,
    tokens: Annotated[
        list[int] | None, typer.Option(min=600, help="Tokens of a text. Repeatable. Default: 2,000 and 8,000.")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="Depth of a key in its text, a multiple of 0.1. Repeatable. Default: all."),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens that the model reads at once.")] = 512,
    extended_attention: Annotated[int, typer.Option(help="Tokens beyond the window that find the keys.", min=1)] = 16,
    trials: Annotated[int, typer.Option(help="Texts of each length.", min=1)] = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """How often a key is found, by the length of the text and the depth of the key in it.

    The context cache speaks as `memlm tune-context` set it for the model.
    """
    from memlm.bench.passkeys import DEPTHS, bench_passkeys
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        rows = bench_passkeys(
            model, Corpus(texts), lengths=tokens or (2000, 8000), depths=depth or DEPTHS, window=window,
            extended_attention=extended_attention, trials=trials, dtype=dtype, device=device, progress=progress,
        )  # fmt: skip
    if json:
        _print_report({"rows": rows}, None)
        return
    ways = dict.fromkeys(row["way"] for row in rows)
    shown = table("tokens", "depth", *(way.replace("_", " ") for way in ways))
    cells = {(row["tokens"], row["depth"], row["way"]): row for row in rows}
    for length, depth in dict.fromkeys((row["tokens"], row["depth"]) for row in rows):
        found = (cells[length, depth, way] for way in ways)
        shown.add_row(
            f"{length:,}", f"{depth:.0%}", *(f"{row['right']:.0%} ({row['nats_of_answer']:.1f})" for row in found)
        )
    print_table(shown)


@app.command(epilog="Example: memlm bench remember held-out/ --model smollm2 --json")
def remember(
    texts: options.Texts,
    model: options.Model,
    num_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a text.")] = 1000,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    repeats: Repeats = 5,
    json: options.Json = False,
) -> None:
    """Seconds until a text is remembered, over the bare prefill of its tokens."""
    from tempfile import TemporaryDirectory

    from memlm.bench.remember import bench_remember
    from memlm.data.corpus import Corpus
    from memlm.model.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    with ConsoleProgress() as progress, TemporaryDirectory() as work:
        figures = bench_remember(
            checkpoint, Corpus(texts), work, num_tokens=num_tokens, repeats=repeats, progress=progress
        )
    _print_figures("bench remember", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench past held-out/ --model model --json")
def past(
    texts: options.Texts,
    model: options.Model,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to read.")] = 100_000,
    document_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of one document.", min=2)] = 8192,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Gain of a continuous cache over the document's past, which needs no training."""
    from memlm.bench.past import bench_past
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_past(
            model,
            Corpus(texts),
            max_tokens=max_tokens,
            document_tokens=document_tokens,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    _print_figures("bench past", figures, None, json=json)


@app.command(epilog="Example: memlm bench datastore docs/ --held-out more/ --model model --work keys --json")
def datastore(
    texts: options.Texts,
    held_out: Annotated[Path, typer.Option(metavar="PATH", help="Queries: text that is not in TEXT.")],
    model: options.Model,
    work: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that keeps the keys for another run.")],
    entries: Annotated[list[int] | None, typer.Option(help="Sizes (default: 100000 and 1000000).")] = None,
    index: Annotated[
        list[str] | None,
        typer.Option(metavar="FACTORY", help="Index types, * for the number of lists (default: nine)."),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Bytes, times, recall, softmax mass and nats of each index type."""
    from memlm.bench.datastore import bench_datastore
    from memlm.data.corpus import Corpus
    from memlm.model.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    with ConsoleProgress() as progress:
        figures = bench_datastore(
            checkpoint, Corpus(texts), Corpus([held_out]), work, sizes=tuple(entries or (100_000, 1_000_000)),
            kinds=tuple(index or ()), progress=progress,
        )  # fmt: skip
    if json:
        _print_report(figures, None)
        return
    shown = table("entries", "index", "bytes", "ms a query", "mass", "recall", "nats")
    for row in figures["rows"]:
        shown.add_row(
            f"{row['entries']:,}", row["index"], f"{row['bytes_per_entry']:,}", f"{row['ms_per_query_k32_batch1']:.3g}",
            f"{row['softmax_mass_k32']:.4f}", f"{row['recall_k32']:.3f}", f"{row['nats_change_k1024']:+.4f}",
        )  # fmt: skip
    print_table(shown)


@app.command("open", epilog="Example: memlm bench open store --json")
def open_store(store: options.StoreArgument, repeats: Repeats = 5, json: options.Json = False) -> None:
    """Seconds from a cold start to the first answer, in a new process with an empty page cache."""
    from tempfile import TemporaryDirectory

    from memlm.bench.opening import bench_opening

    with ConsoleProgress() as progress, TemporaryDirectory() as work:
        figures = bench_opening(store, work, repeats=repeats, progress=progress)
    _print_figures("bench open", figures, repeats, json=json)


@app.command(epilog="Example: memlm bench retrieval held-out/ --tune valid/ --model model --store store --json")
def retrieval(
    texts: options.Texts,
    tune: Annotated[Path, typer.Option(metavar="PATH", help="Text to tune on.")],
    model: options.Model,
    store: Annotated[
        list[Path],
        typer.Option("--store", "-s", metavar="STORE", help="Datastore folder, whose defaults change. Repeatable."),
    ],
    max_tokens: Annotated[int, typer.Option(help="Minimum number of tokens to evaluate on.")] = 20_000,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    repeats: Repeats = 3,
    json: options.Json = False,
) -> None:
    """Nats, searches and time per token of fixed and adaptive lam, retrieval skipping, pointers and pruning."""
    from memlm.bench.retrieval import bench_retrieval
    from memlm.data.corpus import Corpus
    from memlm.model.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    with ConsoleProgress() as progress:
        figures = bench_retrieval(
            checkpoint,
            store,
            Corpus([tune]),
            Corpus(texts),
            max_tokens=max_tokens,
            repeats=repeats,
            progress=progress,
        )
    if json:
        _print_report(figures, repeats)
        return
    shown = table("store", "way", "nats", "gain", "searches", "ms a token", "time")
    for row in figures["rows"]:
        shown.add_row(
            row["store"], row["way"], f"{row['nats']:.4f}", f"{row['gain']:+.4f} ± {row['gain_error']:.4f}",
            f"{row['searches_per_token']:.2f}", f"{row['ms_per_token']:.3g}", f"{row['time_over_one_lam']:.2f}",
        )  # fmt: skip
    print_table(shown)


def _print_figures(title: str, figures: dict[str, Any], repeats: int | None, *, json: bool) -> None:
    if json:
        _print_report(figures, repeats)
        return
    shown = table("", "", title=title)
    shown.show_header = False
    for name, value in figures.items():
        shown.add_row(
            name.replace("_", " "),
            f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value),
        )
    print_table(shown)


def _print_report(figures: dict[str, Any], repeats: int | None) -> None:
    from memlm.bench.report import report

    emit_json(report(figures, repeats=repeats))
