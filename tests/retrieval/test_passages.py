"""What follows a text's end is read from live documents of the searched datastores, as a scan of them all finds it."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from memlm.api.params import RetrievalParams
from memlm.data.corpus import Corpus
from memlm.index import suffix_array
from memlm.index.store.compaction import compact
from memlm.index.store.derived import suffixes as suffixes_module
from memlm.index.store.manifest import SUFFIXES
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load
from memlm.retrieval.passages import SHORTEST_PASSAGE, Passage
from memlm.retrieval.retriever import Retriever

SECRET = "a xylophone of brass remembers every single tone of the evening"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments have several pieces."""
    for module in (suffix_array, suffixes_module):
        monkeypatch.setattr(module, "PIECE_TOKENS", 300)


@pytest.fixture
def store(tmp_path: Path, model_folder: Path, corpus_folder: Path) -> Path:
    """Two segments and a deleted document."""
    files = [corpus_folder / f"doc-{number}.txt" for number in range(8)]
    build_index(model_folder, Corpus(files[:5]), tmp_path / "store", check="none")
    add_to_index(model_folder, Corpus(files[5:]), tmp_path / "store")
    with load(model_folder, [tmp_path / "store"]) as lm:
        lm.delete_documents(["doc-2.txt"])
    return tmp_path / "store"


def retriever_of(lm: LanguageModel, *names: str) -> Retriever:
    return Retriever.of(lm.engine.stores.model_stores(list(names)), RetrievalParams(k=4))


def documents_of(retriever: Retriever) -> list[list[int]]:
    """The tokens of all documents that the retriever sees."""
    return [view.tokens(each.id).tolist() for view in retriever.views for each in view.documents()]


def longest_by_scan(documents: list[list[int]], text: list[int]) -> tuple[int, list[list[int]]]:
    """The length of the longest end of a text that goes on in a document, and all continuations."""
    for length in range(min(16, len(text)), SHORTEST_PASSAGE - 1, -1):
        found = [
            tokens[place + length :]
            for tokens in documents
            for place in range(len(tokens) - length)
            if tokens[place : place + length] == text[-length:]
        ]
        if found:
            return length, found
    return 0, []


def assert_as_scanned(passage: Passage | None, documents: list[list[int]], text: list[int]) -> None:
    length, continuations = longest_by_scan(documents, text)
    assert (passage.length if passage else 0) == length
    if passage:
        assert passage.tokens(1000) in continuations
        assert passage.tokens(5) == passage.tokens(1000)[:5]


def texts_of(lm: LanguageModel) -> list[list[int]]:
    """Ends in all documents, live or not, and ends that stand nowhere whole."""
    snapshot = lm.engine.stores.model_stores([])[0].snapshot
    rng, texts = np.random.default_rng(0), list[list[int]]()
    for segment in snapshot.segments:
        every = segment.values_N[:].tolist()
        for end in rng.integers(20, len(every) + 1, 60).tolist():
            texts += [every[end - 20 : end], [7, *every[end - 5 : end]], every[end - 9 : end][::-1]]
    return [*texts, [], texts[0][:2], texts[0][:3], [texts[0][0]] * 20]


def test_passages_are_those_of_a_scan_of_all_live_documents(store, model_folder):
    with load(model_folder, [store]) as lm:
        retriever, texts = retriever_of(lm, "store"), texts_of(lm)
        without = retriever.excluding(["doc-4.txt", "doc-6.txt"])
        for seen in (retriever, without, retriever.excluding(["*"])):
            documents = documents_of(seen)
            for text in texts:
                assert_as_scanned(seen.passage_after(text), documents, text)
        assert any(retriever.passage_after(text) != without.passage_after(text) for text in texts)


def test_only_the_datastores_of_a_request_are_asked(store, model_folder, tmp_path):
    (tmp_path / "other.txt").write_text(f"I heard {SECRET}.")
    build_index(model_folder, Corpus([tmp_path / "other.txt"]), tmp_path / "other", check="none")
    with load(model_folder, [store, tmp_path / "other"]) as lm:
        text = lm.tokenize(f"I heard {SECRET[:30]}")
        found = retriever_of(lm, "store", "other").passage_after(text)
        assert found is not None
        assert found.length > 10
        assert SECRET[30:].startswith(lm.detokenize(found.tokens(4)))
        alone = retriever_of(lm, "store")
        assert_as_scanned(alone.passage_after(text), documents_of(alone), text)


def test_a_passage_is_followed_while_the_text_agrees_and_its_document_is_there(store, model_folder):
    with load(model_folder, [store]) as lm:
        retriever = retriever_of(lm, "store")
        (view,) = retriever.views
        tokens = view.tokens("doc-3.txt").tolist()
        passage = retriever.passage_after(tokens[:20])
        assert passage is not None
        assert passage.tokens(6) == tokens[20:26]
        further = retriever.follow(passage, tokens[20:24])
        assert further is not None
        assert (further.tokens(3), further.length) == (tokens[24:27], passage.length + 4)
        assert retriever.follow(passage, []) == passage
        assert retriever.follow(passage, [*tokens[20:23], tokens[23] + 1]) is None
        at_end = retriever.follow(passage, tokens[20:])
        assert at_end is not None
        assert at_end.tokens(5) == []
        assert retriever.follow(at_end, [1]) is None
        assert retriever.excluding(["doc-3.txt"]).follow(passage, tokens[20:24]) is None
        lm.delete_documents(["doc-3.txt"])
        assert retriever.follow(passage, tokens[20:24]) is None


def test_every_commit_of_entries_makes_the_file_and_old_stores_work_without(store, model_folder):
    def files() -> list[Path]:
        return sorted(store.glob(f"segments/*/{SUFFIXES}"))

    assert len(files()) == 2
    contents = [file.read_bytes() for file in files()]
    for file in files():
        file.unlink()
    with load(model_folder, [store]) as lm:
        retriever = retriever_of(lm, "store")
        text = retriever.views[0].tokens("doc-3.txt").tolist()[:20]
        assert retriever.passage_after(text) is None
        assert not files()
        lm.trace("the memory of a model")  # makes them
        assert retriever.passage_after(text) is not None
    assert [file.read_bytes() for file in files()] == contents
    compact(store, purge=True)
    assert len(files()) == 1
    shutil.rmtree(store / "building", ignore_errors=True)
    with load(model_folder, [store]) as lm:
        retriever = retriever_of(lm, "store")
        for text in texts_of(lm):
            assert_as_scanned(retriever.passage_after(text), documents_of(retriever), text)
