"""`memlm generate` and `memlm client generate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from memlm.api.params import GenerateRequest
from memlm.cli import options, render
from memlm.cli.console import out
from memlm.cli.fields import with_fields

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
    chunk_store: options.ChunkStore = None,
    domain: options.Domain = None,
    mix_domains: options.MixDomains = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attention_window: options.AttentionWindow = None,
    extended_attention: options.ExtendedAttention = None,
    mix_with: options.MixWith = None,
    mix_top: options.MixTop = 0,
    show_sources: options.ShowSources = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt in this process."""
    request = replace(request, prompt=options.read_prompt(prompt, file))
    if show_sources and not (store and request.retrieval.use_store):
        raise typer.BadParameter("--show-sources needs a datastore; give --store FOLDER")
    if mix_top and not (mix_with or mix_domains):
        raise typer.BadParameter("--mix-top chooses among several models; give --mix-with MODEL, or --mix-domains")
    if mix_with or mix_domains:
        _generate_mixed(
            request,
            [model, *(mix_with or ())],
            mix_top,
            dtype,
            device,
            mix_domains=mix_domains,
            is_plain=not (store or chunk_store or domain or attention_window or extended_attention),
            json=json,
        )
        return
    from memlm.language_model import load

    adapters = () if request.adapter is None else (request.adapter,)
    if request.adapter is not None:
        request = replace(request, adapter=Path(request.adapter).resolve().name)
    with load(
        model, store or (), dtype=dtype, device=device, attention_window=attention_window,
        extended_attention=extended_attention, adapters=adapters,
    ) as lm:  # fmt: skip
        if domain is not None:
            lm.use_domain(domain)
        if chunk_store:
            lm.read_chunks(chunk_store)
        print_continuation(lm, request, show_sources=show_sources, json=json)


def _generate_mixed(
    request: GenerateRequest,
    models: list[Path],
    top: int,
    dtype: str,
    device: str,
    *,
    mix_domains: bool,
    is_plain: bool,
    json: bool,
) -> None:
    if not is_plain:
        raise typer.BadParameter(
            "a mixture goes with neither --store, --chunk-store, --domain, --attention-window nor --extended-attention;"
            " leave them out"
        )
    from memlm.generation.model_mixture import ModelMixture

    mixture = ModelMixture(models, top=top, dtype=dtype, device=device)
    if mix_domains and not any(reader.domain for reader in mixture.readers):
        raise typer.BadParameter(f"--mix-domains mixes experts of domains, and {models[0]} has none; leave it out")
    with mixture.generate(request) as tokens:
        render.print_generation(tokens, prompt=request.prompt, json=json, show_sources=False)


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
