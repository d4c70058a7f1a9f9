"""`memlm session`: KV caches of a server that requests continue."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.base.figures import counted
from memlm.base.printable import one_line
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import HERE, UPLOAD_S, ServerTarget, client_of
from memlm.cli.terminal.console import emit_json, out

session = typer.Typer(help="KV caches of a server, which requests continue.", no_args_is_help=True)
SessionName = Annotated[str, typer.Argument(metavar="NAME", help="A session's name.")]


@session.command("create", epilog="Example: memlm session create --ttl 86400 --target localhost:50051")
def create_session(
    ttl: Annotated[float | None, typer.Option(help="Seconds after its last use at which it expires.")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="Read its text with this adapter.")] = None,
    target: ServerTarget = HERE,
    json: options.Json = False,
) -> None:
    """Create a session and print its name."""
    with client_of(target) as client:
        info = client.session(ttl_s=ttl, adapter=adapter).info()
    emit_json(info) if json else out.print(one_line(info.name), markup=False)


@session.command("append", epilog="Example: memlm session append NAME long.txt --target localhost:50051")
def append_to_session(
    name: SessionName,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Text file. - is standard input.")] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="Append this text instead of a file.")] = None,
    target: ServerTarget = HERE,
    json: options.Json = False,
) -> None:
    """Append a text file to a session: all of it, or nothing on an error."""
    if (file is None) == (text is None):
        raise typer.BadParameter("give a FILE (- is standard input), or --text TEXT")
    content = options.read_text(file) if file is not None else text or ""
    with client_of(target, UPLOAD_S) as client:
        _print_session(client.append_to_session(name, content), json=json)


@session.command("info", epilog="Example: memlm session info NAME --target localhost:50051")
def show_sessions(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One session.")] = None,
    target: ServerTarget = HERE,
    json: options.Json = False,
) -> None:
    """Show the size of a session and the progress of an append, or list yours, last used first."""
    with client_of(target) as client:
        if name is not None:
            _print_session(client.get_session(name), json=json)
            return
        sessions = client.list_sessions()
    if json:
        emit_json({"sessions": sessions})
        return
    for info in sessions:
        _print_session(info, json=False)


@session.command("forget", epilog="Example: memlm session forget NAME 120 480 --target localhost:50051")
def forget_in_session(
    name: SessionName,
    start: Annotated[int, typer.Argument(help="The first token to forget, counted from 0.")],
    stop: Annotated[int, typer.Argument(help="The first token behind the span. At most the number of tokens.")],
    target: ServerTarget = HERE,
    json: options.Json = False,
) -> None:
    """Forget a span of tokens, as if it had never been appended."""
    with client_of(target, UPLOAD_S) as client:
        _print_session(client.forget_in_session(name, start, stop), json=json)


@session.command("fork", epilog="Example: memlm session fork NAME --target localhost:50051")
def fork_session(name: SessionName, target: ServerTarget = HERE, json: options.Json = False) -> None:
    """Copy a session and print the new name."""
    with client_of(target) as client:
        info = client.fork_session(name)
    emit_json(info) if json else out.print(one_line(info.name), markup=False)


@session.command("delete", epilog="Example: memlm session delete NAME --target localhost:50051")
def delete_session(name: SessionName, target: ServerTarget = HERE, json: options.Json = False) -> None:
    """Delete a session."""
    with client_of(target) as client:
        _print_session(client.delete_session(name), json=json)


def _print_session(info: Any, *, json: bool) -> None:
    if json:
        emit_json(info)
        return
    reading = f", reading {info.reading_done:,} of {info.reading:,}" if info.reading else ""
    left = datetime.fromtimestamp(info.expires_s).astimezone().isoformat(" ", "seconds")
    summary = f"{info.name}: {counted(info.num_tokens, 'token')}, {info.num_bytes:,} bytes, until {left}{reading}"
    out.print(one_line(summary), markup=False)
