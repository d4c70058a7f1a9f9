"""The connection of the commands of `memlm client`."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
import typer.core

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
_OF_GROUP = ("--tls", "--token", "--ca", "--cert", "--key")  # the first takes no value
_OF_COMMAND = ("--target", "--timeout")
# The files of TLS: authority, certificate, key.
Files: TypeAlias = "tuple[Path | None, Path | None, Path | None]"
_connection: ContextVar[tuple[str | None, Files | None]] = ContextVar("connection")


class ConnectionGroup(typer.core.TyperGroup):
    """The group `client`, whose connection is described before the name of a command, after it, or both."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, in_their_places(args))


def in_their_places(arguments: Sequence[str]) -> list[str]:
    """The arguments with the options of the group at the beginning, and those of each command at the end."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    first, between, last = list[str](), list[str](), list[str]()
    place = 0
    while place < end:
        name, is_whole, _ = words[place].partition("=")
        size = 1 if is_whole or name not in (*_OF_GROUP[1:], *_OF_COMMAND) else 2
        if place + size > end:  # its value is missing
            return words
        part = first if name in _OF_GROUP else last if name in _OF_COMMAND else between
        part += words[place : place + size]
        place += size
    return [*first, *between, *last, *words[end:]]


def connect_with(token: str | None, *, tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Sets the token and the TLS options of the following connections."""
    _connection.set((token, (ca, cert, key) if tls or ca or cert or key else None))


def client_of(target: str, timeout: float) -> Client:
    """A client with the token and TLS files of the group's options."""
    from memlm.client import Client, Tls

    token, files = _connection.get()
    return Client(target, timeout_s=timeout, token=token, tls=None if files is None else Tls(*files))
