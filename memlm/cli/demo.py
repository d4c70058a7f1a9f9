"""The frame of `memlm demo`: its folder, its texts, and what happens when it is stopped."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from memlm.cli.terminal.console import err, out
from memlm.errors import AlreadyExists
from memlm.indexing.build import BuildReport

LIBRARY = Path(sysconfig.get_path("stdlib"))
MARK = "made-by-memlm-demo"


def run_demo(
    folder: Path, steps: Callable[[Path, Console], None], *, overwrite: bool = False, json: bool = False
) -> None:
    """Runs the steps in a new folder. With `json`, standard output is left to the report.

    Raises AlreadyExists for an existing folder. Leaves nothing if interrupted.
    """
    _make_room(folder, overwrite)
    try:
        with _terminated_like_interrupted():
            steps(folder, err if json else out)
    except BaseException:
        shutil.rmtree(folder)
        raise


def split_modules(modules: Sequence[Path], folder: Path, num_bytes: Mapping[str, int], seed: int) -> dict[str, int]:
    """Copies modules of the standard library at random into one folder for each use, at most so many bytes of them.

    Returns the number of modules in each.
    """
    left, counts = sorted(modules), dict.fromkeys(num_bytes, 0)
    random.Random(seed).shuffle(left)
    for use, most in num_bytes.items():
        copied, passed_over = 0, []
        for module in left:
            size = module.stat().st_size
            if copied + size > most:
                passed_over.append(module)
                continue
            target = folder / use / module.relative_to(LIBRARY)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(module, target)
            copied += size
            counts[use] += 1
        left = passed_over
    return counts


def print_build(built: BuildReport, to: Console) -> None:
    """Prints the size, the speed and the quality of a datastore."""
    to.print(
        f"{built.entries:,} entries of {built.bytes_per_entry:,.0f} bytes, {built.tokens_per_s:,.0f} tokens/s,"
        f" {built.index}"
    )
    if (quality := built.quality) is not None and quality.queries:  # exact search misses nothing
        to.print(f"its index finds {quality.recall:.1%} of the {quality.k} neighbors that an exact search finds")
    to.print()


def print_commands(title: str, commands: Sequence[str], to: Console = out) -> None:
    """Prints commands under a title, to be copied."""
    to.print(f"\n{title}", style="bold")
    for command in commands:
        to.print(f"  {command}", markup=False)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Makes SIGTERM unwind as Ctrl-C does, so that unfinished work is removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_room(folder: Path, overwrite: bool) -> None:
    if folder.exists():
        if not (overwrite and (folder / MARK).exists()):
            raise AlreadyExists(f"{folder} is there already; choose another --out, or replace a demo with --overwrite")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
