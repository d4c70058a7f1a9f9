"""Choosing an index: what is tried, what is judged, and what is chosen within a memory."""

import numpy as np
import pytest
from random_stores import DEFAULTS, DIM, Corpus, build, fill, spec

from memlm.base.progress import silent
from memlm.errors import Incompatible, InvalidInput
from memlm.index import selection
from memlm.index.exact import exact_distances, exact_neighbors
from memlm.index.ivf import PROBES, Ivf, code_bytes, is_lossless, lists_for
from memlm.index.neighbors import Neighbors
from memlm.index.selection import TrialQueries, agreement, select_index
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.writer import StoreWriter

LARGE = Corpus(7, num_documents=120)
KEYS_ND = LARGE.keys_ND.astype(np.float16)
STARTS = np.array([0, *np.cumsum(LARGE.sizes)])
OPQ = pytest.param("OPQ4,IVF4,PQ4x4", marks=pytest.mark.exhaustive)  # training it takes 12 s
LOSSY = ["IVF4,PQ4x4", "IVF4,SQ4", "IVF4,RaBitQ", OPQ]


def filled(factory: str, *, keep_keys: bool = True) -> Ivf:
    return selection._filled(factory, KEYS_ND, LARGE.values_N, keep_keys=keep_keys, seed=0)


def test_agreement_is_what_the_loops_say():
    rng = np.random.default_rng(0)
    for _ in range(20):
        distances_QK = np.sort(rng.exponential(size=(5, 8)).astype(np.float32), axis=1)
        ids_QK = np.stack([rng.permutation(30)[:8] for _ in range(5)])
        ids_QK[0], distances_QK[0] = -1, np.inf
        ids_QK[1, 5:], distances_QK[1, 5:] = -1, np.inf
        values_QK = np.zeros_like(ids_QK)
        found_QK = np.where(rng.random((5, 8)) < 0.7, ids_QK, 99)
        recall_Q, mass_Q = agreement(
            Neighbors(distances_QK, found_QK, values_QK), Neighbors(distances_QK, ids_QK, values_QK), 0.7
        )
        expected = []
        for query in range(1, 5):
            columns = [place for place in range(8) if ids_QK[query, place] >= 0]
            weights = {place: np.exp(-float(distances_QK[query, place]) / 0.7) for place in columns}
            hits = [place for place in columns if ids_QK[query, place] in set(found_QK[query])]
            expected.append((len(hits) / len(columns), sum(weights[p] for p in hits) / sum(weights.values())))
        np.testing.assert_allclose(np.stack([recall_Q, mass_Q], axis=1), expected, rtol=1e-4)


def test_a_trial_leaves_out_the_querys_own_document():
    trial = TrialQueries.of(KEYS_ND, LARGE.values_N, STARTS, seed=0)
    owners_QK = np.searchsorted(STARTS, np.maximum(trial.exact.ids_QK, 0), side="right") - 1
    there_QK = trial.exact.ids_QK >= 0
    assert there_QK.mean() > 0.9
    assert not (there_QK & (owners_QK == trial.documents_Q[:, None])).any()
    own_Q = exact_neighbors(trial.queries_QD, KEYS_ND, LARGE.values_N, 1).distances_QK[:, 0]
    assert (own_Q == 0).all()  # they would find themselves, if they were let


@pytest.mark.parametrize("factory", LOSSY)
def test_reranked_distances_are_exact_and_find_more(factory):
    trial, index = TrialQueries.of(KEYS_ND, LARGE.values_N, STARTS, seed=0), filled(factory)
    queries_QD = trial.queries_QD
    found = index.search(queries_QD, 5, 4, 8)
    expected = exact_neighbors(queries_QD, KEYS_ND, LARGE.values_N, len(KEYS_ND))
    for query in range(len(queries_QD)):
        place = {id_: number for number, id_ in enumerate(expected.ids_QK[query].tolist())}
        for number, id_ in enumerate(found.ids_QK[query].tolist()):
            assert found.distances_QK[query, number] == expected.distances_QK[query, place[id_]]
            assert found.values_QK[query, number] == LARGE.values_N[id_]
    assert (np.diff(found.distances_QK, axis=1) >= 0).all()
    more, less = trial.evaluate(index, 4, 8).softmax_mass, trial.evaluate(index, 4, 1).softmax_mass
    assert more > less or less == 1.0
    part = index.search(queries_QD[:3], len(KEYS_ND), 1, 2)  # one list of four has not all of them
    assert (part.ids_QK < 0).any(axis=1).all()
    assert (np.isinf(part.distances_QK) == (part.ids_QK < 0)).all()
    assert (np.sort(part.distances_QK, axis=1) == part.distances_QK).all()
    everything = index.search(queries_QD[:3], 10_000, 4, 2)
    assert (everything.ids_QK >= 0).sum(axis=1).tolist() == [len(KEYS_ND)] * 3


def test_settling_takes_the_fewest_lists_and_the_least_reranking_that_do():
    trial, index = TrialQueries.of(KEYS_ND, LARGE.values_N, STARTS, seed=0), filled("IVF64,SQfp16")
    easy, hard = trial.tune_nprobe(index, 0.5), trial.tune_nprobe(index, 1.0)
    assert easy.nprobe < hard.nprobe <= 64
    assert (easy.rerank, hard.rerank) == (0, 0)
    assert hard.softmax_mass == pytest.approx(1.0, abs=1e-6)
    lossy = filled("IVF4,PQ4x4")
    reranked = [trial.tune_nprobe(lossy, target).rerank for target in (0.5, 0.9, 1.0)]
    assert reranked == sorted(reranked)
    assert reranked[0] < reranked[-1]
    assert trial.tune_nprobe(filled("IVF4,PQ4x4", keep_keys=False), 1.0).rerank == 0


def settle_plainly(trial: TrialQueries, index: Ivf, target: float) -> int:
    """How many lists: every number is tried, the fewest first."""
    rerank = 8 if index.keys_ND is not None else 0
    tried = [trial.evaluate(index, nprobe, rerank) for nprobe in sorted({min(each, index.nlist) for each in PROBES})]
    enough = [each for each in tried if each.softmax_mass >= target]
    return (enough or [max(tried, key=lambda each: each.softmax_mass)])[0].nprobe


@pytest.mark.parametrize("factory", ["IVF200,SQfp16", "IVF40,SQ8", "PCA6,IVF60,SQ8", "IVF4,SQfp16"])
def test_what_cannot_find_enough_is_passed_over_and_nothing_else(factory, monkeypatch):
    trial, index, judged = TrialQueries.of(KEYS_ND, LARGE.values_N, STARTS, seed=0), filled(factory), []
    monkeypatch.setattr(
        TrialQueries,
        "evaluate",
        lambda *args, evaluate=TrialQueries.evaluate: judged.append(args[2]) or evaluate(*args),
    )
    for target in (0.3, 0.6, 0.9, 0.99, 1.0, 1.1):
        expected, begun = settle_plainly(trial, index, target), len(judged)
        assert trial.tune_nprobe(index, target).nprobe == expected
        if index.keys_ND is None:
            assert judged[begun:] == [expected]  # without codes that lose something, one is tried


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr("memlm.index.ivf.FLAT_NUMBERS", 100)
    monkeypatch.setattr(selection, "_codes", lambda dim: ["SQfp16", "SQ8", "SQ4", "PQ6x4", "PQ3x4"])


def chosen(
    max_ram_bytes: int, target: float = 0.99, *, keep_keys: bool = True
) -> tuple[str, list[selection.IndexTrial]]:
    return select_index(
        KEYS_ND, LARGE.values_N, STARTS, target=target, max_ram_bytes=max_ram_bytes, keep_keys=keep_keys, seed=0,
        progress=silent,
    )  # fmt: skip


def test_the_smallest_codes_that_find_enough_are_chosen(many):
    plenty = 10**9
    factory, tried = chosen(plenty, 0.2)
    sizes = [each.bytes_per_entry for each in tried]
    assert sizes == sorted(sizes)
    assert tried[-1].softmax_mass >= 0.2
    assert all(each.softmax_mass < 0.2 for each in tried[:-1])
    assert factory.partition(",")[2] == tried[-1].index.partition(",")[2]
    strict, all_tried = chosen(plenty, 0.999, keep_keys=False)
    assert len(all_tried) > len(tried)
    assert code_bytes(strict, DIM) > code_bytes(factory, DIM)


def test_no_index_larger_than_the_memory_is_tried_and_the_best_of_the_rest_is_taken(many):
    entries = len(KEYS_ND)
    lists = lists_for(entries) * DIM * 4
    factory, tried = chosen(entries * (3 + 8) + lists, 0.999, keep_keys=False)
    assert {each.index.partition(",")[2] for each in tried} == {"PQ3x4", "PQ6x4"}
    best = max(tried, key=lambda each: each.softmax_mass)
    assert factory.partition(",")[2] == best.index.partition(",")[2]
    with pytest.raises(InvalidInput, match="smallest index") as told:
        chosen(1000)
    assert told.value.field == "max_ram_bytes"
    assert f"{entries * (2 + 8) + lists:,}" in str(told.value)


@pytest.mark.parametrize("factory", [*LOSSY, "IVF4,SQfp16"])
@pytest.mark.parametrize("keep_keys", [True, False])
def test_a_store_knows_what_its_distances_are_of(tmp_path, factory, keep_keys):
    with StoreWriter.create(tmp_path / "s", spec(factory, keep_keys=keep_keys)) as writer:
        fill(writer, LARGE)
        store = writer.commit(defaults=DEFAULTS)
    if not keep_keys:
        store.drop_keys()
    lossless = is_lossless(factory)
    assert store.snapshot.distances == ("exact" if lossless else "re-ranked" if keep_keys else "approximate")
    assert store.snapshot.verify() == []
    with Datastore.open(tmp_path / "s") as again:
        assert again.snapshot.distances == store.snapshot.distances
        found = again.search(LARGE.keys_ND[:20], 3, nprobe=4)
        rows_QK = found.ids_QK - (1 << 40)
        true_QK = exact_distances(LARGE.keys_ND[:20].astype(np.float16).astype(np.float32), KEYS_ND, rows_QK)
        assert np.allclose(found.distances_QK, true_QK, rtol=1e-4, atol=1e-4) == (
            again.snapshot.distances != "approximate"
        )
        again.delete(["doc-0"])
        assert "doc-0" not in {
            p.document_id for ids in again.search(LARGE.keys_ND, 3).ids_QK for p in again.snapshot.locate(ids)
        }
        if not keep_keys:
            assert not (again.path / "segments" / "000001" / "keys.npy").exists()
            with pytest.raises(Incompatible, match="--keep-keys"):
                again.snapshot.exact().search(LARGE.keys_ND[:1], 1)
            with pytest.raises(Incompatible, match="--keep-keys"):
                compact(again.path)
            assert again.snapshot.verify() == []


def test_a_build_within_a_memory_says_what_it_tried(many, tmp_path):
    with StoreWriter.create(tmp_path / "s", spec(max_ram_bytes=10**9, target=0.6)) as writer:
        fill(writer, LARGE)
        store = writer.commit(defaults=DEFAULTS)
    record = store.manifest.segments[0]
    assert record.index == record.tried[-1]["index"]
    assert len(record.tried) > 1
    assert record.tried[-1]["softmax_mass"] > 0.5
    assert Datastore.open(tmp_path / "s").manifest.segments[0] == record


def test_keys_of_small_stores_stay_since_they_are_the_index(tmp_path):
    store = build(tmp_path / "s", Corpus(1))
    number = store.manifest.number
    store.drop_keys()
    assert store.manifest.number == number
    assert store.snapshot.verify() == []
