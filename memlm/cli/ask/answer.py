"""`memlm answer`, `memlm client answer` and `memlm client passages`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.api.answers import Answer, AnswerRequest, FindPassagesRequest
from memlm.api.handles import TokenStream
from memlm.api.params import SAMPLING
from memlm.api.server import ModelInfo
from memlm.cli.remote.connection import HERE, Target, Timeout, client_of
from memlm.cli.store.render import print_passages
from memlm.cli.store.vectors import tell_missing_encoder
from memlm.cli.terminal import options, render
from memlm.cli.terminal.console import emit_json
from memlm.cli.terminal.fields import with_fields
from memlm.errors import PermissionDenied

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", help="Maximum number of tokens of an answer.", rich_help_panel=SAMPLING,
        show_default=f"{options.MAX_TOKENS}, or a quarter of the context",
    ),
]  # fmt: skip
NOT_OF_ANSWERS = ("temperature", "max_tokens", "session", "resume_s")  # or with defaults here


@with_fields(leave_out=NOT_OF_ANSWERS)
def answer(
    request: AnswerRequest,
    model: options.Model,
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attention_window: options.AttentionWindow = None,
    extended_attention: options.ExtendedAttention = None,
    encoder: options.Encoder = "auto",
    temperature: options.Temperature = options.TEMPERATURE,
    max_tokens: MaxTokens = None,
    json: options.Json = False,
) -> None:
    """Answer a question from the passages of datastores that are likeliest to answer it."""
    from memlm.language_model import load

    adapters = () if request.adapter is None else (request.adapter,)
    if request.adapter is not None:
        request = replace(request, adapter=Path(request.adapter).resolve().name)
    if request.num_passages != 0:
        tell_missing_encoder(encoder, request.passages_by)
    with load(
        model, store or (), dtype=dtype, device=device, attention_window=attention_window,
        extended_attention=extended_attention, adapters=adapters, passage_encoder=encoder,
    ) as lm:  # fmt: skip
        _answer(lm, lm.info, request, temperature, max_tokens, json=json)


@with_fields(leave_out=NOT_OF_ANSWERS)
def client_answer(
    request: AnswerRequest,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    temperature: options.Temperature = options.TEMPERATURE,
    max_tokens: MaxTokens = None,
    json: options.Json = False,
) -> None:
    """Answer a question from the passages of a server's datastores that are likeliest to answer it."""
    with client_of(target, timeout) as client:
        model = None
        with suppress(PermissionDenied):  # of a token for answers alone: the server has limits of its own
            model = client.get_model() if max_tokens is None else None
        _answer(client, model, request, temperature, max_tokens, json=json)


def _answer(
    host: LanguageModel | Client,
    model: ModelInfo | None,
    request: AnswerRequest,
    temperature: float,
    max_tokens: int | None,
    *,
    json: bool,
) -> None:
    if max_tokens is None and model is not None:
        max_tokens = min(options.MAX_TOKENS, max(1, model.context_length // 4))
    sampling = replace(request.sampling, temperature=temperature, max_tokens=max_tokens)
    print_answer(host.stream_answer(replace(request, sampling=sampling)), json=json)


@with_fields()
def client_passages(
    request: FindPassagesRequest, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Find the passages of a server's datastores that are likeliest to answer a question."""
    asked = {each.name: getattr(request, each.name) for each in fields(request) if each.name != "question"}
    with client_of(target, timeout) as client:
        print_passages(client.find_passages(request.question, **asked), json=json)


def print_answer(tokens: TokenStream, *, json: bool) -> None:
    """Prints an answer as it arrives, and then the places of its passages, or all as one JSON object."""
    with tokens:
        if json:
            emit_json(Answer.of(tokens.result()))
            return
        render.print_generation(tokens, prompt="", json=False, show_sources=False)
        prompt, found = tokens.accepted.prompt, Answer.of(tokens.result())
    if prompt is not None:
        render.print_places(prompt, cited=found.cited, weights=found.weights)
