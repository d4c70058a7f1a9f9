"""The outcome of reading a file."""

from __future__ import annotations

from typing import NamedTuple


class Extracted(NamedTuple):
    """The text of a file, like Markdown, and the document's own title, "" where it has none."""

    text: str
    title: str = ""


class Unreadable(Exception):
    """A file that holds no text, or none that can be read. Its message is the reason, and advice.

    `line` is where that was found, 0 where it is not one line's.
    """

    def __init__(self, why: str, *, line: int = 0) -> None:
        super().__init__(why)
        self.line = line
