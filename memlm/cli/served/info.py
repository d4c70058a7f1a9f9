"""`memlm info`: a server, its model and its datastores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.text import Text

from memlm.api.datastores import StoreInfo
from memlm.base.figures import figure, file_size
from memlm.base.printable import one_line
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import HERE, ServerTarget, client_of
from memlm.cli.terminal.console import cell, emit_json, err, out, print_table, table
from memlm.errors import PermissionDenied

if TYPE_CHECKING:
    from memlm.api.server import ModelInfo


def info(target: ServerTarget = HERE, json: options.Json = False) -> None:
    """Show a server: its version and limits, its model and its datastores."""
    with client_of(target) as client:
        server = client.get_server_info()
        model, stores = None, list[StoreInfo]()
        with suppress(PermissionDenied):  # a token may have the right to one of these
            model = client.get_model()
        with suppress(PermissionDenied):
            stores += client.datastores.list()
    if json:
        emit_json({"server": server, "model": model, "datastores": stores})
        return
    if model is not None:
        out.print(one_line(_about(model)), markup=False)
    if stores:
        _print_stores(stores)
    shown = table("", "", title=f"limits of {target}")
    shown.show_header = False
    for name in server.__slots__:
        shown.add_row(*_fact(name, getattr(server, name)))
    print_table(shown)


def print_store(info: StoreInfo, *, json: bool) -> None:
    """Prints the facts of a datastore of a server."""
    if json:
        emit_json(info)
        return
    shown = table("", "", title=info.name)
    shown.show_header = False
    for name in info.__slots__[1:]:
        shown.add_row(name.replace("_", " "), cell(str(getattr(info, name))))
    print_table(shown)


def _about(model: ModelInfo) -> str:
    on = f" on {model.device}" if model.device else ""
    return f"{model.name}: {model.num_parameters:,} parameters, context {model.context_length}, {model.dtype}{on}"


def _print_stores(stores: Sequence[StoreInfo]) -> None:
    shown = table("datastore", "entries", "documents", "index", "k", "lam", "temperature")
    for store in stores:
        counts = (f"{store.num_entries:,}", f"{store.num_documents:,}")
        settings = (str(store.k), f"{store.lam:.3f}", figure(store.knn_temperature))
        shown.add_row(cell(store.name), *counts, cell(store.index), *settings)
    print_table(shown)
    for store in stores:
        if store.problem:
            err.print(one_line(f"{store.name} cannot be used: {store.problem}"), markup=False)


def _fact(name: str, value: Any) -> tuple[str, Text]:
    """The name and the value of a fact, with the unit that is in the name of its field."""
    if name.endswith("_bytes"):
        value, name = file_size(value), name.removesuffix("_bytes")
    elif name.endswith("_s"):
        value, name = f"{value:,.0f} s", name.removesuffix("_s")
    elif isinstance(value, bool):
        value = "yes" if value else "no"
    return name.replace("_", " "), cell(f"{value:,}" if isinstance(value, int) else str(value))
