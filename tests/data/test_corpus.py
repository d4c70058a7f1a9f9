import datetime
import gzip
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from memlm.data import formats
from memlm.data.corpus import Corpus, Document, Problem, UnusableText
from memlm.data.synced_folder import SyncedFolder
from memlm.errors import InvalidInput, NotFound

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def ids_of(*paths: Path, **options) -> list[str]:
    return [document.id for document in Corpus(paths, **options)]


def test_a_file_is_called_by_its_path_within_the_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert ids_of(tmp_path) == ["a.txt", "b/two.txt"]
    assert ids_of(tmp_path / "a.txt") == ["a.txt"]


def test_documents_in_memory_are_a_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    documents = [Document("x", "hellö", "T", {"year": 1999}), Document("y", "there")]
    assert list(Corpus(documents)) == list(Corpus(iter(documents))) == documents
    mixed = Corpus([documents[0], tmp_path, documents[1]])
    assert [document.id for document in mixed] == ["a.txt", "x", "y"]
    assert list(replace(mixed, glob="*.md")) == documents
    assert mixed.num_bytes == len("one" + "hellö" + "there") + 1
    assert (mixed.label, Corpus(documents).label) == (f"{tmp_path.name}, 2 documents", "2 documents")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("/a/path", "corpus is '/a/path'; expected files, folders or documents in a list"),
        (Path("docs"), "in a list"),
        (Document("a", "text"), "in a list"),
        (None, "in a list"),
        ([5], "holds 5"),
        ([], "no corpus was given"),
        ([Document("", "text")], "document '': its id"),
        ([Document("a", " ")], "document 'a': \"text\" is missing"),
        ([Document("a", "b\0")], "NUL"),
        ([Document("a", "b", metadata={"x": math.nan})], "x is nan"),
    ],
)
def test_what_is_no_corpus_is_refused_at_once(given, says):
    with pytest.raises(InvalidInput) as caught:
        Corpus(given)
    assert says in str(caught.value)


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


def test_zst_is_read_as_it_is(tmp_path):
    """Also in several frames, as parallel packers write it."""
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(b'{"id": "x", "text": "packed"}\n'))
    (tmp_path / "t.txt.zst").write_bytes(zstd.compress(b"te") + zstd.compress(b"xt"))
    corpus = Corpus([tmp_path])
    assert [document.text for document in corpus] == ["packed", "text"]
    assert corpus.num_bytes == len('{"id": "x", "text": "packed"}\n') + len("text")


def test_size_of_a_large_packed_file_is_guessed(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "SAMPLE_BYTES", 300_000)
    text = "".join(f"{number * 7919 % 1000003} " for number in range(500_000)).encode()
    (tmp_path / "t.txt.zst").write_bytes(zstd.compress(text))
    assert abs(Corpus([tmp_path]).num_bytes / len(text) - 1) < 0.3


PARQUET_ROWS = [
    {"id": "x", "text": "hello", "title": "T", "day": datetime.date(2026, 11, 22), "tags": ["a", "b"]},
    {"id": None, "text": "no id", "title": None, "day": None, "tags": None},
    {"id": "empty", "text": "", "title": None, "day": None, "tags": None},
    {"id": "nul", "text": "a\0", "title": None, "day": None, "tags": None},
]


def test_parquet_keeps_id_title_and_metadata(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist(PARQUET_ROWS * 50), tmp_path / "c.parquet", row_group_size=70)
    problems = list[Problem]()
    corpus = Corpus([tmp_path], on_problem=problems.append)
    first, second, *rest = corpus
    assert (first.id, first.text, first.title) == ("x", "hello", "T")
    assert first.metadata == {"day": "2026-11-22", "tags": ["a", "b"]}
    assert (second.id, second.text, second.title) == ("c.parquet:2", "no id", "")
    assert len(rest) == 98
    assert [problem.where for problem in problems[:3]] == ["c.parquet:3", "c.parquet:4", "c.parquet:7"]
    assert corpus.num_bytes > 0


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    parquet.write_table(pyarrow.Table.from_pylist(PARQUET_ROWS), tmp_path / "c.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnusableText, match=r"pip install 'memlm\[parquet\]'"):
        list(Corpus([tmp_path], on_error="fail"))


@pytest.mark.parametrize("name", ["a", "a.gz", "A.GZ"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_tells_the_encoding_and_is_no_text(tmp_path, encoding, name):
    mark = "\ufeff".encode(encoding)
    rows = '{"id": "x", "text": "eins\u2028ä"}\r\n{"id": "y", "text": "zwei"}\r\n'
    stem, _, packing = name.partition(".")
    contents = {".jsonl": rows, ".txt": "hällo\nwörld\n", "-of-a-mark.txt": ""}
    for suffix, content in contents.items():
        raw = mark + content.encode(encoding)
        path = tmp_path / f"{stem}{suffix}{'.' * bool(packing)}{packing}"
        path.write_bytes(gzip.compress(raw) if packing else raw)
    problems = list[Problem]()
    texts = [document.text for document in Corpus([tmp_path], on_problem=problems.append)]
    assert sorted(texts) == ["eins\u2028ä", "hällo\nwörld\n", "zwei"]
    assert [problem.why for problem in problems] == ["empty"]


def test_a_text_that_is_not_what_its_mark_says_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfeabc")
    with pytest.raises(UnusableText, match=r"a\.txt: its byte order mark says utf-16-le, and it is not"):
        list(Corpus([tmp_path], on_error="fail"))


GOOD = {
    "t.txt.gz": gzip.compress(b"some text " * 100),
    "t.txt.zst": zstd.compress(b"some text " * 100, options={zstd.CompressionParameter.checksum_flag: 1}),
}


@pytest.mark.parametrize("name", [*GOOD, "t.parquet"])
@pytest.mark.parametrize("damage", ["cut", "other", "changed"])
def test_damaged_files_are_named(tmp_path, name, damage):
    if name not in GOOD:
        rows = [{"text": "some text " * 100 + str(number)} for number in range(10)]
        pages_alone = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name, **pages_alone)
    raw = GOOD.get(name) or (tmp_path / name).read_bytes()
    middle = len(raw) // 2
    early = len(raw) // 4  # in what is packed, not in what describes it
    changed = raw[:early] + b"\xff\xff" + raw[early + 2 :]
    (tmp_path / name).write_bytes({"cut": raw[:middle], "other": b"nonsense " * 9, "changed": changed}[damage])
    (tmp_path / "z.txt").write_text("fine")
    problems = list[Problem]()
    corpus = Corpus([tmp_path], on_problem=problems.append)
    assert corpus.num_bytes > 0
    assert [document.id for document in corpus] == ["z.txt"]
    assert [problem.where for problem in problems] == [name]


@pytest.mark.parametrize(
    ("piped", "told"),
    [
        (b"some text\nin lines\n", [["stdin", "some text\nin lines\n"]]),
        (b"\n[1, 2]\n", [["stdin", "\n[1, 2]\n"]]),
        (b'\n{"id": "x", "text": "one"}\n{"text": "two"}\n', [["x", "one"], ["stdin.jsonl:3", "two"]]),
        (b'\xef\xbb\xbf{"id": "x", "text": "one"}\n', [["x", "one"]]),
    ],
)
def test_standard_input_may_be_read_again(piped, told):
    script = (
        "import json; from memlm.data.corpus import Corpus; corpus = Corpus(['-'])\n"
        "print(json.dumps([corpus.num_bytes] + [[[d.id, d.text] for d in corpus] for _ in range(2)]))"
    )
    done = subprocess.run([sys.executable, "-c", script], input=piped, capture_output=True, check=True)
    assert json.loads(done.stdout) == [len(piped), told, told]


def test_a_file_that_is_called_as_standard_input_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-").write_text("in a file")
    assert [(document.id, document.text) for document in Corpus(["."])] == [("-", "in a file")]


def test_the_copy_of_standard_input_is_gone_after_a_kill(tmp_path):
    script = (
        "import os, signal; from memlm.data.corpus import Corpus\nfor document in Corpus(['-']): print(document.text)\n"
        "print(*os.listdir(os.environ['TMPDIR']), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=b"a secret", capture_output=True, env={**os.environ, "TMPDIR": tmp_path}
    )
    assert done.stdout.decode().split() == ["a", "secret"]  # nor has it a name while it is there
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_is_no_corpus(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(InvalidInput, match="nothing is piped in"):
        list(Corpus(["-"]))


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
        ("nan.jsonl", b'{"text": "x", "score": NaN}\n', "nan.jsonl:1"),
        ("huge.jsonl", b'{"text": "x", "a": {"b": [1, -1e999]}}\n', "huge.jsonl:1"),
        ("id.jsonl", b'{"text": "x", "id": "\\ud800"}\n', "id.jsonl:1"),
        ("title.jsonl", b'{"text": "x", "title": "\\udfff"}\n', "title.jsonl:1"),
        ("value.jsonl", b'{"text": "x", "a": ["\\ud800"]}\n', "value.jsonl:1"),
        ("key.jsonl", b'{"text": "x", "a": {"\\ud800": 1}}\n', "key.jsonl:1"),
        ("deep.jsonl", b'{"text": "x", "a": ' + b"[" * 200 + b"]" * 200 + b"}\n", "deep.jsonl:1"),
        ("time.jsonl", b'{"text": "x", "valid_from": "1.5.2024"}\n', "time.jsonl:1"),
        ("ids.jsonl", b'{"text": "x", "supersedes": [{"id": "a"}]}\n', "ids.jsonl:1"),
        ("cut.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:20], "cut.txt.gz"),
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


def test_a_file_whose_name_is_not_utf_8_is_left_out_with_a_message(tmp_path):
    """As Latin-1 systems wrote them: Python gives half a surrogate pair for such a byte."""
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("text")
    (tmp_path / "z.txt").write_text("good")
    problems: list[Problem] = []
    assert [document.id for document in Corpus([tmp_path], on_problem=problems.append)] == ["z.txt"]
    assert str(problems[0]).startswith("caf\\udce9.txt: the file's name is not UTF-8")
    with pytest.raises(UnusableText, match="rename the file"):
        list(Corpus([tmp_path], on_error="fail"))


def test_problems_of_hostile_names_are_one_line_without_control_characters(tmp_path):
    (tmp_path / "a\n\x1b]0;title\x07.txt").write_text("")
    problems: list[Problem] = []
    with pytest.raises(InvalidInput):
        list(Corpus([tmp_path], on_problem=problems.append))
    assert str(problems[0]) == "a\\n\\x1b]0;title\\x07.txt: empty"


def test_a_document_that_might_hold_at_other_times_is_left_out_and_told(tmp_path):
    rows = [{"text": "one", "valid_from": "1.5.2024"}, {"text": "two", "supersedes": ["a", None]}, {"text": "three"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems: list[Problem] = []
    assert [each.text for each in Corpus([tmp_path], on_problem=problems.append)] == ["three"]
    assert [str(each) for each in problems] == [
        "a.jsonl:1: not a JSON document (valid_from is '1.5.2024'; expected a date, as 2024-05-01, or a date and a"
        " time, as 2024-05-01T09:30+02:00)",
        "a.jsonl:2: not a JSON document (supersedes is ['a', None]; expected the id of a document, or a list of ids)",
    ]
    with pytest.raises(InvalidInput, match="document 'a': valid_from is 'soon'"):
        Corpus([Document("a", "text", metadata={"valid_from": "soon"})])


def test_dates_and_lists_of_a_parquet_table_tell_versions(tmp_path):
    day = datetime.datetime(2024, 5, 1, 9, 30, tzinfo=datetime.UTC)
    rows = [{"text": "one", "valid_from": day.date(), "supersedes": ["a", "b"]}, {"text": "two", "valid_from": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["three"], "valid_from": [day]}), tmp_path / "b.parquet")
    documents = list(Corpus([tmp_path], on_error="fail"))
    assert [each.metadata for each in documents] == [
        {"valid_from": "2024-05-01", "supersedes": ["a", "b"]}, {}, {"valid_from": "2024-05-01 09:30:00+00:00"},
    ]  # fmt: skip


def test_nan_in_a_parquet_column_is_a_missing_value(tmp_path):
    rows = [{"text": "one", "score": math.nan, "deep": {"x": math.nan}}, {"text": "two", "score": math.inf}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    problems: list[Problem] = []
    documents = list(Corpus([tmp_path], on_problem=problems.append))
    one, two = documents
    assert one.metadata == {"deep": {"x": None}}
    assert (two.text, two.metadata) == ("two", {})  # the infinity alone is left out, and told
    assert str(problems[0]).startswith("c.parquet:2: 'score' holds NaN or an infinity")


@pytest.mark.parametrize(
    ("given", "id_"),
    [
        (0, "0"),
        (7, "7"),
        (1.0, "1"),
        ("a", "a"),
        ("0", "0"),
        (None, "c.jsonl:1"),
        ("", "c.jsonl:1"),
        (10**30, "1" + "0" * 30),
    ],
)
def test_an_id_is_a_text_or_a_whole_number(tmp_path, given, id_):
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": given, "text": "x"}))
    assert ids_of(tmp_path) == [id_]


@pytest.mark.parametrize("given", [True, False, [1], {}, 1.5, 1e300])
def test_another_id_is_refused_and_told(tmp_path, given):
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": given, "text": "x"}))
    with pytest.raises(UnusableText, match=r'c\.jsonl:1: .*"id" is .*; expected a text or a whole number'):
        list(Corpus([tmp_path], on_error="fail"))


@pytest.mark.parametrize(("given", "kept"), [(None, {}), (5, {"title": 5}), (["a"], {"title": ["a"]})])
def test_a_title_that_is_no_text_is_no_title(tmp_path, given, kept):
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "a", "text": "x", "title": given}))
    (document,) = Corpus([tmp_path])
    assert (document.title, document.metadata) == ("", kept)


def test_a_pipe_is_not_read_before_it_is_wanted():
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write("the text of a pipe")
    try:
        corpus = Corpus([f"/dev/fd/{reading}"])
        corpus.require_text()
        assert [document.text for document in corpus] == ["the text of a pipe"]
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    "name", ["page.html", "text.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "rows.parquet", "in.mbox"]
)
def test_a_named_pipe_is_named_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "z.txt").write_text("fine")
    problems = list[Problem]()
    corpus = Corpus([tmp_path / name, tmp_path / "z.txt"], on_problem=problems.append)
    signal.alarm(30)  # ends this process where it waits for a writer
    try:
        assert corpus.num_bytes < 100
        assert [document.text for document in corpus] == ["fine"]
    finally:
        signal.alarm(0)
    assert [problem.where for problem in problems] == [name]
    assert "no regular file" in problems[0].why


def test_a_corpus_that_is_to_fail_does_so_before_its_first_document_is_used(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\0")
    Corpus([tmp_path]).require_text()
    with pytest.raises(UnusableText, match=r"b\.txt:1"):
        Corpus([tmp_path], on_error="fail").require_text()


def test_an_infinite_figure_is_left_out_and_told(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "x", "a": [1, Infinity], "b": NaN, "c": 1}')
    problems = list[Problem]()
    (document,) = Corpus([tmp_path], on_problem=problems.append)
    assert document.metadata == {"c": 1}
    assert [problem.why[:3] for problem in problems] == ["'a'", "'b'"]


def test_two_files_of_one_name_are_called_by_their_folders(tmp_path):
    for name in ("x/README.md", "x/a.txt", "y/README.md", "y/rows.jsonl", "z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a row"}' if name.endswith(".jsonl") else name)
    x, y = tmp_path / "x", tmp_path / "y"
    assert ids_of(x, tmp_path / "z.txt") == ["README.md", "a.txt", "z.txt"]
    expected = ["x/README.md", "a.txt", "y/README.md", "rows.jsonl:1", "z.txt"]
    assert ids_of(x, y, tmp_path / "z.txt") == expected
    (y / "x").mkdir()
    (y / "x/README.md").write_text("another")  # by its own name in its folder what the first is called apart
    expected = ["x/README.md", "x/a.txt", "y/README.md", "y/rows.jsonl:1", "y/x/README.md"]
    assert sorted(ids_of(x, y)) == expected
    assert ids_of(x / "README.md", y / "README.md") == ["x/README.md", "y/README.md"]
    assert ids_of(x, x) == ["README.md", "a.txt"]  # one file, once


@pytest.mark.parametrize("mode", [0, 0o444])
def test_a_folder_that_cannot_be_read_is_told(tmp_path, mode):
    """In a process of another user where this one may read everything."""
    for name in ("a.txt", "locked/b.txt", "left-out/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
        (tmp_path / name).chmod(0o644)  # whatever the umask
    (tmp_path / ".gitignore").write_text("left-out/\n")
    (tmp_path / ".gitignore").chmod(0o644)
    (tmp_path / "left-out").chmod(0)
    (tmp_path / "locked").chmod(mode)
    tmp_path.chmod(0o755)
    script = (
        "import os; from memlm.data.corpus import Corpus, UnusableText\n"
        "from memlm.errors import InvalidInput, NotFound\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "problems = []\n"
        "print([document.id for document in Corpus(['.'], on_problem=problems.append)], *problems)\n"
        "try: list(Corpus(['.'], on_error='fail'))\n"
        "except UnusableText as error: print('refused', error)\n"
        "try: list(Corpus(['locked']))\n"
        "except InvalidInput as error: print('refused', error)\n"
        "try: list(Corpus(['locked/b.txt']))\n"
        "except (NotFound, InvalidInput) as error: print('refused', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=True, text=True)
    (tmp_path / "locked").chmod(0o755)
    (tmp_path / "left-out").chmod(0o755)
    told, *refused = done.stdout.splitlines()
    assert told.startswith("['a.txt'] locked")
    assert "cannot be read" in told
    assert refused[0].startswith("refused locked")
    assert len(refused) == 3
    assert all("cannot be read (Permission denied)" in line for line in refused)
    assert "left-out" not in done.stdout


@pytest.mark.parametrize(
    "glob",
    ["**/*", "*", "**/*.txt", "*/*", "a/**/*", "**/b/*", "**/*/c.txt", "a/b/c.txt", "[ab]*", "**/.*", "*/b", "**",
     "**/**/*", "a/./b/*", "link/*", "**/link/*"],
)  # fmt: skip
def test_a_glob_chooses_the_files_that_pathlib_chooses(tmp_path, glob):
    for name in ("a/b/c.txt", "a/b/d.md", "b/c.txt", "c.txt", ".h", "a/.h/x.txt", "b.d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    expected = sorted(path for path in tmp_path.glob(glob) if path.is_file())
    found = [path for _, path in Corpus([tmp_path], glob=glob, hidden=True).files()]
    assert found == ([] if glob == "**" else expected)  # which Python 3.13 lets match files


@pytest.mark.parametrize(
    ("name", "raw", "why"),
    [
        ("bad.jsonl", b'{"text": "a', r"bad\.jsonl:1: not a JSON document \(Unterminated string"),
        ("no.jsonl", b'{"id": 1}', r'no\.jsonl:1: .*"text" is missing'),
        ("a.png", b"PNG\0\0", r"a\.png:1: a NUL byte, as in binary files; convert the file"),
        ("empty.txt", b"", r"empty\.txt: empty"),
    ],
)
def test_the_error_of_a_corpus_without_text_has_the_reason(tmp_path, name, raw, why):
    (tmp_path / name).write_bytes(raw)
    for given in (tmp_path / name, tmp_path):
        with pytest.raises(InvalidInput, match=rf"no text was found under .*; nothing was built \({why}"):
            list(Corpus([given]))
    with pytest.raises(InvalidInput, match=r"under \S* with glob '\*\.md'; nothing was built$"):
        list(Corpus([tmp_path], glob="*.md"))


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


@pytest.mark.parametrize(
    "glob",
    ["../*", "../*/*", "a/../../*", "**/../*", "/etc/*", "//etc/*", "", ".", "./", "..", "a\0b", "**x", "a/b**/c",
     "/".join(["**"] * 5), "/".join("a" * 65), "../../../../**/*"],
)  # fmt: skip
def test_a_glob_stays_within_its_folder(tmp_path, glob):
    (tmp_path / "in").mkdir()
    (tmp_path / "out.txt").write_text("outside")
    with pytest.raises(InvalidInput, match="expected") as refused:
        Corpus([tmp_path / "in"], glob=glob)
    assert refused.value.field == "glob"


@pytest.mark.parametrize("glob", ["*", "*.txt", "**/*", "**/*.txt", "a/*", "[ab]/?.txt", "a/./*", "..a/*", "a..b"])
def test_a_glob_within_its_folder_is_taken(tmp_path, glob):
    Corpus([tmp_path], glob=glob)


def test_what_lies_outside_of_the_roots_is_neither_listed_nor_measured_nor_opened(tmp_path):
    """Through a linked file, a linked folder, and a path that is not under the root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "in.txt").write_text("inside")
    (outside / "secret.txt").write_text("s" * 1000)
    (outside / "secret.txt.gz").write_bytes(gzip.compress(b"s" * 1000))
    os.mkfifo(outside / "pipe.zst")
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "folder").symlink_to(outside)
    problems = list[Problem]()
    corpus = Corpus([root, outside], glob="*", roots=[root], on_problem=problems.append)
    inner = Corpus([root], glob="*/*", roots=[root], on_problem=problems.append)
    assert [name for name, _ in corpus.files()] == ["in.txt"]
    assert (corpus.num_bytes, inner.num_bytes) == (len("inside"), 0)
    assert [document.id for document in corpus] == ["in.txt"]
    with pytest.raises(InvalidInput, match="no text was found"):
        list(inner)
    assert [problem.where for problem in problems] == ["link.txt"]  # nor is the number of the other files told


@contextmanager
def nested(folder: Path, levels: int, name: str) -> Iterator[Path]:
    """A folder with a file in its innermost one, whose path may be longer than the system takes, and is removed."""
    top = folder / "top"
    top.mkdir()
    (top / "a.txt").write_text("the text on top")
    with chdir(top):
        for _ in range(levels):
            os.mkdir(name)
            os.chdir(name)
        Path("far.txt").write_text("far below")
    try:
        yield top
    finally:  # Python's own removal calls itself for each level
        subprocess.run(["rm", "-r", top], check=True)


def test_a_folder_may_be_nested_deeper_than_calls_may(tmp_path):
    with nested(tmp_path, levels := 1100, "d") as top:
        assert [name for name, _ in Corpus([top]).files()] == ["a.txt", "d/" * levels + "far.txt"]
        folder = SyncedFolder(Corpus([top]))
        assert len(list(folder.documents())) == 2
        assert len(folder.files()) == 2
        assert folder.doubtful() == set()


def test_a_folder_whose_path_is_too_long_is_told_and_the_rest_is_read(tmp_path):
    with nested(tmp_path, 25, "d" * 200) as top:
        problems = []
        assert [each.id for each in Corpus([top], on_problem=problems.append)] == ["a.txt"]
        (problem,) = problems
        assert str(problem).endswith("d: cannot be read (File name too long); what is in it is left out")
