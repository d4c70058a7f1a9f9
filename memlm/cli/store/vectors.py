"""`memlm index vectors`, and the vectors of passages that a build and an addition make."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from memlm.base.figures import counted, duration
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out
from memlm.cli.terminal.interruption import on_interrupt, this_command
from memlm.errors import InvalidInput

if TYPE_CHECKING:
    from memlm.indexing.vectors import MadeVectors

AT_ONCE_S = 60.0  # what a build and an addition take more, at most


def vectors(
    store: options.StoreArgument,
    model: options.Model,
    encoder: options.Encoder = "auto",
    json: options.Json = False,
) -> None:
    """Make the vectors by which passages are found by meaning. An interrupted run resumes."""
    with on_interrupt(lambda: f"the vectors that are made are used; to go on: {this_command()}"):
        made = _made(store, model, encoder, within_s=None)
    if made is None:
        from memlm.model.files.catalog import NO_ENCODER

        raise InvalidInput(NO_ENCODER if encoder == "auto" else "encoder is none; name one", field="encoder")
    if json:
        emit_json(asdict(made))
        return
    missing = f"; another process makes those of {counted(made.missing, 'passage')}" if made.missing else ""
    out.print(f"{made.made:,} vectors are new, {counted(made.passages, 'passage')} in all{missing}.")


def make_vectors_at_once(store: Path, model: Path) -> None:
    """Makes the vectors of a datastore that was changed, where that takes less than a minute, and says how else."""
    with on_interrupt(lambda: f"{store} is complete; {_later(store, model)}"):
        made = _made(store, model, "auto", within_s=AT_ONCE_S)
    if made is None:
        tell_missing_encoder("auto", "auto")
    elif made.missing_s:
        err.print(
            f"{counted(made.missing, 'passage')} are found by words alone until they have vectors, in"
            f" {duration(made.missing_s)}: {_later(store, model)}",
            markup=False,
        )


def tell_missing_encoder(encoder: str, by: str) -> None:
    """Says in one line that passages are found by words alone, where an encoder would find more."""
    from memlm.model.files.catalog import NO_ENCODER, find_encoder

    if by == "auto" and encoder == "auto" and find_encoder(encoder) is None:
        err.print(NO_ENCODER, markup=False)


def _later(store: Path, model: Path) -> str:
    return f"`memlm index vectors {quote(str(store))} --model {quote(str(model))}` makes them, and `memlm serve` does"


def _made(store: Path, model: Path, encoder: str, *, within_s: float | None) -> MadeVectors | None:
    """What `make_vectors` did, None without an encoder."""
    from memlm.indexing.vectors import make_vectors
    from memlm.model.files.checkpoint import load_tokenizer
    from memlm.model.files.encoder_files import encoder_of

    if (loaded := encoder_of(encoder)) is None:
        return None
    tokenizer = load_tokenizer(model)
    with ConsoleProgress() as progress:
        return make_vectors(store, tokenizer, loaded, within_s=within_s, progress=progress)
