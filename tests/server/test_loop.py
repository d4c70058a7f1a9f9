"""The worker's loop does no work proportional to a request's size: threads do, and other requests go on meanwhile."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_S

from memlm.api.datastores import SearchRequest
from memlm.api.generation import DetokenizeRequest, Finished, TokenizeRequest
from memlm.api.params import GenerateRequest, SamplingParams
from memlm.api.scoring import ScoreRequest
from memlm.api.sessions import (
    AppendToSessionRequest,
    CreateSessionRequest,
    DeleteSessionRequest,
    ForgetInSessionRequest,
    ForkSessionRequest,
)
from memlm.base.steps import run_steps
from memlm.data.tokenizer import Tokenizer
from memlm.errors import DeadlineExceeded, InvalidInput, StorageFull
from memlm.generation.sessions.sessions import Sessions
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.state.decoder_state import DecoderState
from memlm.server.inference.messages import Cancel, Events, Failed, Heartbeat, Request, Result, Stop, Submission
from memlm.server.inference.worker import Worker

PROMPT = "the memory of a model"
LONG = "the memory of a model can be read and edited. " * 600

OTHER = GenerateRequest("the", sampling=SamplingParams(max_tokens=8, temperature=0))


class FakePipe:
    """Stands for the pipe: asks some requests at once, and stops the worker when all of them are answered."""

    def __init__(self, **requests: Request) -> None:
        now_s = time.monotonic()
        self.coming: list[Any] = [Submission(id_, request, now_s, None, id_) for id_, request in requests.items()]
        self.messages: list[Any] = []
        self.ended = {id_: threading.Event() for id_ in requests}
        self.cancelled = set[str]()
        self.at_each_turn: Callable[[], None] = lambda: None

    def take(self, *, wait_s: float) -> list[Any]:
        self.at_each_turn()
        taken, self.coming = self.coming, []
        if not taken and all(event.is_set() or id_ in self.cancelled for id_, event in self.ended.items()):
            return [Stop()]
        if wait_s:
            time.sleep(min(wait_s, 0.001))
        return taken

    def cancel(self, id_: str) -> None:
        if id_ not in self.cancelled:
            self.cancelled.add(id_)
            self.coming.append(Cancel(id_))

    def send(self, message: Any) -> None:
        if isinstance(message, Heartbeat):
            return
        self.messages.append(message)
        if not isinstance(message, Events) or isinstance(message.events[-1], Finished):
            self.ended[message.id].set()

    def play(self, lm: LanguageModel) -> dict[str, Any]:
        """The last answer to each request."""
        Worker(lm.engine, self, self.send, 8).run()  # type: ignore[arg-type]
        return {message.id: message for message in self.messages}


@pytest.fixture
def long_lm(long_model: Path, store_folder: Path, tmp_path: Path) -> LanguageModel:
    """Takes long texts, and keeps its sessions on the disk."""
    checkpoint = load_checkpoint(long_model)
    return LanguageModel(checkpoint, sessions=Sessions(checkpoint, folder=tmp_path / "sessions"))


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Callable[[threading.Event], set[int]]:
    """Encodes long texts only once something has happened, and notes in which threads that was."""

    def after(event: threading.Event) -> set[int]:
        threads, encode = set[int](), Tokenizer._encoded

        def encode_later(tokenizer: Tokenizer, texts: Sequence[str]) -> Any:
            if len(texts[0]) >= len(LONG):
                threads.add(threading.get_ident())
                assert event.wait(PATIENCE_S)
            return encode(tokenizer, texts)

        monkeypatch.setattr(Tokenizer, "_encoded", encode_later)
        return threads

    return after


@pytest.fixture
def syncing(monkeypatch: pytest.MonkeyPatch) -> Callable[[threading.Event], set[int]]:
    """Waits for the disk only once something has happened, and notes in which threads that was."""

    def after(event: threading.Event) -> set[int]:
        threads, fsync = set[int](), os.fsync

        def fsync_later(descriptor: int) -> None:
            threads.add(threading.get_ident())
            assert event.wait(PATIENCE_S)
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", fsync_later)
        return threads

    return after


@pytest.mark.parametrize(
    "long_request",
    [
        TokenizeRequest(LONG),
        ScoreRequest(LONG),
        GenerateRequest(LONG, sampling=SamplingParams(max_tokens=1)),
        AppendToSessionRequest("", LONG),
    ],
    ids=lambda long_request: type(long_request).__name__,
)
def test_long_texts_are_encoded_while_others_are_served(
    long_lm: LanguageModel, encoding: Any, long_request: Any
) -> None:
    """Nothing is encoded before the other generation has come to its end."""
    if isinstance(long_request, AppendToSessionRequest):
        long_request = AppendToSessionRequest(run_steps(long_lm.engine.sessions.create()).name, LONG)
    pipe = FakePipe(long=long_request, other=OTHER)
    threads = encoding(pipe.ended["other"])
    last = pipe.play(long_lm)
    assert not isinstance(last["long"], Failed)
    assert isinstance(last["other"].events[-1], Finished)
    assert threads
    assert threading.get_ident() not in threads


def test_a_search_for_a_long_text_is_encoded_while_others_are_served(lm: LanguageModel, encoding: Any) -> None:
    pipe = FakePipe(long=SearchRequest(LONG), other=OTHER)
    threads = encoding(pipe.ended["other"])
    found = pipe.play(lm)["long"]
    assert threading.get_ident() not in threads
    assert found == Result("long", lm.search(None, LONG))


def test_a_prompt_that_cannot_fit_is_refused_without_encoding_it(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = run_steps(lm.engine.sessions.create()).name
    monkeypatch.setattr(Tokenizer, "_encoded", lambda *_: pytest.fail("it was encoded"))
    last = FakePipe(prompt=GenerateRequest(LONG), append=AppendToSessionRequest(session, LONG)).play(lm)
    for refused in (last["prompt"].error, last["append"].error):
        assert isinstance(refused, InvalidInput)
        assert "at least" in str(refused)
        assert "47" in str(refused)
    assert not lm.engine.sessions.get(session).busy


def test_the_bound_before_encoding_never_exceeds_the_tokens(lm: LanguageModel) -> None:
    tokenizer = lm.checkpoint.tokenizer
    for text in (
        "",
        " ",
        PROMPT,
        "a" * 100,
        "é 猫 🙂" * 9,
        "\n\t \u0301",
        max(tokenizer.token_bytes, key=len).decode(),
    ):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_what_is_cancelled_or_late_while_it_is_encoded_gives_its_session_back(
    long_lm: LanguageModel, encoding: Any
) -> None:
    name, other = run_steps(long_lm.engine.sessions.create()).name, run_steps(long_lm.engine.sessions.create()).name
    over = threading.Event()
    pipe = FakePipe(
        gone=GenerateRequest(LONG, sampling=SamplingParams(max_tokens=1), session=name),
        late=AppendToSessionRequest(other, LONG),
        other=OTHER,
    )
    pipe.coming[1] = Submission("late", pipe.coming[1].request, time.monotonic(), time.monotonic() + 1.0)
    threads = encoding(over)
    pipe.at_each_turn = lambda: pipe.cancel("gone") if threads else None
    last = pipe.play(long_lm)
    over.set()
    assert threads
    assert isinstance(last["late"].error, DeadlineExceeded)
    assert "gone" not in last
    for each in (name, other):
        assert (long_lm.engine.sessions.get(each).busy, long_lm.engine.sessions.get(each).num_tokens) == (False, 0)


def test_a_text_of_more_tokens_than_an_answer_takes_is_refused(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = len(lm.tokenize(PROMPT))
    monkeypatch.setattr("memlm.data.tokenizer.MAX_TOKEN_IDS", most)
    last = FakePipe(
        fits=TokenizeRequest(PROMPT), longer=TokenizeRequest(PROMPT + "s"), long=TokenizeRequest(LONG)
    ).play(lm)
    assert list(last["fits"].value) == lm.tokenize(PROMPT)
    for id_ in ("longer", "long"):
        assert isinstance(last[id_].error, InvalidInput)
        assert f"at most {most} in one call" in str(last[id_].error)


def test_the_text_of_many_tokens_comes_in_steps(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlm.data.tokenizer.DECODED_TOKENS", 7)
    ids = tuple(lm.tokenize("é 猫 🙂 " + LONG))
    messages = FakePipe(ids=DetokenizeRequest(ids), other=OTHER).play(lm)
    assert messages["ids"] == Result("ids", "é 猫 🙂 " + LONG)
    assert isinstance(messages["other"].events[-1], Finished)


@pytest.mark.parametrize("what", ["create", "append", "forget", "fork", "delete", "generate"])
def test_sessions_are_written_while_others_are_served(long_lm: LanguageModel, syncing: Any, what: str) -> None:
    """The disk answers only after the other generation has come to its end, and is answered for by then."""
    name = run_steps(long_lm.engine.sessions.create()).name
    run_steps(long_lm.engine.sessions.append(name, PROMPT))
    request: Any = {
        "create": CreateSessionRequest(),
        "append": AppendToSessionRequest(name, PROMPT),
        "forget": ForgetInSessionRequest(name, 1, 3),
        "fork": ForkSessionRequest(name),
        "delete": DeleteSessionRequest(name),
        "generate": GenerateRequest(PROMPT, sampling=SamplingParams(max_tokens=2), session=name),
    }[what]
    pipe = FakePipe(it=request, other=OTHER)
    threads = syncing(pipe.ended["other"])
    last = pipe.play(long_lm)
    assert threads
    assert threading.get_ident() not in threads
    assert not isinstance(last["it"], Failed)
    assert not any(info.busy for info in long_lm.list_sessions())


def test_a_write_that_has_begun_ends_before_the_session_is_used_again(
    long_lm: LanguageModel, syncing: Any, tmp_path: Path
) -> None:
    """Memory and disk agree after a cancelled append: both have it."""
    name = run_steps(long_lm.engine.sessions.create()).name
    pipe = FakePipe(it=AppendToSessionRequest(name, PROMPT), other=OTHER)
    cancelled = threading.Event()
    threads = syncing(cancelled)

    def cancel_the_write() -> None:
        if "it" in pipe.cancelled and not pipe.coming:  # the worker has taken the cancellation
            assert cancelled.is_set() or long_lm.get_session(name).busy
            cancelled.set()
        elif threads:
            pipe.cancel("it")

    pipe.at_each_turn = cancel_the_write
    assert "it" not in pipe.play(long_lm)
    held = long_lm.get_session(name)
    again = Sessions(long_lm.checkpoint, folder=tmp_path / "sessions")
    assert again.get(name).num_tokens == held.num_tokens


def test_a_write_that_fails_is_that_calls_error_and_changes_nothing(
    long_lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = run_steps(long_lm.engine.sessions.create()).name

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    last = FakePipe(append=AppendToSessionRequest(name, PROMPT), create=CreateSessionRequest(), other=OTHER).play(
        long_lm
    )
    monkeypatch.undo()
    assert isinstance(last["append"].error, StorageFull)
    assert isinstance(last["create"].error, StorageFull)
    assert isinstance(last["other"].events[-1], Finished)
    (info,) = long_lm.list_sessions()
    assert (info.name, info.num_tokens, info.busy) == (name, 0, False)
    assert FakePipe(again=AppendToSessionRequest(name, PROMPT)).play(long_lm)["again"].value.num_tokens > 0


def test_large_states_are_copied_while_others_are_served(
    long_lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither into a row of the batch nor out of it: a generation of a large session has a state of its own."""
    monkeypatch.setattr("memlm.generation.batch.APART_BYTES", 1 << 14)
    monkeypatch.setattr("memlm.generation.batch.APART_SHARE", 1 << 60)
    monkeypatch.setattr("memlm.generation.sessions.reading.LARGE_BYTES", 0)
    name = run_steps(long_lm.engine.sessions.create()).name
    FakePipe(append=AppendToSessionRequest(name, PROMPT * 20)).play(long_lm)
    pipe, threads = FakePipe(it=GenerateRequest(PROMPT, sampling=OTHER.sampling, session=name), other=OTHER), set[int]()
    extract_row = DecoderState.extract_row

    def copy_later(*arguments: Any, **options: Any) -> DecoderState:
        threads.add(threading.get_ident())
        assert pipe.ended["other"].wait(PATIENCE_S)
        return extract_row(*arguments, **options)

    monkeypatch.setattr(DecoderState, "extract_row", copy_later)
    last = pipe.play(long_lm)
    assert not isinstance(last["it"], Failed)
    assert threads
    assert threading.get_ident() not in threads
    assert isinstance(last["it"].events[-1], Finished)
    used = long_lm.get_session(name)
    assert used.num_tokens > 8
    assert long_lm.engine.sessions._sessions[name].state.num_read <= used.num_tokens
