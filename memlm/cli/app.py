"""The `memlm` command: its subcommands and groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from memlm.cli import bench, models
from memlm.cli.ask.answer import answer
from memlm.cli.ask.chat import chat
from memlm.cli.ask.generate import generate
from memlm.cli.ask.score import score
from memlm.cli.ask.trace import trace
from memlm.cli.calibrate import calibrate
from memlm.cli.doctor import doctor
from memlm.cli.eval import evaluate
from memlm.cli.inspect import inspect
from memlm.cli.lm_eval import lm_eval
from memlm.cli.serve import serve as serve_command
from memlm.cli.served.info import info
from memlm.cli.served.operations import operation
from memlm.cli.served.sessions import session
from memlm.cli.store import index
from memlm.cli.store.shards import shard, split_store
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import (
    Authority,
    Certificate,
    PrivateKey,
    RootGroup,
    Timeout,
    Token,
    UseTls,
    connect_with,
)
from memlm.cli.terminal.console import out
from memlm.cli.terminal.fields import CommandWithSettings
from memlm.cli.train import train as train_command
from memlm.cli.tune import tune

ASK, SERVE, MODELS, MACHINE = "Ask", "Documents and servers", "Models", "This machine"  # panels of the help
WISHES = {
    "ask your files": "memlm answer QUESTION -m MODEL -s STORE",
    "see the passages for a question": "memlm index passages STORE QUESTION -m MODEL",
    "find a phrase": "memlm index search STORE PHRASE --by words -m MODEL",
    "continue a text, with its sources": "memlm generate TEXT -m MODEL -s STORE --show-sources",
    "find out who said a sentence": "memlm trace TEXT -m MODEL -s STORE",
}

app = typer.Typer(
    cls=RootGroup,
    help="A language model whose memory you can read, edit, scale and serve.",
    epilog="\n\n".join(f"To {wish:34} {command}" for wish, command in WISHES.items()),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from memlm.base.version import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    timeout: Timeout = None,
    token: Token = None,
    tls: UseTls = False,
    ca: Authority = None,
    cert: Certificate = None,
    key: PrivateKey = None,
) -> None:
    """A language model whose memory you can read, edit, scale and serve."""
    connect_with(context, timeout, token, tls=tls, ca=ca, cert=cert, key=key)


def _add(command: Callable[..., object], panel: str, example: str, name: str | None = None) -> None:
    app.command(name, rich_help_panel=panel, epilog=f"Example: {example}")(command)


_add(chat, ASK, "memlm chat --model smollm2 --store notes")
_add(answer, ASK, "memlm answer 'Which port does the gateway use?' --model smollm2 --store notes")
_add(generate, ASK, "memlm generate 'def main(' --model model --store store --show-sources")
_add(score, ASK, "memlm score 'import os' --model smollm2 --store notes")
_add(trace, ASK, "memlm trace --file answer.txt --model smollm2 --store notes")
app.add_typer(index.app, name="index", rich_help_panel=SERVE)
app.command(
    cls=CommandWithSettings,
    rich_help_panel=SERVE,
    epilog="Example: memlm serve --model model --store store --port 50051",
    context_settings={"auto_envvar_prefix": "MEMLM_SERVE"},
)(serve_command)
_add(info, SERVE, "memlm info --target localhost:50051")
app.add_typer(session, name="session", rich_help_panel=SERVE)
app.add_typer(operation, name="operation", rich_help_panel=SERVE)
_add(shard, SERVE, "memlm shard store --shard 1/4 --listen 10.0.0.7:50061")
index.app.command("shard", epilog="Example: memlm index shard store --shards 4")(split_store)
app.add_typer(models.app, name="models", rich_help_panel=MODELS)
_add(evaluate, MODELS, "memlm eval heldout/ --model model --store store", "eval")
_add(lm_eval, MODELS, "memlm lm-eval --model smollm2 --store store --tasks arc_easy", "lm-eval")
_add(train_command, MODELS, "memlm train docs/ --out model --minutes 5")
_add(tune, MODELS, "memlm tune heldout/ --model smollm2 --store store")
_add(calibrate, MODELS, "memlm calibrate heldout/ --model model --delta 0.1")
_add(inspect, MODELS, "memlm inspect smollm2 --out report.html")
_add(doctor, MACHINE, "memlm doctor --json")
app.add_typer(bench.app, name="bench", rich_help_panel=MACHINE)


@app.command(rich_help_panel=MACHINE, epilog="Example: memlm demo --out demo")
def demo(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="New folder for the demo.")] = Path("memlm-demo"),
    model: options.Model = Path("smollm2"),
    keep_serving: Annotated[bool, typer.Option("--keep-serving", help="Leave the server up until Ctrl-C.")] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal demos.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder of an earlier demo.")] = False,
    json: options.Json = False,
) -> None:
    """Build, tune, serve, teach and forget with a pretrained model (2 to 5 minutes)."""
    from memlm.cli import demo_pretrained
    from memlm.cli.demo import run_demo

    job = partial(demo_pretrained.run, model=model, seed=seed, keep_serving=keep_serving, json=json)
    run_demo(out_folder, job, overwrite=overwrite, json=json)
