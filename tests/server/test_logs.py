"""Lines of the log: no text of others makes one of its own, or reaches the terminal as a command."""

import json
import logging
import sys

import pytest

from memlm.server.telemetry.logs import JsonLines, TextLines

FORGED = "a.txt\n2026-01-01 00:00:00,000 memlm.server ERROR forged\r\x1b]0;title\x07\x85\u2028\ud800\u202e"


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    about = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("memlm.server", logging.WARNING, "f.py", 1, message, args, about)


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_a_message_is_one_line_without_control_characters(formatter: logging.Formatter) -> None:
    for line in (formatter.format(record("%s is left out", FORGED)), formatter.format(record(FORGED))):
        assert len(line.splitlines()) == 1
        assert line.isprintable()
        assert "forged" in line
        line.encode()


def test_a_traceback_keeps_its_lines_none_of_which_looks_like_a_message() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        error = sys.exc_info()[1]
    first, *rest = TextLines().format(record("it failed", error=error)).splitlines()
    assert first.endswith("it failed")
    assert "Traceback" in rest[0]
    assert len(rest) >= 4
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert len(json.loads(JsonLines().format(record("it failed", error=error)))["exception"].splitlines()) > 1
