"""Filters by metadata: what a plain look at every document says, from tables that take little RAM."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_stores import spec

from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import metadata
from memlm.index.store.documents import DocumentTable, DocumentTableWriter
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import KnnDefaults
from memlm.index.store.segment import Segment
from memlm.index.store.writer import StoreWriter

NAMES = ["title", "a", "ä", 'q"\\', "kind"]
VALUES = st.one_of(
    st.sampled_from(["a", "1", "1.0", "true", '"a"', "", "😀", "[]", "{}"]), st.integers(0, 2), st.just(1.0),
    st.booleans(), st.none(), st.just({"a": "a"}),
)  # fmt: skip
METADATA = st.dictionaries(st.sampled_from(NAMES), VALUES | st.lists(VALUES, max_size=3))
ASKED = st.sampled_from(
    ["a", "1", "1.0", "true", '"a"', "", "😀", '"\\ud83d\\ude00"', "null", "[]", "{}", '{"a": "a"}', "\ud83d\ude00"]
)


def write(writer: StoreWriter, documents: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
    with writer:
        for id_, title, fields in documents:
            writer.begin_document(id_, title=title, metadata=fields)
            writer.append(None, np.array([7]))
        writer.commit(defaults=KnnDefaults(8, 0.25, 1.0, None)).close()


def store_of(folder: Path, documents: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Datastore:
    write(StoreWriter.create(folder, spec("none"), keyed=False), documents)
    return Datastore.open(folder)


def plainly(segment: Segment, only: DocumentFilter) -> list[bool]:
    """The slow twin."""
    return [only.accepts(document) for document in segment.documents]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "1"]), METADATA), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from([*NAMES, "absent", "\ufffd"]), ASKED), min_size=1, max_size=2),
    st.sampled_from([(), ("a/",), ("*1",), ("a/0", "b/2")]),
    st.sampled_from([128, 0]),
)
def test_a_filter_chooses_what_a_look_at_every_document_says(tmp_path_factory, documents, where, names, document_bytes):
    given_documents = [
        (f"{'ab'[number % 2]}/{number}", title, fields) for number, (title, fields) in enumerate(documents)
    ]
    store = store_of(tmp_path_factory.mktemp("s") / "s", given_documents)
    (segment,), only = store.snapshot.segments, DocumentFilter(names, tuple(where))
    with store, pytest.MonkeyPatch.context() as patched:
        patched.setattr(metadata, "DOCUMENT_BYTES", document_bytes)
        patched.setattr(metadata, "LEAST_BYTES", document_bytes and 4096)
        for _ in range(2):
            assert segment.chosen(only).tolist() == plainly(segment, only)
        assert segment.metadata.num_bytes <= 4096


def reading(monkeypatch) -> list[str]:
    """The fields that are read from tables."""
    reads, read = list[str](), metadata.FieldValues.read.__func__
    monkeypatch.setattr(
        metadata.FieldValues, "read", classmethod(lambda cls, table, name: reads.append(name) or read(cls, table, name))
    )
    return reads


def test_a_field_is_read_once_for_all_snapshots_that_share_the_documents(tmp_path, monkeypatch):
    store = store_of(tmp_path / "s", [("a", "", {"kind": "x"}), ("b", "", {"kind": ["x", "y"]})])
    reads, only = reading(monkeypatch), DocumentFilter(where=(("kind", "y"),))

    def chosen() -> list[list[bool]]:
        return [segment.chosen(only).tolist() for segment in store.snapshot.segments]

    assert (chosen(), chosen(), reads) == ([[False, True]], [[False, True]], ["kind"])
    store.delete(["a"])
    write(StoreWriter.extend(tmp_path / "s", spec("none"), keyed=False), [("c", "", {"kind": "y"})])
    store.refresh()
    assert (chosen(), len(reads)) == ([[False, True], [True]], 2)
    compact(tmp_path / "s", purge=True)
    store.refresh()
    assert (chosen(), len(reads)) == ([[True, True]], 3)


def test_fields_are_kept_within_a_limit_and_the_last_used_ones_longest(tmp_path, monkeypatch):
    many = [(str(number), "", {f"f{field}": number for field in range(12)}) for number in range(400)]
    many.append(("tags", "", {"long": [*range(10_000)]}))
    with store_of(tmp_path / "s", many) as store:
        (segment,), reads = store.snapshot.segments, reading(monkeypatch)
        most = metadata.DOCUMENT_BYTES * len(many)

        def ask(name: str) -> None:
            only = DocumentFilter(where=((name, "7"),))
            assert segment.chosen(only).tolist() == plainly(segment, only)
            assert segment.metadata.num_bytes <= most

        for number in range(12):
            ask("f0")
            ask(f"f{number}")
        assert reads.count("f0") == 1
        assert len(reads) == 12
        ask("f1")  # was dropped
        assert reads.count("f1") == 2
        for _ in range(2):
            ask("long")  # is too large to be kept
        assert reads.count("long") == 2
        ask("f1")
        assert reads.count("f1") == 2
        for number in range(500):
            ask(f"absent{number}")
        ask("x" * 100_000)


def test_threads_that_ask_at_once_get_the_same(tmp_path):
    many = [(str(number), "", {"kind": number % 3, "other": number % 5}) for number in range(300)]
    with store_of(tmp_path / "s", many) as store:
        (segment,), wrong = store.snapshot.segments, list[object]()

        def ask() -> None:
            for number in range(30):
                only = DocumentFilter(where=((f"absent{number}", "x"), ("kind", "1"))[number % 2 :])
                if segment.chosen(only).tolist() != [number % 2 == 1 and each % 3 == 1 for each in range(300)]:
                    wrong.append(only)

        threads = [Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_field_of_an_older_table_is_found_where_its_name_was_written_otherwise(tmp_path):
    writer = DocumentTableWriter(tmp_path / "t.sqlite")
    writer.add("a", "", {"k": "v"})
    writer._run("update documents set metadata = ?", json.dumps({"\ud800": "v"}))
    writer.commit()
    table = DocumentTable(tmp_path / "t.sqlite")
    (document,) = table
    assert DocumentFilter(where=(("\ufffd", "v"),)).accepts(document)
    assert metadata.SegmentMetadata().having(table, 1, "\ufffd", "v").tolist() == [True]
