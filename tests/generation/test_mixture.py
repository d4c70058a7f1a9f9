"""A mixture of prompts is the sum over the texts that each prompt gives alone, and its rows are those of any batch."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from prompt_mixture import mixed_logprobs

from memlm.api.generation import Token
from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.errors import InvalidInput
from memlm.generation.batch import Batch
from memlm.generation.drive import stream
from memlm.generation.generation import Generation
from memlm.generation.mixture import Mixture
from memlm.language_model import LanguageModel

PROMPTS = ["the memory of", "a page", "it is a model, and the stream ends with the call"]
WEIGHTS = [1.0, 0.5, 0.25]
OPTIONS = {"use_store": False, "drafts": 0, "max_tokens": 8, "temperature": 0}


def start(lm: LanguageModel, prompt: str, **options) -> Generation:
    return run_steps(lm.engine.start(GenerateRequest.of(prompt, {**OPTIONS, **options})))


def mixture_of(lm: LanguageModel, prompts: Sequence[str] = PROMPTS, weights: Sequence[float] = WEIGHTS) -> Mixture:
    return Mixture([start(lm, prompt) for prompt in prompts], weights)


def drawn(lm: LanguageModel, mixture: Mixture) -> list[Token]:
    _, *events, finished = stream(lm.checkpoint, mixture)
    assert finished.passage_weights == mixture.weights
    return [token for each in events for token in each]


def check(lm: LanguageModel, tokens: Sequence[Token], mixture: Mixture) -> None:
    """Compares a text, and the weights after it, with the sum over whole texts."""
    prompts = [lm.tokenizer.prompt(prompt) for prompt in PROMPTS]
    expected, weights = mixed_logprobs(lm, prompts, WEIGHTS, [token.id for token in tokens])
    assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)
    assert mixture.weights == pytest.approx(weights, abs=1e-4)


def test_a_text_of_the_mixture_has_its_probabilities(lm):
    mixture = mixture_of(lm)
    assert mixture.weights == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    tokens = drawn(lm, mixture)
    assert len(tokens) == 8
    check(lm, tokens, mixture)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1, "seed": 3}, {"temperature": 1, "seed": 4, "stop": ["e"], "top_p": 0.9}]
)
def test_one_prompt_gives_the_text_that_it_gives_alone(lm, options):
    options = {**OPTIONS, "max_tokens": 12, **options}
    expected = lm.generate("the memory of", **options).result()
    mixture = Mixture([start(lm, "the memory of", **options)], [1.0])
    tokens = drawn(lm, mixture)
    assert [token.id for token in tokens] == [token.id for token in expected.tokens]
    assert mixture.leader.finished.reason is expected.finished.reason
    assert mixture.weights == (1.0,)


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
    check(lm, tokens[first], mixture)
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
    first = batch.add_mixture(mixture_of(lm, PROMPTS * 10, WEIGHTS * 10))
    batch.step()
    other = run_steps(batch.add(start(lm, "a page", max_tokens=2)))
    order = [sequence for sequence in _until_empty(batch) if sequence.tokens]
    assert order.index(other) < order.index(first)


def test_a_row_that_fails_ends_its_text_alone(lm):
    batch = Batch(lm.checkpoint, max_sequences=8)
    other, mixture = run_steps(batch.add(start(lm, "a page", max_tokens=4))), mixture_of(lm)
    first = batch.add_mixture(mixture)
    batch.step()
    mixture._logweights_B = mixture._logweights_B * np.nan
    batch.step()
    assert "are not numbers" in str(first.failure)
    assert len(batch) == 1
    assert other.failure is None


def test_weights_are_one_a_prompt_and_above_0(lm):
    for prompts, weights in ((PROMPTS, [1.0]), (PROMPTS, [1.0, 0.0, 1.0]), ([], []), (PROMPTS, [1.0, np.nan, 1.0])):
        with pytest.raises(InvalidInput, match="give each prompt a weight above 0"):
            mixture_of(lm, prompts, weights)
