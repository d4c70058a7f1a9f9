"""/v1/datastores/passages and /v1/answers: questions, whose answers come from passages of datastores."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import Any

from memlm.api.answers import AnswerRequest, FindPassagesRequest, cited_passages
from memlm.api.generation import Accepted, Finished, Token
from memlm.api.passages import AnswerPrompt, Passage, PassagesBy, Sentence
from memlm.errors import InvalidInput
from memlm.server.frontend.service import Service
from memlm.server.http.answers import AnswerUsage, ChoiceAnswer, server_sent
from memlm.server.http.bodies import ANSWER, PASSAGES
from memlm.server.http.events import EventStream
from memlm.server.http.exchange import Exchange
from memlm.server.http.openai import AnswerForm, check_model, request_fields
from memlm.server.http.reading import read_body
from memlm.server.http.records import object_of
from memlm.wire.codec import WireEvent, tokens_from_wire


async def passages(service: Service, exchange: Exchange) -> None:
    """Finds passages in one datastore, or without a name in all."""
    async with service.admit("FindPassages", exchange) as call:
        body = await read_body(service, call, exchange, PASSAGES)
        request = FindPassagesRequest.of(body.pop("question"), store=exchange.path_params.get("store"), **body)
        found = await service.ask(call, request)
        await exchange.reply_json({"object": "list", "data": [object_of(passage) for passage in found]})


async def answer(service: Service, exchange: Exchange) -> None:
    """Answers a question, as one object or as a stream of events."""
    async with service.admit("Answer", exchange) as call:
        body = await read_body(service, call, exchange, ANSWER)
        adapter = check_model(body["model"], service.model_names, service.adapter_names) if "model" in body else None
        form = AnswerForm(
            body.get("model", service.model_names[0]),
            is_chat=False,
            is_stream=body.get("stream", False),
            shows_memory="memory" in body,
            adapter=adapter,
        )
        events = service.stream(call, _request(body, form))
        async with aclosing(_Shown(form).parts(events)) as parts:
            await (_stream(exchange, parts) if form.is_stream else _whole(exchange, parts))


class _Shown:
    """The parts of one answer as objects: the prompt with its passages, pieces of the text, the end."""

    def __init__(self, form: AnswerForm) -> None:
        self._form, self._choice, self._text = form, ChoiceAnswer(0, form), ""
        self._prompt: AnswerPrompt | None = None
        self._num_tokens, self._share_sums = 0, list[float]()  # of each passage in a mixture

    async def parts(self, events: AsyncGenerator[WireEvent, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yields each part as it comes. Together they are the whole answer, with the texts joined."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, tuple):
                    self._add(tokens_from_wire(event))
                    if not self._choice.is_empty:
                        yield self._piece()
                elif isinstance(event, Accepted):
                    yield self._begin(event)
                else:
                    yield self._end(event)

    @property
    def _head(self) -> dict[str, Any]:
        chunk = ".chunk" if self._form.is_stream else ""
        head = {"id": f"answer-{self._form.id}", "object": f"answer{chunk}"}
        return {**head, "created": self._form.created, "model": self._form.model}

    def _begin(self, accepted: Accepted) -> dict[str, Any]:
        self._choice.add_accepted(accepted)
        self._prompt = accepted.prompt
        assert self._prompt is not None
        shown = object_of(self._prompt)
        shown["prompt"], shown["num_prompt_tokens"] = shown.pop("text"), shown.pop("num_tokens")
        return {**self._head, **shown}

    def _add(self, tokens: Sequence[Token]) -> None:
        self._choice.add_tokens(tokens)
        self._num_tokens += len(tokens)
        for token in tokens:
            sums = zip_longest(self._share_sums, token.passage_shares, fillvalue=0.0)
            self._share_sums = [share + more for share, more in sums]

    def _piece(self) -> dict[str, Any]:
        memory = {} if self._choice.memory is None else {"memory": self._choice.memory}
        piece, self._text = {**self._head, "text": self._choice.text, **memory}, self._text + self._choice.text
        self._choice.clear()
        return piece

    def _end(self, finished: Finished) -> dict[str, Any]:
        self._choice.add_finished(finished)
        usage = AnswerUsage()
        usage.add(finished.usage, counts_prompt=True)
        named = cited_passages(self._text, self._prompt) if self._prompt is not None else ()
        return {
            **self._piece(),
            "finish_reason": self._choice.finish_reason,
            "cited": [passage.document_id for passage in named],
            "passage_shares": [share / self._num_tokens for share in self._share_sums],
            "usage": usage.shown(has_prediction=False),
        }


async def _whole(exchange: Exchange, parts: AsyncIterator[dict[str, Any]]) -> None:
    whole, text, memory = dict[str, Any](), "", dict[str, Any]()
    async for part in parts:
        text += part.pop("text", "")
        shown = part.pop("memory", {})
        tokens = [*memory.get("tokens", ()), *shown.get("tokens", ())]
        memory |= {**shown, **({"tokens": tokens} if shown else {})}
        whole |= part
    await exchange.reply_json({**whole, "text": text, **({"memory": memory} if memory else {})})


async def _stream(exchange: Exchange, parts: AsyncIterator[dict[str, Any]]) -> None:
    async with EventStream(exchange) as events:
        async for part in parts:
            await events.write(server_sent(part))


def _request(body: Mapping[str, Any], form: AnswerForm) -> AnswerRequest:
    options = {name: body[name] for name in ("num_passages", "budget", "mixture") if name in body}
    try:
        return AnswerRequest(
            body["question"],
            tuple(_passage(each) for each in body.get("passages", ())),
            passages_by=PassagesBy(body.get("passages_by", PassagesBy.AUTO)),
            passage_stores=tuple(body.get("passage_stores", ())),
            **options,
            **request_fields(body, body.get("max_tokens"), form),
        )
    except InvalidInput as error:
        raise InvalidInput(str(error), field=_parameter(error.field)) from None


def _parameter(field: str) -> str:
    """The parameter of a body that a field of a request comes from."""
    if field == "adapter":
        return "model"
    return f"memory.{field}" if field in ANSWER["properties"]["memory"]["properties"] else field


def _passage(given: Mapping[str, Any]) -> Passage:
    """A passage of a request. Only its text and its document are needed."""
    return Passage(
        store=given.get("store", ""),
        document_id=given["document_id"],
        title=given.get("title", ""),
        token_offset=given.get("token_offset", 0),
        num_tokens=given.get("num_tokens", 0),
        text=given["text"],
        score=given.get("score", 0.0),
        metadata=given.get("metadata", {}),
        first_line=given.get("first_line", 0),
        last_line=given.get("last_line", 0),
        headings=tuple(given.get("headings", ())),
        first_page=given.get("first_page", 0),
        last_page=given.get("last_page", 0),
        also=tuple(given.get("also", ())),
        sentence=_sentence(given["sentence"]) if "sentence" in given else None,
    )


def _sentence(given: Mapping[str, Any]) -> Sentence:
    return Sentence(**{**given, "words": tuple(given.get("words", ()))})
