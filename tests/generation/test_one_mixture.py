"""Whatever reads a text mixes its memories alike: all paths equal a mixture in float64, one token at a time."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from memlm.index.store.datastore import Datastore
from memlm.integrations.lm_eval import MemlmLM
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.own_past import ContextSettings

SETTINGS = ContextSettings(k=4, temperature=20.0, lam=0.4)
TEXT = "the memory of a model can be read, and the memory of a page"
CONTEXT, CONTINUATION = TEXT[:30], TEXT[30:]
K, LAM, TEMPERATURE = 6, 0.55, 3.0
OPTIONS = {
    "alone": {"use_store": False},
    "datastore": {"k": K, "lam": LAM, "knn_temperature": TEMPERATURE, "context_cache": 0},
    "past": {"lam": 0.0, "k": K, "knn_temperature": TEMPERATURE},
    "both": {"k": K, "lam": LAM, "knn_temperature": TEMPERATURE},
    "all of it": {"k": K, "lam": 1.0, "knn_temperature": TEMPERATURE},
}
CLOSE = 1e-6  # between two probabilities


@pytest.fixture(scope="module")
def lm(model_folder: Path, store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    folder = tmp_path_factory.mktemp("tuned") / "model"
    shutil.copytree(model_folder, folder)
    SETTINGS.save(folder)
    with LanguageModel(load_checkpoint(folder), [store_folder]) as model:
        yield model


def of_neighbors(distances_K: np.ndarray, values_K: np.ndarray, temperature: float) -> dict[int, float]:
    """p_kNN by its definition (arXiv 1911.00172, equation 2)."""
    weights, p = [np.exp(-(float(each) - float(distances_K.min())) / temperature) for each in distances_K], {}
    for value, weight in zip(values_K.tolist(), weights, strict=True):
        p[value] = p.get(value, 0.0) + weight / sum(weights)
    return p


def mixed_plainly(lm: LanguageModel, store: Datastore, ids: list[int], options: dict) -> np.ndarray:
    """The probability of every token behind some: p_past over p_kNN over p_LM, of a text read from its start."""
    with torch.inference_mode():
        hidden_BTD, keys_BTD = lm.checkpoint.decoder(torch.tensor([ids]))
        p_V = torch.softmax(lm.checkpoint.decoder.logits(hidden_BTD)[0, -1].double(), dim=-1).numpy()
    keys_TD = keys_BTD[0].half().double().numpy()  # as memories keep them
    layers = []
    if options.get("use_store", True) and options["lam"]:
        found = store.search(keys_TD[-1:].astype(np.float32), K)
        layers.append((options["lam"], of_neighbors(found.distances_QK[0], found.values_QK[0], TEMPERATURE)))
    if options.get("use_store", True) and options.get("context_cache") != 0 and len(ids) > 1:
        distances_N = ((keys_TD[:-1] - keys_TD[-1]) ** 2).sum(axis=1)
        nearest = np.argsort(distances_N, kind="stable")[: SETTINGS.k]
        values_K = np.array(ids[1:])[nearest]
        layers.append((SETTINGS.lam, of_neighbors(distances_N[nearest], values_K, SETTINGS.temperature)))
    for lam, memory in layers:
        spread = defaultdict(float, memory)
        p_V = lam * np.array([spread[token_id] for token_id in range(len(p_V))]) + (1 - lam) * p_V
    return p_V


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_all_paths_have_the_probabilities_of_the_plain_mixture(lm, store_folder, options):
    start, (context, whole) = [lm.tokenizer.start_id], map(lm.tokenize, (CONTEXT, TEXT))
    ids = [*start, *whole]
    with Datastore.open(store_folder) as store:
        plain = [mixed_plainly(lm, store, ids[:place], options) for place in range(1, len(ids))]
        wanted = [p_V[token_id] for p_V, token_id in zip(plain, ids[1:], strict=True)]
        scored = lm.score(ids, token_scores=True, top_logprobs=5, **options).token_scores
        assert np.exp([each.logprob for each in scored]) == pytest.approx(wanted, abs=CLOSE)
        for score, p_V in zip(scored, plain, strict=True):
            likely = [each.token_id for each in score.top_logprobs]
            assert [np.exp(each.logprob) for each in score.top_logprobs] == pytest.approx(p_V[likely], abs=CLOSE)
        with np.errstate(divide="ignore"):
            logprob = float(np.log(wanted[len(context) :]).sum())
        for found, _ in (lm.loglikelihood(CONTEXT, CONTINUATION, **options), _by_harness(lm, options)):
            assert found == pytest.approx(logprob, rel=1e-5)
        drawing = {**options, "temperature": 0, "max_tokens": 6, "top_logprobs": 5, "loop_guard": False}
        prompt = ids[: 1 + len(context)]
        for more in ({}, {"drafts": 3, "draft": CONTINUATION}):
            drawn = lm.generate(prompt, **drawing, **more).result().tokens
            beside = lm.generate_batch([prompt, prompt[:4]], **drawing, **more)[0].tokens
            for place, (token, twin) in enumerate(zip(drawn, beside, strict=True)):
                p_V = mixed_plainly(lm, store, [*prompt, *(each.id for each in drawn[:place])], options)
                likely = [each.token_id for each in token.top_logprobs]
                for each in (token, twin):
                    assert np.exp(each.logprob) == pytest.approx(p_V[each.id], abs=CLOSE)
                assert [np.exp(each.logprob) for each in token.top_logprobs] == pytest.approx(p_V[likely], abs=CLOSE)


def _by_harness(lm: LanguageModel, options: dict) -> tuple[float, bool]:
    from lm_eval.api.instance import Instance

    asked = Instance("loglikelihood", {}, (CONTEXT, CONTINUATION), 0)
    return MemlmLM(lm, **options).loglikelihood([asked], disable_tqdm=True)[0]
