"""`memlm answer`, `memlm client answer` and `memlm client passages`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from rich.text import Text

from memlm.api.answers import Answer, AnswerRequest, FindPassagesRequest
from memlm.api.handles import TokenStream
from memlm.base.printable import one_line
from memlm.cli import options, render
from memlm.cli.client_connection import HERE, Target, Timeout, client_of
from memlm.cli.console import emit_json, out
from memlm.cli.fields import with_fields
from memlm.cli.render_index import print_passages


@with_fields(leave_out=("session", "resume_s"))
def answer(
    request: AnswerRequest,
    model: options.Model,
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attention_window: options.AttentionWindow = None,
    extended_attention: options.ExtendedAttention = None,
    json: options.Json = False,
) -> None:
    """Answer a question from the passages of datastores that are likeliest to answer it."""
    from memlm.language_model import load

    adapters = () if request.adapter is None else (request.adapter,)
    if request.adapter is not None:
        request = replace(request, adapter=Path(request.adapter).resolve().name)
    with load(
        model, store or (), dtype=dtype, device=device, attention_window=attention_window,
        extended_attention=extended_attention, adapters=adapters,
    ) as lm:  # fmt: skip
        print_answer(lm.stream_answer(request), json=json)


@with_fields()
def client_answer(
    request: AnswerRequest, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Answer a question from the passages of a server's datastores that are likeliest to answer it."""
    with client_of(target, timeout) as client:
        print_answer(client.stream_answer(request), json=json)


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
    weights = found.weights or (None,) * len(found.passages)
    for number, passage, weight in zip(prompt.numbers if prompt else (), found.passages, weights, strict=False):
        line = Text(one_line(f"[{number}] {passage.place}"), style="dim")
        if passage in found.cited:
            line.append("  named", style="not dim bold")
        out.print(line if weight is None else line.append(f"  weight {weight:.3f}"))
    if found.left_out:
        out.print(f"{len(found.left_out):,} passages had no room in the prompt", style="dim")
