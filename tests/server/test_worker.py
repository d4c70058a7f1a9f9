"""The work loop by itself, with a real model and no processes: each question gets one answer, and nothing else does."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import anonymous_bytes

from memlm.api.answers import AnswerRequest
from memlm.api.datastores import SearchRequest
from memlm.api.generation import Accepted, Finished
from memlm.api.params import GenerateRequest, RetrievalParams, SamplingParams
from memlm.api.scoring import ScoreRequest
from memlm.api.server import GetModelRequest
from memlm.base.steps import run_steps
from memlm.errors import DeadlineExceeded, InternalError, InvalidInput, NotFound, Overloaded
from memlm.language_model import LanguageModel, load
from memlm.model.state.size import row_bytes
from memlm.server.inference import handlers, worker
from memlm.server.inference.messages import (
    MAX_EVENT_BYTES,
    Cancel,
    Events,
    Failed,
    Heartbeat,
    Result,
    Stop,
    Submission,
    merge_tokens,
)
from memlm.server.inference.worker import Worker
from memlm.server.processes import trim_heap
from memlm.wire.codec import token_to_wire

PROMPT, QUESTION = "the memory of", "Which page has the memory?"


@pytest.fixture
def asked(model_folder: Path, store_folder: Path) -> Iterator[LanguageModel]:
    """A model with room for passages."""
    with load(model_folder, [store_folder], attention_window=44) as lm:
        yield lm


class Script:
    """Stands for the pipe: gives the loop one list of messages a round, then `Stop`; notes what it answers.

    An item may be a number: so many rounds in which nothing comes.
    """

    def __init__(self, *rounds: Any) -> None:
        self.rounds: Iterator[list[Any]] = iter(
            [
                rounds_of_messages
                for item in rounds
                for rounds_of_messages in ([[]] * item if isinstance(item, int) else [item])
            ]
            + [[Stop()]]
        )
        self.messages: list[Any] = []

    def take(self, *, wait_s: float) -> list[Any]:
        return next(self.rounds)

    def send(self, message: Any) -> None:
        if not isinstance(message, Heartbeat):
            self.messages.append(message)

    def play(self, lm: LanguageModel, max_running: int = 4) -> list[Any]:
        Worker(lm.engine, self, self.send, max_running).run()  # type: ignore[arg-type]
        return self.messages


def ask(id_: str, request: Any, *, within_s: float | None = None) -> Submission:
    now_s = time.monotonic()
    return Submission(id_, request, now_s, None if within_s is None else now_s + within_s)


def generate(id_: str, count: int = 5, **options: Any) -> Submission:
    """Without drafts, a turn of the engine is a token, however slow its searches are."""
    request = GenerateRequest(PROMPT, sampling=SamplingParams(max_tokens=count, temperature=0), drafts=0)
    return ask(id_, request, **options)


def events_of(messages: list[Any], id_: str) -> list[Any]:
    return [
        event for message in messages if isinstance(message, Events) and message.id == id_ for event in message.events
    ]


def test_a_generation_is_accepted_told_and_finished(lm: LanguageModel) -> None:
    first, *tokens, last = events_of(Script([generate("a")], 6).play(lm), "a")
    assert isinstance(first, Accepted)
    assert first.request_id == "a"
    assert isinstance(last, Finished)
    expected = list(lm.generate(PROMPT, max_tokens=5, temperature=0))
    assert [token for event in tokens for token in event] == list(map(token_to_wire, expected))


def test_tokens_that_come_fast_are_told_together(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one at once; the others when there is time to look, and never later than the end."""
    monkeypatch.setattr(handlers, "COALESCE_S", 3600.0)
    events = events_of(Script([generate("a")], 6).play(lm), "a")
    assert [len(event) for event in events if isinstance(event, tuple)] == [1, 4]
    monkeypatch.setattr(handlers, "COALESCE_S", 0.0)
    monkeypatch.setattr(handlers, "MESSAGES_PER_S", float("inf"))
    events = events_of(Script([generate("a")], 6).play(lm), "a")
    assert [len(event) for event in events if isinstance(event, tuple)] == [1] * 5


def test_all_are_told_of_at_one_beat(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also who joined between two: that one's first token comes at once, as everybody's."""
    turns = itertools.count()
    monkeypatch.setattr(handlers.FlushTimer, "tick", lambda pace: setattr(pace, "flushes", next(turns) // 3))
    messages = Script([generate("a", 9)], [generate("b", 9)], 12).play(lm)
    for id_, sizes in (("a", [1, 3, 3, 2]), ("b", [1, 2, 3, 3])):
        assert [len(event) for event in events_of(messages, id_) if isinstance(event, tuple)] == sizes


def test_the_running_take_turns(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "COALESCE_S", 0.0)
    monkeypatch.setattr(handlers, "MESSAGES_PER_S", float("inf"))
    messages = Script([generate("a"), generate("b")], 6).play(lm)
    tokens = [message.id for message in messages if isinstance(message.events[0], tuple)]
    assert tokens == ["a", "b"] * 5


def test_no_more_run_than_may(lm: LanguageModel) -> None:
    """The second one begins when the first has ended."""
    messages = Script([generate("a"), generate("b")], 12).play(lm, max_running=1)
    begun = [message.id for message in messages]
    assert begun == sorted(begun)
    assert isinstance(events_of(messages, "b")[-1], Finished)


def test_nobodys_many_requests_stand_before_anothers_one(lm: LanguageModel) -> None:
    many = [replace(generate(f"many-{number}", 3), caller="many") for number in range(6)]
    messages = Script([*many, replace(generate("one", 3), caller="one")], 30).play(lm, max_running=2)
    begun = [message.id for message in messages if isinstance(message.events[0], Accepted)]
    assert begun[:2] == ["many-0", "one"]
    assert begun[2:] == [f"many-{number}" for number in range(1, 6)]


def test_more_prompts_than_may_wait_are_refused_with_a_time_to_come_back(lm: LanguageModel) -> None:
    long = GenerateRequest("the memory of a model can be read and edited", sampling=SamplingParams(max_tokens=1))
    script = Script([ask(str(number), long) for number in range(5)], 30)
    Worker(lm.engine, script, script.send, 1, max_queued_tokens=40).run()  # type: ignore[arg-type]
    refused = {message.id: message.error for message in script.messages if isinstance(message, Failed)}
    assert refused
    assert all(isinstance(error, Overloaded) and error.retry_after_s > 0 for error in refused.values())
    finished = {message.id for message in script.messages if isinstance(message, Events) and message.id not in refused}
    assert finished | set(refused) == {"0", "1", "2", "3", "4"}
    assert "0" in finished


def played_with_cache(lm: LanguageModel, cache_bytes: int, *rounds: Any, max_running: int = 8) -> list[Any]:
    script = Script(*rounds)
    Worker(lm.engine, script, script.send, max_running, max_cache_bytes=cache_bytes).run()  # type: ignore[arg-type]
    return script.messages


class SlowScript(Script):
    """A script whose rounds leave other threads time to work. `look` is called before each."""

    look: Callable[[], object] = staticmethod(lambda: None)

    def take(self, *, wait_s: float) -> list[Any]:
        self.look()
        time.sleep(0.002)
        return super().take(wait_s=wait_s)


def answer(id_: str, count: int, **options: Any) -> Submission:
    return ask(id_, AnswerRequest(QUESTION, sampling=SamplingParams(max_tokens=count, temperature=0), **options))


def test_a_waiting_mixture_counts_with_all_its_prompts(asked: LanguageModel) -> None:
    script, queued = SlowScript([generate("a", 1_000)], [answer("mixed", 2, mixture=True, num_passages=3)], 150), []
    loop = Worker(asked.engine, script, script.send, 1)  # type: ignore[arg-type]
    script.look = lambda: queued.append(loop._num_queued_tokens)
    loop.run()
    passages = asked.find_passages(QUESTION, k=3)
    prompts = [
        asked.answer(QUESTION, given, max_tokens=1).num_prompt_tokens for given in ([], *([p] for p in passages))
    ]
    assert len(prompts) == 4
    assert queued[-1] == sum(prompts)


TOKENS = 60  # of two texts that run at once, although the second one begins some steps later


def wait_for_threads(loop: Worker) -> None:
    """So that requests that came together go on together, however busy the machine is."""
    wait([each.offloaded for each in loop._offloaded if each.offloaded is not None])


@pytest.mark.parametrize("kind", ["answer", "mixture", "token ids"])
def test_a_text_whose_prompt_takes_steps_to_make_waits_for_room_in_the_cache(
    asked: LanguageModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nobody knew the size of its prompt when it came, and with many token ids it was admitted to check them."""
    retrieval = RetrievalParams(use_store=False)
    if kind == "token ids":
        monkeypatch.setattr("memlm.data.tokenizer.CHECKED_IDS", 2)
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0)
        request = GenerateRequest("", (1, 2, 3, 4, 5), sampling=sampling, retrieval=retrieval, drafts=0)
        both = [ask(id_, request) for id_ in "ab"]
    else:
        options = {"mixture": kind == "mixture", "num_passages": 2}
        both = [answer(id_, TOKENS, retrieval=retrieval, **options) for id_ in "ab"]
    script, used = SlowScript(both, 400), list[int]()
    loop = Worker(asked.engine, script, script.send, 8)  # type: ignore[arg-type]
    script.look = lambda: (wait_for_threads(loop), used.append(loop._cache_bytes))
    loop.run()
    assert max(used) == 2 * min(filter(None, used))
    for most, expected in (
        (max(used), [Accepted, Accepted, Finished, Finished]),
        (max(used) - 1, [Accepted, Finished, Accepted, Finished]),
    ):
        script = SlowScript(both, 400)
        loop = Worker(asked.engine, script, script.send, 8, max_cache_bytes=most)  # type: ignore[arg-type]
        script.look = lambda loop=loop: wait_for_threads(loop)
        loop.run()
        events = [event for message in script.messages for event in message.events]
        assert [type(event) for event in events if not isinstance(event, tuple)] == expected


def cache_of(lm: LanguageModel, count: int) -> int:
    num_tokens = len(lm.checkpoint.tokenizer.prompt(PROMPT)) + count - 1
    return row_bytes(lm.checkpoint.decoder.config, num_tokens, torch.float32)


def test_a_generation_whose_cache_does_not_fit_waits_until_others_end(lm: LanguageModel) -> None:
    score = ask("score", ScoreRequest("the memory of a model"))
    messages = played_with_cache(
        lm, cache_of(lm, 20), [generate("a", 12), generate("b", 20), generate("c", 2), score], 60
    )
    order = [
        (message.id, type(event)) for message in messages if isinstance(message, Events) for event in message.events
    ]
    marks = [(id_, kind) for id_, kind in order if kind is not tuple]
    both = (Accepted, Finished)
    assert marks == [(id_, kind) for id_ in "abc" for kind in both], "one by one, and in the order of the queue"
    results = [place for place, message in enumerate(messages) if isinstance(message, Result)]
    assert results
    assert messages[results[0]].id == "score"
    assert results[0] < next(place for place, message in enumerate(messages) if message.id == "b"), "it takes no cache"


def test_generations_whose_caches_fit_run_side_by_side(lm: LanguageModel) -> None:
    both = cache_of(lm, 12) + cache_of(lm, 10)
    messages = played_with_cache(lm, both, [generate("a", 12), generate("b", 10), generate("c", 2)], 60)
    begun = [message.id for message in messages if isinstance(message.events[0], Accepted)]
    ended = [message.id for message in messages if isinstance(message.events[-1], Finished)]
    assert (begun, ended[0]) == (["a", "b", "c"], "b")


def test_a_generation_that_can_never_fit_is_refused_with_both_numbers(lm: LanguageModel) -> None:
    most = cache_of(lm, 20)
    messages = played_with_cache(lm, most, [generate("a", 21), generate("b", 20)], 40)
    (error,) = (message.error for message in messages if isinstance(message, Failed))
    assert isinstance(error, InvalidInput)
    assert error.field == "max_tokens"
    assert f"{cache_of(lm, 21) / 2**20:.2f} MiB" in str(error)
    assert f"{most / 2**20:.2f} MiB" in str(error)
    assert isinstance(events_of(messages, "b")[-1], Finished)


def test_a_refused_generation_gives_its_session_back(lm: LanguageModel) -> None:
    name = run_steps(lm.engine.sessions.create()).name
    request = GenerateRequest(PROMPT, sampling=SamplingParams(max_tokens=21), session=name)
    messages = played_with_cache(lm, cache_of(lm, 20), [ask("a", request)], 3)
    assert isinstance(messages[0].error, InvalidInput)
    assert not lm.engine.sessions.get(name).busy


def test_a_cancelled_request_is_never_heard_of_again(lm: LanguageModel) -> None:
    messages = Script([generate("a", 20)], 2, [Cancel("a"), generate("b")], 6).play(lm, max_running=1)
    assert not any(isinstance(event, Finished) for event in events_of(messages, "a"))
    assert isinstance(events_of(messages, "b")[-1], Finished)
    assert messages.index(next(m for m in messages if m.id == "b")) > max(
        i for i, m in enumerate(messages) if m.id == "a"
    )


def test_what_is_cancelled_or_late_before_its_turn_costs_nothing(lm: LanguageModel) -> None:
    rounds_of_messages = [
        generate("a"),
        Cancel("a"),
        generate("b", within_s=-1.0),
        ask("c", GetModelRequest(), within_s=-1.0),
    ]
    messages = Script(rounds_of_messages, 6).play(lm)
    assert {message.id: type(message.error) for message in messages} == {"b": DeadlineExceeded, "c": DeadlineExceeded}
    assert len(messages) == 2


def test_a_deadline_ends_what_runs(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([generate("a", 20, within_s=3600.0)], 2, 3)
    rounds = script.take
    clock = iter([*[0.0] * 2, *[1e9] * 100])

    def take(*, wait_s: float) -> list[Any]:
        ahead_s = next(clock)
        monkeypatch.setattr("memlm.server.inference.worker.time.monotonic", lambda: time.perf_counter() + ahead_s)
        return rounds(wait_s=wait_s)

    script.take = take  # type: ignore[method-assign]
    messages = script.play(lm)
    assert isinstance(messages[-1], Failed)
    assert isinstance(messages[-1].error, DeadlineExceeded)
    assert sum(isinstance(message, Failed) for message in messages) == 1


def test_a_question_that_fails_harms_no_other(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours is told by the request's id only, and the loop goes on."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(lm.engine, "search", fail)
    messages = Script([ask("bug", SearchRequest("a"))], [generate("a"), ask("text", ScoreRequest(""))], 6).play(lm)
    failed = {message.id: message.error for message in messages if isinstance(message, Failed)}
    assert isinstance(failed["bug"], InternalError)
    assert "bug" in str(failed["bug"])
    assert "secret" not in str(failed["bug"])
    assert failed.keys() == {"bug", "text"}
    assert isinstance(events_of(messages, "a")[-1], Finished)


def test_each_question_gets_one_answer(lm: LanguageModel) -> None:
    rounds_of_messages = [
        ask("score", ScoreRequest("the memory\n" * 50)),
        ask("model", GetModelRequest()),
        ask("none", SearchRequest("a", store="x")),
        generate("long", 1000),
        generate("a"),
    ]
    messages = Script(rounds_of_messages, 60).play(lm)
    last = {message.id: message for message in messages}
    assert last["score"] == Result("score", lm.score("the memory\n" * 50))
    assert last["model"] == Result("model", lm.info)
    assert isinstance(last["none"].error, NotFound)
    assert isinstance(last["long"], Failed)
    assert isinstance(events_of(messages, "a")[-1], Finished)
    for id_ in ("score", "model", "none", "long"):
        assert sum(message.id == id_ for message in messages) == 1


def test_what_piled_up_goes_out_together(lm: LanguageModel) -> None:
    """Accepted, then all tokens in one event, then Finished or the failure; in the order in which they came."""
    messages = Script([generate("a", 8)], 9).play(lm)
    accepted, tokens, finished = merge_tokens(messages)
    assert isinstance(accepted, Accepted)
    assert isinstance(tokens, tuple)
    assert len(tokens) == 8
    assert isinstance(finished, Finished)
    broken = merge_tokens([*messages[:-1], Failed("a", NotFound("gone"))])
    assert isinstance(next(broken), Accepted)
    assert next(broken)
    with pytest.raises(NotFound):
        next(broken)


def test_what_piled_up_is_cut_before_it_is_too_large(lm: LanguageModel) -> None:
    stream = lm.generate(PROMPT, max_tokens=6, temperature=0, neighbors=50, k=50)
    heavy = tuple(map(token_to_wire, stream)) * 40
    cut = list(merge_tokens([Events("a", (heavy[i : i + 6],)) for i in range(0, len(heavy), 6)]))
    assert tuple(token for event in cut for token in event) == heavy
    assert len(cut) > 2
    assert max(sum(map(len, event)) for event in cut) < 1.2 * MAX_EVENT_BYTES


def test_who_has_nothing_to_do_gives_back_what_it_took(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not before there was work."""
    given = list[str | int]()
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(worker, "IDLE_RELEASE_S", 0.0)
    monkeypatch.setattr(worker, "trim_heap", lambda: given.append(len(script.messages)))
    monkeypatch.setattr(worker.Batch, "shrink", lambda batch: given.append("room"))
    script = Script(3, [generate("a", 2)], 9)
    answered = len(script.play(lm))
    assert given == ["room", answered]


def test_what_is_given_back_is_the_systems() -> None:
    blocks = [bytearray(b"x") * 60_000 for _ in range(4_000)]
    last = blocks.pop()  # the heap cannot shrink below it by itself
    blocks.clear()
    held = anonymous_bytes(os.getpid())
    trim_heap()
    assert anonymous_bytes(os.getpid()) < held - 200_000_000
    assert last
