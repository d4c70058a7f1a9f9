"""What stands above the text of a passage, where it is searched and where a model reads it."""

from __future__ import annotations

from collections.abc import Sequence

PASSAGE_TOKENS = 160  # at most, of one that is found
FIRST_LINES = 12  # of a text, among which its own headings are


def lines_above(title: str, headings: Sequence[str], text: str) -> tuple[str, ...]:
    """The title of a document and the headings above a passage, each once, without those that its text begins with."""
    said = {line.strip("# \t\r") for line in text.lstrip().split("\n", FIRST_LINES)[:FIRST_LINES]}
    return tuple(line for line in dict.fromkeys((title, *headings)) if line and line not in said)
