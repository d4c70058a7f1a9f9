"""`memlm score`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memlm.api.params import RetrievalParams
from memlm.base.figures import counted
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import Target, host_of
from memlm.cli.terminal.console import emit_json, out
from memlm.cli.terminal.fields import Overrides, with_fields
from memlm.cli.terminal.render import warn_if_partial


@with_fields(leave_out=("loop_guard",))
def score(
    context: typer.Context,
    retrieval: Annotated[dict[str, Any], Overrides(RetrievalParams)],
    text: options.ScoredText = None,
    file: options.PromptFile = None,
    model: options.ModelOrTarget = None,
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    target: Target = None,
    json: options.Json = False,
) -> None:
    """Print the log-probability of a text, and with --json that of each token."""
    read = options.read_prompt(text, file)
    with host_of(context, target, model, store, dtype=dtype, device=device) as host:
        scored = host.score(read, token_scores=json, **retrieval)
    if json:
        emit_json(scored)
        return
    warn_if_partial(scored.searched_share)
    out.print(f"{scored.nll:.4f} nats, {scored.bits_per_byte:.4f} bits per byte, {counted(scored.tokens, 'token')}")
