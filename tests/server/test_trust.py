"""Whatever callers do, places, queue and sessions are afterwards what they were; small here, long when asked for."""

import random
import time
from typing import Any

import pytest

from memlm.api.generation import Finished
from memlm.api.params import GenerateRequest
from memlm.api.scoring import ScoreRequest
from memlm.api.sessions import AppendToSessionRequest
from memlm.base.steps import run_steps
from memlm.language_model import LanguageModel
from memlm.server.inference.messages import Cancel, Events, Failed, Heartbeat, Result, Stop, Submission
from memlm.server.inference.worker import Worker

TEXT = "the memory of a model can be read and edited "


class Crowd:
    """Callers that ask and give up at random; counts what each is told after it gave up, and how each ends."""

    def __init__(self, lm: LanguageModel, seed: int, requests: int) -> None:
        self.rng, self.left = random.Random(seed), requests
        self.session = run_steps(lm.engine.sessions.create()).name
        self.open: dict[str, bool] = {}
        self.cancelled: set[str] = set()
        self.ends: dict[str, int] = {}
        self.late_words = 0

    def take(self, *, wait_s: float) -> list[Any]:
        given_up = [id_ for id_ in self.open if self.rng.random() < 0.2]
        for id_ in given_up:
            self.cancelled.add(id_)
            del self.open[id_]
        messages: list[Any] = [Cancel(id_) for id_ in given_up]
        messages += [self.ask() for _ in range(min(self.left, self.rng.randint(0, 3)))]
        return messages or ([] if self.left or self.open else [Stop()])

    def ask(self) -> Submission:
        self.left -= 1
        id_, now_s = str(self.left), time.monotonic()
        self.open[id_] = True
        request = self.rng.choice(
            [
                GenerateRequest.of(TEXT[: self.rng.randint(0, 20)], {"max_tokens": self.rng.randint(1, 8)}),
                GenerateRequest.of(" it", {"max_tokens": 3, "session": self.session, "use_store": False}),
                ScoreRequest(TEXT * self.rng.randint(1, 30)),
                AppendToSessionRequest(self.session, "a "),
                GenerateRequest.of("x", {"store": "nowhere"}),
            ]
        )
        deadline_s = now_s + self.rng.choice([-1.0, 0.01, 3600.0, 3600.0])
        return Submission(id_, request, now_s, deadline_s, caller=str(self.rng.randint(0, 3)))

    def send(self, message: Any) -> None:
        if isinstance(message, Heartbeat):
            return
        self.late_words += message.id in self.cancelled
        ended = isinstance(message, Result | Failed) or (
            isinstance(message, Events) and isinstance(message.events[-1], Finished)
        )
        if ended:
            self.ends[message.id] = self.ends.get(message.id, 0) + 1
            self.open.pop(message.id, None)


def check(lm: LanguageModel, seed: int, requests: int) -> None:
    crowd = Crowd(lm, seed, requests)
    worker = Worker(lm.engine, crowd, crowd.send, 4)  # type: ignore[arg-type]
    worker.run()
    assert not crowd.left
    assert not crowd.open
    assert crowd.late_words == 0
    assert set(crowd.ends.values()) == {1}
    assert len(crowd.ends) + len(crowd.cancelled) == requests
    assert min(len(crowd.ends), len(crowd.cancelled)) > requests / 20
    assert (worker._waiting, worker._running, len(worker._batch)) == ([], [], 0)
    assert worker._batch._pool.num_rows == 0
    assert not lm.engine.sessions.get(crowd.session).busy


@pytest.mark.parametrize("seed", [1, 2])
def test_whoever_gives_up_leaves_nothing_behind(lm: LanguageModel, seed: int) -> None:
    check(lm, seed, 150)


@pytest.mark.slow
def test_ten_thousand_that_give_up_leave_nothing_behind(lm: LanguageModel) -> None:
    check(lm, 0, 10_000)
