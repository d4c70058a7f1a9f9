"""`memlm demo --train`: train, build, tune, serve and delete, on the standard library of the running Python.

Modules are documents. They are split into training text, datastore text, and held-out text for tuning and testing. The
results of every step stay in the demo's folder, so that each step can be repeated by hand.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from rich.console import Console

from memlm.api.generation import Token
from memlm.api.scoring import Score
from memlm.base.counted import counted
from memlm.cli import render
from memlm.cli.console import ConsoleProgress, emit_json, out, table
from memlm.cli.demo import LIBRARY, print_build, print_commands, split_modules
from memlm.client import Client
from memlm.data.corpus import Corpus
from memlm.evaluation import evaluate
from memlm.indexing.build import BuildReport, build_index
from memlm.indexing.tune import TuneReport, tune
from memlm.language_model import load
from memlm.server.local import started_server
from memlm.training.config import PRESETS
from memlm.training.train import TrainReport, train

STEPS = 900
PROMPT = "import os\nimport sys\n\n\nclass "
MAX_TOKENS = 120
BYTES_OF = {"test": 200_000, "valid": 150_000, "store": 2_000_000, "train": 6_000_000}
# Not code to learn from: tests, tables of character codes, the generated text of pydoc's topics, packages of others.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The report of each step, and the total of seconds."""

    training: TrainReport
    build: BuildReport
    tuning: TuneReport
    score: Score
    top_document: str
    probability_before: float
    probability_after: float
    seconds: float


def run(folder: Path, to: Console, *, steps: int | None = None, seed: int = 0, json: bool = False) -> None:
    """Runs all steps and prints a table, or with `json` one JSON object."""
    begin = time.monotonic()
    report = _run(folder, steps or STEPS, seed, to)
    report = replace(report, seconds=time.monotonic() - begin)
    if json:
        emit_json(replace(report, training=replace(report.training, losses=report.training.losses[-1:])))
    else:
        _print_summary(folder, report)


def _run(folder: Path, steps: int, seed: int, to: Console) -> DemoReport:
    texts, model, store = folder / "texts", folder / "model", folder / "store"
    modules = [file for file in LIBRARY.rglob("*.py") if not LEFT_OUT & set(file.relative_to(LIBRARY).parts)]
    counts = split_modules(modules, texts, BYTES_OF, seed)
    split = ", ".join(f"{number} for {use}" for use, number in counts.items())
    to.print(f"Python {sys.version.split()[0]}'s standard library: {split}.\n")

    to.rule("1. Train a model", align="left")
    with ConsoleProgress() as progress:
        config = replace(PRESETS["tiny"], steps=steps, seed=seed)
        training = train(Corpus([texts / "train"]), model, config, progress=progress)
    to.print(
        f"{training.num_parameters:,} parameters, {training.tokens:,} tokens, {training.tokens_per_s:,.0f} tokens/s\n"
    )

    to.rule("2. Build its datastore", align="left")
    with ConsoleProgress() as progress:
        built = build_index(model, Corpus([texts / "store"]), store, seed=seed, progress=progress)
    print_build(built, to)

    to.rule("3. Tune on held-out modules, test on others", align="left")
    with ConsoleProgress() as progress:
        tuning = tune(model, store, Corpus([texts / "valid"]), max_tokens=30_000, progress=progress)
        with load(model, [store]) as lm:
            score = evaluate(lm, Corpus([texts / "test"]), progress=progress).total
    to.print(f"k {tuning.k}, lam {tuning.lam:.3f}, temperature {tuning.temperature:.3g}")
    to.print(f"bits per byte: model {score.base.bits_per_byte:.4f}, with its datastore {score.bits_per_byte:.4f}\n")

    to.rule("4. Serve the model and generate", align="left")
    with started_server(model, store) as target, Client(target) as client:
        client.wait_until_ready()
        before = render.probability_by_document(_generate(client, seed, to))
        top_document = before.most_common(1)[0][0] if before else client.search("store", PROMPT, k=1)[0].document_id

        to.rule(f"5. Delete {top_document} and generate again", align="left")
        deleted = client.datastores.delete_documents("store", [top_document])
        to.print(f"deleted 1 document, {counted(deleted.num_entries, 'entry')}; the same prompt:\n")
        after = render.probability_by_document(_generate(client, seed, to))
    to.print(
        f"{top_document} contributed {before[top_document]:.2f} tokens before, and {after[top_document]:.2f} now.\n"
    )
    return DemoReport(training, built, tuning, score, top_document, before[top_document], after[top_document], 0.0)


def _generate(client: Client, seed: int, to: Console) -> list[Token]:
    """Streams a continuation, colored by p_kNN, with its sources."""
    to.print(render.legend(to))
    to.print(f"[dim]{PROMPT}[/]", end="")
    with client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0.6, seed=seed, neighbors=64) as tokens:
        seen = render.stream(tokens, colored=True, to=to)
    render.print_sources(seen, to=to)
    to.print()
    return seen


def _print_summary(folder: Path, report: DemoReport) -> None:
    base, mixed, quality = report.score.base, report.score.figures, report.build.quality
    assert quality is not None
    shown = table("held-out modules", "model alone", "with its datastore", title="Results")
    for name in ("bits_per_byte", "token_perplexity", "word_perplexity"):
        shown.add_row(name.replace("_", " "), f"{getattr(base, name):,.3f}", f"{getattr(mixed, name):,.3f}")
    out.print(shown)
    facts = table("", "")
    facts.show_header = False
    facts.add_row("trained on", f"{report.training.tokens:,} tokens, {report.training.tokens_per_s:,.0f}/s")
    facts.add_row("datastore", f"{report.build.entries:,} entries, {report.build.tokens_per_s:,.0f} tokens/s")
    facts.add_row("index", f"{report.build.index}, recall {quality.recall:.3f}")
    facts.add_row(
        f"{report.top_document} contributed",
        f"{report.probability_before:.2f} tokens, then {report.probability_after:.2f}",
    )
    facts.add_row("total time", f"{report.seconds:.0f} s")
    out.print(facts)
    t, m, s = (quote(str(folder / name)) for name in ("texts", "model", "store"))
    print_commands(
        "Each step by hand:",
        [
            f"memlm train {t}/train --out my-model --steps {report.training.steps}",
            f"memlm index build {t}/store --model {m} --out my-store",
            f"memlm index tune {s} {t}/valid --model {m}",
            f"memlm eval {t}/test --model {m} --store {s}",
            f"memlm serve --model {m} --store {s}",
            f"memlm client generate {PROMPT.split()[0]!r} --show-sources",
            f"memlm client datastore delete store {report.top_document}",
        ],
    )
    out.print(f"\nThe texts, the model and the datastore are in {folder}.", markup=False)
