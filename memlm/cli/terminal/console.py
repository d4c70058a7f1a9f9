"""Output of the commands: answers on standard output, progress and problems on standard error.

Long work shows a bar with rate and time left on a terminal, and elsewhere plain lines at growing intervals. With
`--json` the answer is one JSON object, in which nan and inf are null.

`out` and `err` escape control characters. Foreign text in a line (ids, titles, paths, names) passes `one_line` or, in
tables, `cell`, which also remove line ends and markup.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from memlm.base.figures import duration, file_size
from memlm.base.printable import one_line, printable, printable_json
from memlm.base.progress import UNITS


@dataclasses.dataclass(frozen=True)
class _Escaped:
    """A renderable without control characters, except for those of Rich."""

    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderable) for renderable in renderables]


out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)
for console in (out, err):
    console.push_render_hook(_Escaping())

FIRST_WAIT_S, WAIT_GROWTH, LONGEST_WAIT_S = 2.0, 1.5, 30.0  # between two plain lines
NOTICED_S = 1.0  # a shorter phase gets no line


def emit_json(answer: Any) -> None:
    """Writes one JSON object."""
    text = printable_json(json.dumps(jsonable(answer), ensure_ascii=False, allow_nan=False))
    try:
        text.encode(out.encoding)
    except UnicodeEncodeError:  # an escape of Python would be no JSON
        text = json.dumps(jsonable(answer), allow_nan=False)
    out.print(text, markup=False)


def jsonable(value: Any) -> Any:
    """Converts dataclasses, paths and bytes to JSON values, and nan and inf to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def cell(text: str) -> Text:
    """Foreign text in a table: on one line, without markup."""
    return Text(one_line(text))


def table(*columns: str, title: str = "") -> Table:
    """A table with a column of text and columns of figures."""
    shown = Table(title=cell(title) if title else None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right")
    return shown


UNBOUNDED = 10_000  # columns


def print_table(shown: Table, to: Console = out) -> None:
    """Prints a table, or row by row what it holds where a terminal is too narrow for its columns."""
    if not to.is_terminal or Measurement.get(to, to.options.update(width=UNBOUNDED), shown).maximum <= to.width:
        to.print(shown)
        return
    if shown.title:
        to.print(shown.title, style="italic")
    names = [str(column.header) for column in shown.columns]
    width = max(map(len, names))
    for row in zip(*(column.cells for column in shown.columns), strict=True):
        first, *others = (part if isinstance(part, Text) else Text(str(part)) for part in row)
        to.print(Text.assemble(first, style="bold"))
        for name, part in zip(names[1:], others, strict=True):
            line = Text.assemble(("  " + f"{name:{width}}  " * bool(name), "dim"), part)
            to.print(line)  # whole, as a path that somebody copies: the terminal breaks it


def print_problem(problem: object) -> None:
    """Prints one line about a skipped document."""
    err.print(f"[yellow]skipped[/] {escape(one_line(str(problem)))}")


class ConsoleProgress:
    """Shows the progress of successive phases. A context manager that is called as a `Progress`."""

    def __init__(self) -> None:
        self._phase, self._begin, self._line_s, self._wait_s, self._lines = "", 0.0, 0.0, FIRST_WAIT_S, 0
        self._printed: tuple[int, int | None] = (-1, None)  # how far the last line said that the phase is
        self._bars: Bars | None = None
        self._task = TaskID(0)

    def __call__(self, phase: str, done: int, total: int | None, note: str = "") -> None:
        """Updates the phase and its progress."""
        now = time.monotonic()
        if phase != self._phase:
            self._finish()
            self._phase, self._begin, self._line_s, self._wait_s, self._lines = phase, now, now, FIRST_WAIT_S, 0
            self._printed = (-1, None)
            if self._bars:
                self._task = self._bars.add_task(escape(one_line(phase)), total=total, count="", rate="", note="")
        rate = _rate(phase, done, now - self._begin)
        if self._bars:
            count = _count(phase, done, total)
            self._bars.update(
                self._task, completed=done, total=total, count=count, rate=rate, note=escape(one_line(note))
            )
        elif self._is_worth_a_line(now, done, total):
            err.print(one_line(_line(phase, done, total, rate, now - self._begin, note)), markup=False)

    def _finish(self) -> None:
        """Completes the bar of a phase of unknown length, which another phase has followed."""
        if self._bars and self._phase and self._bars.tasks[-1].total is None:
            self._bars.update(self._task, total=1, completed=1)

    def _is_worth_a_line(self, now: float, done: int, total: int | None) -> bool:
        """Whether a plain line would tell something new: at growing intervals, and at the end of a phase that took
        long enough to be noticed.
        """
        is_complete = total is not None and done >= total > 0
        wait_s = NOTICED_S if is_complete and not self._lines else 0.0 if is_complete else self._wait_s
        if (done, total) == self._printed or now - self._line_s < wait_s:
            return False
        if self._lines:
            self._wait_s = min(LONGEST_WAIT_S, self._wait_s * WAIT_GROWTH)
        self._printed, self._line_s, self._lines = (done, total), now, self._lines + 1
        return True

    def __enter__(self) -> ConsoleProgress:
        if err.is_terminal:
            columns = (
                TextColumn("{task.description:14}"),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
                TextColumn("{task.fields[rate]}"),
            )
            self._bars = Bars(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=err)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish()
        if self._bars:
            self._bars.stop()


def _rate(phase: str, done: int, seconds: float) -> str:
    return f"{_amount(phase, round(done / seconds))}/s" if seconds > 0.5 and done >= seconds else ""


def _amount(phase: str, count: int) -> str:
    unit = UNITS.get(phase, "steps")
    return file_size(count) if unit == "bytes" else f"{count:,} {unit}"


def _count(phase: str, done: int, total: int | None) -> str:
    """How much of a phase is done, with its unit."""
    if not total:
        return _amount(phase, done)
    is_bytes = UNITS.get(phase) == "bytes"
    return f"{file_size(done) if is_bytes else f'{done:,}'} of {_amount(phase, total)}"


def _line(phase: str, done: int, total: int | None, rate: str, seconds: float, note: str) -> str:
    if not (done or total):
        return phase
    parts = [f"{phase}: {_count(phase, done, total)}"]
    if total:
        parts[0] += f" ({done / total:.0%})"
        if done and done < total:
            parts.append(f"{duration(seconds * (total - done) / done)} left")
    return ", ".join([*parts, *filter(None, [rate, note])])
