"""Several datastores that speak together, and pointers that are followed in place of a search."""

import dataclasses
import shutil

import numpy as np
import pytest
from batch_helpers import add, start

from memlm.api.params import RetrievalParams
from memlm.data.corpus import Corpus
from memlm.data.windows import Window
from memlm.errors import InvalidInput, NotFound
from memlm.generation.batch import Batch
from memlm.generation.scoring import score_windows
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index
from memlm.indexing.tune import tune
from memlm.language_model import load
from memlm.retrieval.encoder import predictions_of, text_windows
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
        ({"min_pointers": -1}, "at least 0"),
        ({"min_pointers": 2}, "within one datastore"),
    ],
)
def test_what_means_nothing_is_refused(model_folder, halves, memory, message):
    with load(model_folder, [halves / "first", halves / "second"]) as lm:
        with pytest.raises(InvalidInput, match=message):
            lm.generate(PROMPT, **memory)
        with pytest.raises(NotFound, match="third"):
            lm.generate(PROMPT, stores=["first", "third"])


def plain_pointers(datastore: Datastore, found_ids: list[int], token: int) -> list[int]:
    """The positions behind those that named a token, by document and offset."""
    followers = []
    for id_ in found_ids:
        place = datastore.snapshot.locate(np.array([id_]))[0]
        tokens = datastore.snapshot.tokens(place.document_id)
        if tokens[place.token_offset] == token and place.token_offset + 1 < len(tokens):
            followers.append(id_ + 1)
    return followers


def plain_following(
    retriever: Retriever, keys_ND: np.ndarray, targets: list[int], min_pointers: int
) -> tuple[list, int]:
    """RetoMaton, one position after another, from exact search alone."""
    datastore, last, stream, searches = retriever.stores[0].datastore, [], [], 0
    for key_D, target in zip(keys_ND, targets, strict=True):
        found = datastore.snapshot.exact().search(key_D[None], datastore.snapshot.num_entries)
        if len(last) >= min_pointers:
            ids = [int(id_) for id_ in found.ids_QK[0] if id_ in last][: retriever.k]
        else:
            ids, searches = [int(id_) for id_ in found.ids_QK[0][: retriever.k]], searches + 1
        stream.append(set(ids))
        last = plain_pointers(datastore, ids, target)
    return stream, searches


@pytest.mark.parametrize("min_pointers", [1, 3])
def test_following_pointers_is_what_the_plain_twin_does(lm, corpus_folder, min_pointers):
    text = (corpus_folder / "doc-1.txt").read_text()
    window = next(text_windows(lm.checkpoint, text))
    read = predictions_of(lm.checkpoint.decoder, [window])[0]
    retriever = lm.engine.stores.retriever(RetrievalParams(**ASK, min_pointers=min_pointers))
    assert retriever is not None
    policy = retriever.new_policy()
    found = retriever.search_in_order(read.keys_ND, read.max_logprobs_N, window.targets_N, policy)
    expected, searches = plain_following(retriever, read.keys_ND, window.targets_N.tolist(), min_pointers)
    assert int(found.searched_Q.sum()) == searches
    assert 0 < searches < len(expected)
    for ids_K, wanted in zip(found.neighbors.ids_QK, expected, strict=True):
        assert set(ids_K[ids_K >= 0].tolist()) == wanted
    nearest_first = np.nan_to_num(found.neighbors.distances_QK, posinf=1e9)
    assert (np.diff(nearest_first, axis=1) >= 0).all()


def test_generation_batches_and_scoring_follow_alike(lm):
    whole = lm.generate(PROMPT, max_tokens=20, seed=3, min_pointers=2, **ASK)
    tokens = list(whole)
    assert whole.finished.usage.searches < len(tokens)
    batch = lm.generate_batch([PROMPT, "a page"], max_tokens=20, seed=3, min_pointers=2, **ASK)
    assert [token.id for token in batch[0].tokens] == [token.id for token in tokens]
    assert batch[0].finished.usage.searches == whole.finished.usage.searches
    for usage in (whole.finished.usage, batch[0].finished.usage):
        assert 0 < usage.retrieval_ms < usage.prefill_ms + usage.decode_ms
        assert usage.lam == pytest.approx(np.mean([token.lam for token in tokens]))
    alone = lm.generate(PROMPT, max_tokens=3, use_store=False)
    assert len(list(alone))
    assert alone.finished.usage.lam == alone.finished.usage.retrieval_ms == 0
    always = lm.generate(PROMPT, max_tokens=20, seed=3, min_pointers=0, **ASK)
    assert len(list(always)) == always.finished.usage.searches
    read = lm.checkpoint.tokenizer
    ids = np.array([read.start_id, *read.encode(PROMPT), *(token.id for token in tokens)])
    window = Window(ids[:-1], ids[-len(tokens) :])
    retriever = lm.engine.stores.retriever(RetrievalParams(min_pointers=2, **ASK))
    (scored,) = score_windows(lm.checkpoint, iter([window]), retriever)
    assert scored.logprobs_N.tolist() == pytest.approx([token.logprob for token in tokens], abs=1e-3)
    text = "the memory of a page"
    assert lm.score(text, min_pointers=10**6, **ASK).nll == pytest.approx(lm.score(text, **ASK).nll, rel=1e-6)


def test_pointers_end_with_their_document_and_with_its_deletion(model_folder, halves, tmp_path):
    store = Datastore.open(shutil.copytree(halves / "first", tmp_path / "s"))
    with store:
        ends = np.cumsum([document.num_tokens for document in store.snapshot.documents()])
        base = store.snapshot.segments[0].base_id
        assert store.snapshot.successors(base + ends - 1).tolist() == []
        assert store.snapshot.successors(base + ends[:-1]).tolist() == (base + ends[:-1] + 1).tolist()
        store.delete(["doc-1.txt"])
        inside = np.array([ends[0], ends[0] + 1, ends[1]]) + base
        assert store.snapshot.live(inside).tolist() == [base + ends[1]]
        assert store.snapshot.successors(inside).tolist() == [base + ends[1] + 1]
        assert store.snapshot.live(np.array([99 << 40])).tolist() == []


def test_pointers_into_a_deleted_document_are_not_followed(model_folder, halves, tmp_path):
    shutil.copytree(halves / "first", tmp_path / "s")
    with load(model_folder, [tmp_path / "s"]) as lm:
        batch = Batch(lm.checkpoint, max_sequences=1)
        generation = add(batch, start(lm, dataclasses.replace(request_for(lm), neighbors=12))).generation
        (pointers,) = generation.policy.shortcuts
        while not len(pointers.ids_P):
            batch.step()
        doomed = {place.document_id for place in lm.engine.stores.model_store().snapshot.locate(pointers.ids_P)}
        lm.delete_documents(sorted(doomed))
        before = generation.usage.searches
        batch.step()
        assert generation.usage.searches == before + 1


def request_for(lm):
    from memlm.api.params import GenerateRequest

    return GenerateRequest.of(PROMPT, {**ASK, "min_pointers": 1, "temperature": 0.0, "max_tokens": 20})


def test_a_store_without_keys_cannot_be_followed(model_folder, corpus_folder, tmp_path):
    store = tmp_path / "s"
    build_index(model_folder, Corpus([corpus_folder]), store, index="IVF4,SQ8", keep_keys=False)
    with load(model_folder, [store]) as lm:
        with pytest.raises(InvalidInput, match="without keeping its keys"):
            lm.generate(PROMPT, min_pointers=1)
        datastore = lm.engine.stores.model_store().datastore
        datastore.save_defaults(
            dataclasses.replace(datastore.snapshot.defaults, min_pointers=1)
        )  # tuned before the keys went
        assert lm.engine.stores.retriever(RetrievalParams()).min_pointers is None
        assert list(lm.generate(PROMPT, max_tokens=2, seed=1))


def test_tuning_settles_how_many_lists_and_pointers(model_folder, corpus_folder, tmp_path):
    texts = Corpus([corpus_folder / f"doc-{number}.txt" for number in range(7)])
    build_index(model_folder, texts, tmp_path / "s", index="IVF32,SQfp16")
    held_out = Corpus([corpus_folder / "doc-7.txt"])
    cautious = tune(model_folder, tmp_path / "s", held_out, largest_k=16)
    assert not cautious.pointers_kept
    assert cautious.nprobe in (4, 8, 16, 32)
    assert cautious.nprobe_loss <= 0.0005
    bold = tune(model_folder, tmp_path / "s", held_out, largest_k=16, pointer_loss=5.0)
    assert bold.pointers_kept
    assert bold.pointer_share > cautious.pointer_share
    with load(model_folder, [tmp_path / "s"]) as lm:
        datastore = lm.engine.stores.model_store().datastore
        assert (datastore.snapshot.defaults.nprobe, datastore.snapshot.defaults.min_pointers) == (
            bold.nprobe,
            bold.min_pointers,
        )
        retriever = lm.engine.stores.retriever(RetrievalParams())
        assert (retriever.nprobe, retriever.min_pointers) == (bold.nprobe, bold.min_pointers)
        assert lm.engine.stores.retriever(RetrievalParams(nprobe=3, min_pointers=0)).nprobe == 3
        assert not lm.engine.stores.retriever(RetrievalParams(min_pointers=0)).min_pointers
        assert lm.engine.stores.retriever(RetrievalParams(lam=0.5)).min_pointers is None
        whole = lm.generate(PROMPT, max_tokens=20, seed=3)
        assert whole.finished is None
        assert len(list(whole)) > whole.finished.usage.searches > 0
        score = lm.score(held_out_text := (corpus_folder / "doc-7.txt").read_text())
        always = lm.score(held_out_text, min_pointers=0)
        assert (score.nll - always.nll) / score.tokens == pytest.approx(bold.pointer_loss, abs=0.02)
