"""Traces of deleted documents in the files of a datastore, in `benchmarks evidence`."""

from __future__ import annotations

import numpy as np
import pytest
from texts import make_text

from benchmarks.evidence.deletion import parts_of
from benchmarks.evidence.texts import Domain
from benchmarks.evidence.traces import KINDS, WORD, Trace, codes_of, derive, found_in, traces_of
from memlm.data.corpus import Corpus, Document
from memlm.index.ivf import open_index
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.postings import hash_of
from memlm.index.store.segment import INDEX
from memlm.indexing.build import build_index

KEPT = [Document(f"{number}.txt", make_text(number, 200)) for number in range(4)]
GONE = [
    Document("secret.txt", f"zebra zebus {make_text(9, 90)} quagga", "A hidden title", {"shelf": "hidden 7"}),
    Document("other.txt", make_text(10, 90)),
]


@pytest.fixture(params=["Flat", "IVF2,SQ8"])
def stores(request, checkpoint, tmp_path):
    """A datastore that holds two documents more than another one."""
    for documents, name in (([*KEPT, *GONE], "held"), (KEPT, "never")):
        build_index(checkpoint, Corpus(documents), tmp_path / name, index=request.param, check="none")
    return tmp_path / "held", tmp_path / "never"


def test_traces_are_what_only_the_documents_have(checkpoint, stores):
    held, never = stores
    traces, too_short = traces_of(checkpoint, GONE, held, never)
    assert not too_short
    by_kind = {kind: [trace.content for trace in traces if trace.kind == kind] for kind in KINDS}
    assert set(by_kind["id"]) == {b"secret.txt", b"other.txt"}
    assert by_kind["title"] == [b"A hidden title"]
    assert by_kind["metadata"] == [b'{"shelf": "hidden 7"}']
    assert {*by_kind[WORD]} >= {b"zebra", b"zebus", b"quagga"}
    assert b"memory" not in by_kind[WORD]  # which the others have too
    assert all(by_kind[kind] for kind in ("tokens", "key", "term", "chunk"))
    contents = [trace.content for trace in traces if trace.kind != WORD]
    files_held, files_never = (
        [path.read_bytes() for path in store.rglob("*") if path.is_file()] for store in (held, never)
    )
    assert all(any(content in file for file in files_held) for content in contents)
    assert not any(content in file for file in files_never for content in contents)


@pytest.mark.parametrize("stores", ["IVF2,PQ8x4"], indirect=True)
def test_codes_of_fewer_than_eight_bytes_are_left_out_and_counted(checkpoint, stores):
    traces, too_short = traces_of(checkpoint, GONE, *stores)
    assert "code" not in {trace.kind for trace in traces}
    with Datastore.open(stores[0]) as datastore:
        (segment,) = datastore.snapshot.segments
        codes, places = codes_of(stores[0], segment), range(segment.record.entries)
        gone = [row for _, row in datastore.snapshot.find_each([document.id for document in GONE])]
        eighths = {codes[at] for row in gone for at in places[segment.starts[row] : segment.starts[row + 1] : 8]}
    assert {len(code) for code in eighths} == {4}
    assert too_short == {"code": len(eighths)}


def test_ids_of_deleted_documents_are_long_enough_to_be_found(checkpoint):
    documents = tuple(Document(str(number), "the memory of it") for number in range(3))
    _, gone = parts_of(checkpoint, Domain("tiny", documents, documents))
    assert min(len(document.id) for document in gone) >= 8
    assert len({document.id for document in gone}) == 3


@pytest.mark.parametrize(
    ("name", "kind", "trace"),
    [("words.sqlite", WORD, str.encode), ("passages.bin", "term", lambda word: hash_of(word).to_bytes(8, "little"))],
)
def test_words_are_found_in_an_index_of_words_alone(checkpoint, stores, tmp_path, name, kind, trace):
    held, never = stores
    derive(checkpoint, held)
    words = [Trace(kind, trace(word)) for word in ("zebra", "zebus", "quagga", "nowhere")]
    (only,) = (path for path in held.rglob(name))
    (tmp_path / "only").mkdir()
    only.rename(tmp_path / "only" / name)
    assert found_in(tmp_path / "only", words) == {0, 1, 2}
    assert found_in(never, words) == set()


@pytest.mark.parametrize("stores", ["IVF2,SQ8"], indirect=True)
def test_codes_are_those_that_faiss_gives_each_entry(checkpoint, stores):
    with Datastore.open(stores[0]) as datastore:
        (segment,) = datastore.snapshot.segments
        codes = codes_of(stores[0], segment)
        assert codes.keys() == set(range(segment.record.entries))
        path = stores[0] / segment.record.folder / INDEX
        index = open_index(path, segment.num_indexed, segment.keys_ND.shape[1])
        expected = index.sa_encode(segment.keys_ND.astype(np.float32))
        behind_list = expected[:, index.sa_code_size() - index.code_size :]
        assert all(codes[row] == behind_list[row].tobytes() for row in codes)
        content = path.read_bytes()
        assert all(code in content for code in codes.values())


def test_traces_are_found_where_a_search_for_each_finds_them(tmp_path):
    rng = np.random.default_rng(0)
    files = [rng.integers(0, 3, size, np.uint8).tobytes() for size in (5000, 700, 8, 5, 0)]
    for number, content in enumerate(files):
        (tmp_path / f"{number}.bin").write_bytes(content)
    cuts = [files[0][at : at + 20] for at in (0, 1, 7, 2000, 4980)] + [files[1][-9:], files[2], files[0][4985:4995]]
    others = [cut[:-1] + b"\xff" for cut in cuts if len(cut) > 8]  # which begin alike
    traces = [Trace("key", content) for content in [*cuts, *others, bytes(8), b"nowhere at all"]]
    slow = {place for place, trace in enumerate(traces) if any(trace.content in content for content in files)}
    assert found_in(tmp_path, traces) == slow
    assert slow >= set(range(len(cuts)))
