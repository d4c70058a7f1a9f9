"""`memlm serve`: settings from options, the environment and a file."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from memlm.base.interpreter import importing_the_same
from memlm.base.options import RAY, check_shard, format_bytes
from memlm.base.printable import one_line
from memlm.base.texts import read_text
from memlm.cli.terminal.console import emit_json, err
from memlm.cli.terminal.fields import with_fields
from memlm.server.config import ServerConfig, is_on_ray
from memlm.server.registry import built_in
from memlm.server.telemetry.logs import json_line


def _defaults_from(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the settings of a file the defaults of the other options."""
    if path is None:
        return None
    try:
        settings = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read as TOML ({error})") from error
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config_file", "json"}
    if unknown := sorted(set(settings) - known):
        raise typer.BadParameter(f"{path} has {', '.join(unknown)}; the settings are {', '.join(sorted(known))}")
    context.default_map = {**(context.default_map or {}), **settings}
    return path


@with_fields()
def serve(
    config: ServerConfig,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            callback=_defaults_from,
            is_eager=True,
            help="TOML file of settings: these options by their names, and the limits that the documentation lists."
            " Options and MEMLM_SERVE_... take precedence.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Check the settings, print them, and exit.")
    ] = False,
) -> None:
    """Serve a model and its datastores over gRPC, and HTTP on request, until SIGTERM or Ctrl-C."""
    if print_config:
        emit_json(_without_passwords(config))
        return

    config = found_on_ray(config)
    from memlm.server.ownership import keep_private
    from memlm.server.processes import process_context

    def announce(address: str, http_url: str | None) -> None:
        lines = announcement(config, address, http_url)
        if config.log_format == "json":  # nothing else is in the stream
            lines = [json_line("memlm.server", lines[0], address=address, http_url=http_url)]
        err.print("\n".join(map(one_line, lines)), markup=False)  # at once, for those who wait for them

    with importing_the_same():  # the fork server is a `python -c`, and starts anew by itself if it dies
        keep_private()  # before there is any other process, so that all are
        process_context()  # loads while the front does
        from memlm.server.main import serve as run

        raise typer.Exit(run(config, announce))


def found_on_ray(config: ServerConfig) -> ServerConfig:
    """The settings with the folder in place of each datastore ray://NAME, whose shards are searched."""
    stores, shards = list[Path](), list(config.shards)
    for path in config.stores:
        if is_on_ray(path):
            from memlm.distributed.shard_finder import find_folder

            url = RAY + "/".join(path.parts[1:])
            path, shards = Path(find_folder(check_shard(url), config.cluster.address)), [*shards, url]
        stores.append(path)
    return replace(config, stores=tuple(stores), shards=tuple(dict.fromkeys(shards)))


def announcement(config: ServerConfig, address: str, http_url: str | None = None) -> list[str]:
    """The lines of a server once it accepts requests: model, addresses, limits, and a command to try."""
    host = "localhost" if config.host in ("127.0.0.1", "::1", "0.0.0.0", "::") else config.host
    target = f"{host}:{address.rpartition(':')[2]}"
    paths = {path.name: path for path in config.stores} | (built_in(config.store_dir) if config.store_dir else {})
    stores = ", ".join(f"{name} ({path})" for name, path in paths.items()) or "none: the model alone"
    security = ["TLS" if config.tls_cert else "no TLS", "tokens" if config.auth_file else "no tokens"]
    lines = [
        f"serving {config.model} at {address}",
        f"  datastores  {stores}",
        f"  encoder     {_encoder(config.encoder)}",
        *([f"  more in     {config.store_dir}: `memlm index build --target` adds some"] if config.store_dir else []),
        f"  limits      {config.max_running} requests at a time, {config.max_queued} may wait,"
        f" {format_bytes(config.max_session_bytes)} of sessions",
        f"  security    {', '.join(security)}",
    ]
    if config.log_level in ("warning", "error"):
        lines.append(f"  log         {config.log_level}s; --log-level info adds a line for each call")
    if http_url is not None:
        lines.append(f"  HTTP        {http_url}/v1 for OpenAI clients, {http_url}/docs for the calls")
        lines.append(f"  metrics     {http_url}/metrics")
    options = [
        "" if target == "localhost:50051" else f" --target {target}",
        " --ca CA.pem" if config.tls_cert else "",
        " --cert CLIENT.pem --key CLIENT.key" if config.tls_client_ca else "",
        " --token TOKEN" if config.auth_file else "",
    ]
    return [*lines, f"  try         memlm generate 'Once upon a time'{''.join(options)}"]


def _without_passwords(config: ServerConfig) -> ServerConfig:
    """The settings without the user and password of a URL."""
    account, at, _ = urlsplit(config.otlp or "").netloc.rpartition("@")
    return replace(config, otlp=config.otlp.replace(account + at, "***@", 1)) if config.otlp and at else config


def _encoder(encoder: str) -> str:
    from memlm.model.files.catalog import NO_ENCODER, find_encoder

    if encoder == "auto":
        return NO_ENCODER if find_encoder(encoder) is None else "minilm: finds passages by meaning too"
    return "none: passages are found by words" if encoder == "none" else f"{encoder}: finds passages by meaning too"
