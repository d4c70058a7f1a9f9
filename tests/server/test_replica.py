"""A replica by itself, with a real engine and no cluster: one engine answers, whatever Ray Serve delivers twice."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memlm.api.params import GenerateRequest, SamplingParams
from memlm.api.sessions import AppendToSessionRequest, CreateSessionRequest
from memlm.errors import Incompatible, Unavailable
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import Answer, DocumentsDeleted, Events, Failed, Heartbeat, Loaded, Result
from memlm.server.quota import Quota
from memlm.server.telemetry.metrics import Stats

ray_exceptions = pytest.importorskip("ray.exceptions")
pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")
module = pytest.importorskip("memlm.server.inference.replicas.replica")
replica_handle = pytest.importorskip("memlm.server.inference.replicas.replica_handle")

ID = "one"
PATIENCE_S = 120.0


class Replica(module.Replica):  # type: ignore[misc,name-defined]
    """One whose end nobody awaits: Ray Serve calls `__del__`, which is a coroutine there."""

    def __del__(self) -> None:
        pass


@pytest.fixture
async def replica(long_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """One outside Ray Serve, which no server has to outlive."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=ID), app_name="application")
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module.applications, "end_with_server", lambda name: None)
    monkeypatch.setattr(module, "get_node_ip_address", lambda: "here")
    made = Replica(ServerConfig(long_model, (), dtype="float32", device="cpu", num_threads=1), 1)
    async with asyncio.timeout(PATIENCE_S):
        yield made
        await made.stop(ID)


def num_engines() -> int:
    return sum(thread.name == "engine" for thread in threading.enumerate())


async def test_a_replica_that_is_told_to_load_twice_has_one_engine(replica: Any) -> None:
    """While it loads, also where one of both callers leaves, and later."""
    leaving, staying = (asyncio.create_task(replica.load(ID, {}, False)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    (loaded, _), _ = await staying, await asyncio.gather(leaving, return_exceptions=True)
    assert isinstance(loaded, Loaded)
    assert leaving.cancelled()
    assert (await replica.load(ID, {}, True))[0] is loaded
    assert num_engines() == 1


async def test_a_replica_that_could_not_load_tries_again(replica: Any, long_model: Path) -> None:
    config = long_model / "config.json"
    hidden = config.rename(long_model / "hidden")
    try:
        failed, _ = await replica.load(ID, {}, False)
    finally:
        hidden.rename(config)
    assert not isinstance(failed, Loaded)
    replica._engine.join(PATIENCE_S)
    assert isinstance((await replica.load(ID, {}, False))[0], Loaded)
    assert num_engines() == 1


async def test_a_replica_with_another_model_than_the_first_serves_nothing_and_loads_anew(
    replica: Any, long_model: Path, tmp_path: Path
) -> None:
    class Calls:
        """Ray's way to the replica."""

        def __init__(self, method: Any = None) -> None:
            self.remote = method
            if method is None:
                self.load, self.stop, self.heartbeat = map(Calls, (replica.load, replica.stop, replica.heartbeat))

        def options(self, **how: Any) -> Any:
            return self

    quota = Quota("bytes", 1, 1)
    handle = replica_handle.ReplicaHandle(ServerConfig(long_model), ID, "", Calls(), dict, quota, print, print)
    handle.files.check(Loaded({"model": "the first one's", "tokenizer": "same"}))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Incompatible, match=r"of the model and the tokenizer changed since .*; restart the server"):
            await handle.start(restarted=True)
    assert not handle.is_loaded
    assert num_engines() == 0


async def test_both_of_a_request_that_arrives_twice_end(replica: Any) -> None:
    """The first one's caller may have lost its stream, and its session is free for another request."""
    await replica.load(ID, {}, False)
    (created,) = await all_of(ask(replica, "create", CreateSessionRequest()))
    assert isinstance(created, Result)
    long = GenerateRequest("a", session=created.value.name, sampling=SamplingParams(temperature=0, max_tokens=30_000))
    running = ask(replica, "twice", long)
    assert isinstance((await anext(running))[0], Events)
    (refused,) = await all_of(ask(replica, "twice", long))
    assert_arrived_twice(refused)
    *events, last = await all_of(running)
    assert_arrived_twice(last)
    assert all(isinstance(each, Events) for each in events)
    (appended,) = await all_of(ask(replica, "next", AppendToSessionRequest(created.value.name, "a text")))
    assert isinstance(appended, Result), appended
    (refused,) = await all_of(ask(replica, "twice", long))  # also afterwards
    assert_arrived_twice(refused)


async def test_what_an_engine_says_is_told_until_it_has_arrived(replica: Any) -> None:
    """Of heartbeats the latest counts."""
    deleted = [DocumentsDeleted("store", (each,)) for each in ("one", "two", "three")]
    heartbeats = [Heartbeat(Stats(running=number)) for number in range(3)]
    assert await replica.heartbeat("another", 0) is None
    assert await replica.heartbeat(ID, 0) == []
    replica._take([heartbeats[0], deleted[0], heartbeats[1], deleted[1]])
    told = await replica.heartbeat(ID, 0)
    assert [message for _, message in told] == [deleted[0], heartbeats[1], deleted[1]]
    assert await replica.heartbeat(ID, 0) == told
    replica._take([deleted[2], heartbeats[2]])
    later = await replica.heartbeat(ID, told[-1][0])
    assert [message for _, message in later] == [deleted[2], heartbeats[2]]
    assert await replica.heartbeat(ID, later[-1][0]) == []


async def test_deletions_reach_the_front_end_though_answers_are_lost(replica: Any, monkeypatch) -> None:
    """Each once, over the handle of the front end."""
    monkeypatch.setattr(replica_handle, "POLL_S", 0.0)
    lost = ray_exceptions.ActorUnavailableError("for a moment", None)
    deleted = [DocumentsDeleted("store", (str(number),)) for number in range(6)]
    heard, calls = list[Any](), 0

    class Lossy:
        """Ray's way to the replica, on which every other answer is lost."""

        def options(self, **how: Any) -> Any:
            return SimpleNamespace(heartbeat=self)

        async def remote(self, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            replica._take([deleted[calls - 1]] if calls <= len(deleted) else [])
            answer = await replica.heartbeat(*arguments)
            if calls % 2:
                raise lost
            return None if calls > len(deleted) + 2 else answer

    quota, hear = Quota("bytes", 1, 1), lambda *said: heard.append(said)
    handle = replica_handle.ReplicaHandle(ServerConfig(Path("model")), ID, "", Lossy(), dict, quota, hear, print)
    async with asyncio.timeout(PATIENCE_S):
        await handle._poll()
    assert heard == [(each.store, each.document_ids) for each in deleted]


def ask(replica: Any, id_: str, request: Any) -> Any:
    return replica.answer(ID, id_, request, None, "", "")


async def all_of(answers: Any) -> list[Answer]:
    return [answer async for group in answers for answer in group]


def assert_arrived_twice(answer: Answer) -> None:
    assert isinstance(answer, Failed)
    assert isinstance(answer.error, Unavailable)
    assert "twice" in str(answer.error)
