"""Word documents (DOCX) -> text. Insertions are read and deletions are not, as in the document without marks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memlm.data.extract.blocks import Blocks, clean
from memlm.data.extract.container import Container, Element, attribute, child, local
from memlm.data.extract.outcome import Extracted, Unreadable

DOCUMENT = "officeDocument"
# Text that is not to be seen, the second way of drawing the same box, the words of a field's program, and properties.
SKIPPED = frozenset({"del", "moveFrom", "delText", "instrText", "Fallback", "pPr", "rPr", "tblPr", "tcPr", "sdtPr"})
SIGNS = {"tab": " ", "ptab": " ", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
HEADING_STYLE = re.compile(r"heading (\d)", re.IGNORECASE)
MAX_STYLES_UP = 16  # styles that a style is based on


def read_docx(data: bytes) -> Extracted:
    """The text of a document, and its title."""
    container = Container(data, "Word")
    main = next((part for kind, part in container.relations("").values() if kind == DOCUMENT), "word/document.xml")
    reader = _Reader(container, main)
    body = child(container.xml(main), "body")
    if body is not None:
        reader.read(body)
    reader.notes()
    if reader.blocks.is_blank:
        raise Unreadable("has no text")
    return Extracted(reader.blocks.text() + "\n", reader.title or container.property("title"))


class _Reader:
    def __init__(self, container: Container, main: str) -> None:
        self._container, self.blocks, self.title = container, Blocks(), ""
        self._parts = dict(container.relations(main).values())
        self._styles = self._read_styles()
        self._boxes = list[Element]()  # of the paragraph that is read
        self._in_list = False

    def _read_styles(self) -> dict[str, Element]:
        part = self._parts.get("styles", "")
        if part not in self._container:
            return {}
        return {attribute(each, "styleId") or "": each for each in self._container.xml(part) if local(each) == "style"}

    def read(self, body: Element) -> None:
        """Writes the contents of a body, a content control, a text box or a note."""
        for each in body:
            name = local(each)
            if name == "p":
                self._paragraph(each)
            elif name == "tbl":
                self._table(each)
            elif name not in SKIPPED:
                self.read(each)

    def notes(self) -> None:
        """Writes the footnotes and endnotes."""
        for kind in ("footnotes", "endnotes"):
            if (part := self._parts.get(kind, "")) in self._container:
                for note in self._container.xml(part):
                    if attribute(note, "type") in (None, "normal"):
                        text = " ".join(clean(self._text(each)) for each in note if local(each) == "p")
                        self.blocks.paragraph(f"[{_mark(kind, attribute(note, 'id'))}] {text}" if text.strip() else "")

    def _paragraph(self, paragraph: Element) -> None:
        self._boxes = []
        text, level = self._text(paragraph), self._level(paragraph)
        boxes = self._boxes
        depth = None if level is not None else self._depth(paragraph)
        if self._in_list and depth is None:
            self.blocks.part()
        if level is not None:
            self.blocks.heading(text, max(1, level))
            self.title = self.title or (" ".join(text.split()) if level == 0 else "")
        elif depth is not None:
            if not self._in_list:
                self.blocks.part()
            self.blocks.item(text, depth)
        else:
            self.blocks.paragraph(text)
        self._in_list = depth is not None
        for box in boxes:
            self.read(box)

    def _text(self, element: Element) -> str:
        return "".join(self._pieces(element))

    def _pieces(self, element: Element) -> Iterator[str]:
        waiting = [iter(element)]
        while waiting:
            each = next(waiting[-1], None)
            if each is None:
                waiting.pop()
                continue
            name = local(each)
            if name == "t":
                yield each.text or ""
            elif name in SIGNS:
                yield SIGNS[name]
            elif name in ("footnoteReference", "endnoteReference"):
                yield f" [{_mark(name, attribute(each, 'id'))}]"
            elif name == "txbxContent":
                self._boxes.append(each)
            elif name not in SKIPPED:
                waiting.append(iter(each))

    def _table(self, table: Element) -> None:
        """Rows of cells. A table of one column lays out a page."""
        rows = [[cell for cell in row.iter() if local(cell) == "tc"] for row in table.iter() if local(row) == "tr"]
        self.blocks.part()
        for row in rows:
            if len(row) == 1 and max(map(len, rows)) == 1:
                self.read(row[0])
            else:
                self.blocks.row([self._cell(cell) for cell in row])
        self.blocks.part()

    def _cell(self, cell: Element) -> str:
        return " ".join(self._text(each) for each in cell.iter() if local(each) == "p")

    def _level(self, paragraph: Element) -> int | None:
        """The level of a heading, 0 for the document's title, None for another paragraph."""
        properties = child(paragraph, "pPr")
        if (own := attribute(child(properties, "outlineLvl"), "val")) and own.isdigit() and int(own) < 9:
            return int(own) + 1
        for style in self._styles_of(properties):
            name = attribute(child(style, "name"), "val") or ""
            if found := HEADING_STYLE.fullmatch(name):
                return int(found[1])
            if name.lower() == "title":
                return 0
            outline = attribute(child(style, "pPr", "outlineLvl"), "val")
            if outline and outline.isdigit() and int(outline) < 9:
                return int(outline) + 1
        return None

    def _depth(self, paragraph: Element) -> int | None:
        """How many lists a list item is within, None for another paragraph."""
        properties = child(paragraph, "pPr")
        for holder in (properties, *(child(style, "pPr") for style in self._styles_of(properties))):
            numbers = child(holder, "numPr")
            if numbers is not None:
                depth = attribute(child(numbers, "ilvl"), "val") or "0"
                is_list = attribute(child(numbers, "numId"), "val") not in (None, "0")
                return min(int(depth), 8) if is_list and depth.isdigit() else None
        return None

    def _styles_of(self, properties: Element | None) -> Iterator[Element]:
        name = attribute(child(properties, "pStyle"), "val")
        for _ in range(MAX_STYLES_UP):
            style = self._styles.get(name or "")
            if style is None:
                return
            yield style
            name = attribute(child(style, "basedOn"), "val")


def _mark(kind: str, number: str | None) -> str:
    """The name of a note, in the text and at its end."""
    return f"{'note' if kind.startswith('foot') else 'end note'} {number}"
