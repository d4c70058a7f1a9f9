"""Passages by words: building an index of the same text and searching it, by memlm, by SQLite FTS5 and by tantivy.

Texts are cut every 600 characters, and repeated with other rare words, so that the vocabulary grows with them.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memlm.base.phrases import forms_of, terms_of, words_of
from memlm.base.progress import Progress
from memlm.data.corpus import Corpus
from memlm.index.store.derived.bm25 import Query, Searched
from memlm.index.store.derived.postings import Postings, PostingsWriter

CHARACTERS = 600  # of a passage
BEST = 8
COMMON = 300  # passages of one repetition with a word that stays the same in all
Search = Callable[[str], object]


class Way(NamedTuple):
    """A way to index passages in a folder, and to search them afterwards."""

    name: str
    build: Callable[[Iterable[str], Path], None]
    opened: Mapping[str, Callable[[Path], Search]]


def bench_words(
    texts: Corpus, questions: Sequence[str], folder: Path, *, copies: int, slow: int, progress: Progress
) -> list[dict[str, Any]]:
    """Rows of the ways: processor time to build, bytes on disk, and times of a search for the best eight passages. Of
    ways other than memlm's, only `slow` questions are timed.
    """
    passages = [each for document in texts for each in _cut(document.text)]
    counts = Counter(run for each in passages for run in set(each.split()))
    common, rows = {run for run, count in counts.items() if count > COMMON}, list[dict[str, Any]]()
    passages = list(_repeated(passages, common, copies))
    num_bytes = sum(len(each.encode()) for each in passages)
    for number, way in enumerate(ways := _ways()):
        place = folder / way.name.replace(" ", "-")
        place.mkdir(parents=True)
        begin_s = time.process_time()
        way.build(passages, place)
        build_s = time.process_time() - begin_s
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        row = {"megabytes": num_bytes / 1e6, "passages": len(passages), "build_s": build_s, "share": size / num_bytes}
        for name, opened in way.opened.items():
            times = _times(opened(place), questions if number == 0 else questions[:slow])
            rows.append({"way": f"{way.name}{name}", **row, **times})
        progress("compare word indexes", number + 1, len(ways))
    return rows


def _times(search: Search, questions: Sequence[str]) -> dict[str, float]:
    times_ms = list[float]()
    for question in questions:
        begin_s = time.perf_counter()
        search(question)
        times_ms.append(1e3 * (time.perf_counter() - begin_s))
    middle, most, last = np.percentile(times_ms, [50, 90, 99]).tolist()
    return {"questions": len(times_ms), "p50_ms": middle, "p90_ms": most, "p99_ms": last, "first_ms": times_ms[0]}


def _ways() -> list[Way]:
    deleted = partial(_open_postings, deleted=0.1)
    ways = [
        Way("memlm", _build_postings, {"": _open_postings, " with one in ten deleted": deleted}),
        Way("SQLite FTS5", _build_fts5, {"": _open_fts5}),
    ]
    with suppress(ImportError):
        import tantivy  # noqa: F401

        ways.append(Way("tantivy", _build_tantivy, {"": _open_tantivy}))
    return ways


def _cut(text: str) -> Iterator[str]:
    yield from (text[begin : begin + CHARACTERS] for begin in range(0, len(text), CHARACTERS))


def _repeated(passages: Sequence[str], common: set[str], copies: int) -> Iterator[str]:
    yield from passages
    for copy in range(1, copies):
        for passage in passages:
            yield " ".join([run if run in common else f"{run}{copy}" for run in passage.split()])


def _build_postings(passages: Iterable[str], place: Path) -> None:
    with (place / "postings").open("wb") as file:
        writer = PostingsWriter(file)
        for passage in passages:
            writer.add(terms_of(passage))
        writer.finish("bench")


def _open_postings(place: Path, deleted: float = 0.0) -> Search:
    with (place / "postings").open("rb") as file:
        postings = Postings.mapped(file, str(place))
    live_P = np.random.default_rng(0).random(len(postings)) >= deleted if deleted else None
    parts = [Searched(postings, live_P)]
    return lambda question: Query(parts, forms_of(question)).best(BEST)


def _build_fts5(passages: Iterable[str], place: Path) -> None:
    base = sqlite3.connect(place / "fts5.sqlite", isolation_level=None)
    base.execute("pragma journal_mode = off")
    base.execute("pragma synchronous = off")
    base.execute("create virtual table words using fts5(text, content='', tokenize='porter unicode61')")
    base.execute("begin")
    base.executemany("insert into words (text) values (?)", ((passage,) for passage in passages))
    base.execute("commit")
    base.close()


def _open_fts5(place: Path) -> Search:
    base = sqlite3.connect(place / "fts5.sqlite")
    statement = "select rowid, rank from words where words match ? order by rank limit ?"
    return lambda question: base.execute(
        statement, (" OR ".join(f'"{w}"' for w in words_of(question)), BEST)
    ).fetchall()


def _build_tantivy(passages: Iterable[str], place: Path) -> None:
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_text_field("text", stored=False, tokenizer_name="en_stem")
    builder.add_unsigned_field("number", stored=True)
    index = tantivy.Index(builder.build(), str(place))
    writer = index.writer(256 << 20, 1)
    for number, passage in enumerate(passages):
        writer.add_document(tantivy.Document(text=passage, number=number))
    writer.commit()
    writer.wait_merging_threads()


def _open_tantivy(place: Path) -> Search:
    import tantivy

    index = tantivy.Index.open(str(place))
    searcher = index.searcher()
    return lambda question: searcher.search(index.parse_query(" ".join(words_of(question)), ["text"]), BEST).hits
