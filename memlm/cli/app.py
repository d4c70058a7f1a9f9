"""The commands that make and measure: train, eval, generate, demo, serve; and the groups index, client and bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.cli import bench, client, index, models, options, render
from memlm.cli.console import ConsoleProgress, emit_json, out, print_problem, table
from memlm.cli.options import given
from memlm.cli.serve import serve as serve_command
from memlm.cli.train import train as train_command

app = typer.Typer(
    help="A language model whose memory you can read, edit, scale and serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(index.app, name="index")
app.add_typer(client.app, name="client")
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        from memlm.base.version import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A language model whose memory you can read, edit, scale and serve."""


app.command(epilog="Example: memlm train docs/ --out model --minutes 5")(train_command)


@app.command("eval", epilog="Example: memlm eval heldout/ --model model --store store")
def evaluate(
    texts: options.Texts,
    model: options.Model,
    store: options.Stores = None,
    dtype: options.Dtype = "float32",
    use: options.StoreWeights = None,
    k: options.K = None,
    lam: options.Lam = None,
    knn_temperature: options.KnnTemperature = None,
    nprobe: options.Nprobe = None,
    min_pointers: options.MinPointers = None,
    spalm: options.Spalm = False,
    glob: options.Glob = "**/*",
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Measure how well a model, alone and with its datastore, predicts held-out text."""
    from memlm.data.corpus import Corpus
    from memlm.evaluation import evaluate as run
    from memlm.language_model import load

    retrieval = given(stores=options.weights(use), k=k, lam=lam, knn_temperature=knn_temperature, nprobe=nprobe)
    retrieval |= given(min_pointers=min_pointers, spalm=spalm or None)
    with load(model, store or (), dtype=dtype) as lm, ConsoleProgress() as progress:
        evaluation = run(lm, Corpus(texts, glob, on_error, print_problem), progress=progress, **retrieval)
    if json:
        emit_json({**_figures(evaluation.total), "texts": {name: _figures(s) for name, s in evaluation.texts.items()}})
        return
    shown = table("", "bits per byte", "per token", "per word", "nats", title="perplexity")
    for name, figures in (("model", evaluation.total.base), ("with datastore", evaluation.total.knn)):
        if figures:
            rates = (figures.bits_per_byte, figures.token_perplexity, figures.word_perplexity, figures.nll)
            shown.add_row(name, *(f"{rate:,.4g}" for rate in rates))
    out.print(shown)


@app.command(epilog="Example: memlm generate 'def main(' --model model --store store --show-sources")
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: options.Model,
    store: options.Stores = None,
    dtype: options.Dtype = "float32",
    use: options.StoreWeights = None,
    no_store: options.NoStore = False,
    k: options.K = None,
    lam: options.Lam = None,
    knn_temperature: options.KnnTemperature = None,
    nprobe: options.Nprobe = None,
    min_pointers: options.MinPointers = None,
    spalm: options.Spalm = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    time_limit: options.TimeLimit = None,
    show_sources: options.ShowSources = False,
    early_exit: options.EarlyExit = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt in this process."""
    from memlm.language_model import load

    wanted = given(
        stores=options.weights(use),
        min_pointers=min_pointers,
        k=k,
        lam=lam,
        knn_temperature=knn_temperature,
        nprobe=nprobe,
        spalm=spalm or None,
        max_tokens=max_tokens,
    )
    wanted |= given(top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=tuple(stop or ()), time_limit_s=time_limit)
    wanted |= given(temperature=temperature, repetition_penalty=repetition_penalty) | {"use_store": not no_store}
    wanted |= {"neighbors": options.NEIGHBORS_SHOWN if show_sources else 0, "early_exit": early_exit}
    with load(model, store or (), dtype=dtype) as lm, lm.generate(prompt, **wanted) as tokens:
        render.print_generation(tokens, json=json, show_sources=show_sources)


@app.command(epilog="Example: memlm calibrate heldout/ --model model --delta 0.1")
def calibrate(
    texts: options.Texts,
    model: options.Model,
    measure: Annotated[str, typer.Option(metavar="softmax|state", help="What tells how sure a layer is.")] = "softmax",
    delta: Annotated[float, typer.Option(help="The share of greedy tokens that may differ.")] = 0.1,
    epsilon: Annotated[float, typer.Option(help="How improbable a larger share must be.")] = 0.05,
    prompts: Annotated[int, typer.Option(help="Texts to test on.")] = 100,
    glob: options.Glob = "**/*",
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Find how sure a layer must be for the later ones to be left out, and keep it with the model."""
    from memlm.data.corpus import Corpus
    from memlm.generation.early_exit import calibrate as run

    with ConsoleProgress() as progress:
        documents = Corpus(texts, glob, on_error, print_problem)
        report = run(
            model, documents, measure=measure, delta=delta, epsilon=epsilon, prompts=prompts, progress=progress
        )
    if json:
        emit_json(report)
    elif report.rule is None:
        out.print(f"No threshold keeps within delta {delta} of the whole model: nothing was kept.")
    else:
        out.print(
            f"threshold {report.rule.threshold}: {report.layers_share:.0%} of the layers, {report.time_share:.0%} of"
            f" the time, {report.disagreement:.1%} other tokens, {report.nats_change:+.4f} nats per token"
        )


app.command(
    epilog="Example: memlm serve --model model --store store --port 50051",
    context_settings={"auto_envvar_prefix": "MEMLM_SERVE"},
)(serve_command)


@app.command(epilog="Example: memlm demo --out demo")
def demo(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder for all that the demo makes.")] = Path(
        "memlm-demo"
    ),
    steps: Annotated[int | None, typer.Option(help="Train for this many steps; fewer are quicker and worse.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same demo.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder of an earlier demo.")] = False,
    json: options.Json = False,
) -> None:
    """Do the main job, end to end, on this machine's own Python library."""
    from memlm.cli.demo import run_demo

    run_demo(out_folder, steps=steps, seed=seed, overwrite=overwrite, json=json)


def _figures(score: Any) -> dict[str, Any]:
    """A score as `memlm eval --json` tells it: counts, the figures that hold, and both kinds where there is a
    datastore.
    """
    from dataclasses import asdict

    told = {"tokens": score.tokens, "words": score.words, "bytes": score.bytes, **asdict(score.figures)}
    if score.knn is not None:
        used = {"k": score.k, "lambda": score.lam, "temperature": score.knn_temperature}
        told |= {"base": asdict(score.base), "knn": {**asdict(score.knn), **used}}
    return told
