"""URIs of documents, as resources and citations name them: `memlm:DATASTORE/DOCUMENT#L3-L9`, percent-encoded."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from memlm.errors import InvalidInput

SCHEME = "memlm:"
MAX_URI = 8192
_LINES = re.compile(r"L(\d{1,9})(?:-L(\d{1,9}))?")


class DocumentUri(NamedTuple):
    """The document that a URI names, and its lines, from 1: 0 for all."""

    store: str
    document_id: str
    first_line: int = 0
    last_line: int = 0


def uri_of(store: str, document_id: str, first_line: int = 0, last_line: int = 0) -> str:
    """The URI of a document, or of some of its lines."""
    lines = f"#L{first_line}-L{last_line}" if first_line else ""
    return f"{SCHEME}{quote(store, safe='')}/{quote(document_id)}{lines}"


def parse_uri(uri: str) -> DocumentUri:
    """The document and the lines of a URI. Raises InvalidInput for one of another form."""
    whole, _, fragment = uri.partition("#")
    store, _, document = whole.removeprefix(SCHEME).removeprefix("//").partition("/")
    lines = _LINES.fullmatch(fragment)
    is_known = whole.startswith(SCHEME) and len(uri) <= MAX_URI and store and document
    if not is_known or (fragment and not lines and not fragment.startswith("page=")):
        raise InvalidInput(
            f"uri is {uri[:200]!r}; expected memlm:DATASTORE/DOCUMENT, or with lines memlm:DATASTORE/DOCUMENT#L3-L9",
            field="uri",
        )
    first, last = (int(lines[1]), int(lines[2] or lines[1])) if lines else (0, 0)
    if lines and not 1 <= first <= last:
        raise InvalidInput(f"uri has the lines {fragment}; expected the first line, from 1, and the last", field="uri")
    return DocumentUri(_unquoted(store), _unquoted(document), first, last)


def _unquoted(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidInput(f"uri has {text[:200]!r}; expected UTF-8, percent-encoded", field="uri") from None
