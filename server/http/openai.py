"""OpenAI's requests -> ours: a generation for each choice of an answer, and how the answer shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

from memlm.api.chat import ChatRequest, Message
from memlm.api.params import GenerateRequest, RetrievalParams, SamplingParams
from memlm.api.prompts import check_text
from memlm.api.scoring import ScoreRequest
from memlm.errors import InvalidInput, NotFound
from memlm.server.http.bodies import DEFAULT_MAX_TOKENS, MAX_PROMPTS, SAMPLING


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer shows. `num_logprobs` is None where none are asked for."""

    model: str
    is_chat: bool
    is_stream: bool = False
    num_logprobs: int | None = None
    shows_memory: bool = False
    shows_usage: bool = True
    has_prediction: bool = False
    adapter: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: token_hex(12))

    @property
    def head(self) -> dict[str, Any]:
        """The first fields of the answer, or of each of its events."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        chunk = ".chunk" if self.is_chat and self.is_stream else ""
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind + chunk, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation of an answer. `request` is None where only the prompt is scored. With `echo` the answer begins
    with the prompt, and with `score` with the log-probabilities of its tokens. The usage counts each prompt once.
    """

    index: int
    request: GenerateRequest | ChatRequest | None
    echo: str | tuple[int, ...] | None = None
    score: ScoreRequest | None = None
    counts_prompt: bool = True


def check_model(asked: str, served: tuple[str, ...], adapters: tuple[str, ...] = ()) -> str | None:
    """Returns the adapter that a model's name means, None for the model alone. `served` are the names of that.

    Raises NotFound for another name.
    """
    if asked in served:
        return None
    if asked not in adapters:
        names = ", ".join(repr(name) for name in (served[0], *adapters))
        raise NotFound(f"no model {asked[:200]!r}; this server has {names}", kind="model", name=asked[:200])
    return asked


def completion_choices(body: Mapping[str, Any], form: AnswerForm) -> list[Choice]:
    """The choices of a completion: n for each prompt, in the order of the prompts."""
    prompts, number = _prompts(body["prompt"]), body.get("n", 1)
    _check_number(len(prompts) * number)
    max_tokens, echo = body.get("max_tokens", DEFAULT_MAX_TOKENS), body.get("echo", False)
    if max_tokens == 0 and not echo:
        raise InvalidInput("max_tokens is 0; expected at least 1, or echo", field="max_tokens")
    options = request_fields(body, max_tokens if max_tokens > 0 else None, form)
    choices = []
    for index, prompt in enumerate(prompt for prompt in prompts for _ in range(number)):
        text, ids = (prompt, ()) if isinstance(prompt, str) else ("", tuple(prompt))
        request = GenerateRequest(text, ids, **_seeded(options, index)) if max_tokens else None
        score = _score_of(text, ids, options["retrieval"], form) if echo else None
        echoed = (text if isinstance(prompt, str) else ids) if echo else None
        choices.append(Choice(index, request, echoed, score, counts_prompt=index % number == 0))
    return choices


def chat_choices(body: Mapping[str, Any], form: AnswerForm) -> list[Choice]:
    """The choices of a chat: n answers."""
    if "top_logprobs" in body and not body.get("logprobs"):
        raise InvalidInput("top_logprobs goes with logprobs; set logprobs to true", field="top_logprobs")
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    if len(set(limits)) > 1:
        raise InvalidInput(
            f"max_tokens is {limits[1]}, and max_completion_tokens is {limits[0]}; give one", field="max_tokens"
        )
    options = request_fields(body, limits[0] if limits else None, form)
    messages = tuple(Message(each["role"], _content(each["content"])) for each in body["messages"])
    number = body.get("memory", {}).get("passages")
    return [
        Choice(index, ChatRequest(messages, number, **_seeded(options, index)), counts_prompt=index == 0)
        for index in range(body.get("n", 1))
    ]


def answer_form(
    body: Mapping[str, Any], served: tuple[str, ...], adapters: tuple[str, ...], *, is_chat: bool
) -> AnswerForm:
    """How the answer shows its choices. Raises NotFound for another model, InvalidInput for options that exclude each
    other.
    """
    adapter = check_model(body["model"], served, adapters)
    is_stream = body.get("stream", False)
    if "stream_options" in body and not is_stream:
        raise InvalidInput("stream_options goes with stream; set stream to true", field="stream_options")
    asked = body.get("logprobs")
    num_logprobs = (body.get("top_logprobs", 0) if asked else None) if is_chat else asked
    shows_usage = not is_stream or body.get("stream_options", {}).get("include_usage", False)
    return AnswerForm(
        body["model"],
        is_chat,
        is_stream,
        num_logprobs,
        "memory" in body,
        shows_usage,
        "prediction" in body,
        adapter=adapter,
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _check_number(number: int) -> None:
    if number > MAX_PROMPTS:
        raise InvalidInput(f"{number} choices are asked for; at most {MAX_PROMPTS} in one request", field="n")


def request_fields(body: Mapping[str, Any], max_tokens: int | None, form: AnswerForm) -> dict[str, Any]:
    """The fields that the requests of all choices share."""
    stop = body.get("stop", ())
    sampling = SamplingParams(
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        **{name: body[name] for name in SAMPLING if name in body},
    )
    memory = dict(body.get("memory", {}))
    neighbors = memory.pop("neighbors", 0)
    memory.pop("passages", None)  # of a chat alone
    return {
        "sampling": sampling,
        "retrieval": _retrieval(memory),
        "neighbors": neighbors,
        "top_logprobs": form.num_logprobs or 0,
        "drafts": body.get("drafts"),
        "draft": _draft(body.get("prediction")),
        "adapter": form.adapter,
    }


def _draft(prediction: Mapping[str, Any] | None) -> str:
    """The text of a prediction, "" without one. Raises InvalidInput, naming the parameter, for a NUL."""
    text = "" if prediction is None else _content(prediction["content"])
    check_text("prediction", text, field="prediction.content")
    return text


def _retrieval(memory: dict[str, Any]) -> RetrievalParams:
    try:
        if "stores" in memory and not memory["stores"]:
            return RetrievalParams(**{**memory, "stores": (), "use_store": False})
        return RetrievalParams.of(**memory)
    except InvalidInput as error:
        raise InvalidInput(str(error), field=f"memory.{error.field}") from None


def _seeded(options: dict[str, Any], index: int) -> dict[str, Any]:
    """The options of one choice: the seeds of the choices follow each other."""
    sampling: SamplingParams = options["sampling"]
    if sampling.seed is None or index == 0:
        return options
    return {**options, "sampling": replace(sampling, seed=sampling.seed + index)}


def _score_of(text: str, ids: tuple[int, ...], retrieval: RetrievalParams, form: AnswerForm) -> ScoreRequest | None:
    """The request for the log-probabilities of a prompt. None where the answer shows none, or there is none to show."""
    if form.num_logprobs is None or (not text and len(ids) < 2):
        return None
    if form.adapter is not None:
        raise InvalidInput("echo with logprobs scores the model without an adapter; leave out one", field="echo")
    return ScoreRequest(text, replace(retrieval, loop_guard=None), True, ids, form.num_logprobs)


def _content(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
