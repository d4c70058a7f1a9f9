"""`memlm index tune` and `memlm index spalm`: how much of a datastore a model takes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memlm.base.options import RESEARCH
from memlm.base.progress import LOADING
from memlm.cli.store.render import print_tuning
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out
from memlm.cli.terminal.fields import with_fields
from memlm.cli.terminal.interruption import on_interrupt, this_command


@with_fields()
def tune(
    store: options.StoreArgument,
    texts: options.Texts,
    model: options.Model,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to tune on.")] = 50_000,
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
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Tune k, lam and temperature on held-out text, and save them as the datastore's defaults."""
    from memlm.index.store.manifest import read_manifest

    documents = options.corpus_of(texts, glob, on_error, hidden=hidden)
    read_manifest(store)
    left = f"{store} keeps the defaults that it had"
    with on_interrupt(lambda: f"{left}; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        progress(LOADING, 0, 1)
        from memlm.indexing.tune import tune as run
        from memlm.model.files.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(model, dtype=dtype, device=device)
        report = run(checkpoint, store, documents, max_tokens=max_tokens, keep_gain=keep_gain, progress=progress)
    print_tuning(report, json=json)
    if keep_gain is not None and not report.threshold:
        err.print(f"--keep-gain {keep_gain:g} has no effect: {_why_no_threshold(report)}", markup=False)


def _why_no_threshold(report: Any) -> str:
    if report.adaptive_kept:
        return "no threshold of lam leaves positions to the model alone and keeps this share of the gain"
    return (
        "a threshold is of a lam that adapts, and none is kept. On text that it was not fitted to, it takes"
        f" {report.adaptive_nats:.4f} nats per token, the model alone {report.base_nats:.4f}, and one lam"
        f" {report.knn_nats:.4f}"
    )


def spalm(
    store: options.StoreArgument,
    texts: options.Texts,
    model: options.Model,
    k: Annotated[int, typer.Option("--k", help="Neighbors of each position.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to train on.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal gates.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Train a gate between model and datastore on held-out text, and save it with the model."""
    from memlm.index.store.manifest import read_manifest

    documents = options.corpus_of(texts, glob, on_error, hidden=hidden)
    read_manifest(store)  # before what takes long to import
    from memlm.indexing.train_gate import train_spalm as run
    from memlm.model.files.checkpoint import load_checkpoint

    with ConsoleProgress() as progress:
        checkpoint = load_checkpoint(model, dtype=dtype, device=device)
        report = run(checkpoint, store, documents, k=k, max_tokens=max_tokens, seed=seed, progress=progress)
    if json:
        emit_json(report)
        return
    out.print(
        f"{report.base_nats:.4f} nats per token alone, {report.gated_nats:.4f} gated, {report.share:.1%} from p_kNN"
    )
    if report.gated_nats >= report.base_nats:
        out.print("The gate does not help. Nothing was saved.")
