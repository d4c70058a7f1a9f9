"""OpenAI's client against our port: whole and streamed answers, equal to our own clients' to the token."""

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import openai
import pytest
from running import LOGPROB_TOLERANCE, RunningServer

from memlm.api.generation import Alternative, DraftUsage, Token, Usage
from memlm.api.params import SamplingParams
from memlm.base.options import bounds_of
from memlm.client import Client
from memlm.language_model import LanguageModel
from memlm.server.http.answers import AnswerUsage, ChoiceAnswer, server_sent
from memlm.server.http.bodies import CHAT, COMPLETION
from memlm.server.http.openai import AnswerForm, chat_choices, completion_choices
from memlm.server.http.schema import parse_json

PROMPT = "the memory of"
GREEDY = {"max_tokens": 8, "temperature": 0}
SAMPLED = {"max_tokens": 8, "temperature": 0.9, "top_p": 0.9, "seed": 7}
TALK = [{"role": "user", "content": "the memory"}]
FILTERS = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}
MIXED = {"lam": 0.7, "k": 4, "knn_temperature": 2.0}
NAMED = {"stores": ["store"], "neighbors": 3}
WITHOUT = {"exclude_documents": ["doc-1.txt", "doc-[67].txt"], "neighbors": 3, **MIXED}
WEIGHTED = {"stores": {"store": 0.5}, "loop_guard": False}
# Options of ours, and the same ones over HTTP: OpenAI's own, and what stands beside them in the body.
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (GREEDY, GREEDY, {}),
    (SAMPLED, SAMPLED, {}),
    ({**SAMPLED, **FILTERS}, SAMPLED, FILTERS),
    ({**GREEDY, **MIXED}, GREEDY, {"memory": MIXED}),
    ({**GREEDY, **NAMED}, GREEDY, {"memory": NAMED}),
    ({**GREEDY, **WITHOUT}, GREEDY, {"memory": WITHOUT}),
    ({**GREEDY, "use_store": False}, GREEDY, {"memory": {"stores": []}}),
    ({**SAMPLED, **WEIGHTED}, SAMPLED, {"memory": WEIGHTED}),
    ({**GREEDY, "stop": ["e"]}, {**GREEDY, "stop": "e"}, {}),
]


@pytest.fixture
def client(web: RunningServer) -> Iterator[Client]:
    with Client(web.address) as client:
        yield client


def assert_same(shown: list[dict[str, Any]], tokens: list[Token]) -> None:
    """Compares the memory's figures of an answer with our tokens."""
    assert [each["id"] for each in shown] == [token.id for token in tokens]
    assert [each["text"] for each in shown] == [token.text for token in tokens]
    for each, token in zip(shown, tokens, strict=True):
        for name in ("logprob", "lm_logprob", "lam"):
            assert each[name] == pytest.approx(getattr(token, name), abs=LOGPROB_TOLERANCE), name
        if token.knn_logprob is None or token.knn_logprob == -math.inf:
            assert each["knn_logprob"] is None
        else:
            assert each["knn_logprob"] == pytest.approx(token.knn_logprob, abs=1e-3)
        assert each["memory_share"] == pytest.approx(token.knn_share, abs=1e-3)
        places = [(n["store"], n["document_id"], n["token_offset"], n["snippet"]) for n in each["neighbors"]]
        assert places == [(n.store, n.document_id, n.token_offset, n.snippet) for n in token.neighbors]


@pytest.mark.parametrize(("ours", "options", "extra"), CASES)
def test_http_grpc_and_the_library_give_the_same_tokens(
    ai: openai.OpenAI, client: Client, lm: LanguageModel, ours: dict, options: dict, extra: dict
) -> None:
    in_process, over_grpc = list(lm.generate(PROMPT, **ours)), list(client.generate(PROMPT, **ours))
    extra = {"memory": {}, **extra}
    whole = ai.completions.create(model="tiny", prompt=PROMPT, extra_body=extra, **options).choices[0]
    streamed = list(ai.completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body=extra, **options))
    events = [choice for chunk in streamed for choice in chunk.choices]
    for tokens in (in_process, over_grpc):
        assert_same(whole.model_extra["memory"]["tokens"], tokens)
        assert_same([each for event in events for each in event.model_extra["memory"]["tokens"]], tokens)
        assert whole.text == "".join(event.text for event in events) == "".join(token.text for token in tokens)
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == whole.finish_reason


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_a_chat_is_the_same_too(ai: openai.OpenAI, client: Client, lm: LanguageModel, options: dict) -> None:
    extra = {"memory": {"neighbors": 2}}
    ours = {**options, "neighbors": 2}
    whole = ai.chat.completions.create(model="tiny", messages=TALK, extra_body=extra, **options)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "memory"}]}]
    streamed = list(ai.chat.completions.create(model="tiny", messages=parts, stream=True, extra_body=extra, **options))
    events = [choice for chunk in streamed for choice in chunk.choices]
    for tokens in (list(lm.chat(TALK, **ours)), list(client.chat(TALK, **ours))):
        assert_same(whole.choices[0].model_extra["memory"]["tokens"], tokens)
        assert_same([each for event in events for each in event.model_extra["memory"]["tokens"]], tokens)
        text = "".join(token.text for token in tokens)
        assert whole.choices[0].message.content == text
        assert "".join(event.delta.content or "" for event in events) == text
    assert (events[0].delta.role, whole.choices[0].message.role) == ("assistant", "assistant")
    assert (whole.object, streamed[0].object) == ("chat.completion", "chat.completion.chunk")


async def test_the_asynchronous_client_gets_the_same(web: RunningServer, client: Client) -> None:
    tokens = list(client.generate(PROMPT, **GREEDY))
    async with openai.AsyncOpenAI(base_url=f"{web.http_url}/v1", api_key="none", max_retries=0) as ai:
        whole = await ai.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
        stream = await ai.completions.create(model="tiny", prompt=PROMPT, stream=True, **GREEDY)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert whole.choices[0].text == "".join(texts) == "".join(token.text for token in tokens)


def test_several_prompts_and_choices_are_in_order(ai: openai.OpenAI, client: Client) -> None:
    """Choice n of all has seed + n, as in a batch of our client."""
    prompts = ["the memory", "of a"]
    answer = ai.completions.create(model="tiny", prompt=prompts, n=2, **SAMPLED)
    wanted = [
        str(client.generate(prompt, **{**SAMPLED, "seed": SAMPLED["seed"] + number}).result())
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(2))
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == wanted
    assert answer.usage.completion_tokens == 4 * 8
    assert answer.usage.prompt_tokens == sum(len(client.tokenize(prompt)) for prompt in prompts)
    streamed = dict.fromkeys(range(4), "")
    for chunk in ai.completions.create(model="tiny", prompt=prompts, n=2, stream=True, **SAMPLED):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == wanted


def test_token_ids_are_read_as_they_are(ai: openai.OpenAI, client: Client) -> None:
    ids = list(client.tokenize(PROMPT))
    wanted = str(client.generate(ids, **GREEDY).result())
    answer = ai.completions.create(model="tiny", prompt=[ids, ids[:2]], **GREEDY)
    assert answer.choices[0].text == wanted
    assert ai.completions.create(model="tiny", prompt=ids, **GREEDY).choices[0].text == wanted
    assert answer.choices[1].text == str(client.generate(ids[:2], **GREEDY).result())


def test_log_probabilities_of_a_completion(ai: openai.OpenAI, client: Client) -> None:
    tokens = list(client.generate(PROMPT, **GREEDY, top_logprobs=3))
    shown = ai.completions.create(model="tiny", prompt=PROMPT, logprobs=3, **GREEDY).choices[0].logprobs
    assert shown.token_logprobs == pytest.approx([token.logprob for token in tokens], abs=LOGPROB_TOLERANCE)
    assert [len(top) for top in shown.top_logprobs] == [len({a.text for a in token.top_logprobs}) for token in tokens]
    assert shown.text_offset == [sum(len(t.text) for t in tokens[:place]) for place in range(len(tokens))]
    bare = ai.completions.create(model="tiny", prompt=PROMPT, logprobs=0, **GREEDY).choices[0].logprobs
    assert bare.token_logprobs == shown.token_logprobs
    assert set(bare.top_logprobs) == {None}


def test_log_probabilities_of_a_chat(ai: openai.OpenAI, client: Client) -> None:
    tokens = list(client.chat(TALK, **GREEDY, top_logprobs=2))
    answer = ai.chat.completions.create(model="tiny", messages=TALK, logprobs=True, top_logprobs=2, **GREEDY)
    shown = answer.choices[0].logprobs.content
    assert [each.logprob for each in shown] == pytest.approx([t.logprob for t in tokens], abs=LOGPROB_TOLERANCE)
    assert [bytes(each.bytes) for each in shown] == [token.bytes for token in tokens]
    for each, token in zip(shown, tokens, strict=True):
        assert [top.token for top in each.top_logprobs] == [a.text for a in token.top_logprobs]
    bare = ai.chat.completions.create(model="tiny", messages=TALK, logprobs=True, **GREEDY).choices[0]
    assert [each.top_logprobs for each in bare.logprobs.content] == [[]] * len(tokens)


def test_an_echo_shows_the_prompt_and_scores_it(ai: openai.OpenAI, client: Client) -> None:
    """What lm-evaluation-harness asks for."""
    scores = client.score(PROMPT, token_scores=True).token_scores
    tokens = list(client.generate(PROMPT, **GREEDY))
    answer = ai.completions.create(model="tiny", prompt=PROMPT, echo=True, logprobs=0, **GREEDY)
    assert answer.choices[0].text == PROMPT + "".join(token.text for token in tokens)
    wanted = [*(score.logprob for score in scores), *(token.logprob for token in tokens)]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)
    only = ai.completions.create(model="tiny", prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
    assert (only.choices[0].text, only.usage.completion_tokens) == (PROMPT, 0)
    assert only.choices[0].logprobs.token_logprobs == pytest.approx(wanted[: len(scores)], abs=LOGPROB_TOLERANCE)


def test_an_echo_of_token_ids_scores_all_but_the_first(ai: openai.OpenAI, client: Client) -> None:
    ids = list(client.tokenize(PROMPT))
    answer = ai.completions.create(model="tiny", prompt=[ids], echo=True, logprobs=0, max_tokens=0)
    wanted = [score.logprob for score in client.score(ids, token_scores=True).token_scores]
    shown = answer.choices[0].logprobs
    assert shown.token_logprobs[0] is None
    assert shown.token_logprobs[1:] == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)
    assert answer.choices[0].text == PROMPT == "".join(shown.tokens)
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_a_body_takes_every_field_of_sampling_within_its_bounds(body: dict[str, Any]) -> None:
    for each in fields(SamplingParams):
        schema, bounds = body["properties"][each.name], bounds_of(SamplingParams).get(each.name)
        if bounds is not None and "x-none" not in schema and "anyOf" not in schema and each.name != "max_tokens":
            assert (schema.get("minimum"), schema.get("maximum")) == (bounds.least, bounds.most)


def test_a_text_ends_with_its_time(ai: openai.OpenAI) -> None:
    completion = ai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, extra_body={"time_limit_s": 1e-6}
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens < 40


def test_usage_comes_last_on_request(ai: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "stream": True, **GREEDY}
    *events, last = ai.completions.create(**options, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert {event.usage for event in [*events, *ai.completions.create(**options)]} == {None}


def test_a_prediction_is_a_draft_of_each_choice() -> None:
    form, prediction = AnswerForm("tiny", is_chat=False), {"type": "content", "content": "the memory"}
    asked = {"model": "tiny", "prompt": ["a", "b"], "drafts": 4, "prediction": prediction}
    choices = completion_choices(parse_json(json.dumps(asked).encode(), COMPLETION), form)
    assert [(choice.request.draft, choice.request.drafts) for choice in choices] == [("the memory", 4)] * 2
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "memory"}]
    asked = {"model": "tiny", "messages": TALK, "n": 2, "prediction": {"type": "content", "content": parts}}
    choices = chat_choices(parse_json(json.dumps(asked).encode(), CHAT), form)
    assert [(choice.request.draft, choice.request.drafts) for choice in choices] == [("the memory", None)] * 2


def test_usage_tells_what_came_of_drafts_in_the_words_of_openai_and_ours() -> None:
    usage = AnswerUsage()
    usage.add(
        Usage(3, 10, steps=4, drafts=(DraftUsage("request", 9, 6, 3), DraftUsage("text", 2, 0, 1)), cached_tokens=2),
        counts_prompt=True,
    )
    usage.add(Usage(3, 10, steps=9, drafts=(DraftUsage("request", 4, 1, 2),), cached_tokens=2), counts_prompt=False)
    known = {"prompt_tokens_details": {"cached_tokens": 2}}
    counts = {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23, **known}
    request = {"source": "request", "drafted": 13, "accepted": 7, "drafts": 5}
    ours = {"steps": 13, "drafts": [request, {"source": "text", "drafted": 2, "accepted": 0, "drafts": 1}]}
    assert usage.shown(has_prediction=False) == {**counts, **ours}
    details = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 6}
    assert usage.shown(has_prediction=True) == {**counts, "completion_tokens_details": details, **ours}
    none = AnswerUsage(3, 20, cached_tokens=2).shown(has_prediction=True)
    assert none == {**counts, "completion_tokens_details": dict.fromkeys(details, 0)}


def test_usage_tells_how_much_of_a_prompt_was_not_read_again(ai: openai.OpenAI) -> None:
    prompt = [*range(60, 20, -1)]
    usages = [ai.completions.create(model="tiny", prompt=prompt, **GREEDY).usage for _ in range(2)]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, len(prompt) - 1]
    assert {usage.prompt_tokens for usage in usages} == {len(prompt)}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_an_answer_with_a_prediction_is_the_answer_without_in_fewer_steps(ai: openai.OpenAI, options: dict) -> None:
    wanted = ai.completions.create(model="tiny", prompt=PROMPT, extra_body={"drafts": 0}, **options)
    assert "drafts" not in wanted.usage.model_extra
    for text, is_right in ((wanted.choices[0].text, True), ("zebra " * 9, False)):
        extra = {"prediction": {"type": "content", "content": text}, "drafts": 4}
        answer = ai.completions.create(model="tiny", prompt=PROMPT, extra_body=extra, **options)
        assert answer.choices[0].text == wanted.choices[0].text
        assert answer.usage.completion_tokens == wanted.usage.completion_tokens
        details, drafts = answer.usage.completion_tokens_details, answer.usage.model_extra["drafts"]
        of_request = next(each for each in drafts if each["source"] == "request")
        assert details.accepted_prediction_tokens == of_request["accepted"]
        assert details.rejected_prediction_tokens == of_request["drafted"] - of_request["accepted"]
        if is_right:
            assert details.accepted_prediction_tokens > 0
            assert answer.usage.model_extra["steps"] < answer.usage.completion_tokens


def test_a_chat_takes_a_prediction_too_whole_and_streamed(ai: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": TALK, **GREEDY}
    said = ai.chat.completions.create(**options, extra_body={"drafts": 0}).choices[0].message.content
    options |= {"prediction": {"type": "content", "content": said}, "extra_body": {"drafts": 4}}
    answer = ai.chat.completions.create(**options)
    *events, last = ai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    assert answer.choices[0].message.content == said
    assert "".join(choice.delta.content or "" for event in events for choice in event.choices) == said
    for usage in (answer.usage, last.usage):
        assert usage.completion_tokens_details.accepted_prediction_tokens > 0
        assert usage.model_extra["steps"] < usage.completion_tokens


def test_the_chosen_seed_and_the_defaults_are_told(ai: openai.OpenAI) -> None:
    first = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, extra_body={"memory": {}}).choices[0]
    memory = first.model_extra["memory"]
    again = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, seed=memory["seed"]).choices[0]
    assert again.text == first.text
    assert (memory["store"], memory["lam"] > 0, memory["k"] > 0) == ("store", True, True)
    assert "memory" not in again.model_extra


@pytest.mark.parametrize(("is_chat", "model"), [(False, ""), (True, '"" %b {}')])
def test_an_event_with_nothing_but_text_is_the_same_json(is_chat: bool, model: str) -> None:
    """It is put together from parts, which no text and no name of a model may disturb."""
    form = AnswerForm(model, is_chat, is_stream=True)
    for text in ("a", '""', "%b%s{}", '\\"\n\r\0\u2028é\U0001f9e0', "\ud800"):
        answer = ChoiceAnswer(2, form)
        answer.text = text
        content = {"delta": {"content": text}} if is_chat else {"text": text}
        choice = {"index": 2, **content, "logprobs": None, "finish_reason": None}
        assert answer.event() == server_sent({**form.head, "choices": [choice]})
        assert answer.is_empty


def test_numbers_that_json_does_not_have_and_texts_that_are_equal() -> None:
    """No probability is -9999, as OpenAI has it, and null for the memory. Two bytes of no text are one key."""
    top = [Alternative(number, "\ufffd", -number) for number in (1, 2)]
    none = -math.inf
    token = Token(3, "", b"\xff", none, none, knn_logprob=none, lam=0.5, top_logprobs=top)
    answer = ChoiceAnswer(0, AnswerForm("tiny", is_chat=False, is_stream=True, num_logprobs=2, shows_memory=True))
    answer.add_tokens([token])
    (choice,) = json.loads(answer.event().removeprefix(b"data: "))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -1, "bytes:\\xff": -9999}]
    (shown,) = choice["memory"]["tokens"]
    assert (shown["logprob"], shown["lm_logprob"], shown["knn_logprob"], shown["memory_share"]) == (
        -9999,
        -9999,
        None,
        0,
    )
