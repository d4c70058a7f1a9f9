"""A text's own past, mixed after the datastores, and the settings that are saved with a model."""

import json

import numpy as np
import pytest
import torch

from memlm.errors import Corrupt
from memlm.index.neighbors import Neighbors
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.interpolation import knn_logprobs, mix
from memlm.retrieval.own_past import OWN_PAST, SETTINGS_FILE, ContextSettings, OwnPast, with_past
from memlm.retrieval.result import RetrievalResult

VOCABULARY = 12
ADAPTIVE = AdaptiveLam(0.1, (0.5, -0.2, 0.3, 0.1, 0.4), (0.0,) * 5, (1.0,) * 5, reach=3.0)


def result(rng, *, found, lam, store):
    """K neighbors of one key, of which the first are `found`."""
    distances_K = np.sort(rng.uniform(size=5)).astype(np.float32)
    weights_K = np.zeros(5) if not found else rng.dirichlet(np.ones(found)).tolist() + [0.0] * (5 - found)
    with np.errstate(divide="ignore"):
        logweights_K = np.log(np.sort(weights_K)[::-1]).astype(np.float32)
    is_found_K = np.arange(5) < found
    values_K = np.where(is_found_K, rng.integers(0, VOCABULARY, 5), -1)
    near = Neighbors(
        np.where(is_found_K, distances_K, np.inf)[None], np.where(is_found_K, np.arange(5), -1)[None], values_K[None]
    )
    return RetrievalResult(near, logweights_K[None], np.array([lam]), np.full((1, 5), store), took_ms=1.0)


def dense(found, under_V):
    """The mixture of one memory over any distribution, in probabilities."""
    p_V = np.zeros(VOCABULARY)
    for value, logweight in zip(found.neighbors.values_QK[0], found.logweights_QK[0], strict=True):
        if value >= 0:
            p_V[value] += np.exp(float(logweight))
    lam = found.lams_Q[0] if found.neighbors.ids_QK[0, 0] >= 0 else 0.0
    return lam * p_V + (1 - lam) * under_V


@pytest.mark.parametrize("lams", [(0.3, 0.5), (0.0, 0.5), (0.3, 0.0), (0.0, 0.0), (1.0, 0.2), (0.4, 1.0)])
@pytest.mark.parametrize("found", [(5, 5), (0, 3), (4, 0), (0, 0), (2, 5)])
def test_the_past_is_mixed_over_the_datastores(lams, found):
    rng = np.random.default_rng(sum(found))
    memory = result(rng, found=found[0], lam=lams[0], store=0)
    past = result(rng, found=found[1], lam=lams[1], store=OWN_PAST)
    model_V = torch.from_numpy(rng.dirichlet(np.ones(VOCABULARY)).astype(np.float32))
    both = with_past(memory, past)
    knn = knn_logprobs(both.logweights_QK[0], both.neighbors.values_QK[0])
    mixed_V = mix(model_V.log(), knn, 0.0 if knn is None else float(both.lams_Q[0])).exp().numpy()
    np.testing.assert_allclose(mixed_V, dense(past, dense(memory, model_V.numpy())), rtol=1e-5, atol=1e-7)
    is_missing_K = both.neighbors.ids_QK[0] < 0
    assert is_missing_K.sum() == 10 - sum(found)
    assert not is_missing_K[: sum(found)].any()
    assert ((both.stores_QK[0] == OWN_PAST) & ~is_missing_K).sum() == found[1]
    weights_K = np.exp(both.logweights_QK[0][~is_missing_K])
    assert (np.diff(weights_K) <= 0).all()


def test_without_a_datastore_the_past_stands_alone():
    past = result(np.random.default_rng(0), found=3, lam=0.2, store=OWN_PAST)
    assert with_past(None, past) is past


@pytest.mark.parametrize("adaptive", [None, ADAPTIVE])
def test_settings_are_those_that_were_saved(tmp_path, adaptive):
    assert ContextSettings.load(tmp_path) is None
    settings = ContextSettings(16, 3.5, 0.25, adaptive, "held-out (100 tokens)", 0.4, 0.1)
    settings.save(tmp_path)
    assert ContextSettings.load(tmp_path) == settings


WHOLE = {"k": 3, "temperature": 1.0, "lam": 0.5, "adaptive": None}


@pytest.mark.parametrize(
    "content",
    [{"k": 3}, [], None, {**WHOLE, "k": 0}, {**WHOLE, "k": "many"}, {**WHOLE, "temperature": 0}, {**WHOLE, "lam": 2}],
)
def test_a_damaged_file_names_the_command_that_mends_it(tmp_path, content):
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(content))
    with pytest.raises(Corrupt, match="memlm tune"):
        ContextSettings.load(tmp_path)


def test_each_position_is_compared_with_all_before_it():
    keys_ND = np.arange(12, dtype=np.float32).reshape(6, 2) ** 2
    past = OwnPast(ContextSettings(8, 1.0, 0.25), ContextCache(2))
    past.read([10, 11, 12], keys_ND[:3])
    past.read([13, 14, 15], keys_ND[3:])
    found = past.search(keys_ND[3:], np.zeros(3, np.float32)).neighbors
    assert [sorted(ids[ids >= 0].tolist()) for ids in found.ids_QK] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    for ids, values in zip(found.ids_QK, found.values_QK, strict=True):
        assert values[ids >= 0].tolist() == (ids[ids >= 0] + 11).tolist()  # the token that follows each


def test_lam_adapts_to_what_was_found():
    found = Neighbors(np.array([[0.1, 0.2], [9.0, 9.5]], np.float32), np.array([[0, 1], [2, 3]]), np.full((2, 2), 7))
    plain = ContextSettings(2, 1.0, 0.25).weigh(found, np.zeros(2, np.float32))
    assert plain.lams_Q.tolist() == [0.25, 0.25]
    adapted = ContextSettings(2, 1.0, 0.25, AdaptiveLam(0, (-2.0, 0, 0, 0, 0), (0.0,) * 5, (1.0,) * 5)).weigh(
        found, np.zeros(2, np.float32)
    )
    assert adapted.lams_Q[0] > 3 * adapted.lams_Q[1]
    assert (adapted.stores_QK == OWN_PAST).all()
