"""`memlm client`: ask a running server, from a shell, what the Python client asks."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.base.printable import one_line
from memlm.cli import client_datastores, options, render
from memlm.cli.client_connection import HERE, Target, Timeout, client_of, connect_with
from memlm.cli.console import cell, emit_json, out, table
from memlm.cli.options import given
from memlm.cli.render_index import print_neighbors

if TYPE_CHECKING:
    pass

app = typer.Typer(help="Ask a running server.", no_args_is_help=True)
app.add_typer(client_datastores.datastore, name="datastore")
app.add_typer(client_datastores.operation, name="operation")
session = typer.Typer(help="What the model has read and goes on from.", no_args_is_help=True)
app.add_typer(session, name="session")
SessionName = Annotated[str, typer.Argument(metavar="NAME", help="A session's name.")]


@app.callback(epilog="Example: memlm client --ca ca.pem --token SECRET generate 'def main(' --target host:50051")
def connection(
    token: Annotated[
        str | None, typer.Option(envvar="MEMLM_TOKEN", help="The token that the server knows you by.", show_envvar=True)
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS, and trust whom this system trusts.")] = False,
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="Speak TLS, and trust this authority.")] = None,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own certificate, if it is asked for.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
) -> None:
    """Ask a running server."""
    connect_with(token, (ca, cert, key) if tls or ca or cert else None)


@app.command(epilog="Example: memlm client generate 'def main(' --target localhost:50051 --show-sources")
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Target = HERE,
    use: options.StoreWeights = None,
    no_store: options.NoStore = False,
    k: options.K = None,
    lam: options.Lam = None,
    knn_temperature: options.KnnTemperature = None,
    nprobe: options.Nprobe = None,
    min_pointers: options.MinPointers = None,
    spalm: options.Spalm = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    time_limit: options.TimeLimit = None,
    show_sources: options.ShowSources = False,
    early_exit: options.EarlyExit = False,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="Go on from what this session has read.")] = None,
    resume: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Take a stream that breaks up again, for so long.")
    ] = None,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Continue a prompt; the text comes as it is made."""
    wanted = given(
        stores=options.weights(use),
        min_pointers=min_pointers,
        k=k,
        lam=lam,
        knn_temperature=knn_temperature,
        nprobe=nprobe,
        spalm=spalm or None,
        max_tokens=max_tokens,
    )
    wanted |= given(top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=tuple(stop or ()), time_limit_s=time_limit)
    wanted |= given(temperature=temperature, repetition_penalty=repetition_penalty) | {"use_store": not no_store}
    wanted |= {
        "neighbors": options.NEIGHBORS_SHOWN if show_sources else 0,
        "early_exit": early_exit,
        "session": session,
    }
    wanted |= given(resume_s=resume)
    with client_of(target, timeout) as client, client.generate(prompt, **wanted) as tokens:
        render.print_generation(tokens, json=json, show_sources=show_sources)


@app.command(epilog="Example: memlm client score 'import os' --target localhost:50051")
def score(
    text: Annotated[str, typer.Argument(help="The text to score.")],
    target: Target = HERE,
    use: options.StoreWeights = None,
    no_store: options.NoStore = False,
    k: options.K = None,
    lam: options.Lam = None,
    knn_temperature: options.KnnTemperature = None,
    nprobe: options.Nprobe = None,
    min_pointers: options.MinPointers = None,
    spalm: options.Spalm = False,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Tell how probable a text is."""
    retrieval = given(stores=options.weights(use), k=k, lam=lam, knn_temperature=knn_temperature, nprobe=nprobe)
    retrieval |= given(min_pointers=min_pointers, spalm=spalm or None)
    with client_of(target, timeout) as client:
        scored = client.score(text, token_scores=json, use_store=not no_store, **retrieval)
    if json:
        emit_json(scored)
        return
    out.print(f"{scored.nll:.4f} nats, {scored.bits_per_byte:.4f} bits per byte, {scored.tokens:,} tokens")


@app.command(epilog="Example: memlm client search 'import os' --target localhost:50051")
def search(
    text: Annotated[str, typer.Argument(help="The context whose likes are sought.")],
    target: Target = HERE,
    use: options.StoreName = None,
    k: Annotated[int, typer.Option("--k", help="Neighbors to show.")] = 8,
    nprobe: options.Nprobe = None,
    spalm: options.Spalm = False,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Show the places of a datastore whose context is most like a text's end."""
    with client_of(target, timeout) as client:
        print_neighbors(client.search(use, text, k=k, nprobe=nprobe), json=json)


@app.command(epilog="Example: memlm client model --target localhost:50051")
def model(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Show which model a server has loaded."""
    with client_of(target, timeout) as client:
        info = client.get_model()
    if json:
        emit_json(info)
        return
    summary = f"{info.name}: {info.num_parameters:,} parameters, context {info.context_length}, {info.dtype}"
    out.print(one_line(summary), markup=False)


@session.command("create", epilog="Example: memlm client session create --ttl 86400 --target localhost:50051")
def create_session(
    ttl: Annotated[float | None, typer.Option(help="Seconds after its last use at which it goes.")] = None,
    target: Target = HERE,
    timeout: Timeout = 60.0,
    json: options.Json = False,
) -> None:
    """Start a session, and print its name."""
    with client_of(target, timeout) as client:
        info = client.session(ttl_s=ttl).info()
    emit_json(info) if json else out.print(one_line(info.name), markup=False)


@session.command("append", epilog="Example: memlm client session append NAME long.txt --target localhost:50051")
def append_to_session(
    name: SessionName,
    text: Annotated[str, typer.Argument(metavar="FILE", help="A text file; - is standard input.")],
    target: Target = HERE,
    timeout: Timeout = 3600.0,
    json: options.Json = False,
) -> None:
    """Let the model read a file: all of it, or nothing."""
    with client_of(target, timeout) as client, _opened(text) as file:
        _print_session(client.append_to_session(name, file.read()), json=json)


@session.command("info", epilog="Example: memlm client session info NAME --target localhost:50051")
def get_session(name: SessionName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Show what a session holds, and how far an append is."""
    with client_of(target, timeout) as client:
        _print_session(client.get_session(name), json=json)


@session.command("list", epilog="Example: memlm client session list --target localhost:50051")
def list_sessions(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Show your sessions, the latest used first."""
    with client_of(target, timeout) as client:
        sessions = client.list_sessions()
    if json:
        emit_json({"sessions": sessions})
        return
    for info in sessions:
        _print_session(info, json=False)


@session.command("fork", epilog="Example: memlm client session fork NAME --target localhost:50051")
def fork_session(name: SessionName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Start another session that has read the same, and print its name."""
    with client_of(target, timeout) as client:
        info = client.fork_session(name)
    emit_json(info) if json else out.print(one_line(info.name), markup=False)


@session.command("delete", epilog="Example: memlm client session delete NAME --target localhost:50051")
def delete_session(
    name: SessionName, target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False
) -> None:
    """Forget a session."""
    with client_of(target, timeout) as client:
        _print_session(client.delete_session(name), json=json)


def _print_session(info: Any, *, json: bool) -> None:
    if json:
        emit_json(info)
        return
    reading = f", reading {info.reading_done:,} of {info.reading:,}" if info.reading else ""
    left = datetime.fromtimestamp(info.expires_s).astimezone().isoformat(" ", "seconds")
    summary = f"{info.name}: {info.num_tokens:,} tokens, {info.num_bytes:,} bytes, until {left}{reading}"
    out.print(one_line(summary), markup=False)


def _opened(path: str) -> Any:
    return nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8")


@app.command("info", epilog="Example: memlm client info --target localhost:50051")
def server_info(target: Target = HERE, timeout: Timeout = 60.0, json: options.Json = False) -> None:
    """Show what the server takes, and its version."""
    with client_of(target, timeout) as client:
        info = client.get_server_info()
    if json:
        emit_json(info)
        return
    shown = table("", "", title=target)
    shown.show_header = False
    for name in info.__slots__:
        shown.add_row(name.replace("_", " "), cell(str(getattr(info, name))))
    out.print(shown)
