"""The connection of the commands of `memlm client`."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from memlm.client.resume import DEFAULT_TARGET

if TYPE_CHECKING:
    from memlm.client import Client

Target = Annotated[str, typer.Option("--target", metavar="HOST:PORT", help="Address of the server.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Time limit in seconds.")]
PANEL = "Connection"
Token = Annotated[
    str | None, typer.Option(envvar="MEMLM_TOKEN", help="Bearer token.", show_envvar=True, rich_help_panel=PANEL)
]
UseTls = Annotated[
    bool, typer.Option("--tls", help="Use TLS with the authorities of this system.", rich_help_panel=PANEL)
]
Authority = Annotated[
    Path | None, typer.Option("--ca", metavar="FILE", help="Use TLS with this authority.", rich_help_panel=PANEL)
]
Certificate = Annotated[
    Path | None, typer.Option("--cert", metavar="FILE", help="Client certificate.", rich_help_panel=PANEL)
]
PrivateKey = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="Its private key.", rich_help_panel=PANEL)
]
HERE = DEFAULT_TARGET
# The files of TLS: authority, certificate, key.
Files: TypeAlias = "tuple[Path | None, Path | None, Path | None]"
_connection: ContextVar[tuple[str | None, Files | None]] = ContextVar("connection")


def connect_with(token: str | None, *, tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Sets the token and the TLS options of the following connections."""
    _connection.set((token, (ca, cert, key) if tls or ca or cert or key else None))


def client_of(target: str, timeout: float) -> Client:
    """A client with the token and TLS files of the group's options."""
    from memlm.client import Client, Tls

    token, files = _connection.get()
    return Client(target, timeout_s=timeout, token=token, tls=None if files is None else Tls(*files))
