"""`memlm calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, out


def calibrate(
    texts: options.Texts,
    model: options.Model,
    measure: Annotated[
        str, typer.Option(metavar="softmax|state|halt", help="Measure of a layer's confidence.")
    ] = "softmax",
    delta: Annotated[float, typer.Option(help="Share of greedy tokens that may differ.")] = 0.1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Calibrate the confidence threshold for early exit, and save it with the model."""
    documents = options.corpus_of(texts)
    from memlm.generation.early_exit import calibrate as run
    from memlm.model.files.checkpoint import load_checkpoint

    with ConsoleProgress() as progress:
        checkpoint = load_checkpoint(model, dtype=dtype, device=device)
        report = run(checkpoint, documents, measure=measure, delta=delta, progress=progress)
    if json:
        emit_json(report)
    elif report.rule is None:
        out.print(f"No threshold keeps within delta {delta} of the whole model. Nothing was saved.")
    else:
        out.print(
            f"threshold {report.rule.threshold}: {report.layers_share:.0%} of the layers, {report.time_share:.0%} of"
            f" the time, {report.disagreement:.1%} other tokens, {report.nats_change:+.4f} nats per token"
        )
