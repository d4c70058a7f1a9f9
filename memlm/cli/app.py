"""The `memlm` command: its subcommands and groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from memlm.cli import bench, models
from memlm.cli.ask.answer import answer
from memlm.cli.ask.chat import chat
from memlm.cli.ask.generate import generate
from memlm.cli.ask.trace import trace
from memlm.cli.calibrate import calibrate
from memlm.cli.doctor import doctor
from memlm.cli.eval import evaluate
from memlm.cli.inspect import inspect
from memlm.cli.lm_eval import lm_eval
from memlm.cli.remote import client
from memlm.cli.serve import serve as serve_command
from memlm.cli.store import index
from memlm.cli.store.shards import shard, split_store
from memlm.cli.terminal import options
from memlm.cli.terminal.console import out
from memlm.cli.terminal.interruption import InterruptibleGroup
from memlm.cli.train import train as train_command
from memlm.cli.tune_context import tune_context

WISHES = {
    "ask your files": "memlm answer QUESTION -m MODEL -s STORE",
    "see the passages for a question": "memlm index passages STORE QUESTION -m MODEL",
    "find a phrase": "memlm index search STORE PHRASE --by words -m MODEL",
    "continue a text, with its sources": "memlm generate TEXT -m MODEL -s STORE --show-sources",
    "find out who said a sentence": "memlm trace TEXT -m MODEL -s STORE",
}

app = typer.Typer(
    cls=InterruptibleGroup,
    help="A language model whose memory you can read, edit, scale and serve.",
    epilog="\n\n".join(f"To {wish:34} {command}" for wish, command in WISHES.items()),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(index.app, name="index")
app.add_typer(client.app, name="client")
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")


def _print_version(requested: bool) -> None:
    if requested:
        from memlm.base.version import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A language model whose memory you can read, edit, scale and serve."""


app.command(epilog="Example: memlm train docs/ --out model --minutes 5")(train_command)


app.command(epilog="Example: memlm shard store --shard 1/4 --listen 10.0.0.7:50061")(shard)
index.app.command("shard", epilog="Example: memlm index shard store --shards 4")(split_store)


app.command("eval", epilog="Example: memlm eval heldout/ --model model --store store")(evaluate)
app.command(epilog="Example: memlm doctor --json")(doctor)
app.command("lm-eval", epilog="Example: memlm lm-eval --model smollm2 --store store --tasks arc_easy")(lm_eval)
app.command(epilog="Example: memlm generate 'def main(' --model model --store store --show-sources")(generate)
app.command(epilog="Example: memlm chat --model smollm2 --store notes")(chat)
app.command(epilog="Example: memlm answer 'Which port does the gateway use?' --model smollm2 --store notes")(answer)
app.command(epilog="Example: memlm trace --file answer.txt --model smollm2 --store notes")(trace)
app.command(epilog="Example: memlm inspect smollm2 --out report.html")(inspect)
app.command("tune-context", epilog="Example: memlm tune-context heldout/ --model smollm2")(tune_context)
app.command(epilog="Example: memlm calibrate heldout/ --model model --delta 0.1")(calibrate)
app.command(
    epilog="Example: memlm serve --model model --store store --port 50051",
    context_settings={"auto_envvar_prefix": "MEMLM_SERVE"},
)(serve_command)


@app.command(epilog="Example: memlm demo --out demo")
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
