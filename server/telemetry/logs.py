"""Log formats of a server: lines for people, or a JSON object for each record."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from memlm.base.printable import one_line

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def start_logging(level: str, kind: str) -> None:
    """Logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def json_line(logger: str, message: str, **fields: Any) -> str:
    """What a server says at every level, as a JSON object."""
    record = logging.makeLogRecord({"name": logger, "levelname": "INFO", "msg": message, "fields": fields})
    return JsonLines().format(record)


class TextLines(logging.Formatter):
    """Formats a record as one line. Control characters are escaped, so that no name or text from a caller begins a line
    of its own or controls a terminal. Traceback lines are indented.
    """

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {one_line(line)}" for line in lines)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        record_fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            record_fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(record_fields, default=str)
