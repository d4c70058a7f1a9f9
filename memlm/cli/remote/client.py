"""`memlm client`: the calls of the Python client from a shell."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from memlm.api.datastores import SearchRequest
from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.base.figures import counted
from memlm.base.options import format_bytes
from memlm.base.printable import one_line
from memlm.cli.ask.answer import client_answer, client_passages
from memlm.cli.ask.chat import client_chat
from memlm.cli.ask.generate import print_continuation
from memlm.cli.ask.trace import client_trace
from memlm.cli.remote import datastores as client_datastores
from memlm.cli.remote.connection import (
    HERE,
    Authority,
    Certificate,
    ConnectionGroup,
    PrivateKey,
    Target,
    Timeout,
    Token,
    UseTls,
    client_of,
    connect_with,
)
from memlm.cli.store.render import print_neighbors
from memlm.cli.terminal import options
from memlm.cli.terminal.console import cell, emit_json, out, print_table, table
from memlm.cli.terminal.fields import Overrides, with_fields
from memlm.cli.terminal.render import warn_if_partial

app = typer.Typer(cls=ConnectionGroup, help="Call a running server.", no_args_is_help=True)
app.add_typer(client_datastores.datastore, name="datastore")
app.add_typer(client_datastores.operation, name="operation")
session = typer.Typer(help="Server-side KV caches that requests continue.", no_args_is_help=True)
app.add_typer(session, name="session")
SessionName = Annotated[str, typer.Argument(metavar="NAME", help="A session's name.")]


@app.callback(epilog="Example: memlm client --ca ca.pem --token SECRET generate 'def main(' --target host:50051")
def connection(
    token: Token = None,
    tls: UseTls = False,
    ca: Authority = None,
    cert: Certificate = None,
    key: PrivateKey = None,
) -> None:
    """Call a running server. The options of the connection may stand before a command or after it."""
    connect_with(token, tls=tls, ca=ca, cert=cert, key=key)


@app.command(epilog="Example: memlm client generate 'def main(' --target localhost:50051 --show-sources")
@with_fields(leave_out=("prompt",))
def generate(
    request: GenerateRequest,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    show_sources: options.ShowSources = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt on a server."""
    request = replace(request, prompt=options.read_prompt(prompt, file))
    with client_of(target, timeout) as client:
        if show_sources and not (request.retrieval.use_store and client.datastores.list()):
            raise typer.BadParameter("--show-sources needs a datastore, and this request reads none")
        print_continuation(client, request, show_sources=show_sources, json=json)


app.command("trace", epilog="Example: memlm client trace --file answer.txt --target localhost:50051")(client_trace)
app.command("passages", epilog="Example: memlm client passages 'Which port?' --target localhost:50051")(client_passages)
app.command("answer", epilog="Example: memlm client answer 'Which port?' --target localhost:50051")(client_answer)
app.command("chat", epilog="Example: memlm client chat --target localhost:50051")(client_chat)


@app.command(epilog="Example: memlm client score 'import os' --target localhost:50051")
@with_fields(leave_out=("loop_guard",))
def score(
    text: Annotated[str, typer.Argument(help="The text to score.")],
    retrieval: Annotated[dict[str, Any], Overrides(RetrievalParams)],
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Print the log-probability of a text."""
    with client_of(target, timeout) as client:
        scored = client.score(text, token_scores=json, **retrieval)
    if json:
        emit_json(scored)
        return
    warn_if_partial(scored.searched_share)
    out.print(f"{scored.nll:.4f} nats, {scored.bits_per_byte:.4f} bits per byte, {counted(scored.tokens, 'token')}")


@app.command(epilog="Example: memlm client search 'import os' --by words --target localhost:50051")
@with_fields()
def search(
    request: SearchRequest,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Find the places where the model was in the same state as at the end of a text, or where words stand."""
    with client_of(target, timeout) as client:
        found = client.search(
            request.store, request.text, k=request.k, nprobe=request.nprobe, by=request.by,
            documents=request.documents, where=request.where, as_of=request.as_of,
        )  # fmt: skip
    print_neighbors(found, request, json=json)


@app.command(epilog="Example: memlm client model --target localhost:50051")
def model(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Show the model of a server."""
    with client_of(target, timeout) as client:
        info = client.get_model()
    if json:
        emit_json(info)
        return
    summary = f"{info.name}: {info.num_parameters:,} parameters, context {info.context_length}"
    summary += f", {info.dtype} on {info.device}" if info.device else f", {info.dtype}"
    out.print(one_line(summary), markup=False)


@session.command("create", epilog="Example: memlm client session create --ttl 86400 --target localhost:50051")
def create_session(
    ttl: Annotated[float | None, typer.Option(help="Seconds after its last use at which it expires.")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="Read its text with this adapter.")] = None,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Create a session and print its name."""
    with client_of(target, timeout) as client:
        info = client.session(ttl_s=ttl, adapter=adapter).info()
    emit_json(info) if json else out.print(one_line(info.name), markup=False)


@session.command("append", epilog="Example: memlm client session append NAME long.txt --target localhost:50051")
def append_to_session(
    name: SessionName,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Text file. - is standard input.")] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="Append this text instead of a file.")] = None,
    target: Target = HERE,
    timeout: Timeout = 3600.0,
    json: options.Json = False,
) -> None:
    """Append a text file to a session: all of it, or nothing on an error."""
    if (file is None) == (text is None):
        raise typer.BadParameter("give a FILE (- is standard input), or --text TEXT")
    content = options.read_text(file) if file is not None else text or ""
    with client_of(target, timeout) as client:
        _print_session(client.append_to_session(name, content), json=json)


@session.command("info", epilog="Example: memlm client session info NAME --target localhost:50051")
def get_session(name: SessionName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Show the size of a session and the progress of an append."""
    with client_of(target, timeout) as client:
        _print_session(client.get_session(name), json=json)


@session.command("list", epilog="Example: memlm client session list --target localhost:50051")
def list_sessions(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """List your sessions, last used first."""
    with client_of(target, timeout) as client:
        sessions = client.list_sessions()
    if json:
        emit_json({"sessions": sessions})
        return
    for info in sessions:
        _print_session(info, json=False)


@session.command("forget", epilog="Example: memlm client session forget NAME 120 480 --target localhost:50051")
def forget_in_session(
    name: SessionName,
    start: Annotated[int, typer.Argument(help="The first token to forget, counted from 0.")],
    stop: Annotated[int, typer.Argument(help="The first token behind the span. At most the number of tokens.")],
    target: Target = HERE,
    timeout: Timeout = 3600.0,
    json: options.Json = False,
) -> None:
    """Forget a span of tokens, as if it had never been appended."""
    with client_of(target, timeout) as client:
        _print_session(client.forget_in_session(name, start, stop), json=json)


@session.command("fork", epilog="Example: memlm client session fork NAME --target localhost:50051")
def fork_session(name: SessionName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Copy a session and print the new name."""
    with client_of(target, timeout) as client:
        info = client.fork_session(name)
    emit_json(info) if json else out.print(one_line(info.name), markup=False)


@session.command("delete", epilog="Example: memlm client session delete NAME --target localhost:50051")
def delete_session(
    name: SessionName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Delete a session."""
    with client_of(target, timeout) as client:
        _print_session(client.delete_session(name), json=json)


def _print_session(info: Any, *, json: bool) -> None:
    if json:
        emit_json(info)
        return
    reading = f", reading {info.reading_done:,} of {info.reading:,}" if info.reading else ""
    left = datetime.fromtimestamp(info.expires_s).astimezone().isoformat(" ", "seconds")
    summary = f"{info.name}: {counted(info.num_tokens, 'token')}, {info.num_bytes:,} bytes, until {left}{reading}"
    out.print(one_line(summary), markup=False)


@app.command("info", epilog="Example: memlm client info --target localhost:50051")
def server_info(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Show the version and limits of a server."""
    with client_of(target, timeout) as client:
        info = client.get_server_info()
    if json:
        emit_json(info)
        return
    shown = table("", "", title=target)
    shown.show_header = False
    for name in info.__slots__:
        shown.add_row(*_fact(name, getattr(info, name)))
    print_table(shown)


def _fact(name: str, value: Any) -> tuple[str, Text]:
    """The name and the value of a fact, with the unit that is in the name of its field."""
    if name.endswith("_bytes"):
        value, name = format_bytes(value), name.removesuffix("_bytes")
    elif name.endswith("_s"):
        value, name = f"{value:,.0f} s", name.removesuffix("_s")
    elif isinstance(value, bool):
        value = "yes" if value else "no"
    return name.replace("_", " "), cell(f"{value:,}" if isinstance(value, int) else str(value))
