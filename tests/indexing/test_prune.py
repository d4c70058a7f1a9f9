"""Entries that the model alone predicts, left out of the index: the others answer as if these had never been there."""

import math

import numpy as np
import pytest

from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import add_to_index, build_index, compact_index, index_keys
from memlm.language_model import load
from memlm.retrieval.encoder import Encoder, document_windows

PRUNE = 0.0033  # of a model with random parameters: about half of the entries


def predicted(checkpoint, corpus) -> dict[str, np.ndarray]:
    """Which tokens of each document the model gives at least that probability, from its plain predictions."""
    reports = {}
    for document in corpus:
        tokens_n = checkpoint.tokenizer.encode(document.text)
        windows = list(document_windows(checkpoint.decoder, tokens_n, checkpoint.tokenizer.start_id))
        logprobs = [read.logprobs_N for read in Encoder(checkpoint.decoder).predictions(windows)]
        reports[document.id] = np.exp(np.concatenate(logprobs)) >= PRUNE
    return reports


@pytest.fixture(scope="module", params=["Flat", "IVF4,SQfp16", "IVF4,SQ8"])
def pruned_folder(request, model_folder, corpus_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned") / "store"
    report = build_index(model_folder, Corpus([corpus_folder]), folder, index=request.param, prune=PRUNE)
    assert 0.1 < report.pruned < 0.9
    assert report.quality.pruning_nats_change is not None
    return folder


def test_what_the_model_predicts_is_never_found_and_everything_else_is(pruned_folder, checkpoint, corpus_folder):
    expected = predicted(checkpoint, Corpus([corpus_folder]))
    with Datastore.open(pruned_folder) as store:
        rng = np.random.default_rng(0)
        queries_QD = rng.normal(size=(3, store.snapshot.dim)).astype(np.float32)
        nlist = 4
        for found in (store.search(queries_QD, 5000, nprobe=nlist), store.snapshot.exact().search(queries_QD, 5000)):
            for ids_K in found.ids_QK:
                present_ids = ids_K[ids_K >= 0]
                places = {(place.document_id, place.token_offset) for place in store.snapshot.locate(present_ids)}
                assert len(places) == len(present_ids)
                assert places == {
                    (name, offset) for name, known_N in expected.items() for offset in np.flatnonzero(~known_N).tolist()
                }
        assert store.snapshot.num_entries == sum(int((~known_N).sum()) for known_N in expected.values())
        assert store.snapshot.num_pruned_entries == sum(int(known_N.sum()) for known_N in expected.values())
        assert store.snapshot.verify() == []
        assert set(store.snapshot.sample(10**6, 0).tolist()) == {int(id_) for id_ in found.ids_QK[0] if id_ >= 0}
        all_ids = store.snapshot.exact(pruned=True).search(queries_QD, 5000).ids_QK[0]
        assert (all_ids >= 0).sum() == store.snapshot.num_entries + store.snapshot.num_pruned_entries
        assert sorted(store.snapshot.live(all_ids[all_ids >= 0])) == sorted(store.snapshot.sample(10**6, 0))


def test_values_are_those_of_the_entries_that_are_found(pruned_folder, checkpoint):
    with Datastore.open(pruned_folder) as store:
        ids = store.snapshot.sample(40, 1)
        found = store.search(store.snapshot.keys(ids), 1, nprobe=4)
        for id_, value in zip(found.ids_QK[:, 0], found.values_QK[:, 0], strict=True):
            place = store.snapshot.locate(np.array([id_]))[0]
            assert store.snapshot.tokens(place.document_id)[place.token_offset] == value
        if store.snapshot.distances == "exact":
            assert (found.distances_QK == 0).all()


def test_a_pruned_store_is_changed_as_any_other(pruned_folder, model_folder, corpus_folder, tmp_path):
    import shutil

    shutil.copytree(pruned_folder, tmp_path / "s")
    text = (corpus_folder / "doc-2.txt").read_text()
    (tmp_path / "more.txt").write_text(text)
    with Datastore.open(tmp_path / "s") as store:
        before = store.snapshot.num_entries
        deleted = store.delete(["doc-2.txt"])
        assert store.snapshot.num_entries == before - deleted.num_entries
        found = store.search(np.zeros((1, store.snapshot.dim), np.float32), 5000, nprobe=4).ids_QK
        assert "doc-2.txt" not in {place.document_id for place in store.snapshot.locate(found[found >= 0])}
    add_to_index(model_folder, Corpus([tmp_path / "more.txt"]), tmp_path / "s")
    compact_index(tmp_path / "s", model_folder)
    with Datastore.open(tmp_path / "s") as store:
        assert len(store.snapshot.segments) == 1
        assert store.snapshot.num_entries == before
        assert store.snapshot.verify() == []


def test_a_pruned_build_goes_on_where_it_was_interrupted(model_folder, corpus_folder, tmp_path, monkeypatch):
    from memlm.index.store.writer import StoreWriter
    from memlm.indexing import keys

    monkeypatch.setattr(keys, "CHECKPOINT_WINDOWS", 8)
    corpus = Corpus([corpus_folder])
    build_index(model_folder, corpus, tmp_path / "whole", prune=PRUNE)
    steps, checkpoint_once = [], StoreWriter.checkpoint

    def stop(writer: StoreWriter) -> None:
        checkpoint_once(writer)
        steps.append(writer)
        if len(steps) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(StoreWriter, "checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        build_index(model_folder, corpus, tmp_path / "again", prune=PRUNE)
    monkeypatch.setattr(StoreWriter, "checkpoint", checkpoint_once)
    report = index_keys(tmp_path / "again", model_folder)
    assert report.resumed_entries > 0
    for name in ("keys.npy", "values.npy", "pruned.npy", "starts.npy"):
        (whole,), (again,) = ([*(tmp_path / store).glob(f"segments/*/{name}")] for store in ("whole", "again"))
        assert whole.read_bytes() == again.read_bytes()


def test_pruning_without_keys_answers_alike(model_folder, corpus_folder, tmp_path):
    for name, keep in (("kept", True), ("dropped", False)):
        build_index(
            model_folder, Corpus([corpus_folder]), tmp_path / name, index="IVF4,SQfp16", prune=PRUNE, keep_keys=keep
        )
    with load(model_folder, [tmp_path / "kept"]) as kept, load(model_folder, [tmp_path / "dropped"]) as dropped:
        assert kept.score("the memory of a page").nll == dropped.score("the memory of a page").nll


@pytest.mark.parametrize("prune", [0.0, 1.0, -1.0, math.nan])
def test_a_probability_that_is_none_is_refused(model_folder, corpus_folder, tmp_path, prune):
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", prune=prune)
    assert not (tmp_path / "s").exists()


def test_a_store_of_which_nothing_is_left_is_refused(model_folder, corpus_folder, tmp_path):
    with pytest.raises(InvalidInput, match="every token"):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", prune=1e-30)
