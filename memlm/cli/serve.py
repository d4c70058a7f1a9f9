"""`memlm serve`: settings from options, the environment and a file; then the server."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from memlm.cli import options
from memlm.cli.console import emit_json, err

if TYPE_CHECKING:
    from memlm.server.config import ServerConfig


def _defaults_from(context: typer.Context, path: Path | None) -> Path | None:
    """Makes what a file says the defaults of the other options."""
    if path is None:
        return None
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read as TOML ({error})") from error
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config_file", "json"}
    if unknown := sorted(set(said) - known):
        raise typer.BadParameter(f"{path} has {', '.join(unknown)}; the settings are {', '.join(sorted(known))}")
    context.default_map = {**(context.default_map or {}), **said}
    return path


def serve(
    model: options.Model,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            callback=_defaults_from,
            is_eager=True,
            help="Settings, TOML, by the names of these options; what is given here or in MEMLM_SERVE_... goes first.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Only check the settings, and print them as they would be used.")
    ] = False,
    store: options.Stores = None,
    dtype: options.Dtype = "float32",
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.")] = 50051,
    workers: Annotated[int, typer.Option(help="Processes that share the work, each with its own model.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads for each one's model; 0 shares all cores out.")] = 0,
    worker_timeout: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which a loaded worker is killed and replaced.")
    ] = 30.0,
    max_running: Annotated[int, typer.Option(help="Requests that run side by side; others wait.")] = 32,
    max_queued: Annotated[int, typer.Option(help="Requests that may wait; one more is refused.")] = 256,
    max_queued_tokens: Annotated[int, typer.Option(help="Tokens of prompts that may wait.")] = 1 << 20,
    message_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What one message of a request may bring (default: 4MiB).")
    ] = None,
    append_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What one append to a session may bring (default: 64MiB).")
    ] = None,
    unfinished_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What all unfinished appends may hold (default: 1GiB).")
    ] = None,
    max_connections: Annotated[int, typer.Option(help="Connections; one more is closed at once.")] = 1024,
    max_streams: Annotated[int, typer.Option(help="Calls that one connection may have open.")] = 256,
    max_caller_calls: Annotated[int, typer.Option(help="Calls that one caller may have open.")] = 512,
    max_receiving: Annotated[
        int, typer.Option(help="Messages of requests that may be on their way; a fourth of them for one caller.")
    ] = 64,
    max_neighbors: Annotated[int, typer.Option(help="Neighbors that each token of a generation may report.")] = 64,
    stream_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Events of one generation that wait for its client or for resuming (default: 32MiB)."
        ),
    ] = None,
    event_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Events of all generations that wait so (default: 512MiB).")
    ] = None,
    message_timeout: Annotated[
        float, typer.Option(help="Seconds for one message; a call whose next message takes longer ends.")
    ] = 60.0,
    connection_idle: Annotated[
        float, typer.Option(help="Seconds after which a connection without calls is closed; clients connect again.")
    ] = 300.0,
    cache_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="What the keys and values of running requests may take in memory (default: half of the machine's).",
        ),
    ] = None,
    session_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep sessions here, so that they survive a restart.")
    ] = None,
    session_ttl: Annotated[float, typer.Option(help="Seconds after its last use at which a session goes.")] = 3600.0,
    session_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What all sessions may hold in memory (default: 4GiB).")
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions that may be there at a time.")] = 65_536,
    max_sessions_per_caller: Annotated[
        int, typer.Option(help="Sessions of one token; callers without a token count as one.")
    ] = 1024,
    store_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep datastores that clients build here, and load them.")
    ] = None,
    corpus_root: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Datastores may be built of texts in here; may be given again."),
    ] = None,
    index_workers: Annotated[int, typer.Option(help="Processes that build.")] = 1,
    index_threads: Annotated[int, typer.Option(help="Threads of each; 0 takes all cores.")] = 0,
    index_nice: Annotated[
        int, typer.Option(help="Their niceness, 0 to 19; higher yields more to other processes.")
    ] = 10,
    max_jobs: Annotated[int, typer.Option(help="Operations that may run or wait.")] = 64,
    upload_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What one upload of documents may bring (default: 4GiB).")
    ] = None,
    upload_documents: Annotated[int, typer.Option(help="Documents that one upload may bring.")] = 1_000_000,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Speak TLS with this certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only clients whose certificates this authority signed.")
    ] = None,
    auth_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Bearer tokens, TOML: who may call what, and how often.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Answer Prometheus here, over HTTP; 0 takes any free port.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running requests may go on after SIGTERM.")] = 30.0,
    log_level: Annotated[
        str, typer.Option(metavar="debug|info|warning|error", help="What is logged; calls from info on.")
    ] = "warning",
    log_format: Annotated[str, typer.Option(metavar="text|json", help="Lines for people, or for machines.")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log what people ask, too.")] = False,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send spans to this OpenTelemetry collector (memlm[otel]).")
    ] = None,
) -> None:
    """Serve a model and its datastores over gRPC, until SIGTERM or Ctrl-C."""
    from memlm.server.config import ServerConfig

    config = ServerConfig(
        model=model,
        stores=tuple(store or ()),
        dtype=dtype,
        host=host,
        port=port,
        num_workers=workers,
        num_threads=threads,
        worker_timeout_s=worker_timeout,
        max_running=max_running,
        max_queued=max_queued,
        max_queued_tokens=max_queued_tokens,
        max_cache_bytes=options.num_bytes(cache_bytes) or 0,
        max_message_bytes=options.num_bytes(message_bytes) or 4 << 20,
        max_append_bytes=options.num_bytes(append_bytes) or 64 << 20,
        max_unfinished_bytes=options.num_bytes(unfinished_bytes) or 1 << 30,
        max_connections=max_connections,
        max_streams=max_streams,
        max_caller_calls=max_caller_calls,
        max_receiving=max_receiving,
        max_neighbors=max_neighbors,
        max_stream_bytes=options.num_bytes(stream_bytes) or 32 << 20,
        max_event_bytes=options.num_bytes(event_bytes) or 512 << 20,
        message_timeout_s=message_timeout,
        connection_idle_s=connection_idle,
        session_dir=session_dir,
        store_dir=store_dir,
        corpus_roots=tuple(corpus_root or ()),
        index_workers=index_workers,
        index_threads=index_threads,
        index_nice=index_nice,
        max_jobs=max_jobs,
        max_upload_bytes=options.num_bytes(upload_bytes) or 4 << 30,
        max_upload_documents=upload_documents,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        auth_file=auth_file,
        metrics_port=metrics_port,
        session_ttl_s=session_ttl,
        max_session_bytes=options.num_bytes(session_bytes) or 4 << 30,
        max_sessions=max_sessions,
        max_sessions_per_caller=max_sessions_per_caller,
        drain_s=drain,
        log_level=log_level,
        log_format=log_format,
        log_prompts=log_prompts,
        otlp=otlp,
    )
    if print_config:
        emit_json(_without_passwords(config))
        return

    from memlm.server.ownership import keep_private
    from memlm.server.processes import process_context

    keep_private()  # before there is any other process, so that all are
    process_context()  # loads while the front does

    from memlm.server.main import serve as run

    raise typer.Exit(run(config, lambda address: err.print(f"serving {model} at {address}", markup=False)))


def _without_passwords(config: ServerConfig) -> ServerConfig:
    """The settings as they may be printed: of a user and a password in a URL, neither is shown."""
    account, at, _ = urlsplit(config.otlp or "").netloc.rpartition("@")
    return replace(config, otlp=config.otlp.replace(account + at, "***@", 1)) if config.otlp and at else config
