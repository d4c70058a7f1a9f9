"""Several datastores that speak together, and one retriever of generation, batches and scoring."""

import shutil

import numpy as np
import pytest

from memlm.api.params import RetrievalParams
from memlm.data.corpus import Corpus
from memlm.data.windows import Window
from memlm.errors import InvalidInput, NotFound
from memlm.generation.scoring import score_windows
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index
from memlm.indexing.tune import tune
from memlm.language_model import load
from memlm.retrieval.retriever import Retriever

PROMPT = "the memory of a model can"
ASK = {"k": 12, "lam": 0.4, "knn_temperature": 3.0}


@pytest.fixture(scope="module")
def halves(model_folder, corpus_folder, tmp_path_factory):
    """Two stores of four documents each; together they are the store of the other tests."""
    folder = tmp_path_factory.mktemp("halves")
    for name, numbers in (("first", range(4)), ("second", range(4, 8))):
        build_index(model_folder, Corpus([corpus_folder / f"doc-{number}.txt" for number in numbers]), folder / name)
    return folder


def distributions(lm, **memory) -> list[tuple]:
    stream = lm.generate(PROMPT, temperature=0, max_tokens=10, neighbors=12, **ASK, **memory)
    return [
        (token.id, token.logprob, sorted((n.document_id, n.token_offset, round(n.weight, 5)) for n in token.neighbors))
        for token in stream
    ]


def test_two_stores_are_one_store_of_all_their_documents(lm, model_folder, halves):
    with load(model_folder, [halves / "first", halves / "second"]) as both:
        assert {n.store for token in both.generate(PROMPT, max_tokens=9, neighbors=9, seed=1) for n in token.neighbors}
        for one, together in zip(distributions(lm), distributions(both), strict=True):
            assert one[0] == together[0]
            assert one[1] == pytest.approx(together[1], abs=1e-6)
            assert one[2] == together[2]
        assert both.score("the model and a page", **ASK).nll == pytest.approx(
            lm.score("the model and a page", **ASK).nll, rel=1e-6
        )
        stores = {neighbor.document_id: neighbor.store for neighbor in both.search(None, PROMPT, k=400)}
        assert stores["doc-2.txt"] == "first"
        assert stores["doc-6.txt"] == "second"


def test_the_tokens_around_neighbors_are_those_of_their_stores(model_folder, halves):
    with load(model_folder, [halves / "first", halves / "second"]) as both:
        stores = both.engine.stores.model_stores(["first", "second"])
        retriever = Retriever.of(stores, RetrievalParams(**{**ASK, "k": 60}))
        found = retriever.search(np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32))
        ids_E, stores_E = found.neighbors.ids_QK.ravel(), found.stores_QK.ravel()
        around = retriever.tokens_before(ids_E, stores_E, 5), retriever.tokens_after(ids_E, stores_E, 5)
        for entry_id, number, before, after in zip(ids_E, stores_E, *around, strict=True):
            snapshot = retriever.stores[number].snapshot
            assert before.tolist() == snapshot.tokens_before(np.array([entry_id]), 5)[0].tolist()
            assert after.tolist() == snapshot.tokens_after(np.array([entry_id]), 5)[0].tolist()
        assert set(stores_E.tolist()) == {0, 1}


def test_a_weight_of_two_is_the_store_twice(model_folder, halves, tmp_path):
    shutil.copytree(halves / "second", tmp_path / "again")
    everything = {"k": 4000, "lam": 0.5, "knn_temperature": 3.0, "temperature": 0, "max_tokens": 6}
    with load(model_folder, [halves / "first", halves / "second", tmp_path / "again"]) as lm:
        thrice = [token.logprob for token in lm.generate(PROMPT, **everything)]
        doubled = lm.generate(PROMPT, stores={"first": 1, "second": 2.0}, **everything)
        assert [token.logprob for token in doubled] == pytest.approx(thrice, abs=1e-5)
        alone = [token.logprob for token in lm.generate(PROMPT, stores=["second"], **everything)]
        assert alone == [token.logprob for token in lm.generate(PROMPT, store="second", **everything)]
        faint = lm.generate(PROMPT, stores={"first": 1e-12, "second": 1}, **everything)
        assert [token.logprob for token in faint] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"stores": {"first": 0.0}}, "above 0"),
        ({"stores": {"first": float("nan")}}, "above 0"),
        ({"stores": "first"}, "expected names in a list"),
        ({"stores": ["first"], "store": "second"}, "either store or stores"),
    ],
)
def test_what_means_nothing_is_refused(model_folder, halves, memory, message):
    with load(model_folder, [halves / "first", halves / "second"]) as lm:
        with pytest.raises(InvalidInput, match=message):
            lm.generate(PROMPT, **memory)
        with pytest.raises(NotFound, match="third"):
            lm.generate(PROMPT, stores=["first", "third"])


def test_generation_batches_and_scoring_agree(lm):
    whole = lm.generate(PROMPT, max_tokens=20, seed=3, **ASK)
    tokens = list(whole)
    batch = lm.generate_batch([PROMPT, "a page"], max_tokens=20, seed=3, **ASK)
    assert [token.id for token in batch[0].tokens] == [token.id for token in tokens]
    for usage in (whole.finished.usage, batch[0].finished.usage):
        assert usage.searches == len(tokens)
        assert 0 < usage.retrieval_ms < usage.prefill_ms + usage.decode_ms
        assert usage.lam == pytest.approx(np.mean([token.lam for token in tokens]))
    alone = lm.generate(PROMPT, max_tokens=3, use_store=False)
    assert len(list(alone))
    assert alone.finished.usage.lam == alone.finished.usage.retrieval_ms == alone.finished.usage.searches == 0
    read = lm.checkpoint.tokenizer
    ids = np.array([read.start_id, *read.encode(PROMPT), *(token.id for token in tokens)])
    window = Window(ids[:-1], ids[-len(tokens) :])
    retriever = lm.engine.stores.retriever(RetrievalParams(**ASK))
    (scored,) = score_windows(lm.checkpoint, iter([window]), retriever)
    assert scored.logprobs_N.tolist() == pytest.approx([token.logprob for token in tokens], abs=1e-3)


def test_entries_of_a_deleted_document_are_not_live(halves, tmp_path):
    with Datastore.open(shutil.copytree(halves / "first", tmp_path / "s")) as store:
        ends = np.cumsum([document.num_tokens for document in store.snapshot.documents()])
        base = store.snapshot.segments[0].base_id
        store.delete(["doc-1.txt"])
        inside = np.array([ends[0], ends[0] + 1, ends[1]]) + base
        assert store.snapshot.live(inside).tolist() == [base + ends[1]]
        assert store.snapshot.live(np.array([99 << 40])).tolist() == []


def test_tuning_settles_how_many_lists(model_folder, corpus_folder, tmp_path):
    texts = Corpus([corpus_folder / f"doc-{number}.txt" for number in range(7)])
    build_index(model_folder, texts, tmp_path / "s", index="IVF32,SQfp16")
    report = tune(model_folder, tmp_path / "s", Corpus([corpus_folder / "doc-7.txt"]), largest_k=16)
    assert report.nprobe in (4, 8, 16, 32)
    assert report.nprobe_loss <= 0.0005
    with load(model_folder, [tmp_path / "s"]) as lm:
        assert lm.engine.stores.model_store().snapshot.defaults.nprobe == report.nprobe
        assert lm.engine.stores.retriever(RetrievalParams()).knn.nprobe == report.nprobe
        assert lm.engine.stores.retriever(RetrievalParams(nprobe=3)).knn.nprobe == 3
