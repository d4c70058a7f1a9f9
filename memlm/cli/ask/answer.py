"""`memlm answer`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.api.answers import Answer, AnswerRequest
from memlm.api.handles import TokenStream
from memlm.api.params import SAMPLING
from memlm.api.server import ModelInfo
from memlm.cli.store.vectors import tell_missing_encoder
from memlm.cli.terminal import options, render
from memlm.cli.terminal.connection import Target, adapter_name, host_of
from memlm.cli.terminal.console import emit_json, err
from memlm.cli.terminal.fields import with_fields
from memlm.errors import PermissionDenied

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

ALONE = "No passage is about the question, so the model answered alone. --passages 1 takes the closest."

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", help="Maximum number of tokens of an answer.", rich_help_panel=SAMPLING,
        show_default=f"{options.MAX_TOKENS}, or a quarter of the context",
    ),
]  # fmt: skip


@with_fields(leave_out=options.NOT_OF_ANSWERS)
def answer(
    context: typer.Context,
    request: AnswerRequest,
    model: options.ModelOrTarget = None,
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attention_window: options.AttentionWindow = None,
    encoder: options.Encoder = "auto",
    target: Target = None,
    temperature: options.Temperature = options.TEMPERATURE,
    max_tokens: MaxTokens = None,
    json: options.Json = False,
) -> None:
    """Answer a question from the passages of datastores that are likeliest to answer it."""
    path = request.adapter
    request = replace(request, adapter=adapter_name(path, target))
    if target is None and request.num_passages != 0:
        tell_missing_encoder(encoder, request.passages_by)
    with host_of(
        context, target, model, store, adapter=path, dtype=dtype, device=device, attention_window=attention_window,
        passage_encoder=encoder,
    ) as host:  # fmt: skip
        about = _model_of(host) if max_tokens is None else None
        if about is not None:
            max_tokens = min(options.MAX_TOKENS, max(1, about.context_length // 4))
        sampling = replace(request.sampling, temperature=temperature, max_tokens=max_tokens)
        request = replace(request, sampling=sampling)
        print_answer(host.stream_answer(request), request, json=json)


def _model_of(host: LanguageModel | Client) -> ModelInfo | None:
    """The model, or None for a token that answers alone: the server has limits of its own."""
    from memlm.client import Client

    if not isinstance(host, Client):
        return host.info
    with suppress(PermissionDenied):
        return host.get_model()
    return None


def print_answer(tokens: TokenStream, request: AnswerRequest, *, json: bool) -> None:
    """Prints the sentence that an answer stands on, the answer as it arrives, and the places of its passages, or all as
    one JSON object. The sentence comes first, but that of a mixture is known with its first token.
    """
    with tokens:
        if json:
            emit_json(Answer.of(tokens.result()))
            return
        begun = (tokens.take() or ()) if request.mixture else ()
        render.print_sentence(tokens.accepted.prompt, next((token.passage_shares for token in begun), ()))
        render.print_generation(tokens, prompt="", json=False, show_sources=False, begun=begun)
        prompt, found = tokens.accepted.prompt, Answer.of(tokens.result())
    if prompt is not None and prompt.passages:
        render.print_places(prompt, cited=found.cited, shares=found.passage_shares)
    elif request.num_passages is None:
        err.print(ALONE, style="dim", markup=False, soft_wrap=True)
