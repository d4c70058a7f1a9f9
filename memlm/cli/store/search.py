"""`memlm index search` and `memlm index passages`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import typer

from memlm.api.answers import FindPassagesRequest
from memlm.api.datastores import SearchRequest
from memlm.cli.store.render import print_neighbors, print_passages
from memlm.cli.store.vectors import tell_missing_encoder
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import Target, host_of
from memlm.cli.terminal.fields import with_fields


@with_fields(leave_out=("store",))
def search(
    context: typer.Context,
    store: options.AnyStore,
    request: SearchRequest,
    model: options.ModelOrTarget = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    target: Target = None,
    json: options.Json = False,
) -> None:
    """Find the places where the model was in the same state as at the end of a text, or where words stand."""
    with host_of(context, target, model, [store], dtype=dtype, device=device) as host:
        found = host.search(
            _name(store, target), request.text, k=request.k, nprobe=request.nprobe, by=request.by,
            documents=request.documents, where=request.where, as_of=request.as_of,
        )  # fmt: skip
        print_neighbors(found, request, json=json)


@with_fields(leave_out=("store",))
def passages(
    context: typer.Context,
    store: options.AnyStore,
    request: FindPassagesRequest,
    model: options.ModelOrTarget = None,
    encoder: options.Encoder = "auto",
    target: Target = None,
    json: options.Json = False,
) -> None:
    """Find the passages that are likeliest to answer a question, to put them into a prompt."""
    if target is None:
        tell_missing_encoder(encoder, request.by)
    chosen = [each.name for each in fields(request) if each.name not in ("question", "store")]
    asked = {name: getattr(request, name) for name in chosen}
    with host_of(context, target, model, [store], passage_encoder=encoder) as host:
        print_passages(host.find_passages(request.question, store=_name(store, target), **asked), json=json)


def _name(store: Path, target: str | None) -> str | None:
    """A datastore's name in a request: that of a server, or None for the only one that is loaded."""
    return None if target is None else str(store)
