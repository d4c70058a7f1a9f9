"""A chat in the form of any API: a renderer makes events, or a whole answer, from the events of a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from memlm.api.chat import ChatRequest
from memlm.api.generation import Accepted, Finished
from memlm.api.tools import ToolCall
from memlm.server.frontend.service import AdmittedCall, Service
from memlm.server.http.answers import AnswerUsage, ChoiceAnswer
from memlm.server.http.events import EventStream, StreamForm, typed_event
from memlm.server.http.exchange import Exchange
from memlm.server.http.openai import AnswerForm, chat_choices
from memlm.wire.codec import WireEvent


class Kind(Enum):
    """The content of a block."""

    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """A part of an answer: a thought, a text or a call, whose `text` are its arguments. `index` is its place."""

    kind: Kind
    index: int
    text: str = ""
    call: ToolCall | None = None
    is_cited: bool = False  # the text that shows the passages behind the answer
    is_open: bool = True


class Rendering(ABC):
    """One answer, as an API shows it: its blocks as typed events, one behind the other, and in the end the whole.

    Without any thought, text or call, an answer has one empty text. The passages are shown with the first text.
    """

    first_index = 0  # of the blocks

    def __init__(self, form: AnswerForm, request: ChatRequest) -> None:
        self.form, self.request, self.answer = form, request, ChoiceAnswer(0, form, request)
        self.usage, self.blocks = AnswerUsage(), list[Block]()

    @property
    @abstractmethod
    def stream_form(self) -> StreamForm:
        """How the API's streams wait, end and fail."""

    def add(self, event: WireEvent) -> Iterator[dict[str, Any]]:
        """Adds an event of the generation. Yields the API's events that show it."""
        answer = self.answer
        num_thought, num_text, num_calls = len(answer.reasoning), len(answer.text), len(answer.calls)
        answer.add(event)
        if isinstance(event, Accepted):
            yield from self.begin()
            return
        yield from self._grow(Kind.THOUGHT, answer.reasoning[num_thought:])
        yield from self._grow(Kind.TEXT, answer.text[num_text:])
        for call in answer.calls[num_calls:]:
            yield from self._close()
            yield from self._open(Block(Kind.CALL, self._next_index, call=call))
            yield from self._grow(Kind.CALL, call.arguments)
        if isinstance(event, Finished):
            self.usage.add(event.usage, counts_prompt=True)
            if not self.blocks:
                yield from self._open(Block(Kind.TEXT, self._next_index))
            yield from self._close()
            yield from self.end()

    @property
    def _next_index(self) -> int:
        return self.first_index + len(self.blocks)

    def _grow(self, kind: Kind, piece: str) -> Iterator[dict[str, Any]]:
        if not piece:
            return
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._close()
            yield from self._open(Block(kind, self._next_index))
        self.blocks[-1].text += piece
        yield from self.grow(self.blocks[-1], piece)

    def _open(self, block: Block) -> Iterator[dict[str, Any]]:
        has_text = any(each.kind == Kind.TEXT for each in self.blocks)
        block.is_cited = block.kind == Kind.TEXT and not has_text and self.answer.prompt is not None
        self.blocks.append(block)
        yield from self.open(block)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self.blocks and self.blocks[-1].is_open:
            self.blocks[-1].is_open = False
            yield from self.close(self.blocks[-1])

    @abstractmethod
    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before any block. The passages behind the answer are known."""

    @abstractmethod
    def open(self, block: Block) -> Iterator[dict[str, Any]]:
        """The events of a block that begins, without text."""

    @abstractmethod
    def grow(self, block: Block, piece: str) -> Iterator[dict[str, Any]]:
        """The events of a piece of a block's text."""

    @abstractmethod
    def close(self, block: Block) -> Iterator[dict[str, Any]]:
        """The events of a block that has ended."""

    @abstractmethod
    def end(self) -> Iterator[dict[str, Any]]:
        """The events after the last block."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer that is no stream, once it has ended."""


async def answer_chat(service: Service, call: AdmittedCall, exchange: Exchange, rendering: Rendering) -> None:
    """Answers a chat in the form of an API."""
    async with aclosing(service.stream(call, rendering.request)) as events:
        if not rendering.form.is_stream:
            async for event in events:
                for _ in rendering.add(event):
                    pass
            await exchange.reply_json(rendering.whole())
            return
        async with EventStream(exchange, rendering.stream_form) as stream:
            async for event in events:
                if data := b"".join(map(typed_event, rendering.add(event))):
                    await stream.write(data)


def chat_request(chat: Mapping[str, Any], form: AnswerForm) -> ChatRequest:
    """The request of a body of /v1/chat/completions, for one answer."""
    (choice,) = chat_choices(chat, form)
    assert isinstance(choice.request, ChatRequest)
    return choice.request
