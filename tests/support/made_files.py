"""Small files of formats that people have, made by hand: what a test wants to be in them is all that is in them."""

import io
import zipfile

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
A = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
P = 'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main"'
S = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
R = 'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"'
KINDS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"


def zipped(parts: dict[str, str | bytes]) -> bytes:
    """An archive of some parts."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


def relations(**targets: str) -> str:
    """A part of relations: kind and target by id, as `rId1="slide slides/slide1.xml"`."""
    each = (
        f'<Relationship Id="{id_}" Type="{KINDS}{kind}" Target="{target}"/>'
        for id_, (kind, target) in ((id_, value.split()) for id_, value in targets.items())
    )
    return f'<Relationships xmlns="x">{"".join(each)}</Relationships>'


def core(title: str) -> str:
    """The part of a document's properties."""
    return f'<cp:coreProperties xmlns:cp="c" xmlns:dc="d"><dc:title>{title}</dc:title></cp:coreProperties>'


def docx(body: str, styles: str = "", title: str = "", **parts: str) -> bytes:
    """A Word document."""
    return zipped(
        {
            "_rels/.rels": relations(rId1="officeDocument word/document.xml"),
            "word/document.xml": f"<w:document {W}><w:body>{body}</w:body></w:document>",
            "word/_rels/document.xml.rels": relations(rId1="styles styles.xml", rId2="footnotes footnotes.xml"),
            "word/styles.xml": f"<w:styles {W}>{styles}</w:styles>",
            "docProps/core.xml": core(title),
            **parts,
        }
    )


def paragraph(text: str, style: str = "", properties: str = "") -> str:
    """A paragraph of a Word document."""
    style = f'<w:pStyle w:val="{style}"/>' if style else ""
    return f"<w:p><w:pPr>{style}{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def pptx(*slides: str, notes: str = "", title: str = "") -> bytes:
    """A presentation. Notes are those of the first slide."""
    numbers = range(1, len(slides) + 1)
    ids = "".join(f'<p:sldId id="{255 + number}" r:id="rId{number}"/>' for number in reversed(numbers))
    parts = {
        f"ppt/slides/slide{number}.xml": f"<p:sld {P} {A}><p:cSld><p:spTree>{slide}</p:spTree></p:cSld></p:sld>"
        for number, slide in zip(reversed(numbers), slides, strict=True)
    }
    last = len(slides)
    return zipped(
        {
            "ppt/presentation.xml": f"<p:presentation {P} {R}><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>",
            "ppt/_rels/presentation.xml.rels": relations(
                **{f"rId{number}": f"slide slides/slide{number}.xml" for number in numbers}
            ),
            f"ppt/slides/_rels/slide{last}.xml.rels": relations(rId1="notesSlide ../notesSlides/notesSlide1.xml"),
            "ppt/notesSlides/notesSlide1.xml": f"<p:notes {P} {A}>{shape(notes, 'body')}</p:notes>",
            "docProps/core.xml": core(title),
            **parts,
        }
    )


def shape(text: str, placeholder: str | None = None) -> str:
    """A shape of a slide: a paragraph for each line, as deep in a list as it is indented."""
    holder = "" if placeholder is None else f'<p:nvSpPr><p:nvPr><p:ph type="{placeholder}"/></p:nvPr></p:nvSpPr>'
    lines = "".join(
        f'<a:p><a:pPr lvl="{len(line) - len(line.lstrip())}"/><a:r><a:t>{line.strip()}</a:t></a:r></a:p>'
        for line in text.split("\n")
    )
    return f"<p:sp>{holder}<p:txBody>{lines}</p:txBody></p:sp>"


def xlsx(sheets: dict[str, str], strings: str = "", styles: str = "", title: str = "") -> bytes:
    """A workbook: the rows of each sheet."""
    ids = range(1, len(sheets) + 1)
    listed = "".join(f'<sheet name="{name}" r:id="rId{id_}"/>' for id_, name in zip(ids, sheets, strict=True))
    return zipped(
        {
            "xl/workbook.xml": f"<workbook {S} {R}><sheets>{listed}</sheets></workbook>",
            "xl/_rels/workbook.xml.rels": relations(
                **{f"rId{id_}": f"worksheet worksheets/sheet{id_}.xml" for id_ in ids},
                s1="sharedStrings sharedStrings.xml",
                s2="styles styles.xml",
            ),
            "xl/sharedStrings.xml": f"<sst {S}>{strings}</sst>",
            "xl/styles.xml": f"<styleSheet {S}>{styles}</styleSheet>",
            "docProps/core.xml": core(title),
            **{
                f"xl/worksheets/sheet{id_}.xml": f"<worksheet {S}><sheetData>{rows}</sheetData></worksheet>"
                for id_, rows in zip(ids, sheets.values(), strict=True)
            },
        }
    )


def epub(chapters: dict[str, str], title: str = "A book", **parts: str) -> bytes:
    """A book: the pages by their names, read in the reverse order of the manifest."""
    items = "".join(
        f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml"/>' for name in reversed(chapters)
    )
    spine = "".join(f'<itemref idref="{name}"/>' for name in chapters)
    return zipped(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<container><rootfiles><rootfile full-path="OPS/a.opf"/></rootfiles></container>',
            "OPS/a.opf": (
                f'<package xmlns:dc="d"><metadata><dc:title>{title}</dc:title></metadata><manifest>{items}'
                '<item id="nav" properties="nav" href="nav.xhtml" media-type="application/xhtml+xml"/></manifest>'
                f'<spine><itemref idref="nav"/>{spine}</spine></package>'
            ),
            "OPS/nav.xhtml": "<html><body><p>the contents</p></body></html>",
            **{f"OPS/{name}.xhtml": f"<html><body>{page}</body></html>" for name, page in chapters.items()},
            **parts,
        }
    )


def pdf(*pages: str, title: str = "", outline: dict[str, int] | None = None, trailer: str = "") -> bytes:
    """A document with a page for each text, "" for one of pictures, and headings by the number of their page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    headings = outline or {}
    first = 4 + 2 * len(pages)
    outlines = f"/Outlines {first} 0 R" if headings else ""
    objects = [
        f"<</Type/Catalog/Pages 2 0 R{outlines}>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, page in enumerate(pages):
        lines = "".join(f"({line}) Tj 0 -14 Td " for line in page.split("\n"))
        stream = f"BT /F1 12 Tf 72 720 Td {lines}ET" if page else ""
        objects += [
            "<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>"
            f"/Contents {5 + 2 * number} 0 R>>",
            f"<</Length {len(stream)}>>\nstream\n{stream}\nendstream",
        ]
    if headings:
        last = first + len(headings)
        objects.append(f"<</Type/Outlines/First {first + 1} 0 R/Last {last} 0 R/Count {len(headings)}>>")
        for place, (heading, page_number) in enumerate(headings.items(), start=first + 1):
            following = f"/Next {place + 1} 0 R" if place < last else ""
            objects.append(
                f"<</Title({heading})/Parent {first} 0 R{following}/Dest[{4 + 2 * page_number} 0 R/XYZ 0 0 0]>>"
            )
    objects.append(f"<</Title({title})>>")
    out, places = bytearray(b"%PDF-1.4\n"), list[int]()
    for number, each in enumerate(objects, start=1):
        places.append(len(out))
        out += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += f"trailer\n<</Size {len(objects) + 1}/Root 1 0 R/Info {len(objects)} 0 R{trailer}>>\n".encode()
    out += f"startxref\n{start}\n%%EOF".encode()
    return bytes(out)
