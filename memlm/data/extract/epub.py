"""Books (EPUB) -> the text of their chapters, in the order of reading."""

from __future__ import annotations

from memlm.data.extract.blocks import MAX_CHARACTERS
from memlm.data.extract.container import Container, Element, attribute, child, joined, local
from memlm.data.extract.html import read_html
from memlm.data.extract.outcome import Extracted, Unreadable

CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
PAGES = frozenset({"application/xhtml+xml", "text/html", "application/x-dtbook+xml"})


def read_epub(data: bytes) -> Extracted:
    """The text of a book, and its title."""
    container = Container(data, "EPUB")
    package = next(
        (attribute(each, "full-path") for each in container.xml(CONTAINER).iter() if local(each) == "rootfile"), ""
    )
    root = container.xml(package or "")
    chapters = _chapters(root, (package or "").rpartition("/")[0])
    if set(chapters) & _encrypted(container):
        raise Unreadable("is encrypted against copying; get it without")
    texts, characters = list[str](), 0
    for chapter in chapters:
        text = _text_of(container, chapter)
        characters += len(text)
        if characters > MAX_CHARACTERS:
            raise Unreadable(f"has more than {MAX_CHARACTERS:,} characters of text; split it")
        texts += [text.strip("\n")] if text.strip() else []
    if not texts:
        raise Unreadable("has no text: a book of pictures; run OCR on them first")
    title = child(root, "metadata", "title")
    words = "" if title is None else " ".join("".join(title.itertext()).split())
    return Extracted("\n\n".join(texts) + "\n", words)


def _chapters(root: Element, folder: str) -> list[str]:
    """The names of the pages, without that of the contents."""
    items = {attribute(each, "id"): each for each in root.iter() if local(each) == "item"}
    order = [items.get(attribute(each, "idref")) for each in root.iter() if local(each) == "itemref"]
    return [
        joined(folder, attribute(item, "href") or "")
        for item in order
        if item is not None
        and attribute(item, "media-type") in PAGES
        and "nav" not in (attribute(item, "properties") or "").split()
    ]


def _encrypted(container: Container) -> set[str]:
    if ENCRYPTION not in container:
        return set()
    found = (each for each in container.xml(ENCRYPTION).iter() if local(each) == "CipherReference")
    return {joined("", attribute(each, "URI") or "") for each in found}


def _text_of(container: Container, chapter: str) -> str:
    """The text of a chapter, "" for one that is not there or has none, as a cover."""
    if chapter not in container:
        return ""
    data = container.read(chapter)
    try:
        return read_html(data).text
    except Unreadable:
        return ""
