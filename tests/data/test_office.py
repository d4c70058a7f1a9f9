import json

import made_files as made
import pytest

from memlm.data.extract.outcome import Unreadable
from memlm.data.extract.readers import read

STYLES = (
    '<w:style w:styleId="H2"><w:name w:val="heading 2"/></w:style>'
    '<w:style w:styleId="Mine"><w:name w:val="x"/><w:basedOn w:val="H2"/></w:style>'
    '<w:style w:styleId="T"><w:name w:val="Title"/></w:style>'
    '<w:style w:styleId="L"><w:name w:val="List"/><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
    '<w:style w:styleId="O"><w:pPr><w:outlineLvl w:val="2"/></w:pPr></w:style>'
)


def items(depth: int) -> str:
    return f'<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="3"/></w:numPr>'


def test_headings_and_lists_of_a_word_document_are_those_of_its_styles():
    body = "".join(
        [
            made.paragraph("The gateway", "T"), made.paragraph("Ports", "Mine"), made.paragraph("It has two:"),
            made.paragraph("7443", "L"), made.paragraph("inner", "", items(1)), made.paragraph("End."),
            made.paragraph("Deep", "O"),
        ]
    )  # fmt: skip
    text, title = read("docx", made.docx(body, STYLES, title="other"))
    assert text == "# The gateway\n\n## Ports\n\nIt has two:\n\n- 7443\n  - inner\n\nEnd.\n\n### Deep\n"
    assert title == "The gateway"


def test_text_of_a_word_document_is_what_a_reader_sees():
    body = (
        "<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r>"
        "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
        "<w:moveFrom><w:t>moved</w:t></w:moveFrom><w:ins><w:r><w:t> new</w:t></w:r></w:ins>"
        "<w:hyperlink><w:r><w:t> link</w:t></w:r></w:hyperlink><w:r><w:instrText>PAGE</w:instrText></w:r>"
        '<w:r><w:footnoteReference w:id="2"/></w:r></w:p>'
        "<w:sdt><w:sdtPr><w:t>no</w:t></w:sdtPr><w:sdtContent>"
        + made.paragraph("controlled")
        + "</w:sdtContent></w:sdt>"
        "<w:p><w:r><mc:AlternateContent xmlns:mc='m'><mc:Choice><w:txbxContent>"
        + made.paragraph("in a box")
        + "</w:txbxContent></mc:Choice><mc:Fallback><w:t>twice</w:t></mc:Fallback></mc:AlternateContent></w:r></w:p>"
        "<w:tbl><w:tr><w:tc>"
        + made.paragraph("A")
        + "</w:tc><w:tc>"
        + made.paragraph("B")
        + made.paragraph("C")
        + "</w:tc></w:tr></w:tbl>"
    )
    notes = f'<w:footnotes {made.W}><w:footnote w:type="separator"/><w:footnote w:id="2">{made.paragraph("foot")}'
    parts = {"word/footnotes.xml": notes + "</w:footnote></w:footnotes>"}
    text, title = read("docx", made.docx(body, title="Plan", **parts))
    assert text == ("a b\nc new link [note 2]\n\ncontrolled\n\nin a box\n\n| A | B C |\n\n[note 2] foot\n")
    assert title == "Plan"


def test_slides_are_pages_in_the_order_of_the_show():
    table = "<a:tbl><a:tr><a:tc><a:t>no paragraph</a:t></a:tc></a:tr></a:tbl>"
    first = (
        made.shape("Points", "title") + made.shape("one\n two", "body") + made.shape("free") + made.shape("7", "sldNum")
    )
    second = f"<p:grpSp>{made.shape('in a group')}</p:grpSp>{table}"
    text, title = read("pptx", made.pptx(first, second, notes="say it slowly", title="PowerPoint Presentation"))
    assert text == "# Points\n\n- one\n  - two\n\nfree\n\nNotes: say it slowly\n\f\nin a group\n"
    assert title == "Points"


CELLS = (
    '<row><c r="A1" t="s"><v>0</v></c><c r="C1" t="inlineStr"><is><t>in</t></is></c></row>'
    '<row><c r="A2" s="1"><v>45292</v></c><c r="B2" s="2"><v>0.255</v></c>'
    '<c r="C2"><v>0.30000000000000004</v></c></row>'
    '<row><c r="A3" t="b"><v>1</v></c><c r="B3" t="str"><f>A1</f><v>made</v></c>'
    '<c r="C3" s="3"><v>45292.75</v></c></row>'
    '<row><c r="A4"/></row><row><c r="XFD5"><v>9</v></c></row>'
)
FORMATS = (
    '<numFmts><numFmt numFmtId="170" formatCode="[$-409]d/m/yyyy\\ h:mm"/>'
    '<numFmt numFmtId="171" formatCode="0.0%"/></numFmts>'
    '<cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="171"/><xf numFmtId="170"/></cellXfs>'
)


def test_sheets_are_pages_whose_cells_are_what_a_reader_sees():
    strings = "<si><r><t>na</t></r><r><t>me</t></r><rPh><t>say</t></rPh></si>"
    sheets = {"Plan &amp; cost": CELLS, "Empty": "", "Two": '<row><c r="A1"><v>7</v></c></row>'}
    text, title = read("xlsx", made.xlsx(sheets, strings, FORMATS, title="Costs"))
    first = "| name |  | in |\n| 2024-01-01 | 25.5% | 0.3 |\n| TRUE | made | 2024-01-01 18:00:00 |\n| 9 |"
    assert text == f"# Plan & cost\n\n{first}\n\f\n# Empty\n\f\n# Two\n\n| 7 |\n"
    assert title == "Costs"


def test_chapters_of_a_book_are_read_in_their_order():
    book = made.epub({"one": "<h1>First</h1><p>a&nbsp;b</p>", "cover": "<img/>", "two": "<p>c</p>"})
    assert read("epub", book) == ("# First\n\na b\n\nc\n", "A book")


def test_a_book_that_is_encrypted_is_named():
    locked = '<encryption><CipherReference URI="OPS/one.xhtml"/></encryption>'
    with pytest.raises(Unreadable, match="encrypted against copying"):
        read("epub", made.epub({"one": "x"}, **{"META-INF/encryption.xml": locked}))
    fonts = '<encryption><CipherReference URI="OPS/font.otf"/></encryption>'
    assert read("epub", made.epub({"one": "x"}, **{"META-INF/encryption.xml": fonts})).text == "x\n"


def test_a_notebook_has_its_text_code_and_what_the_code_printed():
    cells = [
        {"cell_type": "markdown", "source": ["intro\n", "## Load\n", "text"]},
        {"cell_type": "code", "source": "# no heading\nprint(1)", "outputs": [
            {"output_type": "stream", "text": ["1\n"]}, {"data": {"text/plain": "2", "image/png": "iVBOR"}},
            {"output_type": "error", "traceback": ["no"]},
        ]},
    ]  # fmt: skip
    text, title = read("notebook", json.dumps({"nbformat": 4, "cells": cells}).encode())
    code = "```\n# no heading\nprint(1)\n```"
    assert text == f"intro\n## Load\ntext\n\n{code}\n\n```\n1\n```\n\n```\n2\n```\n"
    assert title == "Load"
    old = {"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "input": "x = 1"}]}]}
    assert read("notebook", json.dumps(old).encode()).text == "```\nx = 1\n```\n"


MESSAGE = b"""From: Ana <ana@example.org>\r
To: =?utf-8?q?J=C3=BCrgen?= <j@example.org>\r
Date: Mon, 2 Nov 2026 10:00:00 +0000\r
Subject: =?iso-8859-1?q?The_gr=F6=DFte?= gateway\r
MIME-Version: 1.0\r
Content-Type: multipart/mixed; boundary=b\r
\r
--b\r
Content-Type: multipart/alternative; boundary=c\r
\r
--c\r
Content-Type: text/plain; charset=iso-8859-1\r
Content-Transfer-Encoding: quoted-printable\r
\r
It listens on port 7443, J=FCrgen.\r
--c\r
Content-Type: text/html\r
\r
<p>the same\r
--c--\r
--b\r
Content-Type: application/pdf; name=plan.pdf\r
Content-Disposition: attachment; filename=plan.pdf\r
\r
%PDF\r
--b--\r
"""


def test_a_message_has_its_subject_people_and_text():
    text, title = read("mail", MESSAGE)
    assert text == (
        "# The größte gateway\n\nFrom: Ana <ana@example.org>\nTo: Jürgen <j@example.org>\n"
        "Date: Mon, 02 Nov 2026 10:00:00 +0000\nAttachments: plan.pdf\n\nIt listens on port 7443, Jürgen.\n"
    )
    assert title == "The größte gateway"


def test_a_message_of_markup_alone_is_read_without_markup():
    page = b"Subject: x\r\nContent-Type: text/html; charset=utf-8\r\n\r\n<h2>Hello</h2><p>there"
    assert read("mail", page).text == "# x\n\n## Hello\n\nthere\n"


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        ("docx", b"PK\x03\x04 nonsense", "is no Word file"),
        ("docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "encrypted, or in an old format"),
        ("docx", made.zipped({"a.txt": "x"}), "it lacks word/document.xml"),
        ("docx", made.docx(""), "has no text"),
        ("docx", made.docx("<w:p>")[:-200], "is no Word file"),
        ("docx", made.docx("<w:p>"), "is damaged (word/document.xml"),
        ("pptx", made.pptx(""), "run OCR"),
        ("xlsx", made.xlsx({"a": ""}), "no cell has a value"),
        ("epub", made.epub({"a": "<img/>"}), "run OCR"),
        ("epub", made.zipped({"META-INF/container.xml": "<container/>"}), "is no EPUB file"),
        ("notebook", b"{}", "lacks nbformat"),
        ("notebook", b"[" * 100_000, "is no notebook"),
        ("notebook", json.dumps({"nbformat": 4, "cells": [5, {"source": 7}]}).encode(), "no cell has a source"),
        ("mail", b"just text\n", "lacks From and Subject"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told(kind, data, why):
    with pytest.raises(Unreadable) as caught:
        read(kind, data)
    assert why in str(caught.value)
