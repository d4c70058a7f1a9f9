"""A mixture of prompts is the sum over the texts that each prompt gives alone, in float64."""

import numpy as np
import pytest

from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.errors import InvalidInput
from memlm.generation.mixture import MixedGeneration, PromptMixture, mixed_logprobs
from memlm.generation.seams import stream_steps
from memlm.language_model import LanguageModel

PROMPTS = ["the memory of", "a page", "it is a model, and the stream ends with the call"]
WEIGHTS = [1.0, 0.5, 0.25]


def alone(lm: LanguageModel, prompt: list[int], text: list[int]) -> np.ndarray:
    """The log-probability of each token of a text after one prompt, from a pass without a state."""
    logits_TV = lm.logits([*prompt, *text]).double().numpy()[len(prompt) - 1 : -1]
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    return logprobs_TV[np.arange(len(text)), text]


@pytest.fixture
def prompts(lm: LanguageModel) -> list[list[int]]:
    return [lm.tokenizer.prompt(prompt) for prompt in PROMPTS]


def test_the_mixture_is_the_sum_over_whole_texts(lm, prompts):
    text = lm.tokenize(" the memory of a model")
    weights_B = np.array(WEIGHTS) / sum(WEIGHTS)
    rows_BT = np.stack([alone(lm, prompt, text) for prompt in prompts])
    found = mixed_logprobs(lm.checkpoint, prompts, WEIGHTS, text)
    assert sum(found) == pytest.approx(np.log(weights_B @ np.exp(rows_BT.sum(axis=1))), abs=1e-4)
    for place in range(len(text)):  # the weights of the prompts after the text so far
        joint_B = weights_B * np.exp(rows_BT[:, :place].sum(axis=1))
        expected = np.log(joint_B / joint_B.sum() @ np.exp(rows_BT[:, place]))
        assert found[place] == pytest.approx(expected, abs=1e-4)


def test_prompts_that_expected_the_text_gain_weight(lm, prompts):
    text = lm.tokenize(" the memory")
    mixture = PromptMixture(lm.checkpoint, prompts, WEIGHTS, capacity=64)
    assert mixture.weights == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    for token_id in text:
        mixture.read()
        mixture.append(token_id)
    joint_B = np.array(WEIGHTS) * np.exp([alone(lm, prompt, text).sum() for prompt in prompts])
    assert mixture.weights == pytest.approx(joint_B / joint_B.sum(), abs=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "stop": ["e"], "top_p": 0.9}])
def test_one_prompt_gives_the_text_that_it_gives_alone(lm, options):
    options = {"use_store": False, "drafts": 0, "max_tokens": 12, **options}
    expected = lm.generate("the memory of", **options).result()
    (generation,) = generations(lm, ["the memory of"], options)
    completion, posterior = run(lm, [generation], [1.0])
    assert completion == (expected.text, [token.id for token in expected.tokens], expected.finished.reason)
    assert posterior == [1.0]


def test_a_text_of_the_mixture_has_its_probabilities(lm):
    options = {"use_store": False, "drafts": 0, "max_tokens": 8, "seed": 5}
    (_, ids, _), posterior = run(lm, generations(lm, PROMPTS, options), WEIGHTS, logprobs := [])
    prompts = [lm.tokenizer.prompt(prompt) for prompt in PROMPTS]
    assert logprobs == pytest.approx(mixed_logprobs(lm.checkpoint, prompts, WEIGHTS, ids), abs=1e-4)
    assert sum(posterior) == pytest.approx(1)


@pytest.mark.parametrize("most_tokens", [1, 2, 3, 7, 1000])
def test_prompts_read_in_pieces_give_the_same_mixture(lm, prompts, most_tokens):
    whole, pieces = (PromptMixture(lm.checkpoint, prompts, WEIGHTS, capacity=64) for _ in range(2))
    num_pieces = 0
    for token_id in lm.tokenize(" the memory"):
        expected_V, found_V = whole.read(), None
        while found_V is None:
            found_V, num_pieces = pieces.read_piece(most_tokens), num_pieces + 1
        assert np.abs((expected_V - found_V).numpy()).max() < 1e-5
        whole.append(token_id)
        pieces.append(token_id)
    assert pieces.weights == pytest.approx(whole.weights, abs=1e-5)
    assert (num_pieces > len(lm.tokenize(" the memory"))) == (most_tokens < 1000)


def test_weights_are_one_a_prompt_and_above_0(lm, prompts):
    for given, weights in ((prompts, [1.0]), (prompts, [1.0, 0.0, 1.0]), ([], []), (prompts, [1.0, np.nan, 1.0])):
        with pytest.raises(InvalidInput, match="give each prompt a weight above 0"):
            PromptMixture(lm.checkpoint, given, weights, capacity=64)


def generations(lm: LanguageModel, prompts: list[str], options: dict) -> list:
    return [run_steps(lm.engine.start(GenerateRequest.of(prompt, options))) for prompt in prompts]


def run(lm: LanguageModel, generations: list, weights: list[float], logprobs: list[float] | None = None):
    _, *events, finished = stream_steps(MixedGeneration(lm.checkpoint, generations, weights))
    tokens = [token for each in events for token in each]
    if logprobs is not None:
        logprobs += [token.logprob for token in tokens]
    text = "".join(token.text for token in tokens)
    return (text, [token.id for token in tokens], finished.reason), [*finished.passage_weights]
