"""What a passage is, where it is cut, where it is searched and where a model reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PASSAGE_TOKENS = 256  # at most, of one that is found
CONVERTED = frozenset({"html", "pdf", "docx", "pptx", "xlsx", "epub", "notebook", "mail"})  # formats, into Markdown
PAGES = {"pdf": "page", "pptx": "slide", "xlsx": "sheet"}  # what a form feed ends in the text of a format
FIRST_LINES = 12  # of a text, among which its own headings are


def format_of(metadata: Mapping[str, Any]) -> str:
    """The format that a document was converted from, as its metadata says. "" for any other value."""
    value = metadata.get("format")
    return value if isinstance(value, str) and value in CONVERTED else ""


def lines_above(title: str, headings: Sequence[str], text: str) -> tuple[str, ...]:
    """The title of a document and the headings above a passage, each once, without those that its text begins with."""
    said = {line.strip("# \t\r") for line in text.lstrip().split("\n", FIRST_LINES)[:FIRST_LINES]}
    return tuple(line for line in dict.fromkeys((title, *headings)) if line and line not in said)
