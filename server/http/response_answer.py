"""A chat's answer as OpenAI's response: output items, and the typed events of a stream, in their order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memlm.api.generation import Finished
from memlm.api.passages import Passage
from memlm.errors import MemlmError
from memlm.server.http.chats import Rendering
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

Keep = Callable[[Mapping[str, Any], str], bool]


class ResponseAnswer(Rendering):
    """A response: the search for passages, if the request names it as a tool, and a message of one text."""

    def __init__(self, form: AnswerForm, body: Mapping[str, Any], question: str, keep: Keep | None) -> None:
        """`keep` takes the whole response and its text. It returns whether they are kept."""
        super().__init__(form)
        self._body, self._question, self._keep = body, question, keep
        self._is_kept, self._is_open, self._number = keep is not None, False, -1
        self._searches = file_search_of(body) is not None
        self._search_id, self._message_id = f"fs_{form.id}", f"msg_{form.id}"

    @property
    def stream_form(self) -> StreamForm:
        return StreamForm(done=b"", error=self._failed)

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._response([]))
        yield self._event("response.in_progress", response=self._response([]))
        if self._searches:
            place = {"output_index": 0, "item_id": self._search_id}
            begun = {**self._search, "status": "in_progress", "queries": [], "results": None}
            yield self._event("response.output_item.added", output_index=0, item=begun)
            for step in ("in_progress", "searching", "completed"):
                yield self._event(f"response.file_search_call.{step}", **place)
            yield self._event("response.output_item.done", output_index=0, item=self._search)

    def grow(self, piece: str) -> Iterator[dict[str, Any]]:
        yield from self._open()
        yield self._event("response.output_text.delta", **self._place, delta=piece, logprobs=[])

    def end(self, finished: Finished) -> Iterator[dict[str, Any]]:
        response = self._response(self._output)
        if self._keep is not None and not self._keep(response, self.answer.text):
            self._is_kept, response = False, {**response, "store": False}
        yield from self._open()
        part = self._part
        for number, annotation in enumerate(part["annotations"]):
            added = {"annotation_index": number, "annotation": annotation}
            yield self._event("response.output_text.annotation.added", **self._place, **added)
        yield self._event("response.output_text.done", **self._place, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=self._message)
        yield self._event(f"response.{self._status}", response=response)

    def whole(self) -> dict[str, Any]:
        return self._response(self._output)

    def _open(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            self._is_open = True
            item = {**self._message, "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=self._index, item=item)
            part = {**self._part, "text": "", "annotations": []}
            yield self._event("response.content_part.added", **self._place, part=part)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _failed(self, error: MemlmError, request_id: str) -> bytes:
        shown = {name: value for name, value in body_of(error, request_id)["error"].items() if name != "type"}
        return typed_event(self._event("error", **shown))

    @property
    def _index(self) -> int:
        """The place of the message in the output."""
        return int(self._searches)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": self._index, "content_index": 0}

    @property
    def _status(self) -> str:
        """OpenAI's clients take a text that a limit cut off for incomplete."""
        reason = self.answer.finish_reason
        return "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"

    @property
    def _output(self) -> list[dict[str, Any]]:
        return [*([self._search] if self._searches else []), self._message]

    @property
    def _message(self) -> dict[str, Any]:
        head = {"id": self._message_id, "type": "message", "role": "assistant", "status": self._status}
        return {**head, "content": [self._part]}

    @property
    def _part(self) -> dict[str, Any]:
        text = self.answer.text
        cited = [
            {"type": "file_citation", **_file_of(passage), "index": span_of(number, text)["start_index"]}
            for number, passage in self._numbered
        ]
        return {"type": "output_text", "text": text, "annotations": cited, "logprobs": []}

    @property
    def _search(self) -> dict[str, Any]:
        """The search, with its results if the request asks for them."""
        results = (
            [_result_of(passage) for _, passage in self._numbered] if RESULTS in self._body.get("include", ()) else None
        )
        head = {"id": self._search_id, "type": "file_search_call", "status": "completed"}
        return {**head, "queries": [self._question], "results": results}

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
            "reasoning": {"effort": None, "summary": None},
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
