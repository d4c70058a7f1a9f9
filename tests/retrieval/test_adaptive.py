"""A lam that adapts: fitted, judged on other text, and used alike everywhere."""

import math
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest

from memlm.api.params import RetrievalParams
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.indexing.fitting import NEAR, PRICE, Evidence, Trial, find_threshold, fit_lam, gain_of, nats_of, sharpened
from memlm.indexing.tune import _fit_adaptive
from memlm.language_model import load
from memlm.retrieval.adaptive import LEAST, AdaptiveLam, features_of, fit
from memlm.retrieval.interpolation import neighbor_logweights
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

LAM = AdaptiveLam(0.3, (-0.5, 0.2, 1.5, 0.1, -0.7), (1.0, 0.5, 0.5, 1.0, -1.0), (0.5, 0.5, 0.3, 0.5, 0.8))


def some_neighbors(rng: np.random.Generator) -> Neighbors:
    distances_QK = np.sort(rng.exponential(size=(6, 9)).astype(np.float32), axis=1)
    values_QK, ids_QK = rng.integers(0, 3, (6, 9)), rng.integers(0, 99, (6, 9))
    for row, columns in ((0, 0), (1, 4)):
        distances_QK[row, columns:], values_QK[row, columns:], ids_QK[row, columns:] = np.inf, -1, -1
    return Neighbors(distances_QK, ids_QK, values_QK)


def test_features_are_what_the_loops_say_and_finite_without_neighbors():
    rng = np.random.default_rng(0)
    found, max_logprobs_Q, temperature = some_neighbors(rng), -rng.exponential(size=6).astype(np.float32), 0.7
    features_QF = features_of(found, neighbor_logweights(found.distances_QK, temperature), temperature, max_logprobs_Q)
    assert np.isfinite(features_QF).all()
    for query in range(1, 6):
        columns = [place for place in range(9) if found.ids_QK[query, place] >= 0]
        distance = [float(found.distances_QK[query, place]) for place in columns]
        raw = [math.exp((distance[0] - each) / temperature) for each in distance]
        weights = [each / sum(raw) for each in raw]
        agreeing = sum(w for w, place in zip(weights, columns, strict=True)
                       if found.values_QK[query, place] == found.values_QK[query, 0])  # fmt: skip
        expected = [
            math.log1p(distance[0] / temperature),
            sum(w * (each - distance[0]) / temperature for w, each in zip(weights, distance, strict=True)),
            agreeing,
            -sum(w * math.log(w) for w in weights),
            float(max_logprobs_Q[query]),
        ]
        np.testing.assert_allclose(features_QF[query], expected, rtol=1e-4, atol=1e-5)


def test_fitting_finds_where_the_memory_is_right():
    rng = np.random.default_rng(1)
    features_QF = rng.normal(size=(4000, 5))
    right_Q = features_QF[:, 2] + 0.3 * rng.normal(size=4000) > 0
    knn_Q, lm_Q = np.where(right_Q, 0.8, 0.01), np.full(4000, 0.2)
    train, test = slice(0, 2000), slice(2000, 4000)
    fixed = max(np.arange(0.01, 1, 0.01), key=lambda lam: np.log(lam * knn_Q[train] + (1 - lam) * lm_Q[train]).mean())
    lams_Q = fit(features_QF[train], lm_Q[train], knn_Q[train], fixed).lams(features_QF[test])
    adapted = np.log(lams_Q * knn_Q[test] + (1 - lams_Q) * lm_Q[test]).mean()
    assert adapted > np.log(fixed * knn_Q[test] + (1 - fixed) * lm_Q[test]).mean() + 0.2
    assert lams_Q[right_Q[test]].mean() > 0.7 > 0.3 > lams_Q[~right_Q[test]].mean()
    useless = fit(rng.normal(size=(2000, 5)), lm_Q[train], knn_Q[train], fixed).lams(rng.normal(size=(50, 5)))
    assert np.abs(useless - fixed).mean() < 0.06


def test_a_neighbor_beyond_reach_has_the_least_weight_and_old_stores_have_no_reach():
    fields = {"bias": 2.0, "weights": [0.0] * 5, "means": [0.0] * 5, "scales": [1.0] * 5}
    features_QF = np.array([[0.5, 0, 0, 0, 0], [1.5, 0, 0, 0, 0]])
    assert AdaptiveLam.of(fields).lams(features_QF) == pytest.approx([0.8808, 0.8808], abs=1e-4)
    near = AdaptiveLam.of({**fields, "reach": 1.0}).lams(features_QF)
    assert near == pytest.approx([0.8808, LEAST], abs=1e-4)


def test_a_lam_below_the_threshold_is_0_and_old_stores_have_no_threshold():
    fields = {"bias": 0.0, "weights": [1.0] + [0.0] * 4, "means": [0.0] * 5, "scales": [1.0] * 5}
    features_QF = np.array([[-1.0, 0, 0, 0, 0], [0.0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0]])
    lams = AdaptiveLam.of(fields).lams(features_QF)
    assert lams == pytest.approx([0.2689, 0.5, 0.7311], abs=1e-4)
    assert AdaptiveLam.of({**fields, "threshold": 0.5}).lams(features_QF) == pytest.approx([0, *lams[1:]])
    # The threshold is kept as a number of 64 bits, and each λ equals it or not as one of 32.
    assert AdaptiveLam.of({**fields, "threshold": float(lams[2])}).lams(features_QF) == pytest.approx([0, 0, lams[2]])


def test_the_temperature_is_a_tenth_where_the_nearest_neighbor_is_near_and_old_stores_have_one_temperature():
    distances_QK = np.array([[0.4, 0.5, 3.0], [0.5, 0.6, 3.0], [np.inf, np.inf, np.inf]], np.float32)
    near = AdaptiveLam.of({**asdict(LAM), "near": 0.5})
    logweights_QK = neighbor_logweights(distances_QK, near.temperatures(distances_QK, 2.0))
    for row, temperature in ((0, 0.2), (1, 2.0)):
        weights = [math.exp(-distance / temperature) for distance in distances_QK[row].tolist()]
        assert np.exp(logweights_QK[row]) == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-5)
    assert (logweights_QK[2] == -np.inf).all()
    old = asdict(LAM)
    del old["near"], old["threshold"], old["reach"]
    assert AdaptiveLam.of(old).temperatures(np.full((1, 2), -1e-6, np.float32), 2.0) == 2.0


@pytest.mark.parametrize(("right", "is_kept"), [(0, True), (1, False)])
def test_weights_are_sharpened_unless_new_text_loses_by_it(right, is_kept):
    """Half of the positions have a neighbor at a distance of 0, and one a little farther. One of them is right."""
    count, values_QK = 400, np.tile([5, 6], (400, 1))
    distances_QK = np.where(np.arange(count)[:, None] % 2, [0.0, 0.3], [4.0, 5.0]).astype(np.float32)
    found = Neighbors(distances_QK, np.tile([7, 8], (count, 1)), values_QK)
    agrees_QK = np.zeros((count, 2), bool)
    agrees_QK[:, right] = True
    lm_Q = np.full(count, np.log(0.1), np.float32)
    evidence = Evidence(lm_Q, lm_Q, np.arange(count) // 20, found, agrees_QK)
    flat = AdaptiveLam(0.0, (0.0,) * 5, (0.0,) * 5, (1.0,) * 5)
    kept = sharpened(flat, evidence, 2, 1.0)
    assert kept == replace(flat, near=0.5 if is_kept else 0.0)
    sharp, plain = (Trial.of(evidence, 2, 1.0, replace(flat, near=near)) for near in (0.5, 0.0))
    assert sharp.knn_Q[1] == pytest.approx(1 / (1 + math.exp(-3.0)) if right == 0 else 1 / (1 + math.exp(3.0)))
    assert plain.knn_Q[1] == pytest.approx(1 / (1 + math.exp(-0.3)) if right == 0 else 1 / (1 + math.exp(0.3)))
    assert sharp.knn_Q[0] == plain.knn_Q[0]
    # λ adapts to the sharper weights as the retriever's does.
    assert sharp.features_QF[1, 2] == pytest.approx(1 / (1 + math.exp(-3.0)))


def test_a_search_has_the_sharper_weights_and_a_request_with_a_setting_has_not(store_folder, checkpoint, tmp_path):
    shutil.copytree(store_folder, tmp_path / "store")
    with Datastore.open(tmp_path / "store") as datastore:
        adaptive = asdict(replace(LAM, near=0.1))
        datastore.save_defaults(replace(datastore.snapshot.defaults, k=16, temperature=3.0, adaptive=adaptive))
        store = ModelStore(datastore, checkpoint)
        (span,) = datastore.snapshot.sample_documents(1, 0)
        stored_QD = datastore.snapshot.keys(span.first_id + np.array([5, 7]))
        keys_QD = np.concatenate([stored_QD, stored_QD + 1.0])
        peaks_Q = np.full(4, -0.5, np.float32)
        found = Retriever.of([store], RetrievalParams()).search(keys_QD, peaks_Q)
        distances_QK = found.neighbors.distances_QK
        assert (distances_QK[:2, 0] < 0.1).all()
        assert (distances_QK[2:, 0] > 0.1).all()
        for rows, temperature in ((slice(0, 2), 0.3), (slice(2, 4), 3.0)):
            assert found.logweights_QK[rows] == pytest.approx(neighbor_logweights(distances_QK[rows], temperature))
        features_QF = features_of(found.neighbors, found.logweights_QK, 3.0, peaks_Q)
        assert found.lams_Q == pytest.approx(LAM.lams(features_QF))
        asked = Retriever.of([store], RetrievalParams(k=16)).search(keys_QD, peaks_Q)
        assert asked.logweights_QK == pytest.approx(neighbor_logweights(distances_QK, 3.0))


@pytest.mark.parametrize("keep", [0.5, 0.9, 1.0])
def test_the_threshold_is_the_largest_of_all_that_keep_the_gain(keep):
    rng = np.random.default_rng(6)
    features_QF = np.zeros((300, 5))
    features_QF[:, 2] = rng.normal(0.5, 0.5, size=300).round(1)  # so that many λs are equal
    lam = replace(LAM, bias=-1.0)
    is_right_Q = rng.random(300) < lam.lams(features_QF)  # as a fitted λ would have it
    trial = Trial(features_QF, rng.uniform(0.05, 0.4, 300), np.where(is_right_Q, 0.9, 0.01), np.arange(300) // 30)

    def gain(threshold: float) -> float:
        mixed_Q = [
            each * knn + (1 - each) * lm if each >= threshold else lm
            for each, knn, lm in zip(lam.lams(features_QF).tolist(), trial.knn_Q, trial.lm_Q, strict=True)
        ]
        return sum(math.log(mixed / lm) for mixed, lm in zip(mixed_Q, trial.lm_Q, strict=True))

    assert gain(0) > 0
    threshold, left_alone, left = find_threshold(trial, lam, keep)
    assert threshold == max(each for each in {0.0, *lam.lams(features_QF).tolist()} if gain(each) >= keep * gain(0))
    assert threshold > 0
    assert left_alone == pytest.approx((lam.lams(features_QF) < np.float32(threshold)).mean())
    assert left == pytest.approx(gain(threshold) / gain(0))
    assert nats_of(trial.mixed(replace(lam, threshold=threshold))) == pytest.approx(
        nats_of(trial.lm_Q) - gain(threshold) / 300
    )


def test_there_is_no_threshold_without_a_gain():
    rng = np.random.default_rng(7)
    trial = Trial(rng.normal(size=(50, 5)), np.full(50, 0.5), np.full(50, 0.1), np.zeros(50, int))
    assert find_threshold(trial, LAM, 0.9) == (0.0, 0.0, 1.0)


def test_stored_text_has_the_largest_weight_that_costs_new_text_nothing():
    rng = np.random.default_rng(5)

    def trial(distance, right, count=400):
        features_QF = np.stack([rng.normal(distance, 0.5, count), *rng.normal(size=(4, count))], axis=1)
        knn_Q = np.where(rng.random(count) < right, 0.9, 1e-3)
        return Trial(features_QF, np.full(count, 0.2), knn_Q, np.arange(count) // 50)

    own = trial(1.0, 0.98)
    apart, mingled = fit_lam(trial(4.0, 0.02), own, 0.01), fit_lam(trial(1.2, 0.02), own, 0.01)
    assert apart.kept
    assert apart.adaptive.lams(own.features_QF).mean() > 0.8
    for new, fitted in ((trial(4.0, 0.02), apart), (trial(1.2, 0.02), mingled)):
        assert nats_of(new.mixed(fitted.adaptive)) < nats_of(new.lm_Q) + 0.01
    assert mingled.adaptive.lams(own.features_QF).mean() < 0.3  # near neighbors of new text are wrong


def test_a_lam_that_fits_noise_is_not_kept():
    rng = np.random.default_rng(4)
    found = Neighbors(
        np.sort(rng.exponential(size=(60, 4)).astype(np.float32)), np.ones((60, 4), int), np.ones((60, 4), int)
    )
    evidence = Evidence(
        np.log(rng.uniform(0.1, 0.3, 60)).astype(np.float32),
        -rng.exponential(size=60).astype(np.float32),
        np.repeat(np.arange(6), 10),
        found,
        np.repeat(rng.random((60, 1)) < 0.4, 4, axis=1),
    )
    report, _ = _fit_adaptive(evidence, None, 4, 1.0, 0.3, 0.9, "noise")
    assert report.adaptive_gain < 0  # fitted and judged on the same half, it would seem to be of use
    assert not report.adaptive_kept
    assert report.threshold == 0


def test_the_gains_error_counts_windows_and_not_tokens():
    rng = np.random.default_rng(2)
    windows_Q = np.repeat(np.arange(40), 25)
    saved_Q = np.repeat(rng.normal(size=40), 25)  # all tokens of a window alike: 40 observations, not 1,000
    gain, error = gain_of(np.exp(saved_Q), np.ones(1000), windows_Q)
    assert gain == pytest.approx(saved_Q.mean())
    assert error == pytest.approx(saved_Q[::25].std(ddof=1) / math.sqrt(40), rel=1e-6)


@pytest.fixture
def tuned(model_folder, store_folder, tmp_path):
    """A store whose lam adapts."""
    shutil.copytree(store_folder, tmp_path / "store")
    with load(model_folder, [tmp_path / "store"]) as lm:
        datastore = lm.engine.stores.model_store().datastore
        defaults = replace(datastore.snapshot.defaults, k=16, temperature=3.0, adaptive=asdict(LAM))
        datastore.save_defaults(defaults)
    with load(model_folder, [tmp_path / "store"]) as lm:
        yield lm


def expected_lam(lm, text_ids: list[int]) -> float:
    import torch

    decoder = lm.checkpoint.decoder
    with torch.inference_mode():
        hidden_BTD, keys_BTD = decoder(torch.tensor([text_ids]))
        peak = decoder.logprobs(hidden_BTD[0, -1:]).amax(dim=1).numpy()
    found = lm.engine.stores.model_store().datastore.search(keys_BTD[0, -1:].float().numpy(), 16)
    return float(LAM.lams(features_of(found, neighbor_logweights(found.distances_QK, 3.0), 3.0, peak))[0])


def test_generation_scoring_and_batches_adapt_alike(tuned):
    drawn = list(tuned.generate("the memory", max_tokens=25, seed=5, neighbors=2, loop_guard=False))
    ids, lams = [tuned.checkpoint.tokenizer.start_id, *tuned.tokenize("the memory")], []
    for token in drawn:
        lams.append(token.lam)
        assert token.lam == pytest.approx(expected_lam(tuned, ids), abs=2e-3)
        assert token.neighbors
        ids.append(token.id)
    assert len({round(lam, 3) for lam in lams}) > 5
    assert [token.id for token in tuned.generate("the memory", max_tokens=25, seed=5, loop_guard=False)] == [
        token.id for token in drawn
    ]
    batch = tuned.generate_batch(["the memory", "a"], max_tokens=25, seed=5, loop_guard=False)
    assert [token.lam for token in batch[0].tokens] == pytest.approx(lams, abs=1e-4)
    scored = tuned.score("the memory" + "".join(token.text for token in drawn), token_scores=True)
    scores = scored.token_scores[-len(drawn) :]
    if [score.id for score in scores] == [token.id for token in drawn]:
        for score, token in zip(scores, drawn, strict=True):
            assert score.logprob == pytest.approx(token.logprob, abs=5e-3)


def test_who_says_how_loud_it_is_is_obeyed(tuned):
    assert {token.lam for token in tuned.generate("the", max_tokens=6, seed=1, lam=0.25)} == {0.25}
    assert tuned.score("the memory", lam=0.0).nll == pytest.approx(tuned.score("the memory").base.nll)


def test_tuning_keeps_what_is_better_on_text_it_was_not_fitted_to(model_folder, corpus_folder, tmp_path):
    from memlm.data.corpus import Corpus
    from memlm.evaluation import evaluate
    from memlm.index.store.datastore import Datastore
    from memlm.indexing.build import build_index
    from memlm.indexing.tune import tune

    build_index(model_folder, Corpus([corpus_folder / f"doc-{n}.txt" for n in range(7)]), tmp_path / "s")
    held_out = Corpus([corpus_folder / "doc-7.txt"])
    report = tune(model_folder, tmp_path / "s", held_out, largest_k=32)
    assert report.gain == pytest.approx(report.base_nats - report.knn_nats)
    assert report.gain > report.gain_error > 0
    assert report.adaptive_gain == pytest.approx(report.knn_nats - report.adaptive_nats)
    assert report.adaptive_kept == (report.adaptive_gain >= -PRICE - report.adaptive_gain_error)
    with Datastore.open(tmp_path / "s") as store:
        assert (store.snapshot.defaults.adaptive is not None) == report.adaptive_kept
        assert store.snapshot.defaults.gain == report.gain
    assert report.threshold == 0
    with load(model_folder, [tmp_path / "s"]) as lm:
        total = evaluate(lm, held_out).total
    best = report.adaptive_nats if report.adaptive_kept else report.knn_nats
    assert total.nll / total.tokens == pytest.approx(best, abs=0.03)


def test_tuning_leaves_positions_to_the_model_alone_where_it_is_asked_to(
    model_folder, store_folder, corpus_folder, tmp_path
):
    from memlm.data.corpus import Corpus
    from memlm.errors import InvalidInput
    from memlm.index.store.datastore import Datastore
    from memlm.indexing.tune import tune

    shutil.copytree(store_folder, tmp_path / "s")
    texts = Corpus([corpus_folder / "doc-7.txt"])
    for wrong in (0.0, 1.1):
        with pytest.raises(InvalidInput, match="keep_gain"):
            tune(model_folder, tmp_path / "s", texts, largest_k=32, keep_gain=wrong)
    report = tune(model_folder, tmp_path / "s", texts, largest_k=32, keep_gain=0.9)
    assert report.adaptive_kept
    assert 0 < report.threshold < 1
    assert report.gain_left >= 0.9
    with Datastore.open(tmp_path / "s") as store:
        adaptive = store.snapshot.defaults.adaptive
    assert adaptive["threshold"] == report.threshold
    assert adaptive["near"] == NEAR * report.temperature
    with load(model_folder, [tmp_path / "s"]) as lm:
        scores = lm.score(next(iter(texts)).text, token_scores=True).token_scores
    left_alone = [score for score in scores if score.logprob == score.lm_logprob]
    assert len(left_alone) / len(scores) == pytest.approx(report.left_alone, abs=0.02)
