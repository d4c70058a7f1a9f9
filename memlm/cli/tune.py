"""`memlm tune`: how much of a memory a model takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.base.figures import counted, figure
from memlm.base.options import RESEARCH
from memlm.base.progress import LOADING
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out
from memlm.cli.terminal.fields import with_fields
from memlm.cli.terminal.interruption import on_interrupt, this_command

if TYPE_CHECKING:
    from memlm.indexing.train_gate import SpalmReport
    from memlm.indexing.tune import TuneReport
    from memlm.indexing.tune_context import ContextTuning
    from memlm.prompting.tune_answers import AnswerTuning


@with_fields()
def tune(
    texts: options.Texts,
    model: options.Model,
    store: Annotated[
        Path | None,
        typer.Option("--store", "-s", metavar="STORE", help="Datastore folder.", rich_help_panel="Model"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to tune on.")] = 50_000,
    spalm: Annotated[
        bool,
        typer.Option(
            "--spalm", rich_help_panel=RESEARCH,
            help="Train a gate between model and datastore instead, and save it with the model.",
        ),
    ] = False,
    answers: Annotated[
        bool,
        typer.Option(
            "--answers", help="TEXT is a file of questions and answers: tune how questions are asked with passages."
        ),
    ] = False,
    keep_gain: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=RESEARCH,
            metavar="SHARE",
            help="Leave to the model alone the positions of small lam, as long as this share of the gain stays.",
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:  # fmt: skip
    """Tune the weight of a datastore on held-out text: k, lam and temperature, which become its defaults.

    Without --store, tune the weight of a text's own past, and save it with the model if it helps. With --answers, tune
    how many passages a question is asked with, and save it with the model if more questions are answered rightly.
    """
    _check_options(store, answers=answers, spalm=spalm, keep_gain=keep_gain)
    if answers:
        _tune_answers(texts, model, store, dtype=dtype, device=device, json=json)
        return
    documents = options.corpus_of(texts)
    if store is not None:
        from memlm.index.store.manifest import read_manifest

        read_manifest(store)  # before what takes long to import
    left = f"{store or model} keeps the settings that it had"
    with on_interrupt(lambda: f"{left}; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        progress(LOADING, 0, 1)
        from memlm.model.files.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(model, dtype=dtype, device=device)
        report: Any
        if store is None:
            from memlm.indexing.tune_context import tune_context

            report = tune_context(checkpoint, documents, max_tokens=max_tokens, progress=progress)
        elif spalm:
            from memlm.indexing.train_gate import train_spalm

            report = train_spalm(checkpoint, store, documents, max_tokens=max_tokens, progress=progress)
        else:
            from memlm.indexing.tune import tune as tune_store

            report = tune_store(
                checkpoint, store, documents, max_tokens=max_tokens, keep_gain=keep_gain, progress=progress
            )
    if json:
        emit_json(report)
    elif store is None:
        _print_past(report, model)
    elif spalm:
        _print_gate(report)
    else:
        _print_datastore(report)
    if keep_gain is not None and not report.threshold:
        err.print(f"--keep-gain {keep_gain:g} has no effect: {_why_no_threshold(report)}", markup=False)


def _check_options(store: Path | None, *, answers: bool, spalm: bool, keep_gain: float | None) -> None:
    """Refuses options that do not go together."""
    given = "--spalm" if spalm else "--keep-gain" if keep_gain is not None else None
    if answers and given:
        raise typer.BadParameter(f"--answers is of prompts; leave out {given}")
    if answers and store is None:
        raise typer.BadParameter("--answers finds passages in a datastore; give --store STORE")
    if store is None and given:
        raise typer.BadParameter(f"{given} is of a datastore; give --store STORE")
    if spalm and keep_gain is not None:
        raise typer.BadParameter("--spalm trains a gate, which has no --keep-gain; leave one of them out")


def _tune_answers(
    texts: options.Texts, model: options.Model, store: Path | None, *, dtype: str, device: str, json: bool
) -> None:
    assert store is not None
    if len(texts) != 1:
        raise typer.BadParameter("--answers takes one file of questions")
    left = f"{model} keeps the settings that it had"
    with on_interrupt(lambda: f"{left}; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        from memlm.prompting.tune_answers import read_questions, tune_answers

        questions = read_questions(Path(texts[0]))
        progress(LOADING, 0, 1)
        from memlm.language_model import load

        with load(model, [store], dtype=dtype, device=device) as lm:
            tuning = tune_answers(lm.engine, questions, label=Path(texts[0]).name, progress=progress)
    if json:
        emit_json(tuning)
    else:
        _print_answers(tuning, model)


def _print_answers(tuning: AnswerTuning, model: Path) -> None:
    """Prints a line for each way, and what came of the best one."""
    asked = f"{counted(tuning.questions, 'question')} about {counted(tuning.documents, 'document')}"
    out.print(f"{asked}, answered rightly:")
    for way in tuning.ways:
        settings = way.settings
        name = f"{counted(settings.num_passages, 'passage')}{', with its sentence' * settings.points_out}"
        out.print(f"  {name:28} {way.right:5.0%} of one half of the documents, {way.right_elsewhere:5.0%} of the other")
    gain = f"{tuning.chosen.gain:+.1%} ± {tuning.chosen.gain_error:.1%}"
    chosen = tuning.chosen
    if tuning.kept and chosen.asks_as(tuning.ways[0].settings):
        out.print(f"The settings that were saved with {model} are removed: the defaults gain {gain} on the other half.")
    elif tuning.kept:
        saved = f"{counted(chosen.num_passages, 'passage')}{', with its sentence' * chosen.points_out}"
        out.print(f"Saved with {model}: {saved}, {gain} on the other half.")
    else:
        out.print(f"Nothing was saved: the best of one half gains {gain} on the other, less than twice its error.")


def _print_datastore(report: TuneReport) -> None:
    """Prints the tuned parameters and their gains."""
    out.print(
        f"k {report.k}, lam {report.lam:.3f}, temperature {figure(report.temperature)}, from {report.tokens:,} tokens"
    )
    out.print(
        f"nats per token: model {report.base_nats:.4f}, with datastore {report.knn_nats:.4f}"
        f" (gain {report.gain:.4f} ± {report.gain_error:.4f})"
    )
    verdict = "kept" if report.adaptive_kept else "not kept: it costs new text too much"
    out.print(
        f"with a lam that adapts {report.adaptive_nats:.4f} (gain over one lam {report.adaptive_gain:.4f} ±"
        f" {report.adaptive_gain_error:.4f}; {verdict})"
    )
    if report.threshold:
        out.print(
            f"lam is 0 below {report.threshold:.3f}, at {report.left_alone:.0%} of positions, and"
            f" {report.gain_left:.0%} of the gain stays"
        )
    if report.nprobe is not None:
        out.print(f"{report.nprobe} lists are searched; more would gain {report.nprobe_loss:.4f} nats per token")


def _why_no_threshold(report: TuneReport) -> str:
    if report.adaptive_kept:
        return "no threshold of lam leaves positions to the model alone and keeps this share of the gain"
    return (
        "a threshold is of a lam that adapts, and none is kept. On text that it was not fitted to, it takes"
        f" {report.adaptive_nats:.4f} nats per token, the model alone {report.base_nats:.4f}, and one lam"
        f" {report.knn_nats:.4f}"
    )


def _print_gate(report: SpalmReport) -> None:
    out.print(
        f"{report.base_nats:.4f} nats per token alone, {report.gated_nats:.4f} gated, {report.share:.1%} from p_kNN"
    )
    if report.gated_nats >= report.base_nats:
        out.print("The gate does not help. Nothing was saved.")


def _print_past(tuning: ContextTuning, model: Path) -> None:
    settings = tuning.settings
    lam = f"λ = {settings.lam:.3g}" if settings.adaptive is None else "a λ that adapts"
    tuned_on = counted(tuning.documents, "document")
    out.print(
        f"{tuning.nats:.4f} nats a token with the text's own past, {tuning.base_nats:.4f} without:"
        f" {settings.gain:+.4f} ± {settings.gain_error:.4f} on {tuned_on} ({tuning.tokens:,} tokens)."
    )
    if tuning.kept:
        out.print(f"Saved with {model}: k = {settings.k}, temperature {figure(settings.temperature)}, {lam}.")
    else:
        out.print("The gain is below twice its standard error. Nothing was saved.")
