"""Traces of documents in the files of a datastore, for the table of deletions in `python -m benchmarks evidence`.

A trace is what a file would have only if it holds something of these documents: bytes of their ids, titles, metadata,
tokens, keys and codes, of the vectors of their chunks, or a word that no other document has. Bytes are
searched for in every file. Words are looked up in every index of words, because SQLite stores only the letters in
which a word differs from the one before.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from jaxtyping import UInt64

from memlm.base.phrases import terms_of, words_of
from memlm.data.corpus import Document
from memlm.index.ivf import VALUE_BITS, inner, open_index
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.chunk_vectors import SegmentChunks
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.derived.postings import hash_of
from memlm.index.store.derived.words import SegmentWords
from memlm.index.store.segment import INDEX, Segment
from memlm.model.files.checkpoint import Checkpoint
from memlm.zoo.retro.chunk_store import TokenMeans

RUN, STEP = 8, 8  # tokens of a run that is searched for, and the distance of two runs, keys or codes
HEAD = 8  # bytes of a trace that a file is searched for at first: fewer also stand where no trace is
CHUNK = 64  # tokens of a chunk, as RETRO reads them
WORD = "word"
KINDS = ("id", "title", "metadata", "tokens", "key", "code", WORD, "term", "chunk")


class Trace(NamedTuple):
    """Something of a document that a file may hold: its kind and its bytes, for a word in UTF-8."""

    kind: str
    content: bytes


def traces_of(
    checkpoint: Checkpoint, gone: Sequence[Document], held: Path, never: Path
) -> tuple[list[Trace], Counter[str]]:
    """Traces of some documents in the files of a datastore that holds them, without those in one that never did, and
    the number of each kind that are left out because they have fewer than eight bytes, as codes of a small model may
    have. Makes the indexes of words and of passages, and the vectors of chunks, in both.
    """
    derive(checkpoint, never)
    derive(checkpoint, held)
    traces, codes = dict[Trace, None](), dict[int, dict[int, bytes]]()
    with Datastore.open(held) as datastore:
        for document in gone:
            ((segment, row),) = datastore.snapshot.find_each([document.id])
            if segment.record.number not in codes:
                codes[segment.record.number] = codes_of(datastore.path, segment)
            parts = [_names_of(document), _entries_of(segment, row, codes[segment.record.number])]
            parts += [_words_of(document), _vectors_of(checkpoint, datastore.path, segment, row)]
            traces.update((Trace(*each), None) for part in parts for each in part)
    every = [trace for trace in traces if trace.kind == WORD or len(trace.content) >= HEAD]
    too_short = Counter(trace.kind for trace in traces.keys() - {*every})
    return [every[place] for place in sorted(found_in(held, every) - found_in(never, every))], too_short


def found_in(store: Path, traces: Sequence[Trace]) -> set[int]:
    """The places of those traces that any file of a datastore holds."""
    by_head, found = dict[int, list[int]](), set[int]()
    words = {word for path in store.rglob("*.sqlite") for word in _words_in(path)}
    for place, (kind, content) in enumerate(traces):
        if kind == WORD:
            found |= {place} if content.decode() in words else set()
        else:
            assert len(content) >= HEAD  # `traces_of` leaves out shorter ones
            by_head.setdefault(int.from_bytes(content[:HEAD], "little"), []).append(place)
    heads_H = np.array(sorted(by_head), "<u8")
    for path in sorted(store.rglob("*")):
        if path.is_file() and len(heads_H):
            content = path.read_bytes()
            for at in _places_of(content, heads_H):
                head = int.from_bytes(content[at : at + HEAD], "little")
                found |= {place for place in by_head[head] if content.startswith(traces[place].content, at)}
    return found


def _places_of(content: bytes, heads_H: UInt64[np.ndarray, " H"]) -> list[int]:
    """Where any of some runs of eight bytes begins, given in ascending order."""
    if len(content) < HEAD:
        return []
    runs_N = np.ndarray(len(content) - HEAD + 1, "<u8", content, strides=(1,)).copy()
    near_N = np.minimum(np.searchsorted(heads_H, runs_N), len(heads_H) - 1)
    places: list[int] = np.flatnonzero(heads_H[near_N] == runs_N).tolist()
    return places


def derive(checkpoint: Checkpoint, store: Path) -> None:
    """Makes the files of each segment that a search would make: words, passages, and vectors of chunks."""
    with Datastore.open(store) as datastore:
        for segment in datastore.snapshot.segments:
            for tables in _tables_of(checkpoint, datastore.path, segment):
                with closing(tables):
                    while not tables.is_complete:
                        tables.build()


def _tables_of(
    checkpoint: Checkpoint, store: Path, segment: Segment
) -> tuple[SegmentWords, SegmentPassages, SegmentChunks]:
    decode = checkpoint.tokenizer.decode_bytes
    cuts = SegmentCuts(store, segment, decode)
    while not cuts.is_complete:
        cuts.build()
    chunks = SegmentChunks(store, segment, CHUNK, TokenMeans(checkpoint.decoder))
    return SegmentWords(store, segment, decode), SegmentPassages(store, segment, cuts), chunks


def _names_of(document: Document) -> Iterator[tuple[str, bytes]]:
    yield "id", document.id.encode()
    if document.title:
        yield "title", document.title.encode()
    if document.metadata:
        yield "metadata", json.dumps(dict(document.metadata)).encode()


def _words_of(document: Document) -> Iterator[tuple[str, bytes]]:
    yield from ((WORD, word.encode()) for word in words_of(document.text))
    yield from (("term", hash_of(term).to_bytes(8, "little")) for term in terms_of(document.text))


def _entries_of(segment: Segment, row: int, codes: Mapping[int, bytes]) -> Iterator[tuple[str, bytes]]:
    """Runs of tokens, keys, and codes of an index, each at every eighth place."""
    keys_ND, ids_N, _ = segment.entries_of(row)
    assert keys_ND is not None  # every kind keeps them
    tokens_N = ids_N.astype("<u4")
    yield from (("tokens", tokens_N[at : at + RUN].tobytes()) for at in range(0, len(ids_N) - RUN + 1, STEP))
    yield from (("key", key_D.tobytes()) for key_D in keys_ND[::STEP])
    first, end = int(segment.starts[row]), int(segment.starts[row + 1])
    yield from (("code", codes[at]) for at in range(first, end, STEP) if at in codes)


def codes_of(store: Path, segment: Segment) -> dict[int, bytes]:
    """The code of each entry in a segment's index, by row. None of them for exact search, which reads the keys."""
    path, keys_ND = store / segment.record.folder / INDEX, segment.keys_ND
    if not path.exists() or keys_ND is None:
        return {}
    index = open_index(path, segment.num_indexed, keys_ND.shape[1])  # which owns the lists
    lists: Any = inner(index).invlists
    codes = dict[int, bytes]()
    for number in range(lists.nlist):
        if not (size := lists.list_size(number)):
            continue
        packed_N = faiss.rev_swig_ptr(lists.get_ids(number), size)
        codes_NC = faiss.rev_swig_ptr(lists.get_codes(number), size * lists.code_size).reshape(size, -1)
        codes |= dict(zip((packed_N >> VALUE_BITS).tolist(), (code_C.tobytes() for code_C in codes_NC), strict=True))
    return codes


def _vectors_of(checkpoint: Checkpoint, store: Path, segment: Segment, row: int) -> Iterator[tuple[str, bytes]]:
    """The vectors of a document's chunks."""
    words, passages, chunks = _tables_of(checkpoint, store, segment)
    with closing(words), closing(passages), closing(chunks):
        vectors = chunks.vectors_PE[chunks.document_P == row]
        yield from (("chunk", vector_E.astype("<f4").tobytes()) for vector_E in vectors)


def _words_in(path: Path) -> list[str]:
    """The words of an index of words, none for another SQLite file."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as base:
        if base.execute("select 1 from sqlite_master where name = 'words'").fetchone() is None:
            return []
        base.execute("create virtual table temp.terms using fts5vocab(main, words, row)")
        return [term for (term,) in base.execute("select term from temp.terms")]
