"""Streams behind proxies: headers that keep events from being collected, and comments while a request waits."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from running import PATIENCE_S, RunningServer, wait_until

from memlm.server.http import events

LONG = {"model": "long", "prompt": "the", "temperature": 0, "max_tokens": 30_000, "stream": True}
STREAMS = {
    "/v1/completions": {"model": "long", "prompt": "the", "max_tokens": 2},
    "/v1/chat/completions": {"model": "long", "messages": [{"role": "user", "content": "the"}], "max_tokens": 2},
    "/v1/answers": {"question": "the?", "num_passages": 0, "max_tokens": 2},
}


@pytest.fixture(scope="module")
def single_web(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[RunningServer]:
    """Runs one generation at a time, and tells those that wait so every 50 ms. Its workers may be killed."""
    options = ("--threads", "1", "--http-port", "0", "--max-running", "1")
    hasty = f"import {events.__name__} as events; events.HEARTBEAT_S = 0.05"
    log = tmp_path_factory.mktemp("log") / "log"
    with RunningServer(log, long_model, options=options, first=hasty) as server:
        yield server


def test_streams_tell_proxies_not_to_collect_them(single_web: RunningServer) -> None:
    with httpx.Client(base_url=single_web.http_url, timeout=PATIENCE_S) as http:
        for path, body in STREAMS.items():
            reply = http.post(path, json={**body, "stream": True})
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-accel-buffering"] == "no"
            assert reply.headers["cache-control"] == "no-cache"
            assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_sends_comments(single_web: RunningServer, path: str) -> None:
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=single_web.http_url, timeout=PATIENCE_S))
        running = stack.enter_context(http.stream("POST", "/v1/completions", json=LONG))
        tokens = running.iter_bytes()  # kept, since its end closes the stream
        next(tokens)
        waiting = stack.enter_context(http.stream("POST", path, json={**STREAMS[path], "stream": True}))
        lines = waiting.iter_lines()
        assert [next(lines) for _ in range(6)] == [": waiting", ""] * 3
        tokens.close()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert {line[:6] for line in rest if line} <= {"data: ", ": wait"}


def test_clients_do_not_see_the_comments(single_web: RunningServer) -> None:
    with (
        httpx.stream("POST", f"{single_web.http_url}/v1/completions", json=LONG, timeout=PATIENCE_S) as running,
        openai.OpenAI(base_url=f"{single_web.http_url}/v1", api_key="none", max_retries=0) as ai,
    ):
        tokens = running.iter_bytes()
        next(tokens)
        chunks = ai.completions.create(model="long", prompt="the", max_tokens=2, stream=True)  # at the first comment
        tokens.close()
        assert "".join(chunk.choices[0].text for chunk in chunks)


def test_an_error_after_a_comment_is_the_last_event(single_web: RunningServer) -> None:
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=single_web.http_url, timeout=PATIENCE_S))
        running = stack.enter_context(http.stream("POST", "/v1/completions", json=LONG))
        tokens = running.iter_bytes()
        next(tokens)
        waiting = stack.enter_context(http.stream("POST", "/v1/completions", json=LONG))
        lines = waiting.iter_lines()
        assert next(lines) == ": waiting"
        os.kill(single_web.worker_pid, signal.SIGKILL)
        *_, last, _ = lines
        assert '"code":"Unavailable"' in last
        wait_until(lambda: http.get("/readyz").status_code == 200)


def test_what_is_wrong_at_once_is_no_event(single_web: RunningServer) -> None:
    reply = httpx.post(f"{single_web.http_url}/v1/completions", json={**LONG, "max_tokens": 1 << 30}, timeout=60)
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")


def test_comments_come_about_every_ten_seconds() -> None:
    assert 5 <= events.HEARTBEAT_S <= 15
