"""The fate of each file of a corpus: told on the terminal by reason, and in full in the file of `--report`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rich.markup import escape

from memlm.base.printable import one_line
from memlm.cli.terminal.console import err, print_problem

if TYPE_CHECKING:
    from memlm.data.corpus import Document, Problem

SHOWN = 3  # of one reason, as they are found


class CorpusFiles:
    """Listens to a corpus. One that is read several times tells everything once."""

    def __init__(self) -> None:
        self._problems = dict[tuple[str, str], None]()
        self._by_reason = defaultdict[str, list[str]](list)
        self._stored = dict[tuple[str, str], tuple[str, int]]()

    def on_problem(self, problem: Problem) -> None:
        """Prints the first problems of each reason."""
        if (key := (problem.where, problem.why)) in self._problems:
            return
        self._problems[key] = None
        places = self._by_reason[problem.reason]
        places.append(problem.where)
        if len(places) <= SHOWN:
            print_problem(problem)

    def on_document(self, file: str, document: Document) -> None:
        """Keeps the document's size and format."""
        format_ = document.metadata.get("format", "text")
        self._stored[file, document.id] = (str(format_), len(document.text))

    def finish(self, report: TextIO | None) -> None:
        """Prints a line for each reason that has more problems, and writes the report, if there is to be one."""
        for reason, places in self._by_reason.items():
            if rest := places[SHOWN:]:
                names = ", ".join(rest[:SHOWN]) + ", ..." * (len(rest) > SHOWN)
                err.print(f"[yellow]skipped[/] {len(rest):,} more: {escape(one_line(f'{reason} ({names})'))}")
        if report is not None:
            report.writelines(json.dumps(line) + "\n" for line in self._lines())
            report.flush()

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The files that were left out come first."""
        for where, why in self._problems:
            yield {"path": where, "reason": why}
        for (file, id_), (format_, characters) in self._stored.items():
            yield {"path": file, "id": id_, "format": format_, "characters": characters}
