"""Bytes of a text -> the text, without the byte order mark that editors and spreadsheets put before it.

A mark also says that a text is UTF-16 or UTF-32, as Windows writes them. Without one, a text is UTF-8.
"""

from __future__ import annotations

import codecs
from pathlib import Path

MARKS = {  # the marks of UTF-32 first: that of UTF-16 begins one of them
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
MARK_BYTES = max(map(len, MARKS))


class InUtf8:
    """Turns a text into UTF-8 as its bytes come, without its mark. Bytes of UTF-8 are passed on, and not checked."""

    def __init__(self) -> None:
        self._head: bytes | None = b""  # until there are enough bytes for a mark
        self._decoder: codecs.IncrementalDecoder | None = None

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """Takes some bytes, and returns those that they make. Raises UnicodeDecodeError where the mark is wrong."""
        if self._head is not None:
            self._head += data
            if len(self._head) < MARK_BYTES and not final:
                return b""
            data, self._head = self._head, None
            mark = next((mark for mark in MARKS if data.startswith(mark)), b"")
            data = data[len(mark) :]
            if mark and MARKS[mark] != "utf-8":
                self._decoder = codecs.getincrementaldecoder(MARKS[mark])()
        return data if self._decoder is None else self._decoder.decode(data, final).encode()


def text_of(data: bytes) -> str:
    """The text of some bytes. Raises UnicodeDecodeError."""
    return InUtf8().feed(data, final=True).decode()


def read_text(path: Path) -> str:
    """The text of a file, with the line ends of `Path.read_text`. Raises OSError, and ValueError for other bytes."""
    return text_of(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")
