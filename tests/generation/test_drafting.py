"""Drafts change the speed of a text, and never the text, be they right or wrong."""

import itertools
import random
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batch_helpers import KINDS, add
from conftest import SHAPE
from hypothesis import given
from hypothesis import strategies as st
from running import alike, is_same_with_drafts

from memlm.api.generation import DraftSource, FinishReason, Token
from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.errors import InvalidInput
from memlm.generation.batch import Batch
from memlm.generation.drafts import sources as drafting
from memlm.generation.drafts.budget import PassCost, Survival, allot
from memlm.generation.drafts.sources import (
    COMPARED,
    LONG_RUN,
    SHORT_RUN,
    Draft,
    Drafter,
    ExpectedText,
    RunIndex,
    neighbors_draft,
)
from memlm.generation.drive import complete_all
from memlm.generation.generation import Generation
from memlm.index.store.snapshot import Snapshot
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever

PROMPT = "a model can be read, a model can"
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.3},
    "stopped": {"temperature": 0, "stop": ("e",)},
}
short_texts = st.lists(st.integers(0, 2), max_size=30)


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request, tokenizer, tmp_path_factory) -> Checkpoint:
    torch.manual_seed(1)
    decoder = Decoder(ModelConfig.from_dict({**SHAPE, "vocab_size": tokenizer.vocab_size, **KINDS[request.param]}))
    folder = tmp_path_factory.mktemp("drafted") / request.param
    save_checkpoint(folder, decoder, tokenizer)
    return load_checkpoint(folder)


@pytest.fixture(scope="module")
def quantized(model_folder) -> Checkpoint:
    """A model whose passes read each token alike, however many there are."""
    return load_checkpoint(model_folder, dtype="int8")


def generation(checkpoint: Checkpoint, prompt: str = PROMPT, **options: Any) -> Generation:
    request = GenerateRequest.of(prompt, {"max_tokens": 20, "seed": 3, **options})
    return run_steps(Generation.start(checkpoint, request, None))


def complete(checkpoint: Checkpoint, prompt: str = PROMPT, **options: Any) -> Any:
    (completion,) = complete_all(checkpoint, [generation(checkpoint, prompt, **options)])
    return completion


def drafted(completion: Any) -> dict[str, tuple[int, int]]:
    return {each.source: (each.drafted, each.accepted) for each in completion.finished.usage.drafts}


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_a_text_is_the_same_with_drafts_that_are_right_wrong_or_end_early(kind, sampling):
    options = SAMPLINGS[sampling]
    expected = complete(kind, drafts=0, **options)
    assert not expected.finished.usage.drafts
    for draft in (expected.text, "zebra crossing " * 9, expected.text[: len(expected.text) // 2], ""):
        for length in (1, 3, 16):
            found = complete(kind, drafts=length, draft=draft, **options)
            assert alike(found.tokens, expected.tokens)
            assert found.finished.reason == expected.finished.reason
            assert found.finished.usage.generated_tokens == expected.finished.usage.generated_tokens
            assert found.finished.usage.steps <= expected.finished.usage.steps


def test_a_right_draft_takes_fewer_steps_and_a_wrong_one_no_more(quantized):
    expected = complete(quantized, drafts=0, temperature=0)
    right = complete(quantized, drafts=4, draft=expected.text, temperature=0)
    num_drafted, num_accepted = drafted(right)["request"]
    assert num_accepted > 0.7 * num_drafted
    assert right.finished.usage.steps < 0.5 * expected.finished.usage.steps
    (usage,) = (each for each in right.finished.usage.drafts if each.source == "request")
    assert usage.drafts == -(-usage.drafted // 4) <= right.finished.usage.steps
    wrong = complete(quantized, drafts=4, draft="zebra crossing " * 9, temperature=0)
    assert wrong.finished.usage.steps <= expected.finished.usage.steps


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
@pytest.mark.parametrize("drafts", [None, 5])
def test_quantized_models_give_the_same_bits_with_drafts(quantized, sampling, drafts):
    expected = complete(quantized, drafts=0, top_logprobs=4, **SAMPLINGS[sampling])
    found = complete(quantized, drafts=drafts, draft=expected.text, top_logprobs=4, **SAMPLINGS[sampling])
    assert is_same_with_drafts(found.tokens, expected.tokens)


@pytest.mark.parametrize("retrieval", [{}, {"k": 40, "lam": 0.7}, {"exclude_documents": "doc-7.txt"}])
def test_a_text_with_memory_is_the_same_with_drafts(model_folder, store_folder, retrieval):
    with LanguageModel(load_checkpoint(model_folder, dtype="int8"), [store_folder]) as lm:
        for seed, temperature in itertools.product(range(3), (0, 1)):
            options = {"seed": seed, "temperature": temperature, "max_tokens": 20, "neighbors": 3, **retrieval}
            expected = lm.generate(PROMPT, drafts=0, **options).result()
            found = lm.generate(PROMPT, drafts=6, **options).result()
            assert is_same_with_drafts(found.tokens, expected.tokens)
            assert "neighbors" in drafted(found)


def test_sequences_that_draft_share_a_batch_with_others(kind):
    rng, batch = random.Random(1), Batch(kind, max_sequences=5)
    waiting = list(range(12))
    options = [
        {"seed": number, "drafts": number % 4 * 3, "draft": "zebra crossing " * 9, "max_tokens": 5 + number}
        for number in waiting
    ]
    seen: dict[Any, list[Token]] = {}
    numbers: dict[Any, int] = {}
    while waiting or len(batch):
        while waiting and len(batch) < 5 and rng.random() < 0.6:
            sequence = add(batch, generation(kind, **options[waiting[-1]]))
            numbers[sequence], seen[sequence] = waiting.pop(), []
        for sequence in batch.step():
            assert sequence.failure is None
            seen[sequence] += sequence.tokens
    for sequence, number in numbers.items():
        assert alike(seen[sequence], complete(kind, **{**options[number], "drafts": 0, "draft": ""}).tokens)
    assert any(sequence.generation.usage.drafts for sequence in numbers)


def test_a_session_goes_on_as_if_nothing_had_been_drafted(model_folder):
    texts = []
    for drafts in (0, 7):
        with LanguageModel(load_checkpoint(model_folder, dtype="int8")) as lm, lm.session() as session:
            parts = [session.generate(PROMPT, max_tokens=8, seed=1, temperature=0, drafts=drafts).result()]
            parts += [session.generate(" and", max_tokens=6, seed=n, drafts=drafts).result() for n in range(2)]
            texts.append([token for part in parts for token in part.tokens])
    assert is_same_with_drafts(texts[1], texts[0])


def test_a_session_that_ends_within_a_draft_has_read_no_more_than_its_text(model_folder):
    checkpoint = load_checkpoint(model_folder, dtype="int8")
    options = {"max_tokens": 14, "seed": 1, "temperature": 0}
    text = complete(checkpoint, drafts=0, **options).text
    outcomes = []
    for drafts in (0, 7):
        with LanguageModel(checkpoint) as lm, lm.session() as session:
            draft = {"drafts": drafts, "draft": text if drafts else "", "stop": text[len(text) // 2 :][:3]}
            first = session.generate(PROMPT, **draft, **options).result()
            assert first.finished.reason == FinishReason.STOP
            second = session.generate(" and", drafts=0, max_tokens=5, seed=2).result()
            outcomes.append(((*first.tokens, *second.tokens), lm.get_session(session.name).num_tokens))
    (expected, num_expected), (found, num_found) = outcomes
    assert num_found == num_expected
    assert is_same_with_drafts(found, expected)


@pytest.mark.parametrize("field", [{"drafts": -1}, {"drafts": 1000}, {"drafts": 1.5}, {"draft": 3}])
def test_drafts_that_mean_nothing_are_refused(field):
    with pytest.raises(InvalidInput) as failure:
        GenerateRequest.of("a", field)
    assert failure.value.field == next(iter(field))


def find_slowly(text: Sequence[int], context: Sequence[int]) -> tuple[int, int]:
    for size in (LONG_RUN, SHORT_RUN):
        for place in range(len(text) - 1, size - 1, -1):
            if len(context) >= size and text[place - size : place] == context[len(context) - size :]:
                equal = 0
                while equal < min(COMPARED, place, len(context)) and text[place - 1 - equal] == context[-1 - equal]:
                    equal += 1
                return place, equal
    return 0, 0


@given(short_texts, short_texts)
def test_the_latest_equal_run_is_found(text, context):
    assert RunIndex(text).find(context) == find_slowly(text, context)
    assert RunIndex(text).find(text) == find_slowly(text, text)


@given(short_texts, st.integers(1, 30))
def test_a_continuation_repeats_what_ends_too_early(text, count):
    index = RunIndex(text)
    for place in range(len(text)):
        loop = text[place:]
        assert index.continuation(place, count) == [loop[n % len(loop)] for n in range(count)]
    assert index.continuation(len(text), count) == []


def test_an_expected_text_is_followed_through_changes():
    expected = ExpectedText(list(range(10, 30)))
    context = list[int]()

    def say(*token_ids: int) -> Draft:
        for token_id in token_ids:
            context.append(token_id)
            expected.append(token_id, context)
        return expected.draft(3)

    assert expected.draft(2) == Draft([10, 11], DraftSource.REQUEST, 0)
    assert say(10, 11).token_ids == [12, 13, 14]
    assert say(99).token_ids == [13, 14, 15]  # in place of 12
    assert say(13).closeness == 1
    assert say(20, 21).token_ids == [22, 23, 24]  # some were left out
    assert say(27, 28).token_ids == [29]
    assert say(29).token_ids == []
    assert say(5).token_ids == []


def chain_slowly(result: RetrievalResult, token_id: int, snapshot: Snapshot, count: int) -> list[int]:
    weights = np.exp(result.logweights_QK[0].astype(np.float64)).tolist()
    alive = [n for n, value in enumerate(result.neighbors.values_QK[0].tolist()) if value == token_id]
    following = {n: snapshot.tokens_after(result.neighbors.ids_QK[0, n : n + 1], count)[0].tolist() for n in alive}
    chain: list[int] = []
    for depth in range(count):
        totals: dict[int, float] = {}
        for n in alive:
            totals[following[n][depth]] = totals.get(following[n][depth], 0.0) + weights[n]
        best = max(totals, key=totals.__getitem__)
        if best < 0:
            break
        chain.append(best)
        alive = [n for n in alive if following[n][depth] == best]
    return chain


def test_a_chain_follows_the_heaviest_neighbors(lm):
    retriever = lm.engine.stores.retriever(lm_retrieval())
    snapshot, checked = retriever.stores[0].snapshot, 0
    keys = snapshot.keys(snapshot.sample(6, 0))
    for row in range(len(keys)):
        result = retriever.search(keys[row : row + 1])
        for token_id in set(result.neighbors.values_QK[0].tolist()) - {-1}:
            draft = neighbors_draft(result, token_id, retriever, 8)
            assert draft.token_ids == chain_slowly(result, token_id, snapshot, 8)
            checked += len(draft.token_ids)
    assert checked > 100


def test_a_very_long_expected_text_is_cut(monkeypatch):
    monkeypatch.setattr(drafting, "INDEXED", 5)
    drafter = Drafter([1], range(100, 200))
    assert [each.token_ids for each in drafter.drafts(9)] == [[100, 101, 102, 103, 104]]


def test_a_drafter_follows_the_text():
    context = [7, 8, 9]
    drafter = Drafter(context)
    assert list(drafter.drafts(3)) == []
    for token_id in (4, 5, 6, 7, 8, 9):
        context.append(token_id)
        drafter.append(token_id, None)
    assert list(drafter.drafts(3)) == [Draft([4, 5, 6], DraftSource.TEXT, 2)]


def test_a_drafter_follows_a_passage_and_forgets_deleted_documents(model_folder, store_folder, tmp_path, monkeypatch):
    shutil.copytree(store_folder, tmp_path / "store")
    searched, search = list[int](), Retriever.passage_after

    def counted(self: Retriever, text: Sequence[int]) -> Any:
        searched.append(len(text))
        return search(self, text)

    monkeypatch.setattr(Retriever, "passage_after", counted)
    with LanguageModel(load_checkpoint(model_folder), [tmp_path / "store"]) as lm:
        retriever = lm.engine.stores.retriever(lm_retrieval())
        snapshot = retriever.stores[0].snapshot
        document = snapshot.tokens("doc-7.txt").tolist()
        result = retriever.search(snapshot.keys(snapshot.sample(1, 0)))
        context = [document[20]]
        drafter = Drafter(context, retriever=retriever)
        for token_id in document[21:40]:
            context.append(token_id)
            drafter.append(token_id, result)
            drafts = {draft.source: draft for draft in drafter.drafts(4)}
        assert len(searched) < 10  # of 19: a passage that the text goes on with is not searched again
        assert drafts[DraftSource.DATASTORE] == Draft(document[40:44], DraftSource.DATASTORE, 5)
        token_id = int(result.neighbors.values_QK[0, 0])
        context.append(token_id)
        drafter.append(token_id, result)
        assert DraftSource.NEIGHBORS in {draft.source for draft in drafter.drafts(4)}
        lm.delete_documents([document.id for document in snapshot.documents()])
        assert {draft.source for draft in drafter.drafts(4)} <= {DraftSource.TEXT}


def lm_retrieval() -> Any:
    return GenerateRequest.of("a", {"k": 200}).retrieval


@given(
    st.lists(st.lists(st.floats(0.01, 1), max_size=4), min_size=1, max_size=3),
    st.lists(st.floats(0.5, 20), min_size=16, max_size=16),
)
def test_rows_go_where_they_give_most_tokens_a_second(chances, times):
    chances = [np.cumprod(each).tolist() for each in chances]  # those of a draft fall along it
    lengths = allot(chances, lambda num_rows: times[num_rows - 1])

    def rate(lengths: Sequence[int]) -> float:
        gained = sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
        return (len(chances) + gained) / times[len(chances) + sum(lengths) - 1]

    best = max(rate(each) for each in itertools.product(*(range(len(each) + 1) for each in chances)))
    assert rate(lengths) == pytest.approx(best)


def test_survival_counts_only_tokens_that_were_tried():
    everyone = Survival()
    own = Survival(everyone)
    draft = Draft([1, 2, 3, 4], DraftSource.TEXT, 2)
    before = own.chances(draft)
    for _ in range(40):
        own.add(draft, 1)  # the first is always right, the second always wrong
    first, second, third, _ = own.chances(draft)
    assert first > 0.9 > before[0]
    assert second < 0.1
    assert third < second
    for survival in (own, everyone):
        assert survival.tried == {(DraftSource.TEXT, 0): 40, (DraftSource.TEXT, 1): 40}
        assert survival.accepted == {(DraftSource.TEXT, 0): 40, (DraftSource.TEXT, 1): 0}
    assert Survival(everyone).chances(draft)[0] > 0.8  # a new sequence begins with the experience of others
    other = draft._replace(closeness=1)
    assert own.chances(other) == pytest.approx(Survival().chances(other))
    assert own.chances(other)[0] < before[0]  # fewer equal tokens before it


def test_each_further_row_has_its_price_however_many_there_are():
    cost = PassCost()
    for step in range(200):
        num_rows = 16 + step % 8
        cost.add(num_rows, 0.001 * num_rows)
    prices = [cost.seconds(num_rows + 1) - cost.seconds(num_rows) for num_rows in range(16, 23)]
    assert min(prices) > 0.0005
    assert max(prices) < 0.002


def test_the_time_of_a_pass_is_learned_and_one_that_waited_is_not_believed():
    cost = PassCost()
    for _ in range(30):
        cost.add(1, 0.010)
        cost.add(8, 0.020)
    assert cost.seconds(1) == pytest.approx(0.010, rel=0.1)
    assert cost.seconds(8) == pytest.approx(0.020, rel=0.1)
    assert cost.seconds(1) < cost.seconds(2) < cost.seconds(4) < cost.seconds(8) < cost.seconds(32)
    cost.add(8, 9.0)
    assert cost.seconds(8) < 0.04
    for _ in range(300):
        cost.add(1, 0.010)
    assert cost.seconds(8) < 0.016  # it is tried again, in case it has become faster
