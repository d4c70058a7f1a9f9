"""HTML -> a light tree, and which parts of it are the page's own.

The markup is read as browsers do it in plain cases: an end tag closes all elements within its own, and a paragraph, a
list item or a cell ends where the next one begins. Elements are navigation by their name, role or class. Nothing is
judged by its words, or the share of its links: reference pages are lists of links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import TypeAlias

MAX_DEPTH = 256  # elements within one another; deeper ones are read as parts of the last
MAIN_SHARE = 0.4  # of a page's text, in the part that is called main

VOID = frozenset({
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
})  # fmt: skip
DROPPED = frozenset({
    "script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "audio", "video", "select",
    "button", "datalist", "nav", "dialog", "head",
})  # fmt: skip
HEADINGS = {f"h{level}": level for level in range(1, 7)}
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "center", "dd", "details", "dialog", "dir", "div", "dl",
    "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
    "hgroup", "hr", "html", "legend", "li", "main", "menu", "nav", "ol", "p", "pre", "search", "section", "summary",
    "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul", "caption", "frameset", "frame", "listing", "xmp",
    "optgroup", "option",
})  # fmt: skip
# What the beginning of an element ends, of those that are open within the nearest of the second.
ENDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "li": (frozenset({"li"}), frozenset({"ul", "ol", "menu", "dir"})),
    "dt": (frozenset({"dt", "dd"}), frozenset({"dl"})),
    "dd": (frozenset({"dt", "dd"}), frozenset({"dl"})),
    "tr": (frozenset({"tr"}), frozenset({"table"})),
    "td": (frozenset({"td", "th"}), frozenset({"table", "tr"})),
    "th": (frozenset({"td", "th"}), frozenset({"table", "tr"})),
    "thead": (frozenset({"thead", "tbody", "tfoot", "caption"}), frozenset({"table"})),
    "tbody": (frozenset({"thead", "tbody", "tfoot", "caption"}), frozenset({"table"})),
    "tfoot": (frozenset({"thead", "tbody", "tfoot", "caption"}), frozenset({"table"})),
}
# An end tag is looked for no further than in these: a stray </p> in a cell ends no paragraph around the table.
SCOPES = frozenset({"table", "td", "th", "object"})
PARAGRAPHS = frozenset({"p"})
PARAGRAPH_SCOPES = SCOPES | {"li", "dd", "div", "section"}
TABLE_PARTS = frozenset({"tr", "td", "th", "thead", "tbody", "tfoot", "caption"})
NAVIGATION_ROLES = frozenset({"navigation", "banner", "contentinfo", "search", "menu", "menubar", "complementary"})
AROUND = frozenset({"header", "footer", "aside"})  # navigation outside of the main part
NAVIGATION = re.compile(
    r"(?:^|[\s_-])(?:nav(?:bar|igation|header|footer|box|links?)?|side-?bar|sphinxsidebar\w*|related|breadcrumbs?"
    r"|(?:site|page|global|main)[-_]?(?:nav|menu|header|footer)|toc(?:tree-wrapper|-?box|-?list)?|contents-?list"
    r"|table-?of-?contents|footer(?:-text)?|skip-?(?:link|nav|to-?content)s?|headerlink|anchorlink|permalink"
    r"|cookie\w*|pagination|pager|menu|drop-?down|mw-editsection|mw-jump-link|noprint|printfooter|catlinks|viewcode-link"
    r"|copybtn|edit-?(?:this-?)?page|share-?(?:buttons?|links?)|social-?links?|advert\w*)(?:$|\s)",
    re.IGNORECASE,
)
HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
LAID_OUT = frozenset({"table", "ul", "ol", "dl", "pre"})
PHRASE, PARAGRAPHS_IN_CELLS, LAYOUT = "phrase", "paragraphs", "layout"  # what a cell of a table holds

Child: TypeAlias = "Element | str"


class Element:
    """An element with its contents."""

    __slots__ = ("children", "is_main", "is_navigation", "tag")

    def __init__(self, tag: str, *, is_navigation: bool = False, is_main: bool = False) -> None:
        self.tag, self.children = tag, list[Child]()
        self.is_navigation, self.is_main = is_navigation, is_main


class Tree(HTMLParser):
    """Builds the tree."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("html")
        self.title = ""
        self._open, self._in_title = [self.root], False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = not self.title
        if tag in ("html", "head", "body"):  # of which there is one each, whatever the markup repeats
            return
        if tag in ENDS:
            self._end_any(*ENDS[tag])
        elif tag in BLOCKS:
            self._end_any(PARAGRAPHS, PARAGRAPH_SCOPES)
        element = Element(tag)
        if attrs:
            _describe(element, attrs)
        self._open[-1].children.append(element)
        if tag not in VOID and len(self._open) < MAX_DEPTH:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)  # as XHTML means it

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        within = frozenset({"table"}) if tag in TABLE_PARTS else SCOPES
        for place in range(len(self._open) - 1, 0, -1):
            open_tag = self._open[place].tag
            if open_tag == tag:
                del self._open[place:]
                return
            if open_tag in within:
                return

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
            return
        self._open[-1].children.append(data)

    def unknown_decl(self, data: str) -> None:
        if data.startswith("CDATA["):
            self.handle_data(data[6:])

    def _end_any(self, tags: frozenset[str], within: frozenset[str]) -> None:
        for place in range(len(self._open) - 1, 0, -1):
            if self._open[place].tag in tags:
                del self._open[place:]
                return
            if self._open[place].tag in within:
                return


def _describe(element: Element, attrs: list[tuple[str, str | None]]) -> None:
    """Notes an element's place in the page."""
    given = dict(attrs)
    role = given.get("role") or ""
    element.is_main = role == "main"
    if element.is_main or element.tag in ("main", "body", "html", "article"):
        return
    names = f"{given.get('class') or ''} {given.get('id') or ''}"
    element.is_navigation = (
        role in NAVIGATION_ROLES
        or "hidden" in given
        or given.get("aria-hidden") == "true"
        or (len(names) > 1 and NAVIGATION.search(names) is not None)
        or HIDDEN.search(given.get("style") or "") is not None
    )


def main_part(root: Element, *, strict: bool) -> Element:
    """The part that is called main, or the whole page where most of the text is elsewhere."""
    if not strict:
        return root
    found = [each for each in below(root) if each.is_main or each.tag == "main"]
    found = found or [each for each in below(root) if each.tag == "article"]
    if len(found) == 1 and _size(found[0]) >= MAIN_SHARE * _size(root):
        return found[0]
    return root


def below(root: Element) -> Iterator[Element]:
    """All elements but those that are left out, parents first."""
    waiting = [root]
    while waiting:
        element = waiting.pop()
        yield element
        waiting += [
            child
            for child in reversed(element.children)
            if not isinstance(child, str) and child.tag not in DROPPED and not child.is_navigation
        ]


def _size(root: Element) -> int:
    """The characters of text in an element."""
    return sum(len(child) for each in below(root) for child in each.children if isinstance(child, str))


def text_of(root: Element, *, strict: bool, dropped: frozenset[str] = DROPPED) -> str:
    """The text in an element, without the parts that are left out."""
    pieces, waiting = list[str](), list[Child](reversed(root.children))
    while waiting:
        child = waiting.pop()
        if isinstance(child, str):
            pieces.append(child)
        elif child.tag == "br":
            pieces.append("\v")
        elif child.tag not in dropped and not (strict and child.is_navigation):
            if child.tag in BLOCKS:
                pieces.append(" ")
                waiting.append(" ")
            waiting += reversed(child.children)
    return "".join(pieces)


def rows_of(table: Element) -> Iterator[list[Element]]:
    """The cells of each row of a table, not of tables within."""
    for child in table.children:
        if isinstance(child, str):
            continue
        if child.tag in ("thead", "tbody", "tfoot"):
            yield from rows_of(child)
        elif child.tag == "tr":
            yield [cell for cell in child.children if not isinstance(cell, str) and cell.tag in ("td", "th")]


def kind_of(cell: Element) -> str:
    """The kind of a cell's contents."""
    paragraphs = 0
    for each in below(cell):
        if each.tag in LAID_OUT or each.tag in HEADINGS:
            return LAYOUT
        paragraphs += each.tag == "p"
    return PARAGRAPHS_IN_CELLS if paragraphs > 1 else PHRASE
