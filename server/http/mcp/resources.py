"""The documents of a host's datastores as resources: listed a page at a time, and read whole or by their lines."""

from __future__ import annotations

import base64
import json
from typing import NamedTuple

from memlm.api.datastores import ListDatastoresRequest
from memlm.api.documents import MAX_PART_TOKENS, ListDocumentsRequest, ReadDocumentRequest
from memlm.errors import InvalidInput
from memlm.server.http.mcp.tools import Host
from memlm.server.http.mcp.uris import DocumentUri, parse_uri, uri_of

PAGE_SIZE, STORES_A_PAGE = 100, 16
MAX_PARTS = 64  # of a document that are looked through for lines: a million tokens
MAX_CHARACTERS = 1 << 17  # of one reading
MORE_LINES = 999  # to read on
MIME_TYPE = "text/plain"  # of converted documents, too: their text is stored


class Listed(NamedTuple):
    """One resource. `name` is for people: the id, before which the datastore stands."""

    uri: str
    name: str
    title: str


class Page(NamedTuple):
    """Resources, and the cursor of the next page, empty on the last one."""

    documents: list[Listed]
    cursor: str


async def list_documents(host: Host, cursor: str = "") -> Page:
    """Some documents, by datastore and id. Raises InvalidInput for a cursor of another form."""
    begin, token = _place_of(cursor) if cursor else ("", "")
    stores = (await host.ask(ListDatastoresRequest())).datastores
    names = sorted(store.name for store in stores if not store.problem and store.name >= begin)
    found, following = list[Listed](), ""
    for name, following in zip(names[:STORES_A_PAGE], [*names[1:], ""], strict=False):  # noqa: B007 - read behind the loop
        page = await host.ask(ListDocumentsRequest(name, PAGE_SIZE - len(found), token if name == begin else ""))
        found += [Listed(uri_of(name, each.id), f"{name}/{each.id}", each.title) for each in page.documents]
        if page.next_page_token:
            return Page(found, _cursor_of(name, page.next_page_token))
        if len(found) == PAGE_SIZE:
            break
    return Page(found, _cursor_of(following, "") if following else "")


async def read_document(host: Host, uri: str) -> str:
    """The text of a document, or of the lines that a URI names, as far as it fits, with a note where it goes on. Raises
    InvalidInput for a URI of another form and for lines that are not there, and NotFound.
    """
    asked = parse_uri(uri)
    first, last = max(1, asked.first_line), asked.last_line or 1 << 62
    kept, size, line, offset = list[str](), 0, 1, 0
    for _ in range(MAX_PARTS):
        part = await host.ask(ReadDocumentRequest(asked.document_id, asked.store, offset, MAX_PART_TOKENS))
        text, line = _lines_of(part.text, line, first, last)
        kept.append(text)
        size, offset = size + len(text), offset + part.num_tokens
        if line > last or size > MAX_CHARACTERS or offset >= part.total_tokens:
            break
    else:
        if not size:
            raise InvalidInput(f"uri has the line {first:,}, which is too far on; search the document", field="uri")
    whole = "".join(kept)
    if asked.first_line and not whole:
        raise InvalidInput(f"uri has the line {first:,}; the document has {line:,} lines", field="uri")
    is_cut = size > MAX_CHARACTERS or (line <= last and offset < part.total_tokens)
    return _cut(whole, asked, first) if is_cut else whole


def _lines_of(text: str, line: int, first: int, last: int) -> tuple[str, int]:
    """The lines from `first` to `last` of a text that begins in a `line`, and the line in which it ends."""
    lines = text.split("\n")
    begin, end = max(0, first - line), max(0, last - line + 1)
    wanted = "\n".join(lines[begin:end])
    is_inner = begin < len(lines) and end < len(lines)
    return wanted + "\n" * (is_inner and end > begin), line + len(lines) - 1


def _cut(text: str, asked: DocumentUri, first: int) -> str:
    """As many whole lines as fit, or the begin of a longer one, and where to read on."""
    shown = text[:MAX_CHARACTERS]
    whole = shown[: shown.rfind("\n") + 1]
    following = first + (whole.count("\n") or 1)
    on = uri_of(asked.store, asked.document_id, following, max(following, asked.last_line or following + MORE_LINES))
    if not whole:
        return f"{shown}\n[Line {first} is longer than this. {on} has the lines behind it, if there are any.]\n"
    return f"{whole}\n[The document goes on. Read {on} for more.]\n"


def _cursor_of(store: str, token: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([store, token]).encode()).decode()


def _place_of(cursor: str) -> tuple[str, str]:
    try:
        store, token = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        if not isinstance(store, str) or not isinstance(token, str):
            raise TypeError
    except (ValueError, TypeError, RecursionError):
        raise InvalidInput(
            "cursor is none that this server gave; take nextCursor of a page, or begin without one", field="cursor"
        ) from None
    return store, token
