"""How the commands of `memlm client` reach a server."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from memlm.client import Client

Target = Annotated[str, typer.Option("--target", metavar="HOST:PORT", help="Where the server listens.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.")]
HERE = "localhost:50051"
# What the group's own options say of the connection: token, and the files of TLS (authority, certificate, key).
Files: TypeAlias = "tuple[Path | None, Path | None, Path | None]"
_connection: ContextVar[tuple[str | None, Files | None]] = ContextVar("connection")


def connect_with(token: str | None, files: Files | None) -> None:
    """Says how all that follows connects."""
    _connection.set((token, files))


def client_of(target: str, timeout: float) -> Client:
    """A client that connects as the group's options say."""
    from memlm.client import Client, Tls

    token, files = _connection.get()
    return Client(target, timeout_s=timeout, token=token, tls=None if files is None else Tls(*files))
