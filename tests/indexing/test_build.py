"""From a corpus to a datastore, and what is measured of it."""

import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHAPE
from reference import decode_plainly
from texts import make_text

from memlm.api.params import RetrievalParams
from memlm.cli.store.build_report import print_build
from memlm.data.corpus import Corpus, Document
from memlm.data.windows import windows_of
from memlm.errors import AlreadyExists, Incompatible, InvalidInput, NotFound, StorageFull
from memlm.evaluation import evaluate
from memlm.index.neighbors import Neighbors
from memlm.index.selection import agreement
from memlm.index.store.datastore import Datastore
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import KnnDefaults
from memlm.index.store.segment import Segment
from memlm.indexing import build as indexing_build
from memlm.indexing import keys as indexing_keys
from memlm.indexing import text as indexing_text
from memlm.indexing.build import add_to_index, build_index, compact_index, finish_build, index_keys
from memlm.indexing.estimate import estimate_build
from memlm.indexing.fitting import best_lam
from memlm.indexing.keys import windows_at_once
from memlm.indexing.quality import check_keys, measure_quality, sample_queries, sample_trial
from memlm.indexing.tune import tune
from memlm.language_model import LanguageModel, load
from memlm.model import Decoder, Memorizing, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.retrieval.encoder import Encoder, predictions_of
from memlm.retrieval.store import ModelStore


class Killed(Exception):
    """Stands for a kill in the middle of a build."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(indexing_keys, "CHECKPOINT_WINDOWS", 4)


def read(store: Path, name: str) -> np.ndarray:
    (folder,) = (store / "segments").iterdir()
    return np.load(folder / name)


def test_every_corpus_token_is_one_entry_with_its_value(store_folder, corpus_folder, tokenizer):
    with Datastore.open(store_folder) as store:
        assert [document.id for document in store.snapshot.documents()] == [f"doc-{number}.txt" for number in range(8)]
        for document in Corpus([corpus_folder]):
            assert store.snapshot.tokens(document.id).tolist() == tokenizer.encode(document.text).tolist()


def test_a_key_is_the_last_feed_forwards_input_after_its_norm(store_folder, corpus_folder, checkpoint):
    document = next(iter(Corpus([corpus_folder / "doc-5.txt"])))
    tokens = [checkpoint.tokenizer.end_id, *checkpoint.tokenizer.encode(document.text).tolist()]
    with Datastore.open(store_folder) as store:
        begin = next(
            i
            for i, place in enumerate(store.snapshot.locate(np.sort(store.snapshot.sample(10**6, 0))))
            if place.document_id == "doc-5.txt"
        )
    keys_ND = read(store_folder, "keys.npy")[begin : begin + 48]
    expected_TD = decode_plainly(checkpoint.decoder, tokens[:48])[1]
    np.testing.assert_allclose(keys_ND, expected_TD, rtol=2e-3, atol=2e-3)


def killing(phase: str, call: int):
    """Progress that kills a build at a call of a phase."""
    calls = iter(range(1, call))

    def tell(now: str, done: int, total: int | None, note: str = "") -> None:
        if now == phase and next(calls, None) is None:
            raise Killed

    return tell


def assert_equal_stores(one: Path, other: Path) -> None:
    for name in ("keys.npy", "values.npy", "starts.npy"):
        np.testing.assert_array_equal(read(one, name), read(other, name))


def test_a_build_killed_before_its_commit_goes_on(model_folder, corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing_text, "CHECKPOINT_TOKENS", 2)
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "whole", check="none")
    with pytest.raises(Killed):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "cut", progress=killing("read", 5))
    resumed = build_index(model_folder, Corpus([corpus_folder]), tmp_path / "cut", check="none")
    assert 0 < resumed.resumed_entries < resumed.entries
    assert_equal_stores(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("call", [20, 40, 70])
def test_killed_keys_go_on_and_end_with_the_same_entries(model_folder, corpus_folder, tmp_path, call):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "whole", check="none")
    with pytest.raises(Killed):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "cut", progress=killing("make keys", call))
    with Datastore.open(tmp_path / "cut") as store:  # with its text
        assert (store.snapshot.num_documents, store.snapshot.is_keyed) == (8, False)
    with pytest.raises(AlreadyExists, match=r"memlm index keys .* makes the keys of documents without"):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "cut")
    resumed = index_keys(tmp_path / "cut", model_folder, check="none")
    assert 0 < resumed.resumed_entries < resumed.keyed_entries
    assert_equal_stores(tmp_path / "cut", tmp_path / "whole")


def test_keys_that_are_made_later_are_those_of_a_build(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "whole")
    assert build_index(model_folder, Corpus([corpus_folder]), tmp_path / "later", keys="none").keyed_entries == 0
    report = index_keys(tmp_path / "later", model_folder)
    assert report.keyed_entries == report.entries > 0
    assert_equal_stores(tmp_path / "later", tmp_path / "whole")
    with Datastore.open(tmp_path / "later") as later, Datastore.open(tmp_path / "whole") as whole:
        assert later.snapshot.defaults == whole.snapshot.defaults
    assert index_keys(tmp_path / "later", model_folder).keyed_entries == 0


def test_keys_that_were_killed_in_their_checks_are_checked_by_the_same_call(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", keys="none")
    with pytest.raises(Killed):
        index_keys(tmp_path / "s", model_folder, progress=kill_in_checks)
    report = index_keys(tmp_path / "s", model_folder)
    assert report.keyed_entries == 0
    assert report.tuning is not None
    with Datastore.open(tmp_path / "s") as store:
        assert store.manifest.quality is not None
        assert store.snapshot.defaults.tuned_on is not None


def test_pieces_of_keys_are_committed_one_by_one_and_no_document_moves(
    model_folder, corpus_folder, tmp_path, monkeypatch
):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "whole", check="none")
    monkeypatch.setattr(indexing_keys, "PIECE_TOKENS", 150)
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", keys="none")
    with Datastore.open(tmp_path / "s") as store:
        ids = [document.id for document in store.snapshot.documents()]
        seen = list[int]()
        while index_keys(tmp_path / "s", model_folder, check="none", most_pieces=1).keyed_entries:
            store.refresh()
            seen.append(store.snapshot.keyed.num_documents)
            assert [document.id for document in store.snapshot.documents()] == ids
            assert store.snapshot.verify() == []
        assert len(seen) > 2
        assert seen == sorted(set(seen))
        assert seen[-1] == len(ids)
    compact_index(tmp_path / "s", model_folder)
    assert_equal_stores(tmp_path / "s", tmp_path / "whole")


def test_a_piece_or_addition_too_small_for_its_codes_is_searched_exactly(
    model_folder, corpus_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(indexing_keys, "PIECE_TOKENS", 600)
    corpus = Corpus([corpus_folder])
    report = build_index(model_folder, corpus, tmp_path / "s", keys="now", index="IVF4,PQ8", check="none")
    assert report.keyed_entries == report.entries > 600
    add_to_index(model_folder, [Document("few", "the memory of a page")], tmp_path / "s", keys="now", check="none")
    with Datastore.open(tmp_path / "s") as store:
        assert {"IVF4,PQ8", "Flat"} == {record.index for record in store.manifest.segments}
        assert store.snapshot.verify() == []


def test_chosen_documents_alone_get_keys_and_alone_give_neighbors(model_folder, checkpoint, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", keys="none")
    index_keys(tmp_path / "s", model_folder, only=DocumentFilter(("doc-3.txt", "doc-5.txt")))
    with LanguageModel(checkpoint, [tmp_path / "s"]) as lm:
        info = lm.get_datastore()
        assert (info.num_documents, info.num_keyed_documents) == (8, 2)
        assert 0 < info.num_keyed_entries < info.num_entries
        text = (corpus_folder / "doc-0.txt").read_text()[:80]
        found = {
            neighbor.document_id
            for token in lm.generate(text, max_tokens=8, neighbors=4)
            for neighbor in token.neighbors
        }
        assert found <= {"doc-3.txt", "doc-5.txt"} != set()
        share = info.num_keyed_entries / info.num_entries
        assert lm.generate(text, max_tokens=2).result().accepted.keyed_share == share
        assert lm.search(None, text.split()[0], by="words", k=50)
        lm.delete_documents(["doc-3.txt", "doc-5.txt"])
    compact_index(tmp_path / "s", purge=True)
    with Datastore.open(tmp_path / "s") as store:
        assert (store.snapshot.num_documents, store.snapshot.num_deleted_documents) == (6, 0)
        assert not store.snapshot.is_keyed


def test_documents_that_go_while_their_keys_are_made_stay_away(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", keys="none")

    def delete(phase: str, done: int, total: int | None, note: str = "") -> None:
        if phase == "make keys" and done == total:
            with Datastore.open(tmp_path / "s") as store:
                if store.snapshot.has_document("doc-4.txt"):
                    store.delete(["doc-4.txt"])

    index_keys(tmp_path / "s", model_folder, progress=delete)
    with Datastore.open(tmp_path / "s") as store:
        assert not store.snapshot.has_document("doc-4.txt")
        assert store.snapshot.num_documents == store.snapshot.keyed.num_documents == 7


def test_an_addition_to_text_without_keys_makes_none_unless_asked(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder / "doc-0.txt"]), tmp_path / "s", keys="none")
    assert add_to_index(model_folder, Corpus([corpus_folder / "doc-1.txt"]), tmp_path / "s").keyed_entries == 0
    added = add_to_index(model_folder, Corpus([corpus_folder / "doc-2.txt"]), tmp_path / "s", keys="now")
    assert added.keyed_entries == added.entries
    with Datastore.open(tmp_path / "s") as store:
        assert [document.id for document in store.snapshot.keyed.documents()] == ["doc-2.txt"]


def test_text_is_committed_without_the_models_weights(model_folder, corpus_folder, tmp_path):
    unread, corpus = load_checkpoint(model_folder, weights=False), Corpus([corpus_folder])
    build_index(unread, corpus, tmp_path / "text", keys="none")
    add_to_index(unread, Corpus([], documents=[Document("more", "more text")]), tmp_path / "text")
    assert unread.unread
    seen = list[bool]()
    build_index(
        unread, corpus, tmp_path / "keyed", keys="now", check="none", on_text=lambda: seen.append(bool(unread.unread))
    )
    assert seen == [True]
    assert not unread.unread
    with Datastore.open(tmp_path / "keyed") as store:
        assert store.snapshot.is_keyed


def test_keys_that_would_take_long_are_not_made_by_themselves(model_folder, corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing_build, "QUICK_KEYS_S", 0.0)
    report = build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s")
    assert (report.keyed_entries, report.keys_s) == (0, 0.0)
    assert build_index(model_folder, Corpus([corpus_folder]), tmp_path / "t", keys="now").keyed_entries


def test_the_first_keys_may_be_of_another_model_with_the_tokenizer(model_folder, checkpoint, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", keys="none")
    shutil.copytree(model_folder, tmp_path / "other")
    other = load_checkpoint(tmp_path / "other")
    with torch.no_grad():
        other.decoder.embedding.weight.mul_(1.5)
    save_checkpoint(tmp_path / "changed", other.decoder, other.tokenizer)
    index_keys(tmp_path / "s", tmp_path / "changed")
    with Datastore.open(tmp_path / "s") as store:
        assert store.manifest.spec.model_fingerprint == load_checkpoint(tmp_path / "changed").fingerprint
    with pytest.raises(Incompatible, match="built by another model"):
        index_keys(tmp_path / "s", model_folder)


def test_a_build_that_is_stopped_leaves_no_thread_at_work(model_folder, corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "memlm.retrieval.encoder.BATCH_TOKENS", 1
    )  # else a block would be one batch, which no other thread reads

    def stop(phase: str, done: int, total: int | None, note: str = "") -> None:
        raise Killed

    before = threading.enumerate()
    with pytest.raises(Killed) as stopped:  # who holds what was raised holds all that was begun
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", progress=stop)
    assert threading.enumerate() == before, stopped


def test_a_build_tells_how_far_it_is_until_all_is_checked(model_folder, corpus_folder, tmp_path):
    phases = list[tuple[str, list[tuple[int, int | None]]]]()

    def tell(phase: str, done: int, total: int | None, note: str = "") -> None:
        if not phases or phases[-1][0] != phase:
            phases.append((phase, []))
        phases[-1][1].append((done, total))

    build_index(
        model_folder, Corpus([corpus_folder]), tmp_path / "s", index="IVF16,SQfp16", check="full", progress=tell
    )
    assert [phase for phase, _ in phases] == [
        "load", "read", "check files", "sort passages", "find passages", "index words",
        "make keys", "train index", "assign to lists", "add to index", "evaluate index", "check files", "sort passages",
        "check", "check keys", "tune", "measure quality",
    ]  # fmt: skip
    for _, steps in phases:
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]
    lengths = {phase: len(steps) for phase, steps in phases}
    assert min(lengths["check keys"], lengths["measure quality"]) > 2


def kill_in_checks(phase: str, done: int, total: int | None, note: str = "") -> None:
    """Progress of a build that comes no further than its commit."""
    if phase == "check":
        raise Killed


@pytest.mark.parametrize("index", ["Flat", "IVF16,SQfp16"])
def test_a_build_killed_in_its_checks_leaves_a_store_of_the_right_scale(
    model_folder, corpus_folder, checkpoint, tmp_path, index
):
    with pytest.raises(Killed):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "killed", index=index, progress=kill_in_checks)
    with Datastore.open(tmp_path / "killed") as killed:
        defaults = killed.snapshot.defaults
        assert killed.manifest.quality is None is defaults.tuned_on
        assert (defaults.k, defaults.lam) == (64, 0.25)
        nearest_Q = sample_trial(ModelStore(killed, checkpoint), checkpoint).exact.distances_QK[:, 0]
        assert 0.7 < defaults.temperature / (np.median(nearest_Q) / 2) < 1.4  # 1, the scale of no keys, is not


def test_an_addition_killed_in_its_checks_is_measured_by_nobodys_figures_until_it_is(
    model_folder, corpus_folder, tmp_path
):
    build_index(model_folder, Corpus([corpus_folder / "doc-0.txt"]), tmp_path / "s")
    with pytest.raises(Killed):
        add_to_index(model_folder, Corpus([corpus_folder / "doc-1.txt"]), tmp_path / "s", progress=kill_in_checks)
    with Datastore.open(tmp_path / "s") as store:
        assert (store.snapshot.num_documents, store.manifest.quality) == (2, None)
    assert finish_build(tmp_path / "s", model_folder)
    with Datastore.open(tmp_path / "s") as store:
        assert store.manifest.quality is not None
    assert not finish_build(tmp_path / "s", model_folder)


@pytest.mark.parametrize(("context", "windows"), [(16, 128), (256, 128), (1024, 32), (2048, 16), (131_072, 1)])
def test_what_a_kill_may_cost_is_bounded_in_tokens_too(monkeypatch, context, windows):
    monkeypatch.setattr(indexing_keys, "CHECKPOINT_WINDOWS", 128)
    assert windows_at_once(context) == windows


def test_a_smaller_stride_gives_more_context_and_the_same_values(model_folder, corpus_folder, tmp_path):
    for stride in (1, 48):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / str(stride), stride=stride, check="none")
    np.testing.assert_array_equal(read(tmp_path / "1", "values.npy"), read(tmp_path / "48", "values.npy"))
    assert not np.array_equal(read(tmp_path / "1", "keys.npy"), read(tmp_path / "48", "keys.npy"))
    with pytest.raises(InvalidInput, match="stride"):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "x", stride=49)


def test_bad_input_harms_nothing_that_was_there(model_folder, corpus_folder, store_folder, tmp_path):
    before = (store_folder / "CURRENT").read_text()
    with pytest.raises(AlreadyExists):
        build_index(model_folder, Corpus([corpus_folder]), store_folder)
    with pytest.raises(NotFound):
        build_index(tmp_path / "nowhere", Corpus([corpus_folder]), tmp_path / "s")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="no text"):
        build_index(model_folder, Corpus([tmp_path / "empty"]), tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert (store_folder / "CURRENT").read_text() == before


def test_added_documents_are_found_and_a_taken_id_is_refused(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder / "doc-0.txt"]), tmp_path / "s")
    report = add_to_index(model_folder, Corpus([corpus_folder / "doc-1.txt"]), tmp_path / "s")
    assert report.documents == 1
    with Datastore.open(tmp_path / "s") as store:
        assert [document.id for document in store.snapshot.documents()] == ["doc-0.txt", "doc-1.txt"]
        assert len(store.manifest.segments) == 2
    with pytest.raises(AlreadyExists, match=r"doc-0\.txt"):
        add_to_index(model_folder, Corpus([corpus_folder / "doc-0.txt"]), tmp_path / "s")


def test_quality_compares_the_index_with_exact_search(model_folder, corpus_folder, checkpoint, tmp_path):
    exact = build_index(model_folder, Corpus([corpus_folder]), tmp_path / "flat").quality
    assert (exact.recall, exact.softmax_mass, exact.nats_change) == (1.0, pytest.approx(1.0), 0.0)
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "ivf", index="IVF16,SQfp16", check="full")
    with Datastore.open(tmp_path / "ivf") as store:
        memory = ModelStore(store, checkpoint)
        stored = store.manifest.quality
        assert stored == measure_quality(memory, sample_trial(memory, checkpoint)).as_dict()
        assert 0.5 < stored["recall"] <= 1.0


def test_a_query_never_finds_its_own_document(store_folder, checkpoint):
    from memlm.indexing.quality import leave_one_out

    with Datastore.open(store_folder) as store:
        queries = sample_queries(store.snapshot, checkpoint)
        for searcher in (store, store.snapshot.exact()):
            found = leave_one_out(store.snapshot, searcher, queries, 5)
            assert (found.ids_QK >= 0).all()
            assert (store.snapshot.document_of(found.ids_QK) != queries.documents_Q[:, None]).all()
        nearest_Q = store.snapshot.document_of(store.snapshot.exact().search(queries.keys_QD, 1).ids_QK)[:, 0]
        assert (nearest_Q == queries.documents_Q).mean() > 0.5  # as it would, if it were let


def test_a_store_of_one_document_is_judged_by_its_other_positions(checkpoint, tmp_path):
    (tmp_path / "long.txt").write_text("".join(f"The {n}th of many lines, {n * n % 97} words on. " for n in range(300)))
    built = build_index(checkpoint, Corpus([tmp_path / "long.txt"]), tmp_path / "s", index="IVF32,SQfp16")
    assert (built.documents, built.entries > 32 * built.quality.k) == (1, True)
    assert 0.5 < built.quality.softmax_mass <= 1  # of what was found, not of nothing
    with Datastore.open(tmp_path / "s") as store:
        trial = sample_trial(ModelStore(store, checkpoint), checkpoint)
        ids_QK, queries = trial.exact.ids_QK, trial.queries
        offsets = [place.token_offset for place in store.snapshot.locate(queries.ids_Q)]
        np.testing.assert_array_equal(store.snapshot.tokens("long.txt")[offsets], queries.targets_Q)
        assert (ids_QK >= 0).all()
        assert (ids_QK != queries.ids_Q[:, None]).all()
        nearest_QK = store.snapshot.exact().search(queries.keys_QD, ids_QK.shape[1] + 1).ids_QK
        for query, own in enumerate(queries.ids_Q):
            others = [id_ for id_ in nearest_QK[query].tolist() if id_ != own]
            assert ids_QK[query].tolist() == others[: ids_QK.shape[1]]


def test_what_is_left_out_costs_a_bounded_search(monkeypatch, checkpoint, store_folder):
    """A long document has all that are near: no search asks for the whole store."""
    from memlm.indexing import quality

    monkeypatch.setattr(quality, "OVERFETCH", (1, 2))
    with Datastore.open(store_folder) as store:
        asked, searcher = [], store.snapshot.exact()
        plain = type(searcher).search
        monkeypatch.setattr(
            type(searcher), "search", lambda self, keys_QD, k: (asked.append(k), plain(self, keys_QD, k))[1]
        )
        queries = sample_queries(store.snapshot, checkpoint)
        found = quality.leave_one_out(store.snapshot, searcher, queries, 4)
        assert asked == [4, 8]
        assert (found.ids_QK < 0).any()
        assert (store.snapshot.document_of(found.ids_QK) != queries.documents_Q[:, None]).all()


def test_agreement_counts_ids_and_weighs_mass():
    exact = Neighbors(np.array([[0.0, 0.0, 50.0]], np.float32), np.array([[1, 2, 3]]), np.zeros((1, 3), int))
    found = Neighbors(np.array([[0.0, 50.0, 60.0]], np.float32), np.array([[2, 3, 9]]), np.zeros((1, 3), int))
    recall, mass = agreement(found, exact, 1.0)
    assert (recall, mass) == (pytest.approx(2 / 3), pytest.approx(0.5))


def test_a_build_reads_windows_of_the_given_size_and_queries_follow_it(
    model_folder, corpus_folder, checkpoint, tmp_path
):
    store = build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "s", window=12, stride=5, check="full").path
    documents = list(Corpus([corpus_folder]))
    with Datastore.open(store) as datastore:
        spec = datastore.manifest.spec
        assert (spec.context, spec.stride, spec.model_fingerprint) == (12, 5, checkpoint.fingerprint)
        assert check_keys(datastore.snapshot, checkpoint).found == 1
    tokens_n, start_id = checkpoint.tokenizer.encode(documents[0].text), checkpoint.tokenizer.start_id
    windows = list(windows_of(tokens_n, start_id=start_id, context=12, stride=5))
    expected_ND = np.concatenate([keys_ND for each in windows for keys_ND in Encoder(checkpoint.decoder).keys([each])])
    np.testing.assert_allclose(read(store, "keys.npy")[: len(tokens_n)], expected_ND, rtol=2e-3, atol=2e-3)
    with load(model_folder, [store]) as lm:
        retriever = lm.engine.stores.retriever(RetrievalParams())
        assert retriever.window_size == (12, 5)
        scored = lm.score(documents[0].text)
        base = -sum(float(each.logprobs_N.sum()) for each in predictions_of(checkpoint.decoder, windows))
        assert scored.base.nll == pytest.approx(base, rel=1e-4)
        assert evaluate(lm, Corpus([corpus_folder / documents[0].id])).total.base.nll == pytest.approx(base, rel=1e-4)
    for name, value in (("window", 0), ("window", 10**6), ("stride", 13)):
        with pytest.raises(InvalidInput, match=name):
            build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "t", **{"window": 12, name: value})


def test_windows_are_as_long_as_the_context_up_to_a_bound(checkpoint, corpus_folder, tmp_path, monkeypatch):
    store = build_index(checkpoint, Corpus([corpus_folder / "doc-0.txt"]), tmp_path / "s", check="none").path
    assert Datastore.open(store).manifest.spec.context == checkpoint.decoder.config.context_length == 48
    monkeypatch.setattr("memlm.retrieval.encoder.DEFAULT_WINDOW", 16)
    store = build_index(checkpoint, Corpus([corpus_folder / "doc-0.txt"]), tmp_path / "t", check="none").path
    spec = Datastore.open(store).manifest.spec
    assert (spec.context, spec.stride) == (16, 8)


def test_tuning_finds_the_best_and_keeps_it(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder / f"doc-{n}.txt" for n in range(7)]), tmp_path / "s")
    report = tune(model_folder, tmp_path / "s", Corpus([corpus_folder / "doc-7.txt"]), largest_k=64)
    assert report.knn_nats < report.base_nats
    with load(model_folder, [tmp_path / "s"]) as lm:
        held_out = Corpus([corpus_folder / "doc-7.txt"])
        tuned = evaluate(lm, held_out, lam=report.lam).total
        assert (tuned.k, tuned.lam, tuned.knn_temperature) == (report.k, report.lam, report.temperature)
        assert tuned.nll / tuned.tokens == pytest.approx(report.knn_nats, rel=1e-3)
        lams = [{"lam": report.lam * 0.7}, {"lam": min(1.0, report.lam * 1.3)}]
        temperatures = [{"knn_temperature": report.temperature * factor} for factor in (0.25, 4)]
        for other in lams + temperatures:
            assert evaluate(lm, held_out, **other).total.nll >= tuned.nll - 1e-3
        assert lm.stores[0].tuned_on == f"doc-7.txt ({report.tokens} tokens)"


def test_the_best_lam_is_where_the_likelihood_is_highest():
    rng = np.random.default_rng(0)
    lm_Q, knn_Q = rng.random(500), rng.random(500) * (rng.random(500) < 0.5)
    best = best_lam(lm_Q, knn_Q)
    grid = np.linspace(0, 0.999, 1000)
    likelihoods = [np.log(lam * knn_Q + (1 - lam) * lm_Q).mean() for lam in grid]
    assert best == pytest.approx(grid[int(np.argmax(likelihoods))], abs=2e-3)
    assert best_lam(lm_Q, np.zeros(500)) == pytest.approx(0, abs=1e-4)


def test_a_store_of_another_model_is_not_tuned_or_extended(
    model_folder, store_folder, corpus_folder, checkpoint, tmp_path
):
    import torch

    from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint

    other = load_checkpoint(model_folder)
    with torch.no_grad():
        other.decoder.norm.weight[0] += 1
    save_checkpoint(tmp_path / "other", other.decoder, other.tokenizer)
    built_by = re.escape(f"another model ({model_folder.name}, fingerprint {checkpoint.fingerprint})")
    for work in (tune, lambda model, store, corpus: add_to_index(model, corpus, store)):
        with pytest.raises(Incompatible, match=built_by):
            work(tmp_path / "other", store_folder, Corpus([corpus_folder]))


def test_evaluation_adds_up(lm, corpus_folder):
    evaluation = evaluate(lm, Corpus([corpus_folder]))
    assert sorted(evaluation.texts) == [f"doc-{number}.txt" for number in range(8)]
    for name in ("tokens", "words", "bytes", "nll"):
        assert getattr(evaluation.total, name) == pytest.approx(
            sum(getattr(s, name) for s in evaluation.texts.values())
        )
    for document in Corpus([corpus_folder]):
        assert evaluation.texts[document.id].nll == pytest.approx(lm.score(document.text).nll, rel=1e-5)
    assert evaluation.total.base == evaluate(lm, Corpus([corpus_folder]), use_store=False).total.base


def test_saved_defaults_are_what_a_request_takes(lm, tmp_path):
    retriever = lm.engine.stores.retriever(RetrievalParams())
    defaults = lm.engine.stores.model_store().snapshot.defaults
    knn = retriever.knn
    assert (knn.k, knn.lam, knn.temperature) == (
        defaults.k,
        defaults.lam,
        defaults.temperature,
    )
    assert isinstance(defaults, KnnDefaults)
    assert json.dumps(lm.engine.stores.model_store().datastore.manifest.quality)


@pytest.fixture(params=["plain", "memorizing"])
def shifted(request, corpus_folder, tokenizer, tmp_path):
    """A model, and a function that builds a store whose keys are so many places off their values."""
    from memlm.index.store.writer import StoreWriter
    from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint

    torch.manual_seed(0)
    memory = {"memorizing": Memorizing(layers=(1,), top_k=4)} if request.param == "memorizing" else {}
    decoder = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE, **memory)).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    save_checkpoint(tmp_path / "model", decoder, tokenizer)
    checkpoint = load_checkpoint(tmp_path / "model")
    append = StoreWriter.append

    def shift(keys_ND: np.ndarray | None, places: int) -> np.ndarray | None:
        return None if keys_ND is None else np.roll(keys_ND, places, 0)

    def build(places: int, **options: Any) -> Datastore:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoreWriter, "append", lambda w, keys, *others: append(w, shift(keys, places), *others))
            path = tmp_path / f"by-{places}"
            return Datastore.open(build_index(checkpoint, Corpus([corpus_folder]), path, **options).path)

    return checkpoint, build


def test_keys_that_are_one_place_off_are_found_out(shifted):
    checkpoint, build = shifted
    sound = check_keys(build(0, check="none").snapshot, checkpoint)
    assert sound.positions > 500
    assert (sound.found, sound.aligned) == (1.0, 1.0)
    assert sound.problems("store") == []
    for places in (1, -1):
        broken = check_keys(build(places, check="none").snapshot, checkpoint)
        assert broken.aligned < 0.2
        assert any("before its value" in problem for problem in broken.problems("store"))


@pytest.mark.parametrize("shifted", ["plain"], indirect=True)
@pytest.mark.parametrize("index", ["IVF8,SQ8", "IVF8,RaBitQ"])
def test_they_are_found_out_without_stored_keys_too(shifted, index):
    checkpoint, build = shifted
    for places, result in ((0, 0), (1, 1), (-1, 1)):
        with build(places, index=index, keep_keys=False) as store:
            assert len(check_keys(store.snapshot, checkpoint).problems("store")) == result


def test_an_index_that_loses_entries_is_found_out(store_folder, checkpoint, monkeypatch):
    with Datastore.open(store_folder) as store:
        assert store.snapshot.verify() == []
        search = Segment.search
        monkeypatch.setattr(Segment, "search", lambda s, queries, *others: search(s, -queries, *others))
        assert "do not find themselves" in store.snapshot.verify()[0]
        assert "find themselves" in check_keys(store.snapshot, checkpoint).problems("store")[0]


def test_replaced_documents_are_read_anew_and_the_compacted_store_is_measured(
    model_folder, corpus_folder, checkpoint, tmp_path
):
    build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "s", check="none")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "doc-3.txt").write_text("Quite another text than before. " * 9)
    with pytest.raises(AlreadyExists, match="--replace"):
        add_to_index(checkpoint, Corpus([tmp_path / "new"]), tmp_path / "s")
    report = add_to_index(checkpoint, Corpus([tmp_path / "new"]), tmp_path / "s", replace=True)
    assert report.documents == 1
    result = compact_index(tmp_path / "s", model_folder)
    assert (result.segments_before, result.deleted_documents) == (2, 1)
    with Datastore.open(tmp_path / "s") as store:
        assert checkpoint.tokenizer.decode(store.snapshot.tokens("doc-3.txt").tolist()).startswith("Quite another")
        assert store.manifest.quality["recall"] == 1.0
        assert check_keys(store.snapshot, checkpoint).problems("store") == []
    build_index(checkpoint, Corpus([tmp_path / "new"]), tmp_path / "other", check="none")
    assert compact_index(tmp_path / "other").segments_before == 1


def test_an_estimate_is_near_what_the_build_takes(checkpoint, corpus_folder, tmp_path):
    result = estimate_build(checkpoint, Corpus([corpus_folder]), tmp_path / "s", index="IVF8,SQfp16")
    report = build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "s", index="IVF8,SQfp16")
    with Datastore.open(tmp_path / "s") as store:
        assert result.entries == pytest.approx(report.entries, rel=0.1)
        assert result.disk_bytes == pytest.approx(store.snapshot.bytes_on_disk, rel=0.25)
        index = store.path / store.manifest.segments[0].folder / "index.faiss"
        assert result.search_bytes == pytest.approx(index.stat().st_size, rel=0.1)
    assert result.index == report.index
    assert result.tokens_per_s > 0 < result.seconds
    smaller = estimate_build(checkpoint, Corpus([corpus_folder]), tmp_path / "s", index="IVF8,SQ8", measure=False)
    assert smaller.disk_bytes == result.disk_bytes  # half the code, but twice while it is written
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InvalidInput, match="no text"):
        estimate_build(checkpoint, Corpus([tmp_path / "empty.txt"]), tmp_path / "t")


def test_a_build_that_the_disk_will_not_hold_is_refused_before_it_starts(
    checkpoint, corpus_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("memlm.indexing.estimate.shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))
    with pytest.raises(StorageFull, match="make room"):
        build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_build_without_its_keys_takes_less_room_and_still_answers(checkpoint, corpus_folder, tmp_path):
    sizes = {}
    for keep_keys in (True, False):
        path = tmp_path / str(keep_keys)
        report = build_index(checkpoint, Corpus([corpus_folder]), path, index="IVF8,SQ8", keep_keys=keep_keys)
        sizes[keep_keys] = report.bytes_per_entry
        assert report.distances == ("re-ranked" if keep_keys else "approximate")
        assert report.tried[-1]["softmax_mass"] > 0.9
        assert report.quality.recall > 0.8
        assert report.key_check.problems("store") == []
        with load(checkpoint.path, [path]) as lm:
            assert lm.score("the memory of a model").figures.nll > 0
    assert sizes[True] - sizes[False] == pytest.approx(2 * 32, abs=0.5)


@pytest.mark.parametrize("index", ["IVF8,SQ8", "IVF8,SQfp16", "IVF8,RaBitQ"])
def test_a_datastore_without_its_keys_is_added_to_and_checked_as_far_as_it_can_be(
    checkpoint, corpus_folder, tmp_path, monkeypatch, capsys, index
):
    store, new = tmp_path / "s", tmp_path / "new"
    build_index(checkpoint, Corpus([corpus_folder]), store, index=index, keep_keys=False)
    new.mkdir()
    (new / "new.txt").write_text(make_text(77, 60))
    report = add_to_index(checkpoint, Corpus([new]), store)
    assert (report.documents, report.quality, report.key_check.aligned) == (1, None, None)
    assert report.key_check.problems("store") == []
    print_build(report, Path("model"), json=False)
    assert "not measured against exact search" in capsys.readouterr().out
    with Datastore.open(store) as datastore:
        assert not any(segment.has_keys for segment in datastore.snapshot.segments)
        assert datastore.manifest.quality is None
        assert datastore.snapshot.verify() == []
        search = Segment.search
        monkeypatch.setattr(Segment, "search", lambda s, queries, *others: search(s, -queries, *others))
        assert "do not find themselves" in check_keys(datastore.snapshot, checkpoint).problems("store")[0]
    monkeypatch.undo()
    assert not finish_build(store, checkpoint)
    with pytest.raises(AlreadyExists) as result:
        build_index(checkpoint, Corpus([corpus_folder]), store)
    assert "not measured" not in str(result.value)


def test_documents_in_memory_are_built_and_added_as_files_are(model_folder, corpus_folder, tmp_path):
    documents = list(Corpus([corpus_folder]))
    build_index(model_folder, documents[:-1], tmp_path / "memory", check="none")
    add_to_index(model_folder, documents[-1:], tmp_path / "memory", check="none")
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "files", check="none")
    with Datastore.open(tmp_path / "memory") as store:
        assert [document.id for document in store.snapshot.documents()] == [each.id for each in documents]
        stored = [
            np.load(tmp_path / "memory" / segment.record.folder / "keys.npy") for segment in store.snapshot.segments
        ]
    (expected,) = [np.load(path) for path in (tmp_path / "files" / "segments").glob("*/keys.npy")]
    assert np.array_equal(np.concatenate(stored), expected)
    with pytest.raises(InvalidInput, match="expected files, folders or documents in a list"):
        Corpus(str(corpus_folder))


def test_a_store_inside_its_corpus_holds_what_one_outside_holds(model_folder, corpus_folder, tmp_path):
    notes = Path(shutil.copytree(corpus_folder, tmp_path / "notes"))
    whole = build_index(model_folder, Corpus([corpus_folder]), tmp_path / "outside", check="none")

    def kill(phase: str, done: int, total: int | None, note: str = "") -> None:
        if phase == "read" and done:
            raise Killed

    with pytest.raises(Killed):
        build_index(model_folder, [notes], notes / "store", progress=kill)
    assert (notes / "store" / "building.json").exists()
    report = build_index(model_folder, [notes], notes / "store", check="none")
    assert (report.documents, report.entries) == (whole.documents, whole.entries)
    added = add_to_index(model_folder, Corpus([notes], hidden=True), notes / "store", replace=True, check="none")
    assert (added.documents, added.entries) == (whole.documents, whole.entries)
    with Datastore.open(notes / "store") as inside, Datastore.open(tmp_path / "outside") as outside:
        stores = (inside.snapshot, outside.snapshot)
        names = [[document.id for document in each.documents()] for each in stores]
        assert names[0] == names[1]
        for name in names[0]:
            assert np.array_equal(*(each.tokens(name) for each in stores))
