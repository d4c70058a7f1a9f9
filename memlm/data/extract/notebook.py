"""Jupyter notebooks -> text: Markdown as it is, code, and its output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from memlm.data.extract.blocks import Blocks
from memlm.data.extract.encodings import decode
from memlm.data.extract.kinds import title_of_markdown
from memlm.data.extract.outcome import Extracted, Unreadable

MAX_OUTPUT = 2000  # characters that a cell printed


def read_notebook(data: bytes) -> Extracted:
    """The text of a notebook, and its first heading."""
    try:
        notebook = json.loads(decode(data))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is no notebook ({error})") from None
    blocks = Blocks()
    title = ""
    for cell in _cells(notebook):
        source = _text(cell.get("source", cell.get("input")))
        if cell.get("cell_type") == "code":
            blocks.code(source)
            for output in _dicts(cell.get("outputs")):
                blocks.code(_printed(output)[:MAX_OUTPUT])
        elif source.strip():
            blocks.markdown(source)
            title = title or title_of_markdown(source)
    if blocks.is_blank:
        raise Unreadable("has no text: no cell has a source")
    return Extracted(blocks.text() + "\n", title)


def _cells(notebook: Any) -> Iterator[dict[str, Any]]:
    """The cells of a notebook of any version."""
    if not isinstance(notebook, dict) or "nbformat" not in notebook:
        raise Unreadable("is no notebook (it lacks nbformat)")
    yield from _dicts(notebook.get("cells"))
    for sheet in _dicts(notebook.get("worksheets")):
        yield from _dicts(sheet.get("cells"))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    """A text, or the list of its lines, which hold their ends."""
    lines = value if isinstance(value, list) else [value]
    return "".join(line for line in lines if isinstance(line, str))


def _printed(output: dict[str, Any]) -> str:
    data = output.get("data")
    plain = data.get("text/plain") if isinstance(data, dict) else None
    return _text(output.get("text") or plain)
