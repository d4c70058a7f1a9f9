"""`memlm generate` and `memlm client generate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from memlm.api.params import GenerateRequest
from memlm.cli.terminal import options, render
from memlm.cli.terminal.console import out
from memlm.cli.terminal.fields import with_fields

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

NEIGHBORS_SHOWN, NEIGHBORS_SUMMED = 16, 4  # of each token: for its sources, and for the documents under the text


@with_fields(leave_out=("prompt", "session", "resume_s"))
def generate(
    request: GenerateRequest,
    model: options.Model,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attention_window: options.AttentionWindow = None,
    extended_attention: options.ExtendedAttention = None,
    show_sources: options.ShowSources = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt in this process."""
    request = replace(request, prompt=options.read_prompt(prompt, file))
    if show_sources and not (store and request.retrieval.use_store):
        raise typer.BadParameter("--show-sources needs a datastore; give --store FOLDER")
    from memlm.language_model import load

    adapters = () if request.adapter is None else (request.adapter,)
    if request.adapter is not None:
        request = replace(request, adapter=Path(request.adapter).resolve().name)
    with load(
        model, store or (), dtype=dtype, device=device, attention_window=attention_window,
        extended_attention=extended_attention, adapters=adapters,
    ) as lm:  # fmt: skip
        print_continuation(lm, request, show_sources=show_sources, json=json)


def print_continuation(
    generator: LanguageModel | Client, request: GenerateRequest, *, show_sources: bool, json: bool
) -> None:
    """Prints the continuation of a prompt as it is generated, by a model in process or a server."""
    if show_sources:
        request = replace(request, neighbors=NEIGHBORS_SHOWN)
    elif out.is_terminal and not json and request.retrieval.use_store and not request.early_exit:
        request = replace(request, neighbors=NEIGHBORS_SUMMED)
    with generator.generate(request) as tokens:
        render.print_generation(tokens, prompt=request.prompt, json=json, show_sources=show_sources)
