"""A request that excludes documents: its answer is that of a datastore from which they were deleted, bit by bit."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import add, start

from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.data.corpus import Corpus
from memlm.errors import Corrupt, InvalidInput, NotFound
from memlm.generation.batch import Batch
from memlm.index.store.compaction import compact
from memlm.index.store.documents import DocumentTable
from memlm.index.store.segment import Segment
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam

PROMPT = "the memory of a model can"
ASK = {"k": 12, "lam": 0.6, "knn_temperature": 3.0, "neighbors": 6, "top_logprobs": 3, "max_tokens": 16, "seed": 5}
ADAPTIVE = AdaptiveLam(0.3, (-0.5, 0.2, 1.5, 0.1, -0.7), (1.0, 0.5, 0.5, 1.0, -1.0), (0.5, 0.5, 0.3, 0.5, 0.8))
GONE = ("doc-5.txt", "doc-6.txt")
KINDS = {"flat": "Flat", "lists": "IVF4,SQfp16", "codes": "IVF4,SQ8"}


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(request, model_folder: Path, corpus_folder: Path, tmp_path_factory) -> Iterator[tuple[LanguageModel, ...]]:
    """A model with a datastore, and its twin: the same datastore, from which documents were deleted."""
    folder = tmp_path_factory.mktemp("pair")
    corpora = [[corpus_folder / f"doc-{number}.txt" for number in numbers] for numbers in (range(6), range(6, 8))]
    build_index(model_folder, Corpus(corpora[0]), folder / "notes", index=KINDS[request.param], check="none")
    add_to_index(model_folder, Corpus(corpora[1]), folder / "notes", check="none")
    shutil.copytree(folder / "notes", folder / "twin" / "notes")
    checkpoint = load_checkpoint(model_folder)
    with (
        LanguageModel(checkpoint, [folder / "notes"]) as lm,
        LanguageModel(checkpoint, [folder / "twin/notes"]) as twin,
    ):
        twin.delete_documents(GONE)
        yield lm, twin


def tokens_of(lm: LanguageModel, prompt: str = PROMPT, **options: Any) -> list:
    return list(lm.generate(prompt, **{**ASK, **options}))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"loop_guard": False},
        {"k": 2000},
        {"lam": 0},
        {"lam": None, "k": None, "knn_temperature": None},
        {"use_store": True, "stores": {"notes": 0.5}},
    ],
    ids=str,
)
def test_a_generation_is_that_of_a_datastore_without_the_documents(pair, options):
    lm, twin = pair
    expected = tokens_of(twin, **options)
    assert tokens_of(lm, exclude_documents=GONE, **options) == expected
    assert tokens_of(lm, exclude_documents=["doc-[56].txt"], **options) == expected
    plain = tokens_of(lm, **options)
    assert {near.document_id for token in plain for near in token.neighbors} & {*GONE}
    assert plain != expected


def test_a_score_is_that_of_a_datastore_without_the_documents(pair, corpus_folder):
    lm, twin = pair
    text, retrieval = (corpus_folder / "doc-5.txt").read_text()[:600], {"k": 12, "lam": 0.6, "knn_temperature": 3.0}
    expected = twin.score(text, token_scores=True, **retrieval)
    assert lm.score(text, token_scores=True, exclude_documents=GONE, **retrieval) == expected
    assert lm.score(text, token_scores=True, **retrieval) != expected
    assert lm.loglikelihood(PROMPT, text[:60], exclude_documents=GONE, **retrieval) == twin.loglikelihood(
        PROMPT, text[:60], **retrieval
    )


def test_an_adaptive_lam_takes_the_documents_for_deleted(pair):
    asked = {"k": None, "lam": None, "knn_temperature": None}
    for each in pair:
        datastore = each.engine.stores.model_store().datastore
        defaults = replace(datastore.snapshot.defaults, k=12, lam=0.6, temperature=3.0, adaptive=asdict(ADAPTIVE))
        datastore.save_defaults(defaults)
    lm, twin = pair
    expected = tokens_of(twin, **asked)
    assert tokens_of(lm, exclude_documents=GONE, **asked) == expected
    assert tokens_of(lm, **asked) != expected
    for each in pair:
        datastore = each.engine.stores.model_store().datastore
        datastore.save_defaults(replace(datastore.snapshot.defaults, adaptive=None))


def test_exclusions_of_one_request_are_of_no_other(pair):
    """In one batch, which searches once for all of them, each request gets what it gets alone."""
    lm, twin = pair
    asked = [{}, {"exclude_documents": GONE}, {"exclude_documents": ("*",)}, {}, {"exclude_documents": GONE}]
    batch = Batch(lm.checkpoint, max_sequences=5)
    sequences = [add(batch, start(lm, GenerateRequest.of(PROMPT, {**ASK, **options}))) for options in asked]
    found: dict[Any, list] = {each: [] for each in sequences}
    while len(batch):
        for sequence in batch.step():
            assert sequence.failure is None
            found[sequence] += sequence.tokens
    for options, tokens in zip(asked, found.values(), strict=True):
        asks_twin = options.get("exclude_documents") == GONE
        alone = tokens_of(twin) if asks_twin else tokens_of(lm, **options)
        assert [(each.id, [near.document_id for near in each.neighbors]) for each in tokens] == [
            (each.id, [near.document_id for near in each.neighbors]) for each in alone
        ]
        assert [each.logprob for each in tokens] == pytest.approx([each.logprob for each in alone], abs=1e-4)
    completions = lm.generate_batch([PROMPT, "a page"], exclude_documents=GONE, **ASK)
    for one, other in zip(completions, twin.generate_batch([PROMPT, "a page"], **ASK), strict=True):
        assert one.tokens == other.tokens


def test_a_session_and_a_chat_exclude_for_one_request_only(pair):
    """A session holds what was read, and nothing that was retrieved: the next request sees all documents."""
    lm, twin = pair
    answers = []
    for each, excluded in ((lm, GONE), (twin, ())):
        with each.session() as session:
            session.append("the memory of a page")
            first = list(session.generate(" can", exclude_documents=excluded, **ASK))
            fork = session.fork()
            again = list(session.generate(" be", exclude_documents=excluded, **ASK))
            answers.append((first, again, list(each.chat("what is a page?", exclude_documents=excluded, **ASK))))
            seen = [near.document_id for token in fork.generate(" be", **ASK) for near in token.neighbors]
            assert bool({*seen} & {*GONE}) == bool(excluded)
            fork.delete()
    assert answers[0] == answers[1]


def test_several_datastores_exclude_together(model_folder, corpus_folder, tmp_path):
    for name, numbers in (("first", range(4)), ("second", range(4, 8))):
        corpus = Corpus([corpus_folder / f"doc-{number}.txt" for number in numbers])
        build_index(model_folder, corpus, tmp_path / name, check="none")
        shutil.copytree(tmp_path / name, tmp_path / "twin" / name)
    weights = {"first": 1.0, "second": 0.5}
    with load(model_folder, [tmp_path / "first", tmp_path / "second"]) as lm:
        found = tokens_of(lm, stores=weights, exclude_documents=["doc-2.txt", "doc-6.txt"])
        with pytest.raises(NotFound, match=r"no document 'doc-9' .*'first' and 'second'.*memlm index search"):
            tokens_of(lm, exclude_documents=["doc-2.txt", "doc-9"])
        with pytest.raises(NotFound, match=r"'doc-6\.txt'"):
            tokens_of(lm, store="first", exclude_documents=["doc-6.txt"])
    with load(model_folder, [tmp_path / "twin/first", tmp_path / "twin/second"]) as twin:
        twin.delete_documents(["doc-2.txt"], store="first")
        twin.delete_documents(["doc-6.txt"], store="second")
        assert tokens_of(twin, stores=weights) == found


@pytest.mark.parametrize("change", ["delete", "compact", "replace"])
def test_a_generation_excludes_whatever_happens_to_the_datastore(model_folder, corpus_folder, tmp_path, change):
    """Each later token is that of a datastore with the same change, from which the documents were deleted."""
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "notes", index="IVF4,SQfp16", check="none")
    shutil.copytree(tmp_path / "notes", tmp_path / "twin" / "notes")
    found = []
    for folder, excluded in ((tmp_path / "notes", GONE), (tmp_path / "twin/notes", ())):
        with load(model_folder, [folder]) as lm:
            if not excluded:
                lm.delete_documents(GONE)
            options = {**ASK, "exclude_documents": excluded, "nprobe": 4}
            batch = Batch(lm.checkpoint, max_sequences=1)
            sequence, tokens = add(batch, start(lm, GenerateRequest.of(PROMPT, options))), list[Any]()
            for number in range(16):
                if number == 6 and change == "delete":
                    lm.delete_documents(["doc-7.txt"])
                elif number == 6 and change == "compact":
                    lm.delete_documents(["doc-1.txt"])
                    compact(folder)
                elif number == 6 and excluded:  # comes back, and stays out
                    add_to_index(model_folder, Corpus([corpus_folder / GONE[0]]), folder, replace=True, check="none")
                lm.refresh()
                batch.step()
                assert sequence.failure is None
                tokens += sequence.tokens
            found.append(tokens)
    assert [token.id for token in found[0]] == [token.id for token in found[1]]
    for one, other in zip(*found, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        places = [sorted((near.document_id, near.token_offset) for near in each.neighbors) for each in (one, other)]
        assert places[0] == places[1]
        assert not {near.document_id for near in one.neighbors} & {*GONE}


def test_a_table_that_cannot_be_read_fails_only_the_request_that_excludes(
    model_folder, corpus_folder, tmp_path, monkeypatch
):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "notes", check="none")
    with load(model_folder, [tmp_path / "notes"]) as lm:
        batch = Batch(lm.checkpoint, max_sequences=2)
        asked = [{"exclude_documents": GONE}, {}]
        excluding, other = (add(batch, start(lm, GenerateRequest.of(PROMPT, {**ASK, **each}))) for each in asked)
        batch.step()
        compact(tmp_path / "notes")
        add_to_index(
            model_folder, Corpus([corpus_folder / "doc-0.txt"]), tmp_path / "notes", replace=True, check="none"
        )
        lm.refresh()

        def unreadable(*_: object) -> None:
            raise Corrupt("documents.sqlite cannot be read")

        monkeypatch.setattr(DocumentTable, "rows_named", unreadable)
        batch.step()
        assert isinstance(excluding.failure, Corrupt)
        assert other.failure is None
        assert len(batch) == 1


def test_exclusions_share_the_keys_in_memory(pair):
    lm, _ = pair
    retriever = lm.engine.stores.retriever(RetrievalParams(exclude_documents=("doc-1.txt",)))
    assert retriever is not None
    (view,), (whole,) = retriever.views, retriever.shared.views
    for one, other in zip(view.segments, whole.segments, strict=True):
        assert one.documents is other.documents
        assert one._index is other._index
        assert other._index is not None or Segment._resident.__get__(one) is Segment._resident.__get__(other)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exclude_documents": ["nobody"]}, NotFound, "no document 'nobody' to exclude"),
        ({"exclude_documents": "folder/"}, NotFound, "'folder/'"),
        ({"exclude_documents": [""]}, InvalidInput, "none empty"),
        ({"exclude_documents": [3]}, InvalidInput, "names of documents"),
        ({"exclude_documents": 3}, InvalidInput, "expected names of documents in a list"),
        ({"exclude_documents": ["a"] * 101}, InvalidInput, "at most 100 names"),
        ({"exclude_documents": ["doc-1.txt"], "use_store": False}, InvalidInput, "no datastore is searched"),
    ],
    ids=str,
)
def test_what_cannot_be_excluded_is_refused(pair, options, error, message):
    lm, _ = pair
    asks_for_little = {"k": None, "lam": None, "knn_temperature": None, "neighbors": 0}
    with pytest.raises(error, match=message):
        tokens_of(lm, **asks_for_little, **options)
    with pytest.raises(error, match=message):
        lm.score("a page", **options)
    assert tokens_of(lm, exclude_documents=None) == tokens_of(lm)
