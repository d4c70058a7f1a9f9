"""How the processes of a server log: lines for people, or one JSON object each for machines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def start_logging(level: str, kind: str) -> None:
    """Sends what this process logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and the fields that it came with."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in it."""
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)
