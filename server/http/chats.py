"""A chat in the form of any API: a renderer makes events, or a whole answer, from the events of a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any

from memlm.api.chat import ChatRequest
from memlm.api.generation import Accepted, Finished
from memlm.server.frontend.service import AdmittedCall, Service
from memlm.server.http.answers import AnswerUsage, ChoiceAnswer
from memlm.server.http.events import EventStream, StreamForm, typed_event
from memlm.server.http.exchange import Exchange
from memlm.server.http.openai import AnswerForm, chat_choices
from memlm.wire.codec import WireEvent


class Rendering(ABC):
    """One answer, as an API shows it: its pieces as typed events, and in the end the whole."""

    def __init__(self, form: AnswerForm) -> None:
        self.form, self.answer, self.usage = form, ChoiceAnswer(0, form), AnswerUsage()

    @property
    @abstractmethod
    def stream_form(self) -> StreamForm:
        """How the API's streams wait, end and fail."""

    def add(self, event: WireEvent) -> Iterator[dict[str, Any]]:
        """Adds an event of the generation. Yields the API's events that show it."""
        begin = len(self.answer.text)
        self.answer.add(event)
        if isinstance(event, Accepted):
            yield from self.begin()
        elif isinstance(event, Finished):
            self.usage.add(event.usage, counts_prompt=True)
            yield from self.end(event)
        elif piece := self.answer.text[begin:]:
            yield from self.grow(piece)

    @abstractmethod
    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before any text. The passages behind the answer are known."""

    @abstractmethod
    def grow(self, piece: str) -> Iterator[dict[str, Any]]:
        """The events of a piece of the text."""

    @abstractmethod
    def end(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """The events after the text."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer that is no stream, once it has ended."""


async def answer_chat(
    service: Service, call: AdmittedCall, exchange: Exchange, chat: Mapping[str, Any], rendering: Rendering
) -> None:
    """Answers a body of /v1/chat/completions in the form of another API."""
    async with aclosing(service.stream(call, chat_request(chat, rendering.form))) as events:
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
