"""`memlm tune-context`."""

from __future__ import annotations

from typing import Annotated

import typer

from memlm.base.figures import counted, figure
from memlm.base.progress import LOADING
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, out
from memlm.cli.terminal.interruption import on_interrupt, this_command


def tune_context(
    texts: options.Texts,
    model: options.Model,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to tune on.")] = 50_000,
    document_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of one document.")] = 8192,
    window: options.Window = None,
    stride: options.Stride = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Tune how much a text's own past counts, on held-out documents, and save it with the model if it helps."""
    documents = options.corpus_of(texts, glob, on_error, hidden=hidden)
    left = f"{model} keeps the settings that it had"
    with on_interrupt(lambda: f"{left}; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        progress(LOADING, 0, 1)
        from memlm.indexing.tune_context import tune_context as run
        from memlm.model.files.checkpoint import load_checkpoint
        from memlm.retrieval.encoder import window_size

        checkpoint = load_checkpoint(model, dtype=dtype, device=device)
        tuning = run(
            checkpoint, documents, max_tokens=max_tokens, document_tokens=document_tokens,
            size=window_size(checkpoint.decoder, window, stride), progress=progress,
        )  # fmt: skip
    if json:
        emit_json(tuning._asdict())
        return
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
