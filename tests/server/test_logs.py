"""Lines of the log: no text of others makes one of its own, or reaches the terminal as a command."""

import json
import logging
import sys
from pathlib import Path

import pytest
from running import RunningServer, wait_until

from memlm.server.telemetry.logs import JsonLines, TextLines, json_line

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


def test_a_server_that_logs_json_writes_nothing_else(model_folder: Path, tmp_path: Path) -> None:
    options = ("--threads", "1", "--http-port", "0", "--log-format", "json")
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        wait_until(lambda: "http_url" in server.output)
        lines = [json.loads(line) for line in server.output.splitlines()]
    (ready,) = (line for line in lines if line["message"].startswith("serving "))
    assert ready["message"] == f"serving {model_folder} at {ready['address']}"
    assert ready["http_url"].startswith("http://127.0.0.1:")


def test_a_line_of_json_has_the_fields_of_records() -> None:
    line = json.loads(json_line("memlm.server", "serving", address="a:1"))
    assert set(line) == {"time", "level", "logger", "message", "address"}
    assert (line["level"], line["address"]) == ("info", "a:1")
