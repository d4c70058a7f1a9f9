"""PDF -> text with a form feed between pages, by PDFium (the extra `documents`).

Headings are those of the document's outline, where a line of the page is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from memlm.data.extract.blocks import MAX_CHARACTERS, PAGE_END
from memlm.data.extract.container import sensible_title
from memlm.data.extract.outcome import Extracted, Unreadable

MISSING = "PDF takes PDFium: pip install 'memlm[documents]'"
PASSWORD, SECURITY = 4, 5  # PDFium's FPDF_ERR_PASSWORD and FPDF_ERR_SECURITY
MAX_OUTLINE = 20_000  # entries
SPLIT_WORD = re.compile("[\\x02\\ufffe\\xad]\\s*\\n?")  # a hyphen where PDFium found a word cut
NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\ufffe\uffff]")
WORD = re.compile(r"\w+")
NUMBERED = re.compile(r"(?:[A-Z]\.)?\d+(?:\.\d+)*\.?\s+")  # sections, whose numbers an outline may leave out


def read_pdf(data: bytes) -> Extracted:
    """The text of all pages, and the title of the document's properties."""
    try:
        import pypdfium2 as pdfium
    except ImportError:
        raise Unreadable(MISSING) from None
    try:
        document = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        raise Unreadable(_why(error)) from None
    pages, characters = list[str](), 0
    headings = _outline(document)
    for number in range(len(document)):
        text = _with_headings(_page_text(document, number, pdfium.PdfiumError), headings.get(number, {}))
        characters += len(text) + 1
        if characters > MAX_CHARACTERS:
            raise Unreadable(f"has more than {MAX_CHARACTERS:,} characters of text; split it")
        pages.append(text)
    if not any(page.strip() for page in pages):
        raise Unreadable(f"has no text: {len(pages):,} pages of pictures; run OCR first, as ocrmypdf does")
    return Extracted(PAGE_END.join(pages) + "\n", sensible_title(_property(document, pdfium.PdfiumError)))


def _why(error: Any) -> str:
    code = getattr(error, "err_code", None)
    if code in (PASSWORD, SECURITY):
        return "is encrypted with a password; save it without one, as qpdf --decrypt does"
    return f"is no PDF that can be read ({error})"


def _property(document: Any, failure: type[Exception]) -> str:
    try:
        return str(document.get_metadata_value("Title"))
    except (failure, UnicodeError):
        return ""


def _page_text(document: Any, number: int, failure: type[Exception]) -> str:
    """The text of a page, "" for one that is damaged."""
    try:
        page = document[number]
        text_page = page.get_textpage()
        text = text_page.get_text_range()
        text_page.close()
        page.close()
    except failure:
        return ""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n")
    lines = (line.rstrip() for line in NO_TEXT.sub("", SPLIT_WORD.sub("", text)).split("\n"))
    return "\n".join(lines).strip("\n")


def _outline(document: Any) -> dict[int, dict[str, int]]:
    """The levels of headings by the words of their lines, for each page."""
    found = dict[int, dict[str, int]]()
    try:
        for count, entry in enumerate(document.get_toc(max_depth=6)):
            if count >= MAX_OUTLINE:
                break
            target = entry.get_dest()
            page = target.get_index() if target is not None else None
            if page is not None:
                found.setdefault(page, {})[_words(entry.get_title())] = entry.level + 1
    except Exception:  # PDFium's and pypdfium2's, of outlines that are wrong: the text is what counts
        return found
    return found


def _words(line: str) -> str:
    return " ".join(WORD.findall(line.lower()))


def _with_headings(text: str, headings: dict[str, int]) -> str:
    """A page's text whose lines that the outline names are headings."""
    return "\n".join(_marked(text.split("\n"), headings)).strip("\n") if headings else text


def _marked(lines: list[str], headings: dict[str, int]) -> Iterable[str]:
    for line in lines:
        words = _words(line)
        level = headings.get(words) or headings.get(_words(NUMBERED.sub("", line, count=1)))
        if words and level:
            yield f"\n{'#' * min(level, 6)} {line.strip()}\n"
        else:
            yield line
