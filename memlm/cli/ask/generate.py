"""`memlm generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from memlm.api.params import GenerateRequest
from memlm.cli.terminal import options, render
from memlm.cli.terminal.connection import Target, adapter_name, host_of
from memlm.cli.terminal.console import out
from memlm.cli.terminal.fields import with_fields

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

NEIGHBORS_SHOWN, NEIGHBORS_SUMMED = 16, 4  # of each token: for its sources, and for the documents under the text


@with_fields(leave_out=("prompt",))
def generate(
    context: typer.Context,
    request: GenerateRequest,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    model: options.ModelOrTarget = None,
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attention_window: options.AttentionWindow = None,
    extended_attention: options.ExtendedAttention = None,
    target: Target = None,
    show_sources: options.ShowSources = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt with a model in this process or on a server."""
    path = request.adapter
    request = replace(request, prompt=options.read_prompt(prompt, file), adapter=adapter_name(path, target))
    if show_sources and not (request.retrieval.use_store and (store or target)):
        raise typer.BadParameter("--show-sources needs a datastore, and this request reads none; give --store FOLDER")
    with host_of(
        context, target, model, store, there=("session", "resume"), adapter=path, dtype=dtype, device=device,
        attention_window=attention_window, extended_attention=extended_attention,
    ) as host:  # fmt: skip
        if show_sources and not _has_stores(host):
            raise typer.BadParameter("--show-sources needs a datastore, and the server has none")
        print_continuation(host, request, show_sources=show_sources, json=json)


def _has_stores(host: LanguageModel | Client) -> bool:
    from memlm.client import Client

    return bool(host.datastores.list() if isinstance(host, Client) else host.stores)


def print_continuation(
    host: LanguageModel | Client, request: GenerateRequest, *, show_sources: bool, json: bool
) -> None:
    """Prints the continuation of a prompt as it is generated, by a model in process or a server."""
    if show_sources:
        request = replace(request, neighbors=NEIGHBORS_SHOWN)
    elif out.is_terminal and not json and request.retrieval.use_store and not request.early_exit:
        request = replace(request, neighbors=NEIGHBORS_SUMMED)
    with host.generate(request) as tokens:
        render.print_generation(tokens, prompt=request.prompt, json=json, show_sources=show_sources)
