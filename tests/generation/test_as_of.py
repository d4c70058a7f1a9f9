"""A request as of a time: its answer is that of a datastore of the documents that held then, bit by bit."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_shards import sharded

from memlm.data.corpus import Corpus, Document
from memlm.errors import InvalidInput, NotFound
from memlm.index.store.compaction import compact
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load

PROMPT, DAY = "the memory of a model can", "2024-03-01"
ASK = {"k": 12, "lam": 0.6, "knn_temperature": 3.0, "neighbors": 6, "max_tokens": 12, "seed": 5}
METADATA: dict[int, dict[str, Any]] = {
    1: {"valid_from": "2020-01-01"},
    2: {"valid_from": "2024-03-02", "supersedes": ["doc-0"]},  # is not there yet
    3: {"supersedes": "doc-1"},
    4: {"valid_from": "2024-03-01", "supersedes": ["doc-3", "nowhere"]},
    6: {"supersedes": "doc-5", "valid_from": "2024-01-01T12:00:00+02:00"},  # in another segment
}
GONE = ["doc-1", "doc-2", "doc-3", "doc-5"]


@pytest.fixture(scope="module")
def folder(model_folder: Path, corpus_folder: Path, tmp_path_factory) -> Path:
    """A datastore of two segments, and a copy, from which the documents that do not hold are deleted."""
    folder = tmp_path_factory.mktemp("versions")
    documents = [
        Document(f"doc-{number}", (corpus_folder / f"doc-{number}.txt").read_text(), "", METADATA.get(number, {}))
        for number in range(8)
    ]
    build_index(model_folder, Corpus(documents[:6]), folder / "notes", index="IVF4,SQfp16", check="none")
    add_to_index(model_folder, Corpus(documents[6:]), folder / "notes", check="none")
    shutil.copytree(folder / "notes", folder / "twin" / "notes")
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path, model_folder: Path) -> Iterator[tuple[LanguageModel, LanguageModel]]:
    with (
        load(model_folder, [folder / "notes"], attention_window=44) as lm,
        load(model_folder, [folder / "twin" / "notes"], attention_window=44) as twin,
    ):
        twin.delete_documents(GONE)
        yield lm, twin


ANSWER = {"max_tokens": 4, "seed": 1, "num_passages": 8}
CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda lm, **o: list(lm.generate(PROMPT, **ASK, **o)),
    "score": lambda lm, **o: lm.score(PROMPT, token_scores=True, k=12, lam=0.6, knn_temperature=3.0, **o),
    "chat": lambda lm, **o: lm.chat(PROMPT, max_tokens=4, seed=1, **o).result().accepted.prompt.passages,
    "answer": lambda lm, **o: lm.answer(PROMPT, **ANSWER, **o).passages,
    "answer by both": lambda lm, **o: list(lm.answer(PROMPT, **ANSWER, lam=0.5, neighbors=4, **o).completion.tokens),
    "mixture": lambda lm, **o: lm.answer(PROMPT, mixture=True, **ANSWER, **o).passages,
    "by state": lambda lm, **o: lm.search(None, PROMPT, k=500, **o),
    "by words": lambda lm, **o: lm.search(None, "edited", k=500, by="words", **o),
    "passages": lambda lm, **o: lm.find_passages(PROMPT, k=500, **o),
    "trace": lambda lm, **o: lm.trace(PROMPT, min_tokens=2, max_documents=20, **o),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_that_of_the_documents_that_held(pair, name):
    lm, twin = pair
    call, expected = CALLS[name], CALLS[name](twin)
    assert expected
    assert call(lm, as_of=DAY) == expected
    assert call(lm) != expected
    assert call(lm, as_of=None) == call(lm)


@pytest.mark.parametrize("name", ["by state", "by words", "passages", "trace"])
def test_filters_hold_together(pair, name):
    lm, twin = pair
    for filters in ({"documents": ["doc-1", "doc-4"]}, {"where": {"supersedes": "doc-5"}}):
        assert CALLS[name](lm, as_of=DAY, **filters) == CALLS[name](twin, **filters)


def test_an_excluded_document_supersedes_none(pair):
    lm, _ = pair
    with_4 = {each.document_id for each in CALLS["passages"](lm, as_of=DAY)}
    without_4 = {each.document_id for each in CALLS["passages"](lm, as_of=DAY, exclude_documents="doc-4")}
    assert without_4 == with_4 - {"doc-4"} | {"doc-3"}
    lm.find_passages(PROMPT, as_of=DAY, exclude_documents="doc-2")  # which is known, though it does not hold
    with pytest.raises(NotFound):
        lm.find_passages(PROMPT, as_of=DAY, exclude_documents="nobody")


@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_time_is_refused_by_name(pair, name):
    with pytest.raises(InvalidInput, match=r"as_of is '1\.3\.2024'; expected a date, as 2024-05-01") as refused:
        CALLS[name](pair[0], as_of="1.3.2024")
    assert refused.value.field == "as_of"


def test_a_model_alone_has_no_documents_to_choose(pair):
    with pytest.raises(InvalidInput, match="as_of is set, but no datastore is searched"):
        pair[0].generate(PROMPT, as_of=DAY, use_store=False)


def test_a_datastore_supersedes_nothing_of_another(model_folder, tmp_path):
    for name, metadata in (("first", {}), ("second", {"supersedes": "doc-1"})):
        documents = [Document(f"doc-{number}", f"the memory of {name}", "", metadata) for number in (1, 2)]
        build_index(model_folder, documents, tmp_path / name, check="none", keys="none")
    with load(model_folder, [tmp_path / "first", tmp_path / "second"]) as lm:
        found = lm.search(None, "the memory", by="words", as_of="today")
        assert [(each.store, each.document_id) for each in found] == [
            ("first", "doc-1"), ("first", "doc-2"), ("second", "doc-2"),
        ]  # fmt: skip
        lm.generate("the memory", as_of="today", max_tokens=1)  # drafts from documents of datastores without keys


def test_deletions_additions_and_compactions_count_with_the_next_request(folder, model_folder, tmp_path):
    store = tmp_path / "notes"
    shutil.copytree(folder / "notes", store)
    with load(model_folder, [store]) as lm:

        def held() -> set[str]:
            return {each.document_id for each in lm.find_passages(PROMPT, k=500, as_of=DAY)}

        before = held()
        assert before == {f"doc-{number}" for number in range(8)} - {*GONE}
        lm.delete_documents(["doc-4"])
        assert held() == before - {"doc-4"} | {"doc-3"}
        lm.remember("the memory of a new page", document_id="new", metadata={"supersedes": ["doc-0", "doc-3"]})
        after = held()
        assert after == before - {"doc-4", "doc-0"} | {"new"}
        compact(store)
        lm.engine.stores.model_store().refresh()
        assert held() == after


def test_shards_search_the_documents_that_held(pair, folder):
    lm, twin = pair
    store, expected = lm.engine.stores.model_store(), CALLS["by state"](twin)
    with sharded(folder / "notes", 2) as shards:
        here, store.search_views = store.search_views, shards.search
        try:
            assert CALLS["by state"](lm, as_of=DAY) == expected
        finally:
            store.search_views = here
