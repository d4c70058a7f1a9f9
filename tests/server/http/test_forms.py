"""Texts that must have a form, over HTTP: OpenAI's `response_format`, vLLM's parameters, and what is refused."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from running import RunningServer

PROMPT = {"model": "tiny", "prompt": "a model", "seed": 1, "max_tokens": 30}
SHORT = {"enum": [1, 2]}


@pytest.fixture
def http(web: RunningServer) -> Any:
    with httpx.Client(base_url=web.http_url, timeout=60) as http:
        yield http


@pytest.mark.parametrize(
    "form",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "numbers", "schema": SHORT, "strict": True},
            }
        },
        {"structured_outputs": {"json": SHORT}},
        {"guided_json": SHORT},
        {"guided_json": json.dumps(SHORT)},
        {"guided_regex": r"[12]"},
        {"structured_outputs": {"regex": r"[12]"}},
        {"guided_choice": ["1", "2"]},
        {"guided_grammar": 'root ::= "1" | "2"'},
    ],
)
def test_completions_have_the_form(http: httpx.Client, form: dict[str, Any]) -> None:
    reply = http.post("/v1/completions", json={**PROMPT, **form, "n": 2, "memory": {"lam": 0.3}})
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        assert json.loads(choice["text"]) in (1, 2)
        assert choice["finish_reason"] == "stop"


def test_the_official_client_gets_the_form(web: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{web.http_url}/v1", api_key="none")
    form: Any = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SHORT}}
    talk: Any = [{"role": "user", "content": "the"}]
    whole = client.chat.completions.create(model="tiny", messages=talk, response_format=form, seed=1)
    assert json.loads(whole.choices[0].message.content or "") in (1, 2)
    with client.chat.completions.create(
        model="tiny", messages=talk, response_format=form, seed=1, stream=True
    ) as events:
        text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content


def test_an_answer_has_the_form(http: httpx.Client) -> None:
    reply = http.post("/v1/answers", json={"question": "a?", "guided_choice": ["yes", "no"], "num_passages": 0})
    assert reply.json()["text"] in ("yes", "no")


def test_json_objects(http: httpx.Client) -> None:
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        reply = http.post("/v1/completions", json={**PROMPT, **form, "max_tokens": 1})
        assert reply.json()["choices"][0]["text"].startswith("{")


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "without a schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "expected one of"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "one form"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "65,536"),
        ({"guided_regex": "("}, "regex", "unclosed"),
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "json_schema", "/properties/a"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unknown"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "ids of tokens"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "at most 100"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias", "outside the vocabulary"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "at most 2"),
    ],
)
def test_what_is_no_form_is_refused_by_name(http: httpx.Client, form: dict[str, Any], param: str, words: str) -> None:
    reply = http.post("/v1/completions", json={**PROMPT, **form})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_biases_and_penalties(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "e"}).json()["tokens"]
    options = {**PROMPT, "temperature": 0, "max_tokens": 8, "memory": {"stores": []}}
    biased = http.post("/v1/completions", json={**options, "logit_bias": {str(ids[0]): 100}}).json()
    assert re.fullmatch("e{8}", biased["choices"][0]["text"])
    mixed = {**options, "logit_bias": {str(ids[0]): 3.0}, "presence_penalty": 2, "frequency_penalty": 2}
    assert http.post("/v1/completions", json=mixed).json()["choices"][0]["text"].count("e") < 8
