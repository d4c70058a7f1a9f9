"""/v1/completions and /v1/chat/completions: every choice is a call of its own, admitted like one over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any

from memlm.api.generation import Accepted, DetokenizeRequest, Finished
from memlm.api.scoring import Score
from memlm.server.frontend.service import AdmittedCall, Service
from memlm.server.http.answers import AnswerUsage, ChoiceAnswer, server_sent
from memlm.server.http.bodies import CHAT, COMPLETION
from memlm.server.http.events import EventStream
from memlm.server.http.exchange import Exchange
from memlm.server.http.openai import AnswerForm, Choice, answer_form, chat_choices, completion_choices
from memlm.server.http.reading import read_body
from memlm.wire.codec import tokens_from_wire


async def complete(service: Service, exchange: Exchange) -> None:
    """Answers /v1/completions."""
    async with service.admit("Generate", exchange) as call:
        body = await read_body(service, call, exchange, COMPLETION)
        form = answer_form(body, service.model_names, service.adapter_names, is_chat=False)
        await _answer(service, call, exchange, form, completion_choices(body, form))


async def chat(service: Service, exchange: Exchange) -> None:
    """Answers /v1/chat/completions."""
    async with service.admit("Chat", exchange) as call:
        body = await read_body(service, call, exchange, CHAT)
        form = answer_form(body, service.model_names, service.adapter_names, is_chat=True)
        await _answer(service, call, exchange, form, chat_choices(body, form))


async def _answer(
    service: Service, call: AdmittedCall, exchange: Exchange, form: AnswerForm, choices: list[Choice]
) -> None:
    answer = _Answer(service, call, exchange, form)
    await (answer.stream(choices) if form.is_stream else answer.whole(choices))


class _Answer:
    """One answer and the generations of its choices, of which at most `max_running` run at a time."""

    def __init__(self, service: Service, call: AdmittedCall, exchange: Exchange, form: AnswerForm) -> None:
        self._service, self._call, self._exchange, self._form = service, call, exchange, form
        self._running = asyncio.Semaphore(service.config.max_running)
        self._usage = AnswerUsage()

    async def whole(self, choices: list[Choice]) -> None:
        answers = [ChoiceAnswer(choice.index, self._form) for choice in choices]

        async def run(choice: Choice) -> None:
            async with aclosing(self._progress(choice, answers[choice.index])) as progress:
                async for _ in progress:
                    pass

        await run_all(map(run, choices))
        shown = [answer.whole() for answer in answers]
        await self._exchange.reply_json({**self._form.head, "choices": shown, "usage": self._shown_usage()})

    async def stream(self, choices: list[Choice]) -> None:
        """Sends each choice's events as they come. What comes while an event waits for the client is sent together. The
        choices of a chat begin in their order, which OpenAI's client relies on.
        """
        begun = [asyncio.Event() for _ in choices]

        async def run(number: int, choice: Choice) -> None:
            answer, first = ChoiceAnswer(choice.index, self._form), self._form.is_chat
            async with aclosing(self._progress(choice, answer)) as progress:
                async for _ in progress:
                    if first and number:
                        await begun[number - 1].wait()
                    if first or not answer.is_empty:
                        data, first = answer.event(first=first), False
                        await events.write(data)
                        begun[number].set()

        async with EventStream(self._exchange) as events:
            await run_all(map(run, count(), choices))
            if self._form.shows_usage:
                await events.write(server_sent({**self._form.head, "choices": [], "usage": self._shown_usage()}))

    def _shown_usage(self) -> dict[str, Any]:
        return self._usage.shown(has_prediction=self._form.has_prediction)

    async def _progress(self, choice: Choice, answer: ChoiceAnswer) -> AsyncGenerator[None, None]:
        """Adds what comes to an answer, and yields after each addition."""
        if choice.echo is not None:
            await self._echo(choice, answer)
            if choice.request is None:
                answer.finish("length")
            yield
        if choice.request is None:
            return
        async with self._admitted(choice) as call, aclosing(self._service.stream(call, choice.request)) as events:
            async for event in events:
                if isinstance(event, tuple):
                    answer.add_tokens(tokens_from_wire(event))
                elif isinstance(event, Accepted):
                    answer.add_accepted(event)
                else:
                    self._finish(choice, answer, event)
                yield

    def _finish(self, choice: Choice, answer: ChoiceAnswer, finished: Finished) -> None:
        answer.add_finished(finished)
        self._usage.add(finished.usage, counts_prompt=choice.counts_prompt)

    @asynccontextmanager
    async def _admitted(self, choice: Choice) -> AsyncIterator[AdmittedCall]:
        """The call of a choice: that of the request for the first one, and one of its own for each further one."""
        async with self._running:
            if choice.index == 0:
                yield self._call
                return
            async with self._service.admit(self._call.record.name, self._exchange) as call:
                yield call

    async def _echo(self, choice: Choice, answer: ChoiceAnswer) -> None:
        """Adds the prompt, and, where the answer shows them, the log-probabilities of its tokens."""
        prompt, first, scored = choice.echo, None, None
        async with self._running:
            if choice.score is not None:
                scored = await self._ask("Score", choice.score)
            if isinstance(prompt, str):
                text = prompt
            else:
                text = await self._ask("Detokenize", DetokenizeRequest(prompt or ()))
                first = await self._ask("Detokenize", DetokenizeRequest((prompt or ())[:1]))
        assert scored is None or isinstance(scored, Score)
        share = None if scored is None else scored.searched_share
        self._usage.add_share(share)
        answer.add_echo(text, () if scored is None else scored.token_scores, first, share)
        if choice.request is None and choice.counts_prompt:
            self._usage.prompt_tokens += (0 if scored is None else scored.tokens) + (first is not None)

    async def _ask(self, name: str, request: Any) -> Any:
        async with self._service.admit(name, self._exchange) as call:
            return await self._service.ask(call, request)


async def run_all(works: Iterable[Awaitable[None]]) -> None:
    """Runs some works at once. The first error cancels the others, and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
