"""Texts of any id, title and metadata, from a corpus to an answer: each is built, found and deleted by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from texts import make_text
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import NotFound
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index
from memlm.language_model import load

IDS = [
    "a\0b", "a\nb", "x" * 10_000, "🙂", "\ufeffdoc", "doc", "\u202egnp.exe", "'; drop table documents; --",
    '" or "1"="1', "%s%n%(id)s", "../../etc/passwd", "a b", "null",
]  # fmt: skip
LICENSES = ["x' or '1'='1", '{"$ne": null}', "%", "MIT'); delete from documents; --", "a=b", "MIT"]


def test_texts_of_any_id_are_found_and_deleted_one_by_one(tmp_path: Path, model_folder: Path) -> None:
    texts = {name: make_text(300 + number, 30) for number, name in enumerate(IDS)}
    lines = [json.dumps({"id": name, "title": name, "text": text, "note": name}) for name, text in texts.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    skipped = list[object]()
    build_index(model_folder, Corpus([tmp_path / "corpus.jsonl"], on_problem=skipped.append), tmp_path / "s")
    assert not skipped
    with load(model_folder, [tmp_path / "s"]) as lm:
        left = list(IDS)
        for name in IDS:
            nearest = lm.search(None, texts[name][:60], k=64)
            described = {found.document_id: (found.title, found.metadata) for found in nearest}
            assert described[name] == (name, {"note": name})
            assert set(described) <= set(left)
            assert lm.delete_documents([name]).num_documents == 1
            left.remove(name)
            assert [document.id for document in lm.engine.stores.model_store().snapshot.documents()] == left
            assert name not in {found.document_id for found in lm.search(None, texts[name][:60], k=64)}
            with pytest.raises(NotFound):
                lm.delete_documents([name])


def test_files_of_any_name_are_documents(tmp_path: Path, model_folder: Path) -> None:
    names = [
        "a\nb.txt",
        "🙂.txt",
        "'; drop table documents; --.txt",
        "%s.txt",
        "-rf",
        "a b.txt",
        "\x1b]0;x\x07.txt",
        "e\u0301.txt",
    ]
    (tmp_path / "texts").mkdir()
    for number, name in enumerate(names):
        (tmp_path / "texts" / name).write_text(make_text(number, 30))
    build_index(model_folder, Corpus([tmp_path / "texts"]), tmp_path / "s")
    with Datastore.open(tmp_path / "s") as store:
        assert sorted(document.id for document in store.snapshot.documents()) == sorted(names)
        for name in names:
            assert store.delete([name]).num_documents == 1
        assert store.snapshot.num_documents == 0


def test_where_compares_values_and_runs_none_of_them(tmp_path: Path, model_folder: Path) -> None:
    lines = [
        json.dumps({"id": f"doc-{number}", "text": make_text(number, 20), "license": license_})
        for number, license_ in enumerate(LICENSES)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    build_index(model_folder, Corpus([tmp_path / "corpus.jsonl"]), tmp_path / "s")

    def delete(*where: str) -> int:
        words = [
            "index",
            "delete",
            str(tmp_path / "s"),
            *(word for each in where for word in ("--where", each)),
            "--json",
        ]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return int(json.loads(done.stdout)["documents"])

    for nothing in (
        "license=%_",
        "license=MI_",
        "license=x",
        "1=1",
        "license' or '1'='1=x",
        "%=MIT",
        'license={"$gt": ""}',
    ):
        assert delete(nothing) == 0
    assert delete(f"license={LICENSES[0]}", "title=MIT") == 0
    twice = ["index", "delete", str(tmp_path / "s"), "--where", f"license={LICENSES[0]}", "--where", "license=MIT"]
    done = CliRunner().invoke(app, twice)
    assert done.exit_code == 2
    assert "give each field once" in " ".join(done.output.split())
    for number, license_ in enumerate(LICENSES, start=1):
        assert delete(f"license={license_}") == 1
        with Datastore.open(tmp_path / "s") as store:
            assert [document.id for document in store.snapshot.documents()] == [
                f"doc-{n}" for n in range(number, len(LICENSES))
            ]
