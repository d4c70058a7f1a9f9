"""A chat's answer as OpenAI's response: output items, and the typed events of a stream, in their order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from memlm.api.answers import MAX_QUESTION_CHARACTERS
from memlm.api.chat import ChatRequest
from memlm.api.passages import Passage
from memlm.errors import MemlmError
from memlm.server.http.chats import Block, Kind, Rendering
from memlm.server.http.errors import body_of
from memlm.server.http.events import StreamForm, typed_event
from memlm.server.http.openai import AnswerForm
from memlm.server.http.records import MOST_URL, cut, span_of
from memlm.server.http.response_bodies import RESULTS, file_search_of

MOST_ATTRIBUTES, MOST_VALUE = 16, 512  # of a result, as OpenAI bounds them
_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "temperature": None, "tool_choice": "auto", "tools": [], "top_p": None, "user": None,
}  # fmt: skip

_TEXTS = {Kind.THOUGHT: "reasoning_text", Kind.TEXT: "output_text", Kind.CALL: "function_call_arguments"}
_IDS = {Kind.THOUGHT: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}

Keep = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


class ResponseAnswer(Rendering):
    """A response: the search for passages, if the request names it as a tool, and an item for each block."""

    def __init__(self, form: AnswerForm, request: ChatRequest, body: Mapping[str, Any], keep: Keep | None) -> None:
        """`keep` takes the whole response and the answer's message. It returns whether they are kept."""
        super().__init__(form, request)
        self._body, self._keep, self._is_kept, self._number = body, keep, keep is not None, -1
        self._searches = file_search_of(body) is not None
        self.first_index = int(self._searches)

    @property
    def stream_form(self) -> StreamForm:
        return StreamForm(done=b"", error=self._failed)

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._response([]))
        yield self._event("response.in_progress", response=self._response([]))
        if self._searches:
            place = {"output_index": 0, "item_id": self._search["id"]}
            begun = {**self._search, "status": "in_progress", "queries": [], "results": None}
            yield self._event("response.output_item.added", output_index=0, item=begun)
            for step in ("in_progress", "searching", "completed"):
                yield self._event(f"response.file_search_call.{step}", **place)
            yield self._event("response.output_item.done", output_index=0, item=self._search)

    def open(self, block: Block) -> Iterator[dict[str, Any]]:
        begun: dict[str, Any] = {"content": []} if block.call is None else {"arguments": ""}
        item = {**self._item(block), "status": "in_progress", **begun}
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.call is None:
            part = self._part(replace(block, text="", is_cited=False))
            yield self._event("response.content_part.added", **self._place(block), part=part)

    def grow(self, block: Block, piece: str) -> Iterator[dict[str, Any]]:
        yield self._event(f"response.{_TEXTS[block.kind]}.delta", **self._place(block), delta=piece, **_logprobs(block))

    def close(self, block: Block) -> Iterator[dict[str, Any]]:
        part = self._part(block)
        for number, annotation in enumerate(part.get("annotations", ())):
            added = {"annotation_index": number, "annotation": annotation}
            yield self._event("response.output_text.annotation.added", **self._place(block), **added)
        done = {"text": block.text} if block.call is None else {"arguments": block.text, "name": block.call.name}
        kind = f"response.{_TEXTS[block.kind]}.done"
        yield self._event(kind, **self._place(block), **done, **_logprobs(block))
        if block.call is None:
            yield self._event("response.content_part.done", **self._place(block), part=part)
        yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def end(self) -> Iterator[dict[str, Any]]:
        response = self.whole()
        if self._keep is not None and not self._keep(response, self._said):
            self._is_kept, response = False, {**response, "store": False}
        yield self._event(f"response.{self._status}", response=response)

    def whole(self) -> dict[str, Any]:
        return self._response([*([self._search] if self._searches else []), *map(self._item, self.blocks)])

    @property
    def _said(self) -> dict[str, Any]:
        """The answer as a message of a chat, without its sources."""
        message = self.answer.whole()["message"]
        shown = {name: message[name] for name in ("reasoning_content", "tool_calls") if name in message}
        return {"role": "assistant", "content": self.answer.text, **shown}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _failed(self, error: MemlmError, request_id: str) -> bytes:
        shown = {name: value for name, value in body_of(error, request_id)["error"].items() if name != "type"}
        return typed_event(self._event("error", **shown))

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        if block.call is not None:
            return place
        return {**place, "content_index": 0}

    def _id(self, block: Block) -> str:
        return f"{_IDS[block.kind]}_{self.form.id}{block.index:02}"

    @property
    def _status(self) -> str:
        """OpenAI's clients take a text that a limit cut off for incomplete."""
        reason = self.answer.finish_reason
        return "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"

    def _item(self, block: Block) -> dict[str, Any]:
        # A limit cuts off the last item alone.
        is_last = block.index == self.first_index + len(self.blocks) - 1
        status = (
            "in_progress"
            if block.is_open
            else self._status
            if is_last and self._status == "incomplete"
            else "completed"
        )
        head = {"id": self._id(block), "status": status}
        if block.call is not None:
            called = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {**head, "type": "function_call", **called}
        if block.kind == Kind.THOUGHT:
            return {**head, "type": "reasoning", "summary": [], "content": [self._part(block)]}
        return {**head, "type": "message", "role": "assistant", "content": [self._part(block)]}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind != Kind.TEXT:
            return {"type": "reasoning_text", "text": block.text}
        cited = [
            {"type": "file_citation", **_file_of(passage), "index": span_of(number, block.text)["start_index"]}
            for number, passage in self._numbered
        ]
        annotations = cited if block.is_cited else []
        return {"type": "output_text", "text": block.text, "annotations": annotations, "logprobs": []}

    @property
    def _search(self) -> dict[str, Any]:
        """The search, with its results if the request asks for them."""
        results = (
            [_result_of(passage) for _, passage in self._numbered] if RESULTS in self._body.get("include", ()) else None
        )
        head = {"id": f"fs_{self.form.id}", "type": "file_search_call", "status": "completed"}
        asked = self.request.question.strip()[-MAX_QUESTION_CHARACTERS:]  # as it is searched for
        return {**head, "queries": [asked], "results": results}

    @property
    def _numbered(self) -> list[tuple[int, Passage]]:
        """The passages behind the answer, and the numbers by which it may name them."""
        prompt = self.answer.prompt
        return [] if prompt is None else [*zip(prompt.numbers, prompt.passages, strict=True)]

    def _response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        finished = self.answer.finished
        memory = {} if finished is None or self.answer.memory is None else {"memory": self.answer.memory}
        return {
            "id": f"resp_{self.form.id}",
            "object": "response",
            "created_at": self.form.created,
            "completed_at": None if finished is None else int(time.time()),
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self.form.model,
            "output": output,
            "reasoning": {"effort": None, "summary": None, **self._body.get("reasoning", {})},
            "text": {"format": {"type": "text"}, **self._body.get("text", {})},
            "truncation": "disabled",
            "background": False,
            **{name: self._body.get(name, default) for name, default in _ECHOED.items()},
            "store": self._is_kept,
            "usage": None if finished is None else self._usage,
            **memory,
        }

    @property
    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.generated_tokens,
        }


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == Kind.TEXT else {}


def _file_of(passage: Passage) -> dict[str, str]:
    """A document as a file: its datastore and its id, and the id as a name."""
    whole = f"{passage.store}/{passage.document_id}"
    name = whole if len(whole) <= MOST_URL else cut(passage.store, MOST_URL)  # half an id would name another document
    return {"file_id": name, "filename": cut(passage.document_id, MOST_VALUE)}


def _result_of(passage: Passage) -> dict[str, Any]:
    """A passage as a result of file_search, with the metadata and the place of its document as attributes."""
    known = {name: value for name, value in passage.metadata.items() if _is_attribute(value)}
    place = {"store": passage.store, "place": passage.sentence_place}
    attributes = [*{**known, **place}.items()][-MOST_ATTRIBUTES:]
    shown = {cut(name, 64): cut(value, MOST_VALUE) if isinstance(value, str) else value for name, value in attributes}
    return {**_file_of(passage), "score": passage.score, "text": passage.text, "attributes": shown}


def _is_attribute(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
