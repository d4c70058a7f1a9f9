"""Ctrl-C: the state of the work, and the command that goes on with it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer.core

INTERRUPTED = "interrupted; committed work is kept"


class Interrupted(Exception):
    """A command was interrupted. The message gives the state of its work."""


class InterruptibleGroup(typer.core.TyperGroup):
    """A group whose commands report an interruption. Typer's own would exit without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Raises Interrupted for a KeyboardInterrupt, with its message if it has one."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            raise Interrupted(str(stopped) or INTERRUPTED) from None


@contextmanager
def on_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """Adds to an interruption of the block a message that is made when it happens."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {describe()}") from None


def this_command() -> str:
    """The command line of this process, as it can be typed again."""
    return shlex.join(["memlm", *sys.argv[1:]])


def describe_build(store: Path, model: Path) -> str:
    """What an interrupted build or addition left in a datastore's folder."""
    from memlm.errors import MemlmError
    from memlm.index.store.journal import KEYS, Journal
    from memlm.index.store.manifest import CURRENT, JOURNAL

    try:
        journal = Journal.decode(store / JOURNAL)
        entries: int | None = 0 if journal.anew else journal.entries
        if journal.task.startswith(KEYS):
            return (
                f"the text of {store} is committed and answers; memlm index keys {shlex.quote(str(store))} --model"
                f" {shlex.quote(str(model))} goes on with its keys"
            )
    except (OSError, MemlmError):
        entries = None
    if entries:
        return f"{entries:,} entries of {store} are on disk; the same command goes on from there: {this_command()}"
    if entries is None and (store / CURRENT).exists():
        return (
            f"{store} is committed; what was left of its checks is done by: memlm index verify"
            f" {shlex.quote(str(store))} --model {shlex.quote(str(model))}"
        )
    return f"nothing was written to {store} yet; to begin anew: {this_command()}"


def describe_training(out: Path) -> str:
    """What an interrupted training run left in its folder."""
    from memlm.training.train import RUN_FILE
    from memlm.training.trainer import CHECKPOINT_FILE

    if not (out / "training" / RUN_FILE).exists():
        return f"nothing is in {out}; to begin anew: {this_command()}"
    resume = "" if "--resume" in sys.argv else " --resume"
    kept = "its last checkpoint" if (out / "training" / CHECKPOINT_FILE).exists() else "no checkpoint yet"
    return f"{out / 'training'} holds {kept}; to go on: {this_command()}{resume}"
