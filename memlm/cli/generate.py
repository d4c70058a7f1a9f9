"""`memlm generate` and `memlm client generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memlm.api.params import GenerateRequest
from memlm.cli import options, render
from memlm.cli.fields import with_fields

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

NEIGHBORS_SHOWN = 16


@with_fields(leave_out=("session", "resume_s"))
def generate(
    request: GenerateRequest,
    model: options.Model,
    store: options.Stores = None,
    dtype: options.Dtype = "float32",
    show_sources: options.ShowSources = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt in this process."""
    from memlm.language_model import load

    with load(model, store or (), dtype=dtype) as lm:
        print_continuation(lm, request, show_sources=show_sources, json=json)


def print_continuation(
    generator: LanguageModel | Client, request: GenerateRequest, *, show_sources: bool, json: bool
) -> None:
    """Prints the continuation of a prompt as it is generated, by a model in process or a server."""
    if show_sources:
        request = replace(request, neighbors=NEIGHBORS_SHOWN)
    with generator.generate(request) as tokens:
        render.print_generation(tokens, json=json, show_sources=show_sources)
