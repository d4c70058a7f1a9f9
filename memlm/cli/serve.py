"""`memlm serve`: settings from options, the environment and a file."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from memlm.cli.console import emit_json, err
from memlm.cli.fields import with_fields
from memlm.server.config import ServerConfig


def _defaults_from(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the settings of a file the defaults of the other options."""
    if path is None:
        return None
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
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
            help="TOML file of settings by the names of these options. Options and MEMLM_SERVE_... take precedence.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Check the settings, print them, and exit.")
    ] = False,
) -> None:
    """Serve a model and its datastores over gRPC until SIGTERM or Ctrl-C."""
    if print_config:
        emit_json(_without_passwords(config))
        return

    from memlm.server.ownership import keep_private
    from memlm.server.processes import process_context

    keep_private()  # before there is any other process, so that all are
    process_context()  # loads while the front does

    from memlm.server.main import serve as run

    raise typer.Exit(run(config, lambda address: err.print(f"serving {config.model} at {address}", markup=False)))


def _without_passwords(config: ServerConfig) -> ServerConfig:
    """The settings without the user and password of a URL."""
    account, at, _ = urlsplit(config.otlp or "").netloc.rpartition("@")
    return replace(config, otlp=config.otlp.replace(account + at, "***@", 1)) if config.otlp and at else config
