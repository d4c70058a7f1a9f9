"""HTML -> text without markup, navigation, and the frame around the content of a page.

Where a page says which part of it is the main one, and enough of the text is there, the rest is left out.
"""

from __future__ import annotations

import re

from memlm.data.extract.blocks import Blocks, clean
from memlm.data.extract.encodings import declared_in_html, decode
from memlm.data.extract.html_tree import (
    AROUND,
    BLOCKS,
    DROPPED,
    HEADINGS,
    LAYOUT,
    PARAGRAPHS_IN_CELLS,
    Element,
    Tree,
    below,
    kind_of,
    main_part,
    rows_of,
    text_of,
)
from memlm.data.extract.outcome import Extracted, Unreadable

POWER = re.compile(r"[-+]?\w{1,8}")
HEAD_BYTES = 4096  # where a page says its encoding


def read_html(data: bytes) -> Extracted:
    """The text of a page, and its first heading if it has one of the first level, else its title."""
    return extract_html(decode(data, declared=declared_in_html(data[:HEAD_BYTES])))


def extract_html(markup: str) -> Extracted:
    """As `read_html`, for markup whose encoding is known. Raises Unreadable where nothing is left."""
    tree = Tree()
    tree.feed(markup)
    tree.close()
    for strict in (True, False):  # a page of nothing but navigation is an index, and that is its text
        part = main_part(tree.root, strict=strict)
        writer = _Writer(strict=strict, is_part=part is not tree.root)
        writer.write(part)
        if not writer.blocks.is_blank:
            title = writer.first_heading or " ".join(tree.title.split())
            return Extracted(writer.blocks.text() + "\n", title)
    raise Unreadable("has no text: a page of images or scripts")


class _Writer:
    """Writes an element as blocks of text. MAX_DEPTH bounds its recursion."""

    def __init__(self, *, strict: bool, is_part: bool) -> None:
        self.blocks, self.first_heading = Blocks(), ""
        self._strict, self._headings_1 = strict, 0
        self._inline = list[str]()
        self._items = list[bool]()  # the open list items, and whether the mark of each is still to be written
        self._gap = "\n\n"
        self._in_header = 0
        self._in_parts = int(is_part)  # articles and sections, within which a header or footer is content

    def write(self, element: Element) -> None:
        """Writes an element, and ends the last paragraph."""
        self._children(element)
        self._end_paragraph()
        if self._headings_1 > 1:
            self.first_heading = ""  # several of the first level are no title

    def _children(self, element: Element) -> None:
        for child in element.children:
            if isinstance(child, str):
                self._inline.append(child)
            elif not self._is_left_out(child):
                self._element(child)

    def _is_left_out(self, element: Element) -> bool:
        if not self._strict:
            return element.tag in DROPPED and element.tag != "nav"
        if element.tag in DROPPED or element.is_navigation:
            return True
        if self._in_header and element.tag in ("ul", "ol"):  # of languages, tags and tools
            return True
        return element.tag in AROUND and not self._in_parts

    def _element(self, element: Element) -> None:
        tag = element.tag
        if tag == "br":
            self._inline.append("\v")
        elif tag == "sup":
            text = text_of(element, strict=self._strict).strip()
            is_power = POWER.fullmatch(text) and not any(each.tag == "a" for each in below(element))
            self._inline.append(f"^{text}" if is_power else text)
        elif tag not in BLOCKS:
            self._children(element)
        elif write := _WRITERS.get(tag):
            self._end_paragraph()
            write(self, element)
            self._end_paragraph()
        else:
            self._end_paragraph()
            self._in_parts += tag in ("article", "section", "main")
            self._in_header += tag == "header"
            self._children(element)
            self._end_paragraph()
            self._in_header -= tag == "header"
            self._in_parts -= tag in ("article", "section", "main")

    def _end_paragraph(self) -> None:
        text = "".join(self._inline)
        self._inline.clear()
        if not text or text.isspace():
            return
        text = " ".join(text.split()) if "\v" not in text else _with_breaks(text)
        if not text:
            return
        if not self._items:
            self.blocks.paragraph(text, gap=self._gap)
        elif self._items[-1]:
            self.blocks.item(text, len(self._items) - 1)
            self._items[-1] = False
        else:
            self.blocks.paragraph(text, gap="\n")
        self._gap = "\n\n"

    def _heading(self, element: Element) -> None:
        text, level = self._inside(element, DROPPED - {"button"}), HEADINGS[element.tag]  # headings that open and close
        if level == 1 and text:
            self._headings_1 += 1
            self.first_heading = text
        if self._items:
            self._inline.append(text)
        else:
            self.blocks.heading(text, level)

    def _inside(self, element: Element, dropped: frozenset[str] = DROPPED) -> str:
        """The text of an element in one line."""
        return " ".join(text_of(element, strict=self._strict, dropped=dropped).split())

    def _list(self, element: Element) -> None:
        is_outer = not self._items
        if is_outer:
            self.blocks.part()
        self._children(element)
        if is_outer:
            self._end_paragraph()
            self.blocks.part()

    def _item(self, element: Element) -> None:
        self._items.append(True)
        self._children(element)
        self._end_paragraph()
        self._items.pop()

    def _term(self, element: Element) -> None:
        """A term stands right above its explanation."""
        self._children(element)
        self._end_paragraph()
        self._gap = "\n"

    def _code(self, element: Element) -> None:
        text = text_of(element, strict=self._strict)
        self.blocks.code(text.replace("\r\n", "\n").replace("\v", "\n"))
        self._gap = "\n\n"

    def _table(self, element: Element) -> None:
        """A line for each row, a paragraph where its cells hold several. Cells that lay out a page are read in turn."""
        for caption in element.children:
            if not isinstance(caption, str) and caption.tag == "caption":
                self.blocks.paragraph(self._inside(caption))
        self.blocks.part()
        for row in rows_of(element):
            kinds = {kind_of(cell) for cell in row}
            if LAYOUT in kinds:
                for cell in row:
                    self._children(cell)
                    self._end_paragraph()
                    self._gap = "\n" if cell.tag == "th" else self._gap
            elif PARAGRAPHS_IN_CELLS in kinds or len(row) == 1:
                self.blocks.paragraph("\n".join(line for cell in row for line in self._lines_of(cell)))
            else:
                self.blocks.row([self._inside(cell) for cell in row])
        self.blocks.part()

    def _lines_of(self, cell: Element) -> list[str]:
        """The paragraphs of a cell."""
        return [self._inside(each) for each in below(cell) if each.tag == "p"] or [self._inside(cell)]


_WRITERS = {
    **dict.fromkeys(HEADINGS, _Writer._heading),
    **dict.fromkeys(("ul", "ol", "menu", "dir"), _Writer._list),
    "li": _Writer._item,
    "dt": _Writer._term,
    **dict.fromkeys(("pre", "listing", "xmp"), _Writer._code),
    "table": _Writer._table,
}


def _with_breaks(text: str) -> str:
    """A paragraph with line ends where the markup has breaks, and nowhere else."""
    return clean("\n".join(" ".join(line.split()) for line in text.split("\v")))
