"""The readers by kind. Each takes a file's bytes, gives its text and title, and raises Unreadable."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from memlm.data.extract.outcome import Extracted, Unreadable

MAX_TITLE = 500  # characters

TEXT = "text"  # in an encoding that has to be found out
READERS = {
    "html": "html.read_html",
    "pdf": "pdf.read_pdf",
    "docx": "docx.read_docx",
    "pptx": "pptx.read_pptx",
    "xlsx": "xlsx.read_xlsx",
    "epub": "epub.read_epub",
    "notebook": "notebook.read_notebook",
    "mail": "mail.read_mail",
    TEXT: "encodings.read_text",
}


def read(kind: str, data: bytes) -> Extracted:
    """The text of a file of some kind, here and without limits. Raises Unreadable."""
    module, _, name = READERS[kind].partition(".")
    reader: Callable[[bytes], Extracted] = getattr(import_module(f"memlm.data.extract.{module}"), name)
    text, title = reader(data)
    text = _storable(text)
    if not text.strip():
        raise Unreadable("has no text")
    return Extracted(text, " ".join(_storable(title).split())[:MAX_TITLE])


def _storable(text: str) -> str:
    """A text without NUL and halves of characters, which have no UTF-8."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")
