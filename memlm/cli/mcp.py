"""`memlm mcp`."""

from __future__ import annotations

import typer

from memlm.cli.terminal import options
from memlm.cli.terminal.connection import Target, host_of
from memlm.errors import Unavailable

MISSING = "memlm mcp needs {}, which is not installed; install it with `pip install 'memlm[mcp]'`"


def mcp(
    context: typer.Context,
    model: options.ModelOrTarget = None,
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    encoder: options.Encoder = "auto",
    target: Target = None,
) -> None:
    """Give an agent the tools search, ask, trace, remember and forget (MCP over standard input and output)."""
    try:
        from memlm.server.http.mcp.stdio import serve
    except ImportError as error:
        raise Unavailable(MISSING.format(error.name)) from error
    with host_of(context, target, model, store, dtype=dtype, device=device, passage_encoder=encoder) as host:
        serve(host)
