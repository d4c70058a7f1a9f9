"""Slides (PPTX) -> text: a page for each slide, with its title as a heading, and the speaker's notes below."""

from __future__ import annotations

from collections.abc import Iterator

from memlm.data.extract.blocks import Blocks
from memlm.data.extract.container import Container, Element, attribute, child, local
from memlm.data.extract.outcome import Extracted, Unreadable

PRESENTATION = "ppt/presentation.xml"
TITLES = frozenset({"title", "ctrTitle"})
LISTS = frozenset({"body", "obj", None})  # placeholders whose paragraphs are list items
NOT_OF_THE_SLIDE = frozenset({"sldNum", "dt", "ftr", "hdr", "sldImg"})


def read_pptx(data: bytes) -> Extracted:
    """The text of all slides, in their order, and the title of the presentation or its first slide."""
    container, blocks, titles = Container(data, "PowerPoint"), Blocks(), list[str]()
    for number, slide in enumerate(_slides(container)):
        if number:
            blocks.page()
        titles += _read_slide(blocks, container.xml(slide))
        for kind, part in container.relations(slide).values():
            if kind == "notesSlide" and part in container:
                _read_notes(blocks, container.xml(part))
    if blocks.is_blank:
        raise Unreadable("has no text: slides of pictures; run OCR on them first")
    return Extracted(blocks.text() + "\n", container.property("title") or next(iter(titles), ""))


def _slides(container: Container) -> Iterator[str]:
    relations = container.relations(PRESENTATION)
    for each in container.xml(PRESENTATION).iter():
        if local(each) == "sldId":
            # The id of the relation has a namespace, and the slide's own number has none.
            found = next((value for key, value in each.attrib.items() if key.endswith("}id")), "")
            if found in relations:
                yield relations[found][1]


def _read_slide(blocks: Blocks, slide: Element) -> list[str]:
    """Writes a slide, its title first. Returns its title, if it has one."""
    shapes = list(_shapes(slide))
    titles = [shape for shape in shapes if _placeholder(shape) in TITLES]
    title = " ".join(" ".join(text for _, text in _paragraphs(shape)) for shape in titles).strip()
    blocks.heading(title, 1)
    for shape in shapes:
        if shape not in titles and _placeholder(shape) not in NOT_OF_THE_SLIDE:
            _read_shape(blocks, shape)
    return [" ".join(title.split())] if title else []


def _shapes(slide: Element) -> Iterator[Element]:
    """The shapes with text and the tables, also those in groups, in the order of drawing."""
    waiting = [iter(slide)]
    while waiting:
        each = next(waiting[-1], None)
        if each is None:
            waiting.pop()
        elif local(each) in ("sp", "tbl"):
            yield each
        elif local(each) != "Fallback":
            waiting.append(iter(each))


def _placeholder(shape: Element) -> str | None:
    """The kind of a placeholder, "" for a shape that is none."""
    holder = child(shape, "nvSpPr", "nvPr", "ph")
    return "" if holder is None else attribute(holder, "type")


def _read_shape(blocks: Blocks, shape: Element) -> None:
    if local(shape) == "tbl":
        blocks.part()
        for row in (each for each in shape if local(each) == "tr"):
            blocks.row([" ".join(text for _, text in _paragraphs(cell)) for cell in row if local(cell) == "tc"])
        blocks.part()
        return
    paragraphs = [(level, text) for level, text in _paragraphs(shape) if text.strip()]
    blocks.part()
    for level, text in paragraphs:
        if _placeholder(shape) in LISTS:
            blocks.item(text, level)
        else:
            blocks.paragraph(text)
    blocks.part()


def _paragraphs(shape: Element) -> Iterator[tuple[int, str]]:
    """The depth and text of each paragraph."""
    for paragraph in shape.iter():
        if local(paragraph) == "p":
            level = attribute(child(paragraph, "pPr"), "lvl") or "0"
            pieces = [
                "\n" if local(each) == "br" else (each.text or "")
                for each in paragraph.iter()
                if local(each) in ("t", "br")
            ]
            yield (min(int(level), 8) if level.isdigit() else 0), "".join(pieces)


def _read_notes(blocks: Blocks, notes: Element) -> None:
    shapes = [shape for shape in _shapes(notes) if _placeholder(shape) == "body"]
    text = "\n".join(text for shape in shapes for _, text in _paragraphs(shape) if text.strip())
    blocks.paragraph(f"Notes: {text}" if text else "")
