import numpy as np
import pytest
import torch
from reference import decode_plainly, generate_uncached

from memlm.api.generation import FinishReason
from memlm.api.params import GenerateRequest, SamplingParams
from memlm.api.prompts import MAX_TOKEN_IDS
from memlm.base.steps import run_steps
from memlm.errors import InvalidInput
from memlm.generation.drive import stream
from memlm.generation.generation import Generation
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint

PROMPT = "the memory of a"


def generate(checkpoint: Checkpoint, prompt: str = PROMPT, *, top_logprobs: int = 0, **sampling) -> list:
    request = GenerateRequest(prompt, sampling=SamplingParams(**sampling), top_logprobs=top_logprobs)
    return list(stream(checkpoint, run_steps(Generation.start(checkpoint, request, None))))


def tokens_of(events: list) -> list:
    return [token for event in events if isinstance(event, tuple) for token in event]


@pytest.mark.parametrize("prompt", ["", PROMPT, "é 猫 🙂 can be read and edited"])
def test_greedy_text_equals_its_uncached_twin(checkpoint, prompt):
    drawn = tokens_of(generate(checkpoint, prompt, temperature=0, max_tokens=20))
    assert [token.id for token in drawn] == generate_uncached(checkpoint, prompt, 20)


def test_a_token_tells_the_models_own_logprob(checkpoint):
    drawn = tokens_of(generate(checkpoint, seed=5, max_tokens=8, top_logprobs=3))
    tokens = [checkpoint.tokenizer.end_id, *checkpoint.tokenizer.encode(PROMPT).tolist()]
    for token in drawn:
        expected_V = decode_plainly(checkpoint.decoder, tokens)[0][-1]
        assert token.logprob == token.lm_logprob == pytest.approx(expected_V[token.id], abs=1e-3)
        assert token.knn_logprob is None
        assert token.knn_share == 0
        best = sorted(range(len(expected_V)), key=lambda i: -expected_V[i])[:3]
        assert [alternative.token_id for alternative in token.top_logprobs] == best
        tokens.append(token.id)


def test_logprobs_are_before_temperature_and_filters(checkpoint):
    plain = tokens_of(generate(checkpoint, temperature=0, max_tokens=4))
    cold = tokens_of(generate(checkpoint, temperature=0.01, top_k=5, seed=0, max_tokens=4))
    assert [token.logprob for token in plain] == [token.logprob for token in cold]


def test_events_come_in_order_and_end_once(checkpoint):
    first, *middle, last = generate(checkpoint, seed=3, max_tokens=6)
    assert first.seed == 3
    assert all(isinstance(event, tuple) and event for event in middle)
    assert last.reason is FinishReason.LENGTH
    assert last.usage.generated_tokens == sum(map(len, middle)) == 6
    assert last.usage.prompt_tokens == len(checkpoint.tokenizer.encode(PROMPT))
    assert last.usage.prefill_ms > 0
    assert last.usage.decode_ms > 0


def test_the_same_seed_gives_the_same_text_and_a_fresh_one_is_told(checkpoint):
    first = generate(checkpoint, max_tokens=10)
    again = generate(checkpoint, max_tokens=10, seed=first[0].seed)
    other = generate(checkpoint, max_tokens=10)
    assert [t.id for t in tokens_of(first)] == [t.id for t in tokens_of(again)]
    assert first[0].seed != other[0].seed


def test_a_stop_string_ends_the_text_before_it(checkpoint):
    whole = "".join(token.text for token in tokens_of(generate(checkpoint, temperature=0, max_tokens=20)))
    stop = whole[7:10]
    events = generate(checkpoint, temperature=0, max_tokens=20, stop=(stop,))
    assert "".join(token.text for token in tokens_of(events)) == whole[: whole.index(stop)]
    assert (events[-1].reason, events[-1].stop_string) == (FinishReason.STOP, stop)


def test_a_time_limit_ends_the_text_as_far_as_it_got(checkpoint):
    events = generate(checkpoint, seed=1, max_tokens=40, time_limit_s=1e-9)
    assert events[-1].reason is FinishReason.TIME
    assert events[-1].usage.generated_tokens == len(tokens_of(events)) == 1
    assert generate(checkpoint, seed=1, max_tokens=4, time_limit_s=3600)[-1].reason is not FinishReason.TIME
    with pytest.raises(InvalidInput, match="time_limit_s"):
        generate(checkpoint, time_limit_s=0.0)


def test_the_models_own_end_of_text_ends_it(checkpoint):
    runs = (generate(checkpoint, temperature=2.0, seed=seed) for seed in range(100))
    events = next(events for events in runs if events[-1].reason is FinishReason.END)
    drawn = tokens_of(events)
    assert checkpoint.tokenizer.end_id not in [token.id for token in drawn]
    assert events[-1].usage.generated_tokens == len(drawn)
    assert "".join(token.text for token in drawn) == checkpoint.tokenizer.decode([token.id for token in drawn])


def test_a_generation_may_fill_the_context_and_no_more(checkpoint):
    context = checkpoint.decoder.config.context_length
    size = len(checkpoint.tokenizer.encode(PROMPT))
    room = context - size
    assert len(tokens_of(generate(checkpoint, temperature=0))) <= room
    with pytest.raises(InvalidInput, match=f"for {room}: ask for at most that") as caught:
        generate(checkpoint, max_tokens=room + 1)
    assert caught.value.field == "max_tokens"


def test_a_prompt_longer_than_the_context_is_refused(checkpoint):
    with pytest.raises(InvalidInput, match="at most 47: shorten the prompt") as caught:
        generate(checkpoint, "the memory of a model " * 20)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(("prompt", "says"), [("a\0b", "NUL at character 1"), ("a\udc80", "surrogate")])
def test_a_prompt_that_is_no_text_is_refused(checkpoint, prompt, says):
    with pytest.raises(InvalidInput, match=says):
        generate(checkpoint, prompt)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(InvalidInput, match="temprature"):
        GenerateRequest.of("x", {"temprature": 1})


def ids_of(lm: LanguageModel, prompt: str) -> list[int]:
    return [lm.checkpoint.tokenizer.start_id, *lm.tokenize(prompt)]


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, iter])
def test_token_ids_are_continued_as_the_text_that_they_are(lm, form):
    ids = ids_of(lm, PROMPT)
    expected = lm.generate(PROMPT, temperature=0, max_tokens=8, neighbors=2)
    stream = lm.generate(form(ids), temperature=0, max_tokens=8, neighbors=2)
    assert list(stream) == list(expected)
    assert stream.finished.usage.prompt_tokens == len(ids)
    assert list(lm.generate(prompt_token_ids=ids, seed=2)) == list(lm.generate(PROMPT, seed=2))


def test_token_ids_get_no_start_token(lm, checkpoint):
    ids = lm.tokenize(PROMPT)
    (token,) = lm.generate(ids, temperature=0, max_tokens=1, use_store=False)
    assert token.logprob == pytest.approx(decode_plainly(checkpoint.decoder, ids)[0][-1][token.id], abs=1e-3)


def test_token_ids_go_on_in_a_session(lm):
    with lm.session() as session:
        list(session.generate(prompt_token_ids=ids_of(lm, PROMPT), temperature=0, max_tokens=4))
        again = list(session.generate(lm.tokenize(" and"), temperature=0, max_tokens=4))
    with lm.session() as session:
        list(session.generate(PROMPT, temperature=0, max_tokens=4))
        assert list(session.generate(" and", temperature=0, max_tokens=4)) == again


@pytest.mark.parametrize(
    ("prompt", "ids", "says"),
    [
        (PROMPT, [1, 2], "not both"),
        ([1], [2], "not both"),
        ("", [], "holds no token ids"),
        ([], None, "holds no token ids"),
        ("", [1, -1], "the id -1, outside the vocabulary"),
        ([1, 300], None, "the id 300, outside the vocabulary of 300"),
        ("", "1, 2", "expected a text, or token ids"),
        ([1.5], None, "expected a text, or token ids"),
        (5, None, "expected a text, or token ids"),
        ([7] * 60, None, "at most 47: shorten the prompt"),
        ([7] * (MAX_TOKEN_IDS + 1), None, "at most 1,048,576 in one call"),
    ],
)
def test_a_prompt_of_wrong_ids_or_of_both_kinds_is_refused(lm, prompt, ids, says):
    with pytest.raises(InvalidInput, match=says) as caught:
        lm.generate(prompt, **({} if ids is None else {"prompt_token_ids": ids}))
    assert caught.value.field.startswith("prompt")


def test_token_ids_are_scored_as_the_text_that_they_are(lm):
    for options in ({}, {"use_store": False}, {"k": 4, "lam": 0.5}):
        expected = lm.score(PROMPT, token_scores=True, **options)
        assert lm.score(ids_of(lm, PROMPT), token_scores=True, **options) == expected
    for ids, says in (([1], "at least two"), ([1, 300], "outside the vocabulary"), ([], "no token ids")):
        with pytest.raises(InvalidInput, match=says):
            lm.score(ids)


def test_every_seed_is_a_number_that_json_keeps(lm):
    seeds = {lm.generate(PROMPT, max_tokens=1).accepted.seed for _ in range(64)}
    assert 2**50 < max(seeds) < 2**53
    assert len(seeds) == 64
    assert lm.generate(PROMPT, max_tokens=1, seed=2**53).accepted.seed == 2**53
    with pytest.raises(InvalidInput, match="seed"):
        lm.generate(PROMPT, seed=2**53 + 1)


PROMPTS = ["", PROMPT, "é 猫 🙂 can be read and edited", "the " * 9]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"seed": 5, "top_p": 0.8, "stop": "a"}])
@pytest.mark.parametrize("use_store", [True, False])
def test_prompts_continued_side_by_side_are_what_they_are_alone(lm, options, use_store):
    together = lm.generate_batch(PROMPTS, max_tokens=12, use_store=use_store, **options)
    for number, (prompt, completion) in enumerate(zip(PROMPTS, together, strict=True)):
        own = {**options, "seed": options["seed"] + number} if "seed" in options else options
        stream = lm.generate(prompt, max_tokens=12, use_store=use_store, **own)
        tokens = list(stream)
        assert [token.id for token in completion.tokens] == [token.id for token in tokens]
        assert completion.text == "".join(token.text for token in tokens)
        assert completion.finished.reason == stream.finished.reason
        assert completion.finished.usage.retrieved_neighbors == stream.finished.usage.retrieved_neighbors
        for ours, alone in zip(completion.tokens, tokens, strict=True):
            assert ours.logprob == pytest.approx(alone.logprob, abs=1e-3)


def test_a_list_of_prompts_is_a_batch(lm):
    expected = lm.generate_batch(PROMPTS, max_tokens=6, seed=3)
    assert lm.generate(PROMPTS, max_tokens=6, seed=3)[0].text == expected[0].text
    assert [each.tokens for each in lm.generate(tuple(PROMPTS), max_tokens=6, seed=3)] == [
        each.tokens for each in lm.generate_batch(PROMPTS, max_tokens=6, seed=3)
    ]
    ids = [ids_of(lm, prompt) for prompt in PROMPTS]
    for one, other in zip(lm.generate_batch(ids, max_tokens=6, seed=3), expected, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ("Once", {}, "prompts is 'Once'; expected prompts in a list"),
        (5, {}, "prompts is 5"),
        (["a", 5], {}, "prompt is 5; expected a text"),
        (["a", "b"], {"session": "x"}, "one prompt at a time"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(lm, prompts, options, says):
    with pytest.raises(InvalidInput) as caught:
        lm.generate_batch(prompts, **options)
    assert says in str(caught.value)


def test_a_list_of_texts_is_scored_one_by_one(lm):
    texts = [PROMPT, "can be read"]
    assert lm.score(texts, token_scores=True) == tuple(lm.score(text, token_scores=True) for text in texts)


def test_no_prompts_give_no_completions_and_a_bad_one_spoils_none(lm):
    assert lm.generate_batch([]) == ()
    with pytest.raises(InvalidInput, match="prompt"):
        lm.generate_batch([PROMPT, "the " * 500])
