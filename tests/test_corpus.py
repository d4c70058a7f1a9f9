import gzip
import json
from pathlib import Path

import pytest

from memlm.corpus import Corpus, Problem, UnusableText
from memlm.errors import InvalidInput, NotFound


def ids_of(*paths: Path, **options) -> list[str]:
    return [document.id for document in Corpus(paths, **options)]


def test_a_file_is_called_by_its_path_within_the_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert ids_of(tmp_path) == ["a.txt", "b/two.txt"]
    assert ids_of(tmp_path / "a.txt") == ["a.txt"]


def test_glob_chooses_files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.md").write_text("two")
    assert ids_of(tmp_path, glob="**/*.md") == ["a.md"]


def test_json_lines_keep_id_title_and_metadata(tmp_path):
    lines = [{"id": "x", "text": "hello", "title": "T", "year": 1999}, {"text": "no id"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second = Corpus([tmp_path])
    assert (first.id, first.text, first.title, first.metadata) == ("x", "hello", "T", {"year": 1999})
    assert second.id == "c.jsonl:2"


def test_gz_is_read_as_it_is(tmp_path):
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"id": "x", "text": "packed"}\n')
    with gzip.open(tmp_path / "t.txt.gz", "wb") as file:
        file.write(b"text")
    corpus = Corpus([tmp_path])
    assert [document.text for document in corpus] == ["packed", "text"]
    assert corpus.num_bytes == len('{"id": "x", "text": "packed"}\n') + len("text")


@pytest.mark.parametrize(
    ("name", "raw", "where"),
    [
        ("bad.txt", b"fine\nfine\n\xff\n", "bad.txt:3"),
        ("nul.txt", b"fine\n\0", "nul.txt:2"),
        ("empty.txt", b"", "empty.txt"),
        ("blank.txt", b" \n\t\n", "blank.txt"),
        ("bad.jsonl", b'{"text": "ok"}\n{"text": \n', "bad.jsonl:2"),
        ("list.jsonl", b"[1]\n", "list.jsonl:1"),
        ("notext.jsonl", b'{"id": 1}\n', "notext.jsonl:1"),
        ("idlist.jsonl", b'{"id": [], "text": "x"}\n', "idlist.jsonl:1"),
        ("bytes.jsonl", b'{"text": "ok"}\n\n{"text": "\xff"}\n', "bytes.jsonl:3"),
        ("surrogate.jsonl", b'{"text": "\\ud800"}\n', "surrogate.jsonl:1"),
        ("nul.jsonl", b'{"text": "a\\u0000"}\n', "nul.jsonl:1"),
        ("cut.txt.gz", gzip.compress(b"x" * 1000)[:20], "cut.txt.gz"),
    ],
)
def test_what_cannot_be_used_is_told_by_file_and_line(tmp_path, name, raw, where):
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "z.txt").write_text("good")
    problems: list[Problem] = []
    documents = list(Corpus([tmp_path], on_problem=problems.append))
    assert documents[-1].text == "good"
    assert where in [problem.where for problem in problems]
    with pytest.raises(UnusableText, match=where.replace(".", r"\.")):
        list(Corpus([tmp_path], on_error="fail"))


def test_a_missing_path_is_refused_before_work_starts(tmp_path):
    with pytest.raises(NotFound, match="nowhere"):
        Corpus([tmp_path / "nowhere"])


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="no text"):
        list(Corpus([tmp_path]))
    with pytest.raises(InvalidInput, match="no corpus"):
        Corpus([])


def test_documents_are_streamed(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n' * 3 + "broken")
    documents = iter(Corpus([tmp_path], on_error="fail"))
    assert [next(documents).text for _ in range(3)] == ["a"] * 3
    with pytest.raises(UnusableText):
        next(documents)
