"""The guard against loops: what it withholds, and that a text is the same alone, in a batch and in parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import alike

from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.neighbors import Neighbors
from memlm.indexing.build import build_index
from memlm.language_model import load
from memlm.retrieval.interpolation import knn_logprobs, neighbor_logweights
from memlm.retrieval.loop_guard import RUN, repeating_ids, without_repeats
from memlm.retrieval.result import RetrievalResult

STRONG = {"lam": 0.9, "k": 8, "knn_temperature": 0.1, "temperature": 0}


def by_loops(context: list[int], run: int, window: int) -> set[int]:
    recent = context[-window:]
    runs = {tuple(recent[begin : begin + run]) for begin in range(len(recent) - run + 1)}
    return {token for token in range(4) if (*recent[len(recent) - run + 1 :], token) in runs and len(recent) >= run}


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(2, 5), st.integers(5, 30))
def test_the_withheld_tokens_are_those_of_plain_loops(context, run, window):
    assert set(repeating_ids(context, run=run, window=window).tolist()) == by_loops(context, run, window)


def random_result(rng: np.random.Generator) -> RetrievalResult:
    distances_QK = np.sort(rng.random((5, 9), np.float32) * 4, axis=1)
    missing_QK = np.arange(9) >= rng.integers(0, 10, 5)[:, None]
    found = Neighbors(
        np.where(missing_QK, np.float32(np.inf), distances_QK),
        np.where(missing_QK, -1, rng.integers(0, 10**6, (5, 9))),
        np.where(missing_QK, -1, rng.integers(0, 6, (5, 9))),
    )
    stores_QK = found.ids_QK % 3
    logweights_QK = neighbor_logweights(found.distances_QK, 0.7)
    return RetrievalResult(found, logweights_QK, rng.random(5), stores_QK)


def text_that_withholds(ids: list[int]) -> list[int]:
    """A text after which just these tokens would repeat a run."""
    runs = [token for number, last in enumerate(ids) for token in (91, 92, 93, last, 200 + number)]
    return [*runs, 91, 92, 93]


def nothing_before(ids_E: np.ndarray, stores_E: np.ndarray, count: int) -> np.ndarray:
    return np.full((len(ids_E), count), -1)


@pytest.mark.parametrize("seed", range(20))
def test_what_stays_gives_each_token_as_much_as_before(seed):
    rng = np.random.default_rng(seed)
    result = random_result(rng)
    withheld = [rng.choice(6, rng.integers(0, 7), replace=False) for _ in range(5)]
    guarded = without_repeats(result, [text_that_withholds(ids.tolist()) for ids in withheld], nothing_before)
    for row in range(5):
        before, after = (
            knn_logprobs(each.logweights_QK[row], each.neighbors.values_QK[row]) for each in (result, guarded)
        )
        masses = np.zeros(6) if before is None else result.lams_Q[row] * np.exp(before.to_dense(6).double().numpy())
        masses[withheld[row]] = 0.0
        given_ = np.zeros(6) if after is None else guarded.lams_Q[row] * np.exp(after.to_dense(6).double().numpy())
        assert given_ == pytest.approx(masses, abs=1e-6)
        stays = [
            (neighbor_id, value, store)
            for neighbor_id, value, store in zip(
                result.neighbors.ids_QK[row], result.neighbors.values_QK[row], result.stores_QK[row], strict=True
            )
            if neighbor_id >= 0 and value not in withheld[row]
        ]
        found = guarded.neighbors.ids_QK[row] >= 0
        columns = (guarded.neighbors.ids_QK, guarded.neighbors.values_QK, guarded.stores_QK)
        assert list(zip(*(column[row, found] for column in columns), strict=True)) == stays
        if after is not None:
            assert np.exp(guarded.logweights_QK[row].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


def test_without_a_repeat_the_result_is_as_it_was():
    result = random_result(np.random.default_rng(0))
    assert without_repeats(result, [text_that_withholds([77])] * 5, nothing_before) is result
    assert without_repeats(result, [[]] * 5, nothing_before) is result


def test_an_entry_stays_where_the_text_copies_its_document():
    result, text = random_result(np.random.default_rng(3)), text_that_withholds([0, 1, 2, 3, 4, 5])

    def before(ids_E: np.ndarray, stores_E: np.ndarray, count: int) -> np.ndarray:
        tokens_EC = np.tile(text[-count:], (len(ids_E), 1))
        tokens_EC[ids_E % 2 == 0, 0] = 7  # the first of them differs
        return tokens_EC

    guarded = without_repeats(result, [text] * 5, before)
    for row in range(5):
        ids = result.neighbors.ids_QK[row]
        kept = guarded.neighbors.ids_QK[row]
        assert kept[kept >= 0].tolist() == ids[(ids >= 0) & (ids % 2 == 1)].tolist()


def test_tokens_before_are_those_of_the_document(lm):
    snapshot = lm.engine.stores.model_store().snapshot
    ids = snapshot.sample(200, 0)
    for before, place in zip(snapshot.tokens_before(ids, 9), snapshot.locate(ids), strict=True):
        tokens = snapshot.tokens(place.document_id, max(0, place.token_offset - 9), place.token_offset).tolist()
        assert before.tolist() == [-1] * (9 - len(tokens)) + tokens


@pytest.fixture(scope="module")
def circle(model_folder, tmp_path_factory):
    """A store whose documents are little but line ends."""
    folder = tmp_path_factory.mktemp("circle")
    for number in range(3):
        (folder / f"{number}.txt").write_text("the memory\n" + "\n" * 30 + "of a model\n" * number)
    store = tmp_path_factory.mktemp("circle-store") / "store"  # not in the corpus, which would read it
    build_index(model_folder, Corpus([folder]), store)
    return store


def ids_of(tokens) -> list[int]:
    return [token.id for token in tokens]


def runs_of(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[begin : begin + RUN]) for begin in range(len(ids) - RUN + 1)]


def test_memory_does_not_go_round_in_a_circle(model_folder, circle):
    with load(model_folder, [circle]) as lm:
        guarded = list(lm.generate("the memory\n\n", max_tokens=30, neighbors=8, **STRONG))
        free = list(lm.generate("the memory\n\n", max_tokens=30, neighbors=8, loop_guard=False, **STRONG))
        prompt = lm.tokenize("the memory\n\n")
        assert len(set(runs_of(ids_of(free)))) < 5
        context = prompt
        for token in guarded:
            repeats = token.id in repeating_ids(context).tolist()
            assert token.knn_share == 0.0 or not repeats or context[-16:] == [context[-1]] * 16
            context = [*context, token.id]
        assert len(set(runs_of(ids_of(guarded)))) > 20


def test_texts_are_the_same_alone_in_a_batch_and_in_parts(model_folder, circle):
    with load(model_folder, [circle]) as lm:
        prompts = ["the memory\n\n", "the memory\n", "of a model\nof a model\n", "a"]
        alone = [list(lm.generate(prompt, max_tokens=20, **STRONG)) for prompt in prompts]
        together = lm.generate_batch(prompts, max_tokens=20, **STRONG)
        assert all(alike(batched.tokens, tokens) for batched, tokens in zip(together, alone, strict=True))
        mixed = lm.generate_batch(prompts[:1] * 2, max_tokens=20, **STRONG)
        assert alike(mixed[1].tokens, alone[0])
        for prompt, tokens in zip(prompts, alone, strict=True):
            with lm.session() as session:
                session.append(prompt)
                parts = [token for _ in range(4) for token in session.generate(max_tokens=5, **STRONG)]
            assert ids_of(parts) == ids_of(tokens)


def test_scoring_has_no_guard(model_folder, circle):
    with load(model_folder, [circle]) as lm:
        text, settings = "the memory\n\n\n\n\n\n\n", {name: STRONG[name] for name in ("lam", "k", "knn_temperature")}
        scored = lm.score(text, token_scores=True, **settings)
        free = lm.score(text, token_scores=True, loop_guard=False, **settings)
        assert scored == free
        assert scored.token_scores[-1].knn_logprob is not None
        assert scored.token_scores[-1].knn_logprob > -1  # a line end, as often before
        with pytest.raises(InvalidInput, match="loop_guard is of generation"):
            lm.score(text, loop_guard=True)
