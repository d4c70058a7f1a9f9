"""A mixture of prompts is the sum over the texts that each prompt gives alone, and its rows are those of any batch."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from prompt_mixture import POWER, mixed

from memlm.api.generation import Token
from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.generation.batch import Batch
from memlm.generation.drive import stream
from memlm.generation.generation import Generation
from memlm.generation.mixture import Mixture
from memlm.language_model import LanguageModel

QUESTION = "which page has it?"
PROMPTS = [f"a page. {QUESTION}", f"the stream ends. {QUESTION}", QUESTION]
CLOSE = 1e-6  # between two shares
OPTIONS = {"use_store": False, "drafts": 0, "max_tokens": 8, "temperature": 0}


def start(lm: LanguageModel, prompt: str | Sequence[int], **options) -> Generation:
    return run_steps(lm.engine.start(GenerateRequest.of(prompt, {**OPTIONS, **options})))


def mixture_of(lm: LanguageModel, prompts: Sequence[str | Sequence[int]] = PROMPTS, **options) -> Mixture:
    return Mixture([start(lm, prompt, **options) for prompt in prompts])


def drawn(lm: LanguageModel, mixture: Mixture) -> list[Token]:
    _, *events, _ = stream(lm.checkpoint, mixture)
    return [token for each in events for token in each]


def check(lm: LanguageModel, tokens: Sequence[Token], prompts: Sequence[Sequence[int]] = ()) -> None:
    """Compares a text, and the shares in its tokens, with the sum over whole texts."""
    prompts = prompts or [lm.tokenizer.prompt(prompt) for prompt in PROMPTS]
    expected_T, shares_TB = mixed(lm, prompts, [token.id for token in tokens])
    assert [token.logprob for token in tokens] == pytest.approx(expected_T, abs=1e-4)
    assert np.array([token.passage_shares for token in tokens]) == pytest.approx(shares_TB[:, :-1], abs=CLOSE)


def test_a_text_of_the_mixture_has_its_probabilities_and_each_token_its_shares(lm):
    tokens = drawn(lm, mixture_of(lm))
    assert len(tokens) == 8
    check(lm, tokens)


def test_a_question_that_follows_nothing_counts_from_its_second_token_on(lm):
    """As that of a model without a token at the start."""
    asked = lm.tokenize(QUESTION)
    prompts = [[*lm.tokenize("a page of"), *asked], asked]
    check(lm, drawn(lm, mixture_of(lm, prompts)), prompts)


def test_shares_are_those_of_a_sum_in_float64(lm):
    """Whatever the rows give, also to tokens that some of them exclude."""
    mixture, generator = mixture_of(lm, temperature=1, seed=5), torch.Generator().manual_seed(3)
    asked_B = np.array([-3.0, -2.0, -9.0])
    for generation, asked in zip(mixture.generations, asked_B.tolist(), strict=True):
        generation.prompt_logprob = asked
    expected_B = POWER * asked_B
    for _ in range(6):
        logits_BV = 5 * torch.randn(3, lm.tokenizer.vocab_size, generator=generator)
        logits_BV[0, ::3] = -torch.inf
        rows_BV = logits_BV.log_softmax(dim=1)
        (token,) = mixture.draw(rows_BV, 0.0)
        expected_B = expected_B + rows_BV[:, token.id].double().numpy()
        shares_B = np.exp(expected_B) / np.exp(expected_B).sum()
        assert token.passage_shares == pytest.approx(shares_B[:-1], abs=1e-12)


def test_a_token_that_is_shown_late_has_the_shares_of_its_place(lm):
    """As where a stop string may begin with it."""
    plain = drawn(lm, mixture_of(lm))
    text = "".join(token.text for token in plain)
    held = drawn(lm, mixture_of(lm, stop=[text + "!"]))
    assert [token.passage_shares for token in held] == [token.passage_shares for token in plain]


def test_the_order_of_passages_matters_neither_to_the_text_nor_to_the_shares(lm):
    plain = drawn(lm, mixture_of(lm))
    turned = drawn(lm, mixture_of(lm, [PROMPTS[1], PROMPTS[0], PROMPTS[2]]))
    assert [token.id for token in turned] == [token.id for token in plain]
    for one, other in zip(plain, turned, strict=True):
        assert one.passage_shares == pytest.approx(other.passage_shares[::-1], abs=CLOSE)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1, "seed": 3}, {"temperature": 1, "seed": 4, "stop": ["e"], "top_p": 0.9}]
)
def test_one_prompt_gives_the_text_that_it_gives_alone(lm, options):
    options = {**OPTIONS, "max_tokens": 12, **options}
    expected = lm.generate("the memory of", **options).result()
    mixture = mixture_of(lm, ["the memory of"], **options)
    tokens = drawn(lm, mixture)
    assert [token.id for token in tokens] == [token.id for token in expected.tokens]
    assert mixture.leader.finished.reason is expected.finished.reason
    assert {token.passage_shares for token in tokens} == {()}


@pytest.mark.parametrize("prefill_tokens", [1, 3, 7, 1000])
@pytest.mark.parametrize("max_sequences", [2, 8])  # fewer than rows, and more
def test_rows_share_the_batch_with_other_texts(lm, prefill_tokens, max_sequences):
    """Whatever comes before, beside and behind them, and however their prompts are cut."""
    batch = Batch(lm.checkpoint, max_sequences=max_sequences, prefill_tokens=prefill_tokens)
    others = [start(lm, prompt, max_tokens=length) for prompt, length in (("the", 3), ("a page of the", 20))]
    before, beside = run_steps(batch.add(others[0])), run_steps(batch.add(others[1]))
    mixture, tokens = mixture_of(lm), dict[object, list[Token]]()
    first = batch.add_mixture(mixture)
    for sequence in _until_empty(batch):
        tokens.setdefault(sequence, []).extend(sequence.tokens)
    assert set(tokens) == {before, beside, first}
    check(lm, tokens[first])
    for sequence, length in ((before, 3), (beside, 20)):
        alone = start(lm, sequence.generation._request.prompt, max_tokens=length)
        _, *events, _ = stream(lm.checkpoint, alone)
        assert [token.id for token in tokens[sequence]] == [token.id for each in events for token in each]


def _until_empty(batch: Batch) -> Iterator:
    while len(batch):
        yield from batch.step()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 9])
def test_all_rows_are_removed_together(lm, num_steps):
    """Before, while and after their prompts are read."""
    batch = Batch(lm.checkpoint, max_sequences=8, prefill_tokens=4)
    other = run_steps(batch.add(start(lm, "a page", max_tokens=30)))
    first = batch.add_mixture(mixture_of(lm))
    for _ in range(num_steps):
        batch.step()
    batch.remove(first)
    assert len(batch) == 1
    assert not batch._held
    assert batch.step() in ([], [other])
    assert batch._pool.num_rows <= 1


@pytest.mark.parametrize("prefill_tokens", [4, 16])
def test_a_prompt_that_comes_behind_a_mixture_does_not_wait_for_all_of_it(lm, prefill_tokens):
    batch = Batch(lm.checkpoint, max_sequences=2, prefill_tokens=prefill_tokens)
    first = batch.add_mixture(mixture_of(lm, PROMPTS * 10))
    batch.step()
    other = run_steps(batch.add(start(lm, "a page", max_tokens=2)))
    order = [sequence for sequence in _until_empty(batch) if sequence.tokens]
    assert order.index(other) < order.index(first)


def test_a_row_that_fails_ends_its_text_alone(lm):
    batch = Batch(lm.checkpoint, max_sequences=8)
    other, mixture = run_steps(batch.add(start(lm, "a page", max_tokens=4))), mixture_of(lm)
    first = batch.add_mixture(mixture)
    batch.step()
    mixture._logshares_B = mixture.logshares_B * np.nan
    batch.step()
    assert "are not numbers" in str(first.failure)
    assert len(batch) == 1
    assert other.failure is None
