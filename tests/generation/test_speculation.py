"""Speculative retrieval: with guesses before slow searches a text is the same, in fewer searches."""

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_helpers import KINDS, add, start
from conftest import SHAPE
from hypothesis import given, settings
from hypothesis import strategies as st
from running import alike

from memlm.api.generation import Completion, DraftSource, Token
from memlm.api.params import GenerateRequest
from memlm.data.corpus import Corpus
from memlm.errors import Unavailable
from memlm.generation import speculation
from memlm.generation.batch import Batch, complete_all
from memlm.generation.draft_budget import Experience, PassCost, SearchCost, Survival, run_length
from memlm.generation.drafting import Draft, Drafter
from memlm.generation.step_search import RunningSequence
from memlm.index.neighbors import Neighbors
from memlm.index.store.exclusion import search_views
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.nearby import FOLLOWED, NearbyEntries
from memlm.retrieval.own_past import ContextSettings

PROMPT = "a model can be read, a model can"
PASS_S, SEARCH_S = 0.005, 0.05
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9},
    "penalized": {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.3},
    "stopped": {"temperature": 0, "stop": ("e",)},
}
RETRIEVALS: dict[str, dict[str, Any]] = {
    "as built": {},
    "much": {"k": 40, "lam": 0.7},
    "without guard": {"k": 40, "lam": 0.7, "loop_guard": False},
    "shown alone": {"lam": 0.0},
    "excluding": {"k": 20, "lam": 0.6, "exclude_documents": ("doc-7.txt", "doc-3.txt")},
}


class Searches:
    """A search of a real datastore, which notes its keys, takes its time, and may fail from a number on."""

    def __init__(self, delay_s: float = 0.0, fails_at: int | None = None) -> None:
        self.sizes, self.delay_s, self.fails_at = list[int](), delay_s, fails_at

    def __call__(self, views_Q: Sequence[Any], queries_QD: np.ndarray, k: int, **options: Any) -> Neighbors:
        self.sizes.append(len(queries_QD))
        if self.fails_at is not None and len(self.sizes) >= self.fails_at:
            raise Unavailable("shard 1 at here does not answer; try again in a moment")
        time.sleep(self.delay_s)
        return search_views(views_Q, queries_QD, k, **options)


def watch(lm: LanguageModel, **options: Any) -> Searches:
    searches = Searches(**options)
    for store in lm.engine.stores:
        store.usable.search_views = searches
    return searches


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of their times, passes and searches take those of a slow store, on a busy machine too."""
    times = {PassCost: PASS_S, SearchCost: SEARCH_S}
    for kind, first_s in times.items():

        def timed(self: Any, num: int, _: float, add: Any = kind.add, first_s: float = first_s) -> None:
            add(self, num, first_s * (1 + 0.01 * (num - 1)))

        monkeypatch.setattr(kind, "add", timed)


@pytest.fixture(scope="module")
def quantized(model_folder: Path) -> Checkpoint:
    return load_checkpoint(model_folder, dtype="int8")


@pytest.fixture
def lm(quantized: Checkpoint, store_folder: Path) -> Iterator[LanguageModel]:
    with LanguageModel(quantized, [store_folder]) as lm:
        yield lm


def nearby(completions: Sequence[Completion]) -> tuple[int, int]:
    """How many tokens were read before searches, and how many of them were accepted."""
    found = [each for text in completions for each in text.finished.usage.drafts if each.source == "nearby"]
    return sum(each.drafted for each in found), sum(each.accepted for each in found)


def written(lm: LanguageModel, **options: Any) -> Completion:
    return lm.generate(PROMPT, **{"max_tokens": 24, "seed": 3, "neighbors": 3, **options}).result()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("retrieval", sorted(RETRIEVALS))
@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_a_text_has_the_same_bits_in_fewer_searches(lm, sampling, retrieval):
    found, num_searches, num_tokens = list[Completion](), 0, 0
    for seed in range(3):
        options = {**SAMPLINGS[sampling], **RETRIEVALS[retrieval], "top_logprobs": 3, "seed": seed}
        expected = written(lm, drafts=0, **options)
        searches = watch(lm)
        found.append(written(lm, **options))
        assert found[-1].tokens == expected.tokens
        assert found[-1].finished.reason == expected.finished.reason
        assert found[-1].finished.usage.searches == expected.finished.usage.searches
        num_searches, num_tokens = num_searches + len(searches.sizes), num_tokens + len(expected.tokens)
    if sampling != "stopped":
        assert num_searches < 0.9 * num_tokens
    if SAMPLINGS[sampling]["temperature"]:  # greedy texts may be loops, for which copies are better
        drafted, accepted = nearby(found)
        assert 0 < accepted <= drafted


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("retrieval", sorted(RETRIEVALS))
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "penalized"])
def test_guesses_with_the_right_neighbors_are_right(lm, monkeypatch, sampling, retrieval):
    """The guess is all that sampling is: λ, the guard against loops, the penalty and the random numbers."""
    excluded = RETRIEVALS[retrieval].get("exclude_documents", ())
    retriever = lm.engine.stores.shared_retriever(GenerateRequest.of("a", {}).retrieval).excluding(excluded)
    monkeypatch.setattr(NearbyEntries, "search", lambda self, _, key_1D, k: retriever.views[0].search(key_1D, k))
    monkeypatch.setattr(Drafter, "drafts", lambda self, count: ())
    texts = [written(lm, **SAMPLINGS[sampling], **RETRIEVALS[retrieval], seed=seed) for seed in range(2)]
    drafted, accepted = nearby(texts)
    assert 20 < drafted == accepted


@pytest.mark.usefixtures("slow")
def test_guesses_count_as_no_search(lm):
    searches = watch(lm)
    (store,) = lm.engine.stores
    store.usable.counter.take()
    text = written(lm, temperature=0.9)
    assert nearby([text])[0] > 0
    counts = store.usable.counter.take()
    assert sum(counts.by_duration) == len(searches.sizes)
    assert counts.contexts == sum(searches.sizes)
    assert text.finished.usage.searches == len(text.tokens)


@pytest.mark.usefixtures("slow")
def test_neighbors_that_change_nothing_are_searched_for_many_tokens_at_once(lm):
    texts, searches = [written(lm, temperature=0.9, lam=0.0, max_tokens=28, drafts=0)], watch(lm)
    texts += [written(lm, temperature=0.9, lam=0.0, max_tokens=28) for _ in range(2)]
    assert texts[0].tokens == texts[1].tokens == texts[2].tokens
    drafted, accepted = nearby(texts)
    assert 30 < drafted == accepted  # the model alone decides
    assert max(searches.sizes) == 9
    assert len(searches.sizes) < len(texts[0].tokens) / 2


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_with_a_number_of_drafts_searches_in_every_step(lm, drafts):
    searches = watch(lm)
    usage = written(lm, temperature=0, drafts=drafts).finished.usage
    assert "nearby" not in {each.source for each in usage.drafts}
    assert len(searches.sizes) == usage.steps


def test_a_fast_store_is_searched_in_every_step_and_nothing_is_read_of_it(lm, monkeypatch):
    monkeypatch.setattr(SearchCost, "add", lambda self, num, _, add=SearchCost.add: add(self, num, 1e-9))
    monkeypatch.setattr(NearbyEntries, "update", lambda self: pytest.fail("entries were read"))
    searches = watch(lm)
    usage = written(lm, temperature=0.9).finished.usage
    assert len(searches.sizes) == usage.steps
    assert "nearby" not in {each.source for each in usage.drafts}


def test_a_store_that_takes_its_time_is_searched_less_often(quantized, store_folder):
    with LanguageModel(quantized, [store_folder]) as lm:
        expected = written(lm, temperature=0.9, drafts=0, k=8, max_tokens=28)
        searches = watch(lm, delay_s=0.3)
        found = written(lm, temperature=0.9, k=8, max_tokens=28)
        assert found.tokens == expected.tokens
        assert nearby([found])[0] > 0
        assert len(searches.sizes) < len(found.tokens)


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request, tokenizer, corpus_folder, tmp_path_factory) -> tuple[Checkpoint, Path]:
    """A model with memories of each kind, and a datastore of it."""
    torch.manual_seed(1)
    decoder = Decoder(ModelConfig.from_dict({**SHAPE, "vocab_size": tokenizer.vocab_size, **KINDS[request.param]}))
    folder = tmp_path_factory.mktemp("speculated") / request.param
    save_checkpoint(folder, decoder, tokenizer)
    build_index(folder, Corpus([corpus_folder / f"doc-{n}.txt" for n in range(3)]), folder / "store", check="none")
    return load_checkpoint(folder), folder / "store"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows move after a few tokens."""
    monkeypatch.setattr("memlm.model.state_size.SPARE_PLACES", 12)


@pytest.mark.usefixtures("slow", "narrow")
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_models_with_memories_of_their_own_write_the_same(kind, sampling):
    checkpoint, store = kind
    with LanguageModel(checkpoint, [store]) as lm:
        found = []
        for seed in range(2):
            options = {**SAMPLINGS[sampling], "seed": seed, "max_tokens": 28, "k": 12, "lam": 0.5}
            expected = written(lm, drafts=0, **options)
            found.append(written(lm, **options))
            assert alike(found[-1].tokens, expected.tokens)
        assert nearby(found)[0] > 0


@pytest.mark.usefixtures("slow", "narrow")
def test_models_with_memories_of_their_own_write_the_same_side_by_side(kind):
    """Rows that wait for the run of others hold a draft, some of which is taken back behind the run."""
    checkpoint, store = kind
    options: list[dict[str, Any]] = [
        {"seed": 1, "temperature": 0.9},
        {"seed": 2, "temperature": 0.9, "drafts": 4, "draft": "zebra crossing " * 9},
        {"seed": 3, "temperature": 0.9, "max_tokens": 20},
        {"seed": 4, "temperature": 0.9, "drafts": 0},
    ]
    with LanguageModel(checkpoint, [store]) as lm:
        requests = [GenerateRequest.of(PROMPT, {"max_tokens": 28, "k": 12, "lam": 0.5, **each}) for each in options]
        found = complete_all(checkpoint, [start(lm, request) for request in requests])
        assert nearby([found[0]])[0] > 0
        for request, text in zip(requests, found, strict=True):
            (alone,) = complete_all(checkpoint, [start(lm, replace(request, drafts=0, draft=""))])
            assert [token.id for token in text.tokens] == [token.id for token in alone.tokens]
            # p_kNN may differ more: a last bit of a key decides how it is rounded to float16.
            expected = pytest.approx([token.lm_logprob for token in alone.tokens], abs=1e-4)
            assert [token.lm_logprob for token in text.tokens] == expected


@pytest.mark.usefixtures("slow")
def test_two_stores_a_context_cache_and_an_adaptive_weight_give_the_same(
    model_folder, store_folder, corpus_folder, tmp_path
):
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    adaptive = AdaptiveLam(0.2, (-0.1, 0.2, 0.3, 0.1, 0.2), (0.0,) * 5, (1.0,) * 5)
    ContextSettings(k=6, temperature=20.0, lam=0.4, adaptive=adaptive).save(folder)
    build_index(folder, Corpus([corpus_folder / "doc-6.txt"]), tmp_path / "other", check="none")
    with LanguageModel(load_checkpoint(folder, dtype="int8"), [store_folder, tmp_path / "other"]) as lm:
        for options in ({"stores": {"store": 1.0, "other": 0.5}, "k": 12, "lam": 0.5}, {"store": "other"}):
            found = []
            for temperature in (0, 0.9):
                expected = written(lm, drafts=0, temperature=temperature, **options)
                found.append(written(lm, temperature=temperature, **options))
                assert found[-1].tokens == expected.tokens
            assert nearby(found)[0] > 0


@pytest.mark.usefixtures("slow")
def test_a_session_goes_on_as_if_nothing_had_been_guessed(lm):
    texts, found = [], []
    for options in ({"drafts": 0}, {}):
        with lm.session() as session:
            parts = [session.generate(PROMPT, max_tokens=8, seed=1, temperature=0, **options).result()]
            parts += [session.generate(" and", max_tokens=5, seed=n, **options).result() for n in range(2)]
            texts.append([part.tokens for part in parts])
            found = parts
            assert lm.get_session(session.name).num_tokens > 0
    assert texts[0] == texts[1]
    assert nearby(found)[0] > 0


@pytest.mark.usefixtures("slow")
def test_sequences_that_guess_share_a_batch_with_others(lm):
    rng, batch = random.Random(1), Batch(lm.checkpoint, max_sequences=5)
    waiting = list(range(12))
    options: list[dict[str, Any]] = [
        {
            "seed": number, "temperature": 0.9 * (number % 2), "max_tokens": 6 + 2 * number,
            **({"drafts": 5, "draft": "zebra crossing " * 9} if number % 4 == 1 else {}),
            **({"use_store": False} if number % 4 == 2 else {"k": 8}),
        }
        for number in waiting
    ]  # fmt: skip
    expected = [lm.generate(PROMPT, **{**each, "drafts": 0, "draft": ""}).result().tokens for each in options]
    seen: dict[Any, list[Token]] = {}
    numbers: dict[Any, int] = {}
    while waiting or len(batch):
        while waiting and len(batch) < 5 and rng.random() < 0.6:
            sequence = add(batch, start(lm, GenerateRequest.of(PROMPT, options[waiting[-1]])))
            numbers[sequence], seen[sequence] = waiting.pop(), []
        for sequence in batch.step():
            assert sequence.failure is None
            seen[sequence] += sequence.tokens
    sources = set[str]()
    for sequence, number in numbers.items():
        assert seen[sequence] == list(expected[number])
        sources |= {each.source for each in sequence.generation.usage.drafts}
        sequence.generation.close()
    assert {"nearby", "request"} <= sources


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("fails_at", [1, 2, 3, 5])
def test_a_search_that_fails_ends_the_text_behind_confirmed_tokens(lm, fails_at):
    expected = written(lm, temperature=0, drafts=0, k=8)
    watch(lm, fails_at=fails_at)
    tokens = list[Token]()
    with pytest.raises(Unavailable, match="shard 1"):
        tokens.extend(lm.generate(PROMPT, temperature=0, max_tokens=24, seed=3, neighbors=3, k=8))
    assert tokens == list(expected.tokens[: len(tokens)])
    assert len(tokens) < len(expected.tokens)
    watch(lm)
    assert written(lm, temperature=0, k=8).tokens == expected.tokens


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("failing", ["update", "search", "next"])
def test_a_text_whose_guess_fails_goes_on_without(lm, monkeypatch, failing, caplog):
    unlucky = start(lm, GenerateRequest.of(PROMPT, {"max_tokens": 20, "seed": 1, "k": 8}))
    other = start(lm, GenerateRequest.of(PROMPT, {"max_tokens": 20, "seed": 2, "k": 8}))
    expected = [lm.generate(PROMPT, max_tokens=20, seed=seed, k=8, drafts=0).result().tokens for seed in (1, 2)]

    def fail(*_: Any) -> Neighbors:
        raise OSError("the disk is gone")

    assert unlucky.guesser is not None
    monkeypatch.setattr(unlucky.guesser if failing == "next" else unlucky.guesser.nearby, failing, fail)
    batch, tokens = Batch(lm.checkpoint, max_sequences=2), ([], [])
    sequences = [add(batch, each) for each in (unlucky, other)]
    while len(batch):
        for sequence in batch.step():
            tokens[sequences.index(sequence)].extend(sequence.tokens)
    assert [each.failure for each in sequences] == [None, None]
    assert tokens == tuple(map(list, expected))
    assert not any(each.source == "nearby" for each in unlucky.usage.drafts)
    assert caplog.text.count("the disk is gone") >= 1


@pytest.mark.usefixtures("slow")
def test_no_token_of_a_run_is_shown_before_its_search(lm, monkeypatch):
    """A run reads tokens, and the text has those of the steps before until the search has come back."""
    lengths, read_on = list[int](), speculation.read_on

    def shown(sequence: RunningSequence) -> tuple[Any, ...]:
        generation = sequence.generation
        return sequence.tokens, generation.usage, [*generation.pending_ids], [*generation._context_ids]

    def noted(decoder: Any, state: Any, decoded: Any, *arguments: Any) -> Any:
        before = [shown(each.sequence) for each in decoded]
        read = read_on(decoder, state, decoded, *arguments)
        assert [shown(each.sequence) for each in decoded] == before
        lengths.extend(len(each.sequence.generation.draft.token_ids) for each in read)
        return read

    monkeypatch.setattr("memlm.generation.batch.read_on", noted)
    lm.generate(PROMPT, temperature=0, max_tokens=24, k=8).result()
    assert sum(lengths) > 0


def test_entries_of_deleted_documents_are_forgotten(quantized, store_folder, tmp_path):
    with LanguageModel(quantized, [Path(shutil.copytree(store_folder, tmp_path / "store"))]) as lm:
        retriever = lm.engine.stores.shared_retriever(GenerateRequest.of("a", {"k": 8}).retrieval)
        snapshot = retriever.stores[0].snapshot
        key_1D = snapshot.keys(snapshot.sample(1, 0))
        entries, result = NearbyEntries(retriever), retriever.search(key_1D)
        entries.observe(result, int(result.neighbors.values_QK[0, 0]))
        entries.update()
        assert (entries.search(0, key_1D, 8).ids_QK >= 0).all()
        lm.delete_documents([document.id for document in snapshot.documents()][:-1])
        entries.observe(result, 0)  # found before the deletion
        entries.update()
        left = entries.search(0, key_1D, 8).ids_QK
        left = left[left >= 0]
        assert len(left) == len(retriever.stores[0].snapshot.live(left))


def nearest_slowly(snapshot: Any, noted: Sequence[tuple[Any, int]], key_1D: np.ndarray, k: int) -> Neighbors:
    """All entries that were noted or follow, compared one by one."""
    ids = set[int]()
    for result, token_id in noted:
        near = zip(result.neighbors.ids_QK[0].tolist(), result.neighbors.values_QK[0].tolist(), strict=True)
        for entry, value in near:
            ids.add(entry)
            for _ in range(FOLLOWED if value == token_id else 0):
                following = snapshot.successors(np.array([entry])).tolist()
                if not following:
                    break
                (entry,) = following
                ids.add(entry)
    return snapshot.nearest_among(key_1D, np.array(sorted(ids)), k)


@settings(deadline=None, max_examples=40)  # the first search maps the files
@given(seed=st.integers(0, 1000), searches=st.integers(1, 4), k=st.integers(1, 12))
def test_the_nearest_entries_are_those_of_a_comparison_with_each(shared_lm, seed, searches, k):
    retriever = shared_lm.engine.stores.retriever(GenerateRequest.of("a", {"k": 12}).retrieval)
    snapshot = retriever.stores[0].snapshot
    keys_ND = snapshot.keys(snapshot.sample(searches + 1, seed)) * np.float32(1 + 1e-4)  # not as float16 has them
    entries, noted = NearbyEntries(retriever), []
    for key_D in keys_ND[1:]:
        result = retriever.search(key_D[None])
        noted.append((result, int(result.neighbors.values_QK[0, seed % 3])))
        entries.observe(*noted[-1])
        if seed % 2:
            entries.update()
    entries.update()
    found, expected = entries.search(0, keys_ND[:1], k), nearest_slowly(snapshot, noted, keys_ND[:1], k)
    np.testing.assert_array_equal(found.distances_QK[found.ids_QK >= 0], expected.distances_QK[0])
    np.testing.assert_array_equal(found.ids_QK[found.ids_QK >= 0], expected.ids_QK[0])
    np.testing.assert_array_equal(found.values_QK[found.ids_QK >= 0], expected.values_QK[0])


@pytest.fixture(scope="module")
def shared_lm(quantized: Checkpoint, store_folder: Path) -> Iterator[LanguageModel]:
    with LanguageModel(quantized, [store_folder]) as lm:
        yield lm


def experience_of(pass_s: float, search_s: float, key_s: float) -> Experience:
    experience = Experience()
    for num in (1, 4, 1, 8, 1, 2):
        experience.cost.add(num, pass_s)
        experience.search.add(num, search_s + key_s * (num - 1))
    return experience


@given(
    chances=st.lists(st.lists(st.floats(0.05, 1), max_size=8), min_size=1, max_size=3),
    search_s=st.floats(0.001, 0.2),
    gained=st.floats(0, 3),
)
def test_a_run_is_as_long_as_gives_most_tokens_a_second(chances, search_s, gained):
    chances = [np.cumprod(each).tolist() for each in chances]  # those of a draft fall along it
    experience, B = experience_of(0.005, search_s, 0.1 * search_s), len(chances)
    gained_B, drafted_B = [gained] * B, [4] * B
    length = run_length(chances, gained_B, drafted_B, experience)

    def rate(length: int) -> float:
        tokens, rows, seconds = 0.0, 0, 0.0
        for each in chances:
            tokens += 1 + (sum(each[:length]) if each and length else gained)
            rows += 1 if each and length else 5
        seconds = experience.cost.seconds(rows)
        for place in range(length):
            reading = sum(len(each) > place for each in chances)
            rows, seconds = rows + reading, seconds + experience.cost.seconds(reading)
        return tokens / (seconds + experience.search.seconds(rows))

    def waited_s(length: int) -> float:
        return sum(experience.cost.seconds(sum(len(each) > place for each in chances)) for place in range(length))

    longest, others = max(map(len, chances)), chances.count([])
    if others:  # they wait for the run as long as for the search, at most
        most_s = experience.search.seconds(B + 4 * others)
        longest = max((length for length in range(longest + 1) if waited_s(length) <= most_s), default=0)
    best = max(map(rate, range(1, longest + 1)), default=0.0)
    if length:
        assert rate(length) == pytest.approx(best)
        assert best > 1.1 * rate(0)
    else:
        assert best <= 1.1 * rate(0) * (1 + 1e-9)


def test_runs_that_failed_are_tried_again_later():
    experience = experience_of(0.005, 0.01, 0.0)
    text = Survival(experience.survival)
    wrong = Draft([0] * 8, DraftSource.NEARBY, 0)

    def length() -> int:
        return run_length([text.chances(wrong)], [0.0], [0], experience)

    assert length() > 0
    for _ in range(20):
        text.add(wrong, 0)
    assert length() == 0
    for _ in range(200):
        text.fade(DraftSource.NEARBY)
    assert length() > 0


def test_a_run_counts_the_time_to_read_its_entries():
    experience = experience_of(0.005, 0.02, 0.0)
    assert run_length([[0.9] * 8], [0.0], [0], experience) > 0
    experience.reading.add(1, 0.5)
    assert run_length([[0.9] * 8], [0.0], [0], experience) == 0
    for _ in range(200):
        experience.reading.fade()
    assert run_length([[0.9] * 8], [0.0], [0], experience) > 0


@pytest.mark.usefixtures("slow")
def test_no_text_reads_on_while_a_prompt_waits(lm, monkeypatch):
    waiting, read_on = list[int](), speculation.read_on
    batch = Batch(lm.checkpoint, max_sequences=2, prefill_tokens=4)

    def noted(*arguments: Any) -> Any:
        waiting.append(len(batch._prompts))
        return read_on(*arguments)

    monkeypatch.setattr("memlm.generation.batch.read_on", noted)
    add(batch, start(lm, GenerateRequest.of(PROMPT, {"max_tokens": 24, "temperature": 0, "k": 8})))
    while not waiting:
        batch.step()
    add(batch, start(lm, GenerateRequest.of(PROMPT, {"max_tokens": 4, "temperature": 0, "k": 8})))
    while len(batch):
        batch.step()
    assert max(waiting) == 0


def test_the_time_of_a_search_follows_a_store_that_becomes_slow_and_fast_again():
    cost = SearchCost()
    assert cost.seconds(3) == 0
    for _ in range(30):
        cost.add(1, 0.0005)
    assert cost.seconds(1) == pytest.approx(0.0005)
    cost.add(1, 0.5)  # a spike
    assert cost.seconds(1) < 0.001
    cost.add(1, 0.0005)
    for _ in range(10):
        cost.add(1, 0.05)
    assert cost.seconds(1) > 0.04
    for _ in range(20):
        cost.add(5, 0.0005)  # within runs
    assert cost.seconds(1) < 0.002


@pytest.mark.parametrize("key_s", [0.0, 0.005, 0.05])
def test_the_price_of_a_key_is_learned_and_a_spike_is_forgotten(key_s):
    cost = SearchCost()
    for num in (1, 1, 4, 1, 6, 2, 8) * 3:
        cost.add(num, 0.05 + key_s * (num - 1))
    for num in (1, 4, 8):
        assert cost.seconds(num) == pytest.approx(0.05 + key_s * (num - 1), rel=0.25)
    cost.add(1, 0.05)
    cost.add(4, 3.0)
    for _ in range(200):
        cost.add(1, 0.05)
    assert cost.seconds(4) < 0.08
