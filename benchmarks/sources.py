"""What the files in a bench's folder were made from, so that no run takes those of another model or of other texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memlm.base.files import write_atomic
from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import Checkpoint

FILE = "source.json"
NAMES = {"model": "another model", "dtype": "another number type", "texts": "other texts"}


def source_of(checkpoint: Checkpoint, texts: str) -> dict[str, Any]:
    """The source of files that a model makes from texts. `texts` is their hash."""
    dtype = str(checkpoint.decoder.dtype).removeprefix("torch.")
    return {"model": checkpoint.fingerprint, "dtype": dtype, "texts": texts}


def known_source(folder: Path, source: Mapping[str, Any], holds: str) -> dict[str, Any] | None:
    """The source that is noted in a folder with some further words, None for a folder without a note. `holds` says in
    an error what the folder has.

    Raises InvalidInput if the note is of another source.
    """
    if not (note := folder / FILE).exists():
        return None
    known: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    for name, other in NAMES.items():
        if known.get(name) != source[name]:
            raise InvalidInput(f"work has {holds} of {other}; give another folder", field="work")
    return known


def note_source(folder: Path, source: Mapping[str, Any]) -> None:
    """Notes the source in the folder."""
    write_atomic(folder / FILE, json.dumps(dict(source)).encode())
