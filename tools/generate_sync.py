"""Generates the synchronous client from the asynchronous one: `make client`.

Each file is rewritten word by word (`await`, `async`, `Async...`, `aio_...` and the names of the asynchronous
protocols), then sorted and formatted by ruff. A test compares the files with fresh ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "memlm"
SOURCES = ("api/aio_handles.py", "client/aio_client.py", "client/aio_datastores.py", "client/aio_transport.py")

# In this order: patterns, and the words that replace them.
RULES = (
    (r"AsyncGenerator\[([\w.]+), None\]", r"Generator[\1, None, None]"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(\w+)", r"\1"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\ba(next|close|closing)\b", r"\1"),
    (r"\baio_(\w+)", r"\1"),
    (r"\bgrpc\.aio\b", "grpc"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"^import asyncio\n", ""),
    (r", awaited(?=[.,: ])", ""),
    (r" `memlm/\w+/\w+\.py` is generated from this file\.", ""),
)


def target_of(source: str) -> Path:
    """The file that is generated from a source."""
    return FOLDER / source.replace("aio_", "")


def synchronous(source: str) -> str:
    """The text of a source's synchronous twin."""
    text = (FOLDER / source).read_text(encoding="utf-8")
    for pattern, words in RULES:
        text = re.sub(pattern, words, text, flags=re.MULTILINE)
    name, target = Path(source).name, str(target_of(source))
    text = f"# Generated from {name} by tools/generate_sync.py (`make client`); edit that file instead.\n{text}"
    for command in (["check", "--quiet", "--fix", "--select", "I,F401"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", target, "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    for source in SOURCES:
        target_of(source).write_text(synchronous(source), encoding="utf-8")
