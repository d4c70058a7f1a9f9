"""Documents of any id, and fields of any value: stored, listed, found and deleted each for itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from random_stores import DEFAULTS, DIM, spec

from memlm.errors import NotFound
from memlm.index.store.datastore import Datastore
from memlm.index.store.writer import StoreWriter

IDS = [
    "",
    "a\0b",
    "a\nb\r\n",
    "x" * 10_000,
    "🙂猫é",
    "e\u0301",  # which looks like é, and is another id
    "\ufeffdoc",
    "doc",
    "\u202egnp.exe",
    "'; drop table documents; --",
    '" or "1"="1',
    "%s%n%(id)s{0}",
    "../../etc/passwd",
    "\x1b]0;title\x07",
]
VALUES = ["x' or '1'='1", "%", "_", '{"$ne": null}', "'; drop table documents; --", "null", "a\0b", "MIT"]


def built(path: Path, ids: list[str], known: list[dict]) -> None:
    with StoreWriter.create(path, spec()) as writer:
        for number, (name, metadata) in enumerate(zip(ids, known, strict=True)):
            writer.begin_document(name, title=name, metadata=metadata)
            writer.append(np.full((2, DIM), number, np.float32), np.array([number, number]))
        writer.commit(defaults=DEFAULTS).close()


def test_documents_of_any_id_are_listed_found_and_deleted_one_by_one(tmp_path: Path) -> None:
    built(tmp_path / "s", IDS, [{"id": name} for name in IDS])
    left = list(IDS)
    for number, name in enumerate(IDS):
        with Datastore.open(tmp_path / "s") as store:
            assert [document.id for document in store.snapshot.documents()] == left
            assert [document.title for document in store.snapshot.documents()] == left
            found = store.search(np.full((1, DIM), number, np.float32), 2)
            assert {place.document_id for place in store.snapshot.locate(found.ids_QK[0])} == {name}
            assert store.delete([name]).num_documents == 1
            left.remove(name)
            assert [document.id for document in store.snapshot.documents()] == left
            with pytest.raises(NotFound):
                store.delete([name])


def test_a_field_is_compared_as_it_is_and_never_run(tmp_path: Path) -> None:
    names = [f"doc-{number}" for number in range(len(VALUES))]
    built(tmp_path / "s", names, [{"license": value} for value in VALUES])
    with Datastore.open(tmp_path / "s") as store:
        for name, value in zip(names, VALUES, strict=True):
            assert store.snapshot.matching({"license": value}) == [name]
        for field in ("license' or '1'='1", "%", "lic%", "$.license", "*"):
            assert store.snapshot.matching({field: "MIT"}) == []
        for value in ("x", "MI_", "m%", json.dumps({"$ne": "MIT"}), "", "[]"):
            assert store.snapshot.matching({"license": value}) == []
        assert store.delete_where({"license": VALUES[0]}).num_documents == 1
        assert [document.id for document in store.snapshot.documents()] == names[1:]
        assert store.snapshot.verify() == []
