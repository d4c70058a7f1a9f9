"""`memlm demo`: a pretrained model reads a package of the standard library, and learns a fact that it cannot know.

Modules of asyncio are documents. They are split into datastore text, and held-out text for tuning and testing. Then a
server learns a paragraph about an invented product, answers from it, and forgets it. The results of every step stay in
the demo's folder, so that each step can be repeated by hand.
"""

from __future__ import annotations

import contextlib
import math
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.text import Text

from memlm.api.datastores import NewDocument
from memlm.api.scoring import Score
from memlm.base.figures import counted
from memlm.cli.demo import LIBRARY, print_build, print_commands, split_modules
from memlm.cli.terminal import render
from memlm.cli.terminal.console import ConsoleProgress, emit_json, out, table
from memlm.client import Client
from memlm.data.corpus import Corpus
from memlm.errors import NotFound
from memlm.evaluation import evaluate
from memlm.indexing.build import BuildReport, build_index
from memlm.indexing.tune import TuneReport, tune
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.server.local import started_server

PACKAGE = "asyncio"
BYTES_OF = {"store": 60_000, "valid": 20_000, "test": 20_000}
USES = {"store": "to store", "valid": "to tune on", "test": "to test with"}
CITED_FROM = 0.005  # of an answer; a smaller share is printed as 0%
TUNED_TOKENS = 4_000
PROMPT = 'class DelayedQueue(Queue):\n    """A subclass of Queue that'
MAX_TOKENS = 60
FACT_ID = "quillon-40.md"
FACT = """\
# Quillon 40

The Quillon 40 is a weather station for ships. Maren Voss designed it in Tromsø. It measures wind, pressure and the
height of waves.
"""
QUESTION = "What is the Quillon 40?"
STATEMENT, ENDING = "The Quillon 40 is a", " weather station"


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer, and the documents that it was asked from. `probability` is that of the statement's right
    ending.
    """

    text: str
    sources: tuple[str, ...]
    probability: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The report of each step, and the total of seconds."""

    build: BuildReport
    tuning: TuneReport
    score: Score
    tokens_per_s: float
    before: Answer
    taught: Answer
    forgotten: Answer
    seconds: float


def run(
    folder: Path, to: Console, *, model: Path, seed: int = 0, keep_serving: bool = False, json: bool = False
) -> None:
    """Runs all steps and prints a table, or with `json` one JSON object. With `keep_serving`, serves until Ctrl-C."""
    begin = time.monotonic()
    texts, store = folder / "texts", folder / "store"
    checkpoint = load_checkpoint(model)
    built = _build(checkpoint, texts, store, seed, to)
    tuning, score = _tune(checkpoint, texts, store, to)
    del checkpoint
    to.rule("3. Serve it, and continue a text", align="left")
    options = ("--store-dir", str(folder / "served"))  # without one, a server takes no documents
    with started_server(model, store, options=options) as target, Client(target) as client:
        client.wait_until_ready()
        tokens_per_s = _continue(client, to)
        before, taught, forgotten = _teach_and_forget(client, to)
        seconds = time.monotonic() - begin
        report = DemoReport(built, tuning, score, tokens_per_s, before, taught, forgotten, seconds)
        if json:
            emit_json(report)
        else:
            _print_summary(folder, model, report)
        if keep_serving:
            _wait(target, to)


def _build(checkpoint: Checkpoint, texts: Path, store: Path, seed: int, to: Console) -> BuildReport:
    counts = split_modules(list((LIBRARY / PACKAGE).rglob("*.py")), texts, BYTES_OF, seed)
    split = ", ".join(f"{number} {USES[use]}" for use, number in counts.items())
    to.print("A model reads some documents, uses them, learns a fact that it cannot know, and forgets it.")
    to.print(f"The documents are modules of {PACKAGE} in Python {sys.version.split()[0]}: {split}.\n")
    to.rule("1. Build a datastore", align="left")
    with ConsoleProgress() as progress:
        built = build_index(checkpoint, Corpus([texts / "store"]), store, keys="now", seed=seed, progress=progress)
    print_build(built, to)
    return built


def _tune(checkpoint: Checkpoint, texts: Path, store: Path, to: Console) -> tuple[TuneReport, Score]:
    to.rule("2. Tune it on modules that are not stored, test it on others", align="left")
    with ConsoleProgress() as progress:
        tuning = tune(checkpoint, store, Corpus([texts / "valid"]), max_tokens=TUNED_TOKENS, progress=progress)
        with LanguageModel(checkpoint, [store]) as lm:
            score = evaluate(lm, Corpus([texts / "test"]), progress=progress).total
    alone, mixed = score.base.bits_per_byte, score.bits_per_byte
    to.print(f"k {tuning.k}, lam {tuning.lam:.3f}, temperature {tuning.temperature:.3g}")
    to.print(f"bits per byte: model alone {alone:.4f}, with the datastore {mixed:.4f} ({mixed / alone - 1:+.0%})\n")
    return tuning, score


def _continue(client: Client, to: Console) -> float:
    """Streams a continuation, shaded by p_kNN, with its sources. Returns tokens/s."""
    to.print(render.legend(to))
    to.print(PROMPT, style="dim", markup=False, end="")
    with client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0, neighbors=16) as tokens:
        seen = render.stream(tokens, colored=True, to=to)
    render.print_sources(seen, to=to)
    assert tokens.finished is not None
    usage = tokens.finished.usage
    to.print(f"{render.summary(seen, usage, tokens.accepted)}\n", style="dim")
    return 1000 * (usage.generated_tokens - 1) / usage.decode_ms


def _teach_and_forget(client: Client, to: Console) -> tuple[Answer, Answer, Answer]:
    """Asks before a document is added, with it, and after it is deleted."""
    to.rule("4. Teach it a fact, and delete the fact", align="left")
    before = _ask("Before", client, to)
    to.print(f"Adding {FACT_ID}:", style="bold", markup=False)
    to.print("".join(f"  {line}\n" for line in FACT.splitlines()), markup=False)
    client.datastores.add("store", [NewDocument(FACT_ID, FACT)]).result()
    taught = _ask("With the document", client, to)
    deleted = client.datastores.delete_documents("store", [FACT_ID])
    to.print(f"Deleted 1 document, {counted(deleted.num_entries, 'entry')}.\n")
    forgotten = _ask("After the deletion", client, to)
    return before, taught, forgotten


def _ask(when: str, client: Client, to: Console) -> Answer:
    try:
        tokens = client.chat(QUESTION, max_tokens=40, temperature=0, neighbors=16)
    except NotFound:  # a model without a chat template
        tokens = client.generate(STATEMENT, max_tokens=16, temperature=0, neighbors=16)
    with tokens:
        seen = list(tokens)
    prompt, shares = tokens.accepted.prompt, render.probability_by_document(seen)
    passages = () if prompt is None else prompt.passages
    sources = [each.document_id for each in passages]
    if prompt is None:
        sources = [document for document, share in shares.most_common(2) if share / len(seen) >= CITED_FROM]
    text = "".join(token.text for token in seen)
    answer = Answer(text, tuple(sources), _probability_of(STATEMENT, ENDING, client))
    cited = ", ".join([each.place for each in passages] or sources)
    to.print(f"{when}:", style="bold")
    to.print(f"  {QUESTION}", style="dim", markup=False)
    for sentence in [each.sentence for each in passages[:1] if each.sentence is not None]:
        to.print(Text("  ").append(render.quoted(sentence)))
    to.print(textwrap.indent(text, "  "), markup=False)
    to.print(
        f"  from {cited or 'the model alone'}; {STATEMENT!r} goes on with {ENDING!r} with a probability of"
        f" {answer.probability:.2g}\n",
        style="dim",
        markup=False,
    )
    return answer


def _probability_of(prompt: str, continuation: str, client: Client) -> float:
    scores = client.score(prompt + continuation, token_scores=True).token_scores
    return math.exp(sum(score.logprob for score in scores[len(client.tokenize(prompt)) :]))


def _wait(target: str, to: Console) -> None:
    """Waits for Ctrl-C, with the commands to try meanwhile."""
    print_commands(
        f"Serving at {target}; Ctrl-C ends it. Try in another shell:",
        [
            f"memlm generate {STATEMENT!r} --target {target} --show-sources",
            f"memlm index add store notes/ --target {target}",
        ],
        to,
    )
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def _print_summary(folder: Path, model: Path, report: DemoReport) -> None:
    base, mixed = report.score.base, report.score.figures
    shown = table("modules that are not stored", "model alone", "with the datastore", title="Results (less is better)")
    for name in ("bits_per_byte", "token_perplexity", "word_perplexity"):
        shown.add_row(name.replace("_", " "), f"{getattr(base, name):,.3f}", f"{getattr(mixed, name):,.3f}")
    out.print(shown)
    facts = table("", "")
    facts.show_header = False
    facts.add_row(
        "datastore",
        f"{report.build.entries:,} entries of {report.build.bytes_per_entry:,.0f} bytes,"
        f" {report.build.tokens_per_s:,.0f} tokens/s",
    )
    facts.add_row("generation", f"{report.tokens_per_s:.1f} tokens/s, one stream over gRPC")
    before, taught, forgotten = (each.probability for each in (report.before, report.taught, report.forgotten))
    facts.add_row(f"probability of {ENDING.strip()!r}", f"{before:.2g}, taught {taught:.2g}, deleted {forgotten:.2g}")
    facts.add_row("total time", f"{report.seconds:.0f} s")
    out.print(facts)
    print_commands(
        "The same with your own files:",
        [
            f"memlm index build docs/ --model {quote(str(model))} --out my-store --keys now",
            f"memlm answer 'QUESTION' --model {quote(str(model))} --store my-store",
            f"memlm generate 'To install, run' --model {quote(str(model))} --store my-store --show-sources",
            f"memlm serve --model {quote(str(model))} --store my-store",
        ],
    )
    out.print(f"\nThe texts and the datastore are in {folder}.", markup=False)
