"""What a command prints with --json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memlm.bench.report import report
from memlm.cli.terminal.console import emit_json

PROGRAM = "python -m benchmarks"


def print_report(figures: Mapping[str, Any], *, repeats: int | None) -> None:
    """Prints the report of a bench that this process has just run."""
    emit_json(report(figures, repeats=repeats, program=PROGRAM))
