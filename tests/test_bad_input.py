"""Values that JSON or UTF-8 cannot hold, and control characters: refused where they come in, escaped where printed."""

import io
import json
import math
import os
import shutil
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from random_stores import DEFAULTS, spec
from running import RunningServer

import memlm
from memlm.api.datastores import NewDocument
from memlm.base.printable import one_line, printable, printable_json
from memlm.cli import main
from memlm.client import Client
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput, NotFound
from memlm.index.store.datastore import Datastore
from memlm.index.store.writer import StoreWriter
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.v1 import datastores_pb2
from memlm.v1.datastores_pb2_grpc import DatastoresStub
from memlm.wire import codec

HALF = "\ud800"
TITLE_A_WINDOW = "\x1b]0;owned\x07"
ALLOWED = set("\n\t")
UNSTORABLE = [
    ({"document_id": f"a{HALF}"}, "id"),
    ({"title": HALF}, "title"),
    ({"metadata": {"a": math.nan}}, "metadata"),
    ({"metadata": {"a": {"b": [-math.inf]}}}, "metadata"),
    ({"metadata": {"a": HALF}}, "metadata"),
    ({"metadata": {HALF: 1}}, "metadata"),
    ({"metadata": {"a": b"bytes"}}, "metadata"),
]


@pytest.mark.parametrize(("values", "field"), UNSTORABLE)
def test_a_store_refuses_values_that_json_and_utf8_cannot_hold(tmp_path, values, field):
    with StoreWriter.create(tmp_path / "store", spec()) as writer:
        with pytest.raises(InvalidInput, match=f"document .*{field}") as raised:
            writer.begin_document(**{"document_id": "a", **values})
        assert raised.value.field == f"documents.{field}"
        writer.begin_document("b")
        writer.append(np.ones((2, 12), np.float32), np.arange(2))
        with writer.commit(defaults=DEFAULTS) as store:
            assert [document.id for document in store.snapshot.documents()] == ["b"]


def test_an_id_that_is_no_text_names_no_document(tmp_path):
    with StoreWriter.create(tmp_path / "store", spec()) as writer:
        writer.begin_document("a")
        writer.append(np.ones((2, 12), np.float32), np.arange(2))
        writer.commit(defaults=DEFAULTS).close()
    with Datastore.open(tmp_path / "store") as store, pytest.raises(NotFound, match="nothing was changed"):
        store.delete([f"a{HALF}"])


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda lm: lm.search(None, [1, 2]), "text"),
        (lambda lm: lm.search(None, b"bytes", by="words"), "text"),
        (lambda lm: lm.trace([1, 2]), "text"),
        (lambda lm: lm.loglikelihood([1], "x"), "context"),
        (lambda lm: lm.loglikelihood("x", None), "continuation"),
        (lambda lm: lm.tokenize([1]), "text"),
        (lambda lm: lm.remember_feedback("x", 5), "feedback"),
        (lambda lm: lm.get_datastore(5), "store"),
        (lambda lm: lm.load_datastore(5), "store"),
        (lambda lm: lm.load_datastore("x", name=5), "name"),
        (lambda lm: memlm.evaluate("texts", lm), "lm"),
        (lambda lm: memlm.load(5), "model"),
        (lambda lm: memlm.load(lm), "model"),
        (lambda lm: memlm.load("x", [5]), "stores"),
        (lambda lm: memlm.load(lm.checkpoint.path, device=5), "device"),
        (lambda lm: memlm.load(lm.checkpoint.path, attention_window="5"), "attention_window"),
        (lambda lm: memlm.load(lm.checkpoint.path, passage_encoder=5), "passage_encoder"),
        (lambda lm: memlm.build_index(lm, [memlm.Document("a", "x")], "nowhere"), "model"),
        (lambda lm: memlm.build_index(lm.checkpoint, [memlm.Document("a", "x")], None), "out"),
        (lambda lm: memlm.train([memlm.Document("a", "x")], None), "out"),
        (lambda lm: memlm.compact_index(5), "store"),
        (lambda lm: Client(5), "target"),
        (lambda lm: Client("http://localhost:50051/v1"), "target"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named_with_what_was_expected(lm, call, field):
    with pytest.raises(InvalidInput, match=rf"\A{field} is .*; expected ") as raised:
        call(lm)
    assert raised.value.field == field
    assert "\n" not in str(raised.value)


def test_texts_to_measure_are_a_path_a_list_or_a_corpus(lm, corpus_folder):
    expected = memlm.evaluate(lm, Corpus([corpus_folder / "doc-7.txt"]))
    assert expected.total.tokens > 10
    for texts in (corpus_folder / "doc-7.txt", str(corpus_folder / "doc-7.txt"), [corpus_folder / "doc-7.txt"]):
        assert memlm.evaluate(lm, texts) == expected


def test_a_store_of_an_older_version_that_holds_nan_answers_with_null(tmp_path, model_folder, monkeypatch):
    (tmp_path / "c.jsonl").write_text(
        '{"id": "x", "text": "the memory of a model", "a": NaN, "b": [Infinity, 2],'
        ' "c": "\\ud800", "d": "\\ud83d\\ude42"}'
    )
    with monkeypatch.context() as older:  # it checked neither here nor there
        older.setattr("memlm.data.records.problem_in", lambda record: "")
        older.setattr("memlm.index.store.documents.check_document", lambda *document: None)
        build_index(model_folder, Corpus([tmp_path / "c.jsonl"]), tmp_path / "store")
    expected = {"a": None, "b": [None, 2], "c": "\ufffd", "d": "🙂"}
    with LanguageModel(load_checkpoint(model_folder), [tmp_path / "store"]) as lm:
        neighbor = lm.search(None, "the memory", k=1)[0]
    assert neighbor.metadata == expected
    sent = codec.to_wire(neighbor)
    assert json.loads(sent.metadata, parse_constant=pytest.fail) == expected


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"metadata": '{"a": NaN}'}, "document 'mine': metadata.a is nan"),
        ({"metadata": '{"a": [1e999]}'}, "document 'mine': metadata.a[0] is inf"),
        ({"metadata": '{"a": "\\ud800"}'}, "document 'mine': metadata.a has half a surrogate pair"),
        ({"metadata": '{"\\ud800": 1}'}, "document 'mine': metadata has the key"),
    ],
)
def test_a_server_names_the_document_and_the_field_that_it_refuses(document, says):
    message = datastores_pb2.Document(id="mine", text="text", **document)
    request = datastores_pb2.AddDocumentsRequest(store="s", documents=[message])
    with pytest.raises(InvalidInput) as raised:
        codec.from_wire(codec.read_request(datastores_pb2.AddDocumentsRequest, request.SerializeToString()))
    assert says in str(raised.value)
    assert raised.value.field == "documents.metadata"


@pytest.mark.parametrize("field", ["id", "title"])
def test_bytes_that_are_no_text_are_refused_by_the_name_of_their_field(field):
    raw = datastores_pb2.Document(**{"id": "mine", "text": "text", "title": "t", field: "XXX"}).SerializeToString()
    raw = raw.replace(b"XXX", HALF.encode(errors="surrogatepass"))
    whole = datastores_pb2.AddDocumentsRequest(store="s").SerializeToString() + b"\x22" + bytes([len(raw)]) + raw
    with pytest.raises(InvalidInput, match=f"documents.{field} is not valid UTF-8"):
        codec.read_request(datastores_pb2.AddDocumentsRequest, whole)


def test_what_a_server_refuses_is_an_invalid_argument(tmp_path, model_folder, own_store):
    options = ("--threads", "1", "--store-dir", str(tmp_path / "stores"))
    with RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server:
        with grpc.insecure_channel(server.address) as channel:
            for metadata in ('{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'):
                document = datastores_pb2.Document(id="mine", text="text", metadata=metadata)
                request = datastores_pb2.AddDocumentsRequest(store="store", documents=[document])
                with pytest.raises(grpc.RpcError, match=r"document 'mine': metadata\.a") as raised:
                    DatastoresStub(channel).AddDocuments(iter([request]))
                assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with Client(server.address) as client:
            job = client.datastores.add("store", [NewDocument("fine", "the memory", metadata={"a": 1})])
            assert job.result().num_documents == 9
        assert not list((tmp_path / "stores" / "jobs").glob("*.jsonl"))


@pytest.fixture
def own_store(store_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store_folder, tmp_path / "store"))


def test_printing_escapes_control_characters_and_reordering():
    hostile = "a\x1b[2J\x07\x9b31m\x7f\u202e\u2066\r\n\tб é 🙂\ud800"
    assert printable(hostile) == "a\\x1b[2J\\x07\\x9b31m\\x7f\\u202e\\u2066\\r\n\tб é 🙂\\ud800"
    assert one_line(hostile) == printable(hostile).replace("\n", "\\n")
    dumped = printable_json(json.dumps(hostile, ensure_ascii=False))
    assert json.loads(dumped) == hostile
    assert not controls_in(dumped)


def controls_in(text: str) -> set[str]:
    return {letter for letter in text if not letter.isprintable() and letter not in ALLOWED}


@pytest.fixture(scope="module")
def hostile_store(tmp_path_factory, model_folder) -> Path:
    """Its ids, titles, metadata and texts would retitle a window and forge lines."""
    folder = tmp_path_factory.mktemp("hostile")
    record = {"text": f"the memory {TITLE_A_WINDOW}\u202e\x9b of [/red] a model " * 8, "title": f"t{TITLE_A_WINDOW}"}
    for number in range(3):
        record |= {"id": f"[/b]id-{number}\nforged {TITLE_A_WINDOW}", "license": TITLE_A_WINDOW}
        with (folder / "c.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    build_index(model_folder, Corpus([folder / "c.jsonl"]), folder / "store")
    return folder / "store"


def run(capsys: pytest.CaptureFixture, *words: object) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["memlm", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    captured = capsys.readouterr()
    assert not controls_in(captured.out), words
    assert not controls_in(captured.err), words
    assert ended.value.code in (0, None), captured.err
    return captured.out, captured.err


def test_commands_escape_what_documents_bring(capsys, hostile_store, model_folder):
    search = ("index", "search", hostile_store, "the memory", "--model", model_folder, "--k", 2)
    shown, _ = run(capsys, *search)
    assert "forged" in shown
    (neighbor, _) = json.loads(run(capsys, *search, "--json")[0])["neighbors"]
    assert neighbor["document_id"].endswith(f"\nforged {TITLE_A_WINDOW}")
    generate = ("generate", "the memory", "--model", model_folder, "--store", hostile_store, "--lam", 0.9)
    shown, _ = run(capsys, *generate, "--show-sources", "--temperature", 0, "--max-tokens", 40)
    assert "forged" in shown
    doomed, _ = run(capsys, "index", "delete", hostile_store, "--where", f"license={TITLE_A_WINDOW}", "--dry-run")
    assert len(doomed.splitlines()) == 4
    run(capsys, "index", "info", hostile_store)


def test_the_client_escapes_what_a_server_sends(capsys, hostile_store, model_folder, tmp_path):
    with RunningServer(tmp_path / "log", model_folder, hostile_store, options=("--threads", "1")) as server:
        target = ("--target", server.address)
        shown, _ = run(capsys, "index", "search", "store", "the memory", *target)
        assert "forged" in shown
        words = ("generate", "the memory", "--show-sources", "--lam", 0.9, "--max-tokens", 40)
        assert "forged" in run(capsys, *words, "--temperature", 0, *target)[0]
        with pytest.raises(AssertionError, match="this request"):
            run(capsys, *words, "--no-store", *target)
        run(capsys, "info", *target)
        run(capsys, "index", "info", "store", *target)


def test_errors_are_one_line_without_control_characters(capsys, tmp_path, model_folder):
    nowhere = tmp_path / f"a\n{TITLE_A_WINDOW}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["memlm", "index", "info", str(nowhere)])
        with pytest.raises(SystemExit):
            main()
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert not controls_in(errors)


def test_a_latin_1_file_name_does_not_end_a_build(capsys, tmp_path, model_folder):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    (tmp_path / "corpus" / "z.txt").write_text("the memory of a model")
    _, errors = run(capsys, "index", "build", tmp_path / "corpus", "--model", model_folder, "--out", tmp_path / "store")
    assert "skipped caf\\udce9.txt: the file's name is not UTF-8" in errors


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_locale_cannot_write_is_escaped(tmp_path, model_folder, monkeypatch, encoding):
    (tmp_path / "λ\N{ROCKET}.txt").write_text("the memory of a model", encoding="utf-8")
    build_index(model_folder, Corpus([tmp_path]), tmp_path / "store")

    def printed(*words: object) -> str:
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "argv", ["memlm", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None)
        stream.seek(0)
        return stream.read()

    search = ("index", "search", tmp_path / "store", "the memory", "--model", model_folder, "--k", 1)
    assert ("λ\N{ROCKET}.txt" if encoding == "utf-8" else r"\u03bb\U0001f680.txt") in printed(*search)
    assert json.loads(printed(*search, "--json"))["neighbors"][0]["document_id"] == "λ\N{ROCKET}.txt"
