"""Settings at the ends of what they may be: every number that comes back is finite and sensible, or the setting is
refused by name.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from memlm.api.params import MAX_NEIGHBORS
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.evaluation import evaluate
from memlm.indexing.build import add_to_index
from memlm.language_model import LanguageModel, load

PROMPT = "the memory of a model can"
TINY, HUGE = 5e-324, 1.7e308

EXTREMES: list[dict[str, Any]] = [
    *({"temperature": value} for value in (TINY, 1e-300, 1e-38, 1e-6, 1e6, 1e38, HUGE)),
    *({"lam": value} for value in (0.0, TINY, 1e-30, 1 - 1e-9, 1 - 1e-16, 1.0)),
    *({"knn_temperature": value} for value in (1e-300, 1e-30, 1e30, 1e308)),
    *({"knn_temperature": value, "lam": 0.999} for value in (1e-300, 1e308)),
    *({"stores": {"store": value}} for value in (TINY, 1e-30, 1e30, HUGE)),
    *({"stores": {"store": value, "twin": 1.0}, "lam": 0.5} for value in (TINY, 1e-30, 1e30, HUGE)),
    *({"repetition_penalty": value} for value in (TINY, 1e-30, 1e30, 1e308)),
    *({"min_p": value} for value in (TINY, 1.0)),
    *({"top_p": value} for value in (TINY, 1e-30, 1 - 1e-16)),
    *({"k": value} for value in (1, MAX_NEIGHBORS)),
    *({"nprobe": value} for value in (1, 10**30)),
    {"top_k": 2**62},
    {"temperature": 1e38, "repetition_penalty": 1e308, "lam": TINY, "knn_temperature": 1e308},
]


def label(options: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


@pytest.fixture(scope="module")
def pair(model_folder: Path, store_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """A store and its twin."""
    twin = shutil.copytree(store_folder, tmp_path_factory.mktemp("pair") / "twin")
    with load(model_folder, [store_folder, twin]) as lm:
        yield lm


@pytest.mark.parametrize("options", EXTREMES, ids=label)
def test_numbers_stay_finite_at_the_ends_of_every_setting(pair: LanguageModel, options: dict[str, Any]) -> None:
    options = options if "stores" in options else {"store": "store", **options}
    for draw in ({"seed": 1}, {"temperature": 0}):
        stream = pair.generate(PROMPT, max_tokens=6, neighbors=3, top_logprobs=3, **{**draw, **options})
        for token in stream:
            assert math.isfinite(token.logprob)
            assert token.logprob <= 1e-5
            assert math.isfinite(token.lm_logprob)
            assert 0 <= token.knn_share <= 1
            assert not math.isnan(token.knn_logprob)
            assert [n for n in token.neighbors if not 0 <= n.weight <= 1 + 1e-6 or not math.isfinite(n.distance)] == []
            assert not any(math.isnan(each.logprob) for each in token.top_logprobs)
        assert stream.finished is not None


@pytest.mark.parametrize("options", [each for each in EXTREMES if not {"temperature", "top_p"} & set(each)], ids=label)
def test_scores_are_numbers_at_the_ends_of_every_setting(pair: LanguageModel, options: dict[str, Any]) -> None:
    params = {name: value for name, value in options.items() if name not in ("repetition_penalty", "min_p", "top_k")}
    scored = pair.score(PROMPT, **(params if "stores" in params else {"store": "store", **params}))
    assert math.isfinite(scored.base.nll)
    assert scored.knn is not None
    assert scored.knn.nll >= 0  # infinite where the datastore alone is used and lacks the token
    assert math.isfinite(scored.knn.nll) or params.get("lam", 0) == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-TINY, math.inf, math.nan)),
        ("lam", (-TINY, 1 + 1e-15, math.nan)),
        ("knn_temperature", (0.0, -1.0, math.inf, math.nan)),
        ("repetition_penalty", (0.0, -1.0, math.inf, math.nan)),
        ("top_p", (0.0, 1.1, math.nan)),
        ("min_p", (-TINY, 1.1, math.nan)),
        ("k", (0, -1, MAX_NEIGHBORS + 1, 10**6)),
        ("nprobe", (0, -1)),
        ("max_tokens", (0, -1)),
        ("top_k", (0, -1)),
        ("stores", ({"store": 0.0}, {"store": -1.0}, {"store": math.inf}, {"store": math.nan})),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_name(pair: LanguageModel, name: str, values: tuple) -> None:
    for value in values:
        with pytest.raises(InvalidInput) as refused:
            pair.generate(PROMPT, **{name: value})
        assert refused.value.field == name


def test_a_weight_too_small_to_count_leaves_the_model_bit_for_bit(lm: LanguageModel) -> None:
    for draw in ({"seed": 3}, {"temperature": 0}, {"seed": 3, "temperature": 1e6}):
        alone = [(t.id, t.logprob) for t in lm.generate(PROMPT, max_tokens=8, use_store=False, **draw)]
        assert [(t.id, t.logprob) for t in lm.generate(PROMPT, max_tokens=8, lam=0.0, **draw)] == alone
        assert [(t.id, t.logprob) for t in lm.generate(PROMPT, max_tokens=8, lam=TINY, **draw)] == alone


def test_a_seed_draws_alone_what_it_draws_in_a_batch(lm: LanguageModel) -> None:
    prompts = [PROMPT, "the", "", "it serves; delete a page, and it is", "read"]
    completions = lm.generate_batch(prompts, seed=7, max_tokens=10)
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        alone = list(lm.generate(prompt, seed=7 + number, max_tokens=10))
        assert [token.id for token in completion.tokens] == [token.id for token in alone]
        assert completion.text == "".join(token.text for token in alone)


def test_a_store_of_which_nothing_is_left_answers_as_the_model_and_takes_documents_again(
    model_folder: Path, store_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(store_folder, tmp_path / "store"))
    with load(model_folder, [store]) as lm:
        lm.delete_documents([document.id for document in lm.engine.stores.model_store().snapshot.documents()])
        assert lm.search(None, PROMPT, k=5) == ()
        alone = [(t.id, t.logprob) for t in lm.generate(PROMPT, max_tokens=5, seed=2, use_store=False)]
        silent = lm.generate(PROMPT, max_tokens=5, seed=2, neighbors=4, lam=0.9)
        assert [(t.id, t.logprob, t.neighbors) for t in silent] == [(*each, ()) for each in alone]
        judged = evaluate(lm, Corpus([corpus_folder / "doc-7.txt"])).total
        assert judged.knn is not None
        assert judged.knn.nll == judged.base.nll
        add_to_index(model_folder, Corpus([corpus_folder / "doc-3.txt"]), store)
        assert lm.refresh()
        assert {neighbor.document_id for neighbor in lm.search(None, PROMPT, k=5)} == {"doc-3.txt"}


def test_long_stop_strings_cost_little_and_change_nothing(lm: LanguageModel) -> None:
    stop = [chr(ord("a") + number) * 1_000_000 for number in range(16)]
    plain = [token.id for token in lm.generate(PROMPT, max_tokens=30, seed=5)]
    assert [token.id for token in lm.generate(PROMPT, max_tokens=30, seed=5, stop=stop)] == plain
