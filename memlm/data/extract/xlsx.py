"""Workbooks (XLSX) -> text: a page for each sheet, with its name as a heading, and a line for each row.

Values are those that were saved with formulas. Dates and shares are written as such, other numbers in full.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

from memlm.data.extract.blocks import Blocks
from memlm.data.extract.container import Container, Element, attribute, child, local
from memlm.data.extract.outcome import Extracted, Unreadable

WORKBOOK = "xl/workbook.xml"
MAX_COLUMNS = 64  # of a row whose empty cells are kept, so that columns stand below one another
DATE, SHARE, NUMBER = "date", "share", ""
BUILT_IN = {
    **dict.fromkeys((*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)), DATE),
    9: SHARE,
    10: SHARE,
}
NOT_CODES = re.compile(r'"[^"]*"|\\.|\[[^\]]*\]|_.|\*.')
FIRST_DAY = datetime.datetime(1899, 12, 30, tzinfo=datetime.UTC)  # day 0, since day 60 is a leap day that was none
FIRST_DAY_1904 = datetime.datetime(1904, 1, 1, tzinfo=datetime.UTC)
LETTERS = re.compile(r"[A-Z]{1,3}")


def read_xlsx(data: bytes) -> Extracted:
    """The text of all sheets, in their order, and the title of the workbook."""
    container = Container(data, "Excel")
    workbook, relations = container.xml(WORKBOOK), container.relations(WORKBOOK)
    values, blocks = _Values(container, workbook, relations), Blocks()
    for each in workbook.iter():
        if local(each) != "sheet":
            continue
        found = next((value for key, value in each.attrib.items() if key.endswith("}id")), "")
        kind, part = relations.get(found, ("", ""))
        if kind == "worksheet" and part in container:
            if not blocks.is_blank:
                blocks.page()
            blocks.heading(each.get("name", ""), 1)
            for row in container.elements(part, "row"):
                blocks.row(_cells(row, values))
    if not values.has_some:
        raise Unreadable("has no text: no cell has a value")
    return Extracted(blocks.text() + "\n", container.property("title"))


class _Values:
    """The values of cells, by the texts and formats that the sheets share."""

    def __init__(self, container: Container, workbook: Element, relations: dict[str, tuple[str, str]]) -> None:
        parts = dict(relations.values())
        self._texts = list[str]()
        if (part := parts.get("sharedStrings", "")) in container:
            self._texts = [_rich_text(each) for each in container.elements(part, "si")]
        self._kinds = _formats(container.xml(part)) if (part := parts.get("styles", "")) in container else []
        is_1904 = attribute(child(workbook, "workbookPr"), "date1904") in ("1", "true")
        self._first_day = FIRST_DAY_1904 if is_1904 else FIRST_DAY
        self.has_some = False

    def of(self, cell: Element) -> str:
        """The text of a cell, "" for one without."""
        text = self._text(cell)
        self.has_some = self.has_some or bool(text.strip())
        return text

    def _text(self, cell: Element) -> str:
        kind, value = cell.get("t", "n"), child(cell, "v")
        if kind == "inlineStr":
            inline = child(cell, "is")
            return "" if inline is None else _rich_text(inline)
        raw = (value.text or "") if value is not None else ""
        if kind == "s":
            return self._texts[int(raw)] if raw.isdigit() and int(raw) < len(self._texts) else ""
        if kind == "b":
            return {"1": "TRUE", "0": "FALSE"}.get(raw, raw)
        return self._number(raw, cell.get("s", "")) if kind == "n" else raw

    def _number(self, raw: str, style: str) -> str:
        kind = self._kinds[int(style)] if style.isdigit() and int(style) < len(self._kinds) else NUMBER
        try:
            number = float(raw)
            if kind == DATE:
                return self._date(number)
            return f"{number * 100:.10g}%" if kind == SHARE else f"{number:.15g}"
        except (ValueError, OverflowError):
            return raw

    def _date(self, days: float) -> str:
        moment = self._first_day + datetime.timedelta(seconds=round(days * 86400))
        if days < 1:
            return moment.time().isoformat()
        return moment.date().isoformat() if days == int(days) else moment.replace(tzinfo=None).isoformat(" ")


def _cells(row: Element, values: _Values) -> list[str]:
    """The texts of a row. Empty cells before others are kept, so that columns stand below one another."""
    placed, place = dict[int, str](), 0
    for cell in row:
        if local(cell) == "c":
            found = LETTERS.match(cell.get("r", ""))
            place = _column(found[0]) if found else place + 1
            if text := values.of(cell):
                placed[place] = text
    if not placed or max(placed) > MAX_COLUMNS:
        return list(placed.values())
    return [placed.get(column, "") for column in range(1, max(placed) + 1)]


def _column(letters: str) -> int:
    number = 0
    for letter in letters:
        number = number * 26 + ord(letter) - ord("A") + 1
    return number


def _rich_text(holder: Element) -> str:
    return "".join(_plain_runs(holder))


def _plain_runs(holder: Element) -> Iterator[str]:
    """The runs of a text, without the marks that say how to pronounce it."""
    for each in holder:
        if local(each) == "t":
            yield each.text or ""
        elif local(each) == "r":
            yield from _plain_runs(each)


def _formats(styles: Element) -> list[str]:
    """The kind of the numbers of each style."""
    codes = {
        attribute(each, "numFmtId"): attribute(each, "formatCode") or ""
        for each in styles.iter()
        if local(each) == "numFmt"
    }
    formats = child(styles, "cellXfs")
    return [_format(attribute(each, "numFmtId") or "0", codes) for each in (formats if formats is not None else ())]


def _format(number: str, codes: dict[str | None, str]) -> str:
    if number not in codes:
        return BUILT_IN.get(int(number), NUMBER) if number.isdigit() else NUMBER
    code = NOT_CODES.sub("", codes[number]).lower()
    if "%" in code:
        return SHARE
    return DATE if re.search("[ymdhs]", code) and "general" not in code else NUMBER
