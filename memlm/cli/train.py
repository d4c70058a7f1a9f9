"""`memlm train`."""

from __future__ import annotations

import os
import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.base.texts import read_text
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, out
from memlm.cli.terminal.fields import Overrides, with_fields
from memlm.cli.terminal.interruption import describe_training, on_interrupt
from memlm.errors import InvalidInput
from memlm.training.config import PRESETS, SHAPE, TrainConfig

FINE_TUNING = {"optimizer": "adamw", "learning_rate": 3e-4}  # unless set otherwise
ADAPTING = {**FINE_TUNING, "learning_rate": 1e-3}


@with_fields()
def train(
    corpus: options.Corpora,
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The model's new folder.")],
    overrides: Annotated[dict[str, Any], Overrides(TrainConfig)],
    preset: Annotated[str, typer.Option(metavar="tiny|small|base", help="Shape and rates to start from.")] = "tiny",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TOML file of the fields of TrainConfig, those of the model in its table model."
        ),
    ] = None,
    valid: Annotated[list[str] | None, typer.Option(metavar="PATH", help="Held-out text to score. Repeatable.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Use this tokenizer instead of training one.")
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Continue from this model: a folder, or an id on the hub.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the interrupted run in the folder.")] = False,
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Train a model on a corpus."""
    from memlm.data.tokenizer import Tokenizer
    from memlm.training.train import train as run

    settings = train_config(preset, config, overrides, fine_tuning=init_from is not None)
    with on_interrupt(partial(describe_training, out_folder)), ConsoleProgress() as progress:
        report = run(
            options.corpus_of(corpus, glob, on_error, hidden=hidden),
            out_folder,
            settings,
            valid=options.corpus_of(valid, glob, on_error, hidden=hidden) if valid else None,
            tokenizer=Tokenizer.load(tokenizer) if tokenizer else None,
            init_from=init_from,
            resume=resume,
            progress=progress,
        )
    if os.environ.get("RANK", "0") != "0":  # only the first of several processes prints
        return
    if json:
        emit_json(report)
        return
    out.print(f"{report.num_parameters:,} parameters, {report.steps:,} steps, {report.tokens_per_s:,.0f} tokens/s")
    out.print(f"loss {report.losses[-1]:.3f} nats per token" + (f", valid {report.valid_loss:.3f}" if valid else ""))
    out.print(f"The {'adapter' if settings.adapter else 'model'} is in {out_folder}.", markup=False)


def train_config(preset: str, file: Path | None, overrides: dict[str, Any], *, fine_tuning: bool) -> TrainConfig:
    """The settings of a preset, overridden by a file, and both by the command line."""
    if preset not in PRESETS:
        raise InvalidInput(f"preset is {preset!r}; expected one of {', '.join(PRESETS)}", field="preset")
    changes: dict[str, Any] = {}
    if file is not None:
        try:
            changes = tomllib.loads(read_text(file))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidInput(f"{file} cannot be read as TOML ({error})", field="config") from error
    if fine_tuning:
        is_adapter = bool({**changes, **overrides}.get("adapter"))
        changes = {**(ADAPTING if is_adapter else FINE_TUNING), **changes}
    model_fields = changes.pop("model", {})
    if fine_tuning:  # a given shape is compared with the model's
        model_fields = {name: changes.pop(name) for name in (*SHAPE, "vocab_size") if name in changes} | model_fields
    try:
        return TrainConfig.from_dict({**vars(PRESETS[preset]), **changes, **overrides, "model_fields": model_fields})
    except (TypeError, InvalidInput) as error:
        raise InvalidInput(f"{file or 'the settings'}: {error}", field="config") from error
