"""The server that a command works on: `--target`, and the token, the TLS and the time limit of its calls.

The last three are options of the whole command line. They may stand before the name of a command that takes
`--target`, or behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from memlm.api.params import SERVER
from memlm.cli.terminal.interruption import InterruptibleGroup
from memlm.client.resume import DEFAULT_TARGET, DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

HERE = DEFAULT_TARGET
UPLOAD_S = 3600.0  # the time limit of what takes a text in, where none is given


def _check_target(target: str | None) -> str | None:
    if target is not None and not target.strip():
        raise typer.BadParameter(f"it is empty; give HOST:PORT, as {HERE}")
    return target


def _check_timeout(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not timeout_s > 0:
        raise typer.BadParameter(f"it is {timeout_s:g}; give more than 0 seconds")
    return timeout_s


Target = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="HOST:PORT", rich_help_panel=SERVER, callback=_check_target,
        help="Work on this server, with the options of `memlm --help` for its token and TLS.",
    ),
]  # fmt: skip
ServerTarget = Annotated[
    str,
    typer.Option(
        "--target", metavar="HOST:PORT", rich_help_panel=SERVER, callback=_check_target, help="Address of the server."
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", rich_help_panel=SERVER, callback=_check_timeout, help="Time limit of a call."
    ),
]
Token = Annotated[
    str | None, typer.Option(envvar="MEMLM_TOKEN", help="Bearer token.", show_envvar=True, rich_help_panel=SERVER)
]
UseTls = Annotated[
    bool, typer.Option("--tls", help="Use TLS with the authorities of this system.", rich_help_panel=SERVER)
]
Authority = Annotated[
    Path | None, typer.Option("--ca", metavar="FILE", help="Use TLS with this authority.", rich_help_panel=SERVER)
]
Certificate = Annotated[
    Path | None, typer.Option("--cert", metavar="FILE", help="Client certificate.", rich_help_panel=SERVER)
]
PrivateKey = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="Its private key.", rich_help_panel=SERVER)
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait", help="Wait for the end of its job, or only print its name.", rich_help_panel=SERVER
    ),
]
_FLAGS, _WITH_VALUE = ("--tls",), ("--timeout", "--token", "--ca", "--cert", "--key")
# Options of a model that is loaded by the command.
_OF_MODEL = {
    "model", "store", "dtype", "device", "attention_window", "extended_attention", "encoder", "engine", "yes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Connection:
    timeout_s: float | None
    token: str | None
    has_tls: bool
    files: tuple[Path | None, Path | None, Path | None]  # authority, certificate, key
    flags: tuple[str, ...]  # of the command line


_connection: ContextVar[_Connection] = ContextVar("connection")
_target: ContextVar[str] = ContextVar("target", default=HERE)


class RootGroup(InterruptibleGroup):
    """The command line. Where a command takes `--target`, options of the connection may stand anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        command = _command_of(self, args)
        if any("--target" in parameter.opts for parameter in command.params):
            return super().parse_args(ctx, in_their_places(args))
        flags = [flag for word in _before_dashes(args) if (flag := word.partition("=")[0]) in (*_FLAGS, *_WITH_VALUE)]
        if flags and not hasattr(command, "commands"):
            raise typer.BadParameter(f"{', '.join(flags)} is for a server, and `{command.name}` works on none")
        return super().parse_args(ctx, args)


def in_their_places(arguments: Sequence[str]) -> list[str]:
    """The arguments with the options of the connection at the beginning, and `--target` behind the others."""
    words = list(arguments)
    end = len(_before_dashes(words))
    first, between, last = list[str](), list[str](), list[str]()
    place = 0
    while place < end:
        name, is_whole, _ = words[place].partition("=")
        size = 2 if name in (*_WITH_VALUE, "--target") and not is_whole else 1
        if place + size > end:  # its value is missing
            return words
        part = last if name == "--target" else first if name in (*_FLAGS, *_WITH_VALUE) else between
        part += words[place : place + size]
        place += size
    return [*first, *between, *last, *words[end:]]


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    """The words that may be options."""
    return words[: words.index("--")] if "--" in words else words


def _command_of(group: Any, words: Sequence[str]) -> Any:
    """The command that the words name, or the last group that they do."""
    for word in words:
        group = getattr(group, "commands", {}).get(word, group)
    return group


def connect_with(
    context: typer.Context,
    timeout: float | None,
    token: str | None,
    *,
    tls: bool,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> None:
    """Sets the time limit, the token and the TLS options of the following connections."""
    flags = _on_command_line(context, {"timeout", "token", "tls", "ca", "cert", "key"})
    _connection.set(_Connection(timeout, token, bool(tls or ca or cert or key), (ca, cert, key), tuple(flags)))


def _on_command_line(context: typer.Context, names: Collection[str]) -> list[str]:
    """The flags of the parameters of these names that the command line gave."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.param_type_name == "option"
        and parameter.name in names
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]


def client_of(target: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Client:
    """A client of a server. `timeout_s` holds where the command line gives no time limit."""
    from memlm.client import Client, Tls

    given = _connection.get()
    _target.set(target)
    timeout_s = timeout_s if given.timeout_s is None else given.timeout_s
    return Client(target, timeout_s=timeout_s, token=given.token, tls=Tls(*given.files) if given.has_tls else None)


def to_this_server() -> str:
    """The options that name the server of the last client, as they are typed behind a command. A token is left out."""
    given = _connection.get()
    files = zip(("--ca", "--cert", "--key"), given.files, strict=True)
    options = [each for flag, file in files if file is not None for each in (flag, str(file))]
    options += ["--tls"] * ("--tls" in given.flags) + ["--token", "TOKEN"] * ("--token" in given.flags)
    target = _target.get()
    return "".join(f" {quote(each)}" for each in (*(() if target == HERE else ("--target", target)), *options))


def is_served(
    context: typer.Context, target: str | None, *, here: Collection[str] = (), there: Collection[str] = ()
) -> bool:
    """Whether a command works on a server. Raises BadParameter for options of the other place: `here` are parameters of
    this process, beside those of its model, and `there` are those of a server.
    """
    unused = {*_OF_MODEL, *here} if target is not None else {"wait", *there}
    given = _on_command_line(context, unused)
    if target is None:
        given += _connection.get().flags
    if given and target is not None:
        of_stores = "; --store-name NAME chooses among the datastores of a server" if "--store" in given else ""
        raise typer.BadParameter(f"a server does not take {', '.join(given)}; leave it out, or --target{of_stores}")
    if given:
        raise typer.BadParameter(f"{', '.join(given)} is for a server; give --target HOST:PORT")
    return target is not None


def model_of(model: Path | None) -> Path:
    """The model of a command without a server. Raises BadParameter where none is given."""
    if model is None:
        raise typer.BadParameter("give --model MODEL, or --target HOST:PORT of a server")
    return model


@contextmanager
def host_of(
    context: typer.Context,
    target: str | None,
    model: Path | None,
    stores: Sequence[Path] | None,
    *,
    here: Collection[str] = (),
    there: Collection[str] = (),
    adapter: str | None = None,
    **loading: Any,
) -> Iterator[LanguageModel | Client]:
    """The host of a command: the server at `target`, or a model that it loads. Raises BadParameter as `is_served`."""
    if is_served(context, target, here=here, there=there):
        assert target is not None
        with client_of(target) as client:
            yield client
        return
    model = model_of(model)
    from memlm.language_model import load

    with load(model, stores or (), adapters=() if adapter is None else (adapter,), **loading) as lm:
        yield lm


def adapter_name(adapter: str | None, target: str | None) -> str | None:
    """The name of an adapter in a request: its name on a server, or that of its folder."""
    return adapter if target is not None or adapter is None else Path(adapter).resolve().name
