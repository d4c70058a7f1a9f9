"""The commands of `python -m benchmarks`, each of which makes the figures of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.asking.command import asking
from benchmarks.evidence.command import evidence
from benchmarks.printed import PROGRAM, print_report
from benchmarks.scale.command import scale
from benchmarks.shards_command import shards
from memlm.cli.bench import Repeats, print_figures
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, print_table, table
from memlm.cli.terminal.interruption import InterruptibleGroup

app = typer.Typer(
    cls=InterruptibleGroup,
    help="Measure what the reports of memlm say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog="Example: python -m benchmarks evidence library --only gain-by-domain --model smollm2")(evidence)
app.command(
    epilog="Example: python -m benchmarks asking questions.jsonl --model smollm2 --store store --rows rows.jsonl"
)(asking)
app.command(epilog="Example: python -m benchmarks shards store --model smollm2 --shards 4")(shards)
app.command(epilog="Example: python -m benchmarks scale docs/ --held-out more/ --model model --predict 1e8")(scale)


@app.command(epilog="Example: python -m benchmarks drafts held-out/ --model smollm2 --store store --json")
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
    from benchmarks.drafts import bench_drafts
    from memlm.api.generation import DraftSource
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_drafts(
            model, store, Corpus(texts), prompts=prompts, streams=streams or (1, 16), dtype=dtype, repeats=repeats,
            progress=progress,
        )  # fmt: skip
    if json:
        print_report(figures, repeats=repeats)
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


@app.command(epilog="Example: python -m benchmarks words books/ --questions questions.txt --copies 12 --json")
def words(
    texts: options.Texts,
    questions: Annotated[Path, typer.Option(metavar="FILE", help="Questions, a line each.")],
    copies: Annotated[int, typer.Option(help="Repeat the texts with other rare words.", min=1)] = 1,
    slow: Annotated[int, typer.Option(help="Questions that are timed of the other programs.", min=1)] = 50,
    json: options.Json = False,
) -> None:
    """Passages by words: building and searching, beside SQLite FTS5, and tantivy where it is installed."""
    from tempfile import TemporaryDirectory

    from benchmarks.word_search import bench_words
    from memlm.data.corpus import Corpus

    asked = questions.read_text(encoding="utf-8").splitlines()
    with ConsoleProgress() as progress, TemporaryDirectory() as folder:
        rows = bench_words(Corpus(texts), asked, Path(folder), copies=copies, slow=slow, progress=progress)
    if json:
        print_report({"rows": rows}, repeats=1)
        return
    shown = table("way", "MB", "passages", "build, s", "bytes a byte", "p50, ms", "p90, ms", "p99, ms", "first, ms")
    for row in rows:
        shown.add_row(
            row["way"], f"{row['megabytes']:.0f}", f"{row['passages']:,}", f"{row['build_s']:.1f}",
            f"{row['share']:.2f}", f"{row['p50_ms']:.1f}", f"{row['p90_ms']:.1f}", f"{row['p99_ms']:.1f}",
            f"{row['first_ms']:.1f}",
        )  # fmt: skip
    print_table(shown)


@app.command(epilog="Example: python -m benchmarks context held-out/ --model smollm2 --store store --json")
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
    from benchmarks.context import bench_context
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        figures = bench_context(
            model, Corpus(texts), store, window=window, max_tokens=max_tokens, document_tokens=document_tokens,
            needles=needles, extended_attention=extended_attention, repeats=repeats, progress=progress,
        )  # fmt: skip
    rows = [] if json else figures.pop("rows", [])
    print_figures("context", figures, repeats, json=json, program=PROGRAM)
    if rows:
        shown = table("way", "keys", "windows", "answers", "right", "nats of an answer")
        for row in rows:
            shown.add_row(
                row["way"].replace("_", " "), str(row["keys"]), str(row["windows"]), str(row["answers"]),
                f"{row['right']:.0%}", f"{row['nats_of_answer']:.2f}",
            )  # fmt: skip
        print_table(shown)


@app.command(epilog="Example: python -m benchmarks passkeys books/ --model smollm2 --tokens 2000 --tokens 30000 --json")
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

    The context cache speaks as `memlm tune` set it for the model.
    """
    from benchmarks.passkeys import DEPTHS, bench_passkeys
    from memlm.data.corpus import Corpus

    with ConsoleProgress() as progress:
        rows = bench_passkeys(
            model, Corpus(texts), lengths=tokens or (2000, 8000), depths=depth or DEPTHS, window=window,
            extended_attention=extended_attention, trials=trials, dtype=dtype, device=device, progress=progress,
        )  # fmt: skip
    if json:
        print_report({"rows": rows}, repeats=None)
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


@app.command(epilog="Example: python -m benchmarks datastore docs/ --held-out more/ --model model --work keys --json")
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
    from benchmarks.datastore import bench_datastore
    from memlm.data.corpus import Corpus
    from memlm.model.files.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    with ConsoleProgress() as progress:
        figures = bench_datastore(
            checkpoint, Corpus(texts), Corpus([held_out]), work, sizes=tuple(entries or (100_000, 1_000_000)),
            kinds=tuple(index or ()), progress=progress,
        )  # fmt: skip
    if json:
        print_report(figures, repeats=None)
        return
    shown = table("entries", "index", "bytes", "ms a query", "mass", "recall", "nats")
    for row in figures["rows"]:
        shown.add_row(
            f"{row['entries']:,}", row["index"], f"{row['bytes_per_entry']:,}", f"{row['ms_per_query_k32_batch1']:.3g}",
            f"{row['softmax_mass_k32']:.4f}", f"{row['recall_k32']:.3f}", f"{row['nats_change_k1024']:+.4f}",
        )  # fmt: skip
    print_table(shown)


@app.command(
    epilog="Example: python -m benchmarks retrieval held-out/ --tune valid/ --model model --store store --json"
)
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
    """Nats and time per token of fixed and adaptive lam, and of pruned datastores."""
    from benchmarks.retrieval import bench_retrieval
    from memlm.data.corpus import Corpus
    from memlm.model.files.checkpoint import load_checkpoint

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
        print_report(figures, repeats=repeats)
        return
    shown = table("store", "way", "nats", "gain", "ms a token", "time")
    for row in figures["rows"]:
        shown.add_row(
            row["store"], row["way"], f"{row['nats']:.4f}", f"{row['gain']:+.4f} ± {row['gain_error']:.4f}",
            f"{row['ms_per_token']:.3g}", f"{row['time_over_one_lam']:.2f}",
        )  # fmt: skip
    print_table(shown)


@app.command(epilog="Example: python -m benchmarks questions questions.jsonl --model smollm2 --store store --by words")
def questions(
    path: Annotated[Path, typer.Argument(metavar="QUESTIONS", help="JSON Lines of question, answers, and files.")],
    model: options.Model,
    store: Annotated[list[Path], typer.Option("--store", "-s", metavar="STORE", help="Datastore folder. Repeatable.")],
    by: Annotated[list[str] | None, typer.Option(help="Way of searching (default: auto). Repeatable.")] = None,
    encoder: options.Encoder = "auto",
    json: options.Json = False,
) -> None:
    """Share of questions whose answer stands in the first 1, 3 and 8 passages that a search finds."""
    from benchmarks.questions import FIRST, bench_questions, questions_of
    from memlm.language_model import load

    with load(model, store, passage_encoder=encoder) as lm, ConsoleProgress() as progress:
        figures = bench_questions(lm, questions_of(path), ways=by or ("auto",), progress=progress)
    if json:
        print_report(figures, repeats=1)
        return
    shown = table("by", "kind", "questions", *(f"in {most}" for most in FIRST), "ms a search")
    for row in figures["rows"]:
        shares = (f"{row[f'first_{most}']:.0%}" for most in FIRST)
        shown.add_row(row["by"], row["kind"], str(row["questions"]), *shares, f"{row['ms']:.1f}")
    print_table(shown)


@app.command(epilog="Example: python -m benchmarks memorizing --largest 131072 --json")
def memorizing(
    largest: Annotated[int, typer.Option(help="Pairs of kNN attention to grow to.", min=8192)] = 262_144,
    json: options.Json = False,
) -> None:
    """Tokens/s of kNN attention while its cache grows, and bytes of a session."""
    from benchmarks.memorizing import bench_memorizing

    with ConsoleProgress() as progress:
        figures = bench_memorizing(largest=largest, progress=progress)
    print_figures("memorizing", figures, None, json=json, program=PROGRAM)


@app.command("versus-transformers", epilog="Example: python -m benchmarks versus-transformers --json")
def versus_transformers(repeats: Repeats = 5, json: options.Json = False) -> None:
    """Tokens/s of a server relative to transformers' `generate` on GPT-2's shape."""
    from benchmarks.versus_transformers import bench_versus_transformers

    with ConsoleProgress() as progress:
        figures = bench_versus_transformers(repeats=repeats, progress=progress)
    print_figures("versus-transformers", figures, repeats, json=json, program=PROGRAM)
