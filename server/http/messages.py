"""/v1/messages: chats as Anthropic's clients ask for them, with the passages behind an answer as citations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memlm.api.chat import ChatRequest, CountTokensRequest
from memlm.api.generation import FinishReason
from memlm.api.tools import arguments_of
from memlm.errors import MemlmError
from memlm.server.frontend.service import Service
from memlm.server.http.chats import Block, Kind, Rendering, answer_chat, chat_request
from memlm.server.http.errors import message_error_of
from memlm.server.http.events import StreamForm, typed_event
from memlm.server.http.exchange import Exchange
from memlm.server.http.message_bodies import COUNT, MESSAGE, chat_of
from memlm.server.http.openai import AnswerForm, answer_form
from memlm.server.http.reading import read_body
from memlm.server.http.records import source_of

_REASONS = {
    FinishReason.END: "end_turn",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TIME: "max_tokens",
}

_DELTAS = {
    Kind.THOUGHT: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


def _failed(error: MemlmError, request_id: str) -> bytes:
    return typed_event(message_error_of(error, request_id))


MESSAGE_EVENTS = StreamForm(heartbeat=typed_event({"type": "ping"}), done=b"", error=_failed)


async def create_message(service: Service, exchange: Exchange) -> None:
    """Answers /v1/messages."""
    async with service.admit("Chat", exchange) as call:
        body = await read_body(service, call, exchange, MESSAGE)
        chat = chat_of(body, service.model.context_length)
        form = answer_form(chat, service.model_names, service.adapter_names, is_chat=True)
        await answer_chat(service, call, exchange, _Message(form, chat_request(chat, form), body["max_tokens"]))


async def count_tokens(service: Service, exchange: Exchange) -> None:
    """Answers /v1/messages/count_tokens."""
    async with service.admit("Chat", exchange) as call:
        chat = chat_of(await read_body(service, call, exchange, COUNT), service.model.context_length)
        form = answer_form(chat, service.model_names, service.adapter_names, is_chat=True)
        count = await service.ask(call, CountTokensRequest.before(chat_request(chat, form)))
        await exchange.reply_json({"input_tokens": count})


class _Message(Rendering):
    """A message, whose blocks are thoughts, texts and uses of tools."""

    def __init__(self, form: AnswerForm, request: ChatRequest, max_tokens: int) -> None:
        super().__init__(form, request)
        self._max_tokens = max_tokens

    @property
    def stream_form(self) -> StreamForm:
        return MESSAGE_EVENTS

    def begin(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._message([])}

    def open(self, block: Block) -> Iterator[dict[str, Any]]:
        begun = _shown(replace(block, text="")) if block.kind != Kind.CALL else {**_shown(block), "input": {}}
        yield {"type": "content_block_start", "index": block.index, "content_block": begun}

    def grow(self, block: Block, piece: str) -> Iterator[dict[str, Any]]:
        kind, name = _DELTAS[block.kind]
        yield _delta(block, {"type": kind, name: piece})

    def close(self, block: Block) -> Iterator[dict[str, Any]]:
        for citation in self._citations if block.is_cited else ():
            yield _delta(block, {"type": "citations_delta", "citation": citation})
        yield {"type": "content_block_stop", "index": block.index}

    def end(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._stop, "usage": self._usage, **self._memory}
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        citations = {"citations": self._citations}
        blocks = [{**_shown(block), **(citations if block.is_cited else {})} for block in self.blocks]
        return {**self._message(blocks), **self._memory}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self.form.id}", "type": "message", "role": "assistant", "model": self.form.model}
        return {**head, "content": content, **self._stop, "usage": self._usage}

    @property
    def _memory(self) -> dict[str, Any]:
        return {} if self.answer.memory is None else {"memory": self.answer.memory}

    @property
    def _stop(self) -> dict[str, str | None]:
        """Why the message ended. A context that is full is no limit of the request."""
        finished = self.answer.finished
        if finished is None:
            return {"stop_reason": None, "stop_sequence": None}
        is_full = finished.reason == FinishReason.LENGTH and finished.usage.generated_tokens < self._max_tokens
        reason = "model_context_window_exceeded" if is_full else _REASONS[finished.reason]
        if self.answer.finish_reason == "tool_calls":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": finished.stop_string}

    @property
    def _usage(self) -> dict[str, int]:
        """`input_tokens` are those that were read. At the begin of a stream, the prompt's count if it has passages."""
        usage, prompt = self.usage, self.answer.prompt
        num_known = 0 if prompt is None or self.answer.finished is not None else prompt.num_tokens
        return {
            "input_tokens": num_known or usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.generated_tokens,
        }

    @property
    def _citations(self) -> list[dict[str, Any]]:
        """The passages as search results, the only citations that name a place by an address."""
        shown = list[dict[str, Any]]()
        for number, passage in enumerate(() if self.answer.prompt is None else self.answer.prompt.passages):
            source = source_of(passage)
            shown.append(
                {
                    "type": "search_result_location",
                    "cited_text": source["content"],
                    "source": source["url"],
                    "title": source["title"],
                    "search_result_index": number,
                    "start_block_index": 0,
                    "end_block_index": 1,
                }
            )
        return shown


def _shown(block: Block) -> dict[str, Any]:
    if block.call is not None:
        arguments = arguments_of(block.call.arguments)
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}
    if block.kind == Kind.THOUGHT:
        return {"type": "thinking", "thinking": block.text, "signature": ""}  # this server trusts any thought
    return {"type": "text", "text": block.text}


def _delta(block: Block, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}
