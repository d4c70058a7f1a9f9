"""`memlm train`."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.cli import options
from memlm.cli.console import ConsoleProgress, emit_json, out, print_problem
from memlm.cli.options import given
from memlm.errors import InvalidInput

FINE_TUNING = {"optimizer": "adamw", "learning_rate": 3e-4}  # unless it is said otherwise


def train(
    corpus: options.Corpora,
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="MODEL", help="The model's new folder.")],
    preset: Annotated[str, typer.Option(metavar="tiny|small|base", help="Shape and rates to start from.")] = "tiny",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="F.toml", help="Fields of TrainConfig that differ; those of the model stand in the table \\[model]."
        ),
    ] = None,
    valid: Annotated[list[str] | None, typer.Option(metavar="PATH", help="Held-out text to report a loss on.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A tokenizer to use, not to train one.")
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model to go on with: a folder, or an id on the hub.")
    ] = None,
    memorizing_layers: Annotated[
        str | None, typer.Option(metavar="N,N", help="Layers that get kNN attention over the document's past.")
    ] = None,
    memory_mixing: Annotated[
        str | None, typer.Option(metavar="gate|tanh|joint", help="How these layers mix memory in.")
    ] = None,
    xl_length: Annotated[int | None, typer.Option(help="Tokens of Transformer-XL memory.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps.")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Train for this many readings of the corpus (default 1).")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for about this long.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows read at once.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches that make one step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest rate.")] = None,
    schedule: Annotated[str | None, typer.Option(metavar="cosine|constant", help="How the rate goes on.")] = None,
    valid_every: Annotated[int | None, typer.Option(help="Score the held-out text every so many steps.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="End after so many scores without a new best, with the best weights.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write MODEL/tensorboard too.")] = False,
    compile_first: Annotated[bool, typer.Option("--compile", help="Compile the model first.")] = False,
    seed: Annotated[int | None, typer.Option(help="Same seed, same model.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in MODEL.")] = False,
    glob: options.Glob = "**/*",
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Train a model on a corpus."""
    from memlm.data.corpus import Corpus
    from memlm.data.tokenizer import Tokenizer
    from memlm.training.train import train as run

    fields = given(
        steps=steps, epochs=epochs, minutes=minutes, seed=seed, batch_size=batch_size, accumulate=accumulate,
        learning_rate=learning_rate, schedule=schedule, valid_every=valid_every, patience=patience,
        tensorboard=tensorboard or None, compile=compile_first or None,
    )  # fmt: skip
    layers = None if memorizing_layers is None else _layers(memorizing_layers)
    memories: dict[str, Any] = given(xl_length=xl_length, memorizing=given(layers=layers, mixing=memory_mixing) or None)
    settings = train_config(preset, config, fields, memories, fine_tuning=init_from is not None)
    with ConsoleProgress() as progress:
        report = run(
            Corpus(corpus, glob, on_error, print_problem),
            out_folder,
            settings,
            valid=Corpus(valid, glob, on_error, print_problem) if valid else None,
            tokenizer=Tokenizer.load(tokenizer) if tokenizer else None,
            init_from=init_from,
            resume=resume,
            progress=progress,
        )
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
        return
    if json:
        emit_json(report)
        return
    out.print(f"{report.num_parameters:,} parameters, {report.steps:,} steps, {report.tokens_per_s:,.0f} tokens/s")
    out.print(f"loss {report.losses[-1]:.3f} nats per token" + (f", valid {report.valid_loss:.3f}" if valid else ""))
    out.print(f"The model is in {out_folder}.", markup=False)


def train_config(
    preset: str, file: Path | None, fields: dict[str, Any], memories: dict[str, Any], *, fine_tuning: bool
) -> Any:
    """The settings: a preset, a file over it, and what was said on the command line over both."""
    from memlm.training.config import PRESETS, SHAPE, TrainConfig

    if preset not in PRESETS:
        raise InvalidInput(f"preset is {preset!r}; expected one of {', '.join(PRESETS)}", field="preset")
    changes: dict[str, Any] = dict(FINE_TUNING) if fine_tuning else {}
    if file is not None:
        try:
            changes |= tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidInput(f"{file} cannot be read as TOML ({error})", field="config") from error
    model_fields = changes.pop("model", {})
    if fine_tuning:  # a shape that is asked for is held against the model's own
        model_fields = {name: changes.pop(name) for name in (*SHAPE, "vocab_size") if name in changes} | model_fields
    if isinstance(kept := model_fields.get("memorizing"), dict) and "memorizing" in memories:
        memories = {**memories, "memorizing": {**kept, **memories["memorizing"]}}
    model_fields = {**model_fields, **memories}
    try:
        return TrainConfig.from_dict({**vars(PRESETS[preset]), **changes, **fields, "model_fields": model_fields})
    except (TypeError, InvalidInput) as error:
        raise InvalidInput(f"{file or 'the settings'}: {error}", field="config") from error


def _layers(fields: str) -> list[int]:
    try:
        return [int(layer) for layer in fields.split(",")]
    except ValueError as error:
        raise InvalidInput(
            f"memorizing_layers is {fields!r}; expected numbers with commas between", field="memorizing_layers"
        ) from error
