"""A folder of formats that people have, as a corpus reads it."""

import gzip
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import made_files as made
import pytest
from texts import make_text

from memlm.data import reading
from memlm.data.corpus import Corpus, Document, Problem, UnusableText
from memlm.data.extract import pool
from memlm.data.extract.pool import Limits
from memlm.indexing.build import build_index

pytest.importorskip("pypdfium2", reason="the extra `documents` is not installed")

NOTEBOOK = json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown", "source": "# N\nfrom a notebook"}]})
FILES = {
    "a.txt": b"plain",
    "b.html": b"<title>B</title><p>from a page",
    "c.pdf": made.pdf("from a pdf", "page two", title="C"),
    "d.docx": made.docx(made.paragraph("from word"), title="D"),
    "e.pptx": made.pptx(made.shape("from slides", "title")),
    "f.xlsx": made.xlsx({"F": '<row><c><v>7</v></c></row>'}),
    "g.epub": made.epub({"one": "<p>from a book"}, "G"),
    "h.ipynb": NOTEBOOK.encode(),
    "i.eml": b"Subject: I\nFrom: a@b.c\n\nfrom a mail",
    "j.md": b"---\nname: x\n---\n```\n# no\n```\n# J #\ntext",
    "k.html.gz": gzip.compress(b"<p>from a packed page"),
    "l.PY": b"# no title\nprint()",
}  # fmt: skip


def write(folder: Path, **files: bytes) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def read(folder: Path, **options) -> tuple[list[Document], dict[str, str]]:
    problems = list[Problem]()
    documents = list(Corpus([folder], on_problem=problems.append, **options))
    return documents, {problem.where: problem.why for problem in problems}


def test_each_format_is_text_under_its_files_name(tmp_path):
    write(tmp_path, **FILES)
    documents, problems = read(tmp_path)
    assert problems == {}
    assert [(each.id, each.title, each.metadata.get("format"), each.text.strip()) for each in documents] == [
        ("a.txt", "a.txt", None, "plain"),
        ("b.html", "B", "html", "from a page"),
        ("c.pdf", "C", "pdf", "from a pdf\n\f\npage two"),
        ("d.docx", "D", "docx", "from word"),
        ("e.pptx", "from slides", "pptx", "# from slides"),
        ("f.xlsx", "f.xlsx", "xlsx", "# F\n\n| 7 |"),
        ("g.epub", "G", "epub", "from a book"),
        ("h.ipynb", "N", "notebook", "# N\nfrom a notebook"),
        ("i.eml", "I", "mail", "# I\n\nFrom: a@b.c\n\nfrom a mail"),
        ("j.md", "J", None, "---\nname: x\n---\n```\n# no\n```\n# J #\ntext"),
        ("k.html.gz", "k.html.gz", "html", "from a packed page"),
        ("l.PY", "l.PY", None, "# no title\nprint()"),
    ]


def test_a_file_is_what_its_first_bytes_say_where_its_name_says_nothing(tmp_path):
    page = b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- a --><!DOCTYPE html><html><p>page"
    write(tmp_path, page=page, paper=made.pdf("paper"), **{"z.txt": b"<HTML><body>text"})
    documents, problems = read(tmp_path)
    assert problems == {}
    assert [(each.id, each.text, each.metadata) for each in documents] == [
        ("page", "page\n", {"format": "html"}),
        ("paper", "paper\n", {"format": "pdf"}),
        ("z.txt", "text\n", {"format": "html"}),
    ]


def test_a_text_of_comments_is_read_at_once(tmp_path):
    comments = "<!---->" * 1100
    write(tmp_path, **{"a.txt": comments.encode(), "b.txt": f"{comments}<html><p>x".encode()})
    assert [document.text for document in read(tmp_path)[0]] == [comments, "x\n"]


def test_order_is_that_of_the_names_however_long_each_takes(tmp_path):
    for number in range(60):
        kind = number % 3
        name, page = f"{number:02}.{('html', 'txt', 'eml')[kind]}", f"number {number} " * (1 + 5000 * (number == 3))
        (tmp_path / name).write_text(("<p>", "", "Subject: x\n\n")[kind] + page)
    names = [document.id for document in read(tmp_path)[0]]
    assert names == sorted(names)
    assert len(names) == 60
    assert read(tmp_path) == read(tmp_path)


def test_a_mailbox_has_a_document_for_each_message(tmp_path):
    box = (
        b"From a@b.c Mon Nov  2 10:00:00 2026\nSubject: one\n\nfirst\n>From here\nFrom the middle\n\n"
        b"From x\nnothing of a message\n\nFrom a@b.c Tue\nSubject: two\n\nsecond\n"
    )
    write(tmp_path, **{"in.mbox": box, "none.mbox": b"text\n"})
    documents, problems = read(tmp_path)
    assert [(each.id, each.title, each.text) for each in documents] == [
        ("in.mbox:1", "one", "# one\n\nfirst\nFrom here\nFrom the middle\n"),
        ("in.mbox:3", "two", "# two\n\nsecond\n"),
    ]
    assert problems == {
        "in.mbox:2": "is no message (it lacks From and Subject)",
        "none.mbox": "has no messages; one begins with a line 'From SENDER DATE'",
    }


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.zip", made.zipped({"a.txt": "x"}), "a packed archive"),
        ("unnamed", made.zipped({"a.txt": "x"}), "a packed archive"),
        ("a.tar.gz", gzip.compress(b"a.txt" + b"\0" * 600), "a packed archive"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c\0\0", "a packed archive"),
        ("a.odt", made.zipped({"a.txt": "x"}), "a format without a reader here"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0", "a format without a reader here"),
        ("a.rtf", rb"{\rtf1 x}", "a format without a reader here"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0", "a NUL byte, as in binary files"),
        ("scan.pdf", made.pdf("", ""), "has no text"),
        ("cut.pdf", made.pdf("x")[:80], "is no PDF that can be read"),
        ("a.html", b"<html><img>", "has no text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # packed bytes hold the time
)
def test_what_has_no_text_is_named_with_its_reason(tmp_path, name, content, reason):
    write(tmp_path, **{name: content, "z.txt": b"fine"})
    problems = list[Problem]()
    assert [each.id for each in Corpus([tmp_path], on_problem=problems.append)] == ["z.txt"]
    assert [(problem.where.partition(":")[0], problem.reason) for problem in problems] == [(name, reason)]
    with pytest.raises(UnusableText, match=reason):
        list(Corpus([tmp_path], on_error="fail"))


# From qpdf's documentation of how encryption is stored: a user password that is not the empty one.
LOCKED = (
    "/Encrypt<</Filter/Standard/V 1/R 2/P -4"
    "/O<0000000000000000000000000000000000000000000000000000000000000000>"
    "/U<1111111111111111111111111111111111111111111111111111111111111111>>>"
    "/ID[<00000000000000000000000000000000><00000000000000000000000000000000>]"
)


def test_an_encrypted_pdf_is_named_with_what_to_try(tmp_path):
    write(tmp_path, **{"a.pdf": made.pdf("secret", trailer=LOCKED), "z.txt": b"fine"})
    assert read(tmp_path)[1] == {"a.pdf": "is encrypted with a password; save it without one, as qpdf --decrypt does"}


def test_lines_that_an_outline_names_are_headings(tmp_path):
    write(
        tmp_path,
        **{"a.pdf": made.pdf("Ports\nIt has two.", "3.1.2 The gateway\nPorts", outline={"Ports": 0, "The gateway": 1})},
    )
    assert read(tmp_path)[0][0].text == "# Ports\n\nIt has two.\n\f\n# 3.1.2 The gateway\n\nPorts\n"


def test_without_the_extra_a_pdf_says_what_to_install_and_all_else_is_read(tmp_path, monkeypatch):
    write(tmp_path, **FILES)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "pypdfium2").is_dir()])
    documents, problems = read(tmp_path)
    assert problems == {"c.pdf": "PDF takes PDFium: pip install 'memlm[documents]'"}
    assert len(documents) == len(FILES) - 1


ZEROS = made.zipped({"word/document.xml": b"<a>" + b" " * (100 << 20) + b"</a>"})
CELLS = "<row>" + "<c><v>1</v></c>" * 1_000_000 + "</row>"
LAUGHS = '<!DOCTYPE a [<!ENTITY b "hahaha"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'
WHOLE = made.docx(made.paragraph("a word, and another one, and a third"))
PLACE = WHOLE.index(b"word/document.xml") + 60  # within the packed text
CHANGED = WHOLE[:PLACE] + bytes([WHOLE[PLACE] ^ 255]) + WHOLE[PLACE + 1 :]
OUTSIDE = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><document>&b;</document>'
HOSTILE = {
    "bomb.docx": (ZEROS, "unpacks to more than is read of one file"),
    "laughs.docx": (
        made.zipped({"word/document.xml": f"{LAUGHS}<document><body>&c;</body></document>"}), "declares a document type"
    ),
    "secret.docx": (
        made.zipped({"word/document.xml": OUTSIDE}),
        "declares a document type",
    ),
    "deep.docx": (made.docx("<w:sdt>" * 5000 + "</w:sdt>" * 5000), "is nested too deeply"),
    "wide.xlsx": (made.xlsx({"a": CELLS}), "takes more than 100 MiB of memory"),
    "changed.docx": (CHANGED, "is damaged (word/document.xml"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_named_and_the_rest_is_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(reading, "LIMITS", Limits(cpu_s=20, ram_bytes=100 << 20))
    content, why = HOSTILE[name]
    write(tmp_path, **{f"m-{name}": content, "a.html": b"<p>before", "z.html": b"<p>after"})
    documents, problems = read(tmp_path)
    assert [document.text for document in documents] == ["before\n", "after\n"]
    assert [*problems] == [f"m-{name}"]
    assert why in problems[f"m-{name}"]


def readers(monkeypatch, **readers: str) -> None:
    """Adds readers that do what a hostile file makes a real one do, in the children."""
    lines = [f"import memlm.data.extract.readers as r, {module}" for module in ("os", "signal", "time")]
    lines += [f"r.READERS[{kind!r}] = 'test.{kind}'" for kind in readers]
    body = "; ".join(lines)
    code = "import types; m = types.ModuleType('memlm.data.extract.test'); sys.modules[m.__name__] = m; " + "; ".join(
        f"m.{kind} = lambda data: {source}" for kind, source in readers.items()
    )
    factor = 1 if any("sleep" in source for source in readers.values()) else 60
    waits = f"import memlm.data.extract.worker as w; w.WALL_FACTOR = {factor}"
    monkeypatch.setattr(pool, "BOOT", pool.BOOT.replace("main()", f"{body}; {code}; {waits}; main()"))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its reader ended (SIGSEGV)"),
        ("any(iter(int, 1))", "takes more than 1 s of processor time"),
        ("time.sleep(60)", "takes more than 10 times 1 s to read"),
        ("b'x' * (1 << 32)", "takes more than 100 MiB of memory"),
        ("os._exit(3)", "its reader ended (code 3)"),
        ("os.write(2, b'noise') and print('noise') or 1 / 0", "is damaged (ZeroDivisionError"),
        ("os.close(0) or os.close(1) or time.sleep(60)", "takes more than 10 times 1 s"),
    ],
)
def test_a_reader_that_loops_grows_or_crashes_is_replaced(monkeypatch, source, why):
    readers(monkeypatch, bad=source, good="(data.decode(), '')")
    with pool.Extractor(Limits(cpu_s=1, ram_bytes=100 << 20), children=1) as extractor:
        for _ in range(2):
            assert extractor.extract("good", b"text").text == "text"
            with pytest.raises(pool.Unreadable) as caught:
                extractor.extract("bad", b"")
            assert why in str(caught.value)


def test_children_end_with_their_pool_and_with_their_parent(tmp_path):
    with pool.Extractor(Limits(), children=2) as extractor:
        assert extractor.extract("html", b"<p>x").text == "x\n"
        (child,) = extractor._started
    assert child._process.returncode == -signal.SIGKILL


def test_a_pool_that_was_closed_waits_for_no_file_and_starts_no_child():
    begun, goes_on = threading.Event(), threading.Event()

    def late() -> bytes:
        begun.set()
        assert goes_on.wait(60)
        return b"<p>x"

    with pool.Extractor(Limits(), children=1) as extractor:
        reading, waiting = (extractor.submit("html", late) for _ in range(2))
        assert begun.wait(60)
    assert not reading.done()
    goes_on.set()
    with pytest.raises(CancelledError):
        reading.result(60)
    assert waiting.cancelled()
    assert not extractor._started


def test_a_build_of_converted_files_goes_on_after_a_kill_as_if_there_was_none(tmp_path, model_folder):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        page = "".join(f"<h2>Part {part}</h2><p>{make_text(number * 9 + part, 300)}" for part in range(3))
        write(folder, **{f"{number:02}.html": page.encode(), f"{number:02}.pdf": made.pdf(f"page {number}", "two")})
    write(folder, **{"05.docx": b"PK nonsense"})
    whole = build_index(model_folder, Corpus([folder]), tmp_path / "whole", check="none")
    script = (
        "import os, signal, sys; from memlm.data.corpus import Corpus; from memlm.indexing.build import build_index\n"
        "from memlm.indexing import text; text.CHECKPOINT_TOKENS, text.AT_ONCE_DOCUMENTS = 1, 2\n"
        "def kill(phase, done, total, note=''):\n"
        "    if note.startswith('7 '): os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_index(sys.argv[1], Corpus([sys.argv[2]]), sys.argv[3], check='none', progress=kill)"
    )
    command = [sys.executable, "-c", script, str(model_folder), str(folder), str(tmp_path / "cut")]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    report = build_index(model_folder, Corpus([folder]), tmp_path / "cut", check="none")
    assert 0 < report.resumed_entries < report.entries == whole.entries
    first, second = (
        {
            file.name: file.read_bytes()
            for file in (tmp_path / name / "segments").rglob("*.npy")
            if file.name != "keys.npy"
        }
        for name in ("whole", "cut")
    )
    assert first == second
    assert "values.npy" in first


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child ends with its file")
def test_children_end_when_their_parent_is_killed(tmp_path, monkeypatch):
    """Also while they read."""
    readers(monkeypatch, slow="time.sleep(60)")
    script = (
        "import os, signal, sys, time; from memlm.data.extract import pool\n"
        "pool.BOOT = sys.argv[1]\n"
        "extractor = pool.Extractor(pool.Limits(), 2); extractor.extract('html', b'<p>x')\n"
        "extractor.submit('slow', bytes); extractor.submit('slow', bytes)\n"
        "while len(extractor._started) < 2: time.sleep(0.01)\n"
        "time.sleep(1)\n"
        "print(*[child._process.pid for child in extractor._started], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, pool.BOOT], capture_output=True, text=True)
    children = [Path(f"/proc/{child}") for child in done.stdout.split()]
    deadline = time.monotonic() + 20
    while any(child.exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [child.exists() for child in children] == [False, False]
