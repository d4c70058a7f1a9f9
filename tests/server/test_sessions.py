"""Sessions behind the service: the same as in process, and nothing is lost or left when callers or servers go."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from running import RunningServer, alike, family_of, wait_until
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.client import AsyncClient, Client
from memlm.errors import InvalidInput, Locked, MemlmError, NotFound
from memlm.language_model import LanguageModel
from memlm.v1 import sessions_pb2, sessions_pb2_grpc

TEXT = "the memory of a model can be read and edited"


@pytest.fixture(params=["in process", "remote"])
def host(request, server: RunningServer, lm: LanguageModel) -> Iterator[Client | LanguageModel]:
    """One suite for both."""
    if request.param == "in process":
        yield lm
        return
    with Client(server.address) as client:
        yield client


def test_sessions_come_in_pages_the_last_created_first(server: RunningServer) -> None:
    with Client(server.address) as client, ExitStack() as opened, grpc.insecure_channel(server.address) as channel:
        sessions = [opened.enter_context(client.session()) for _ in range(5)]
        sessions[1].append(TEXT)
        names = [info.name for info in client.list_sessions()]
        assert names[0] == sessions[1].name
        stub = sessions_pb2_grpc.SessionsStub(channel)
        whole = stub.ListSessions(sessions_pb2.ListSessionsRequest())  # as clients without pages ask
        assert sorted(session.name for session in whole.sessions) == sorted(names)
        assert whole.next_page_token == ""
        assert [session.name for session in whole.sessions][:5] == [session.name for session in reversed(sessions)]
        for page_size in (1, 2, len(names), 5000):
            found, token = [], ""
            while not found or token:
                request = sessions_pb2.ListSessionsRequest(page_size=page_size, page_token=token)
                page = stub.ListSessions(request)
                assert len(page.sessions) <= page_size
                found += page.sessions
                token = page.next_page_token
            assert [each.name for each in found] == [each.name for each in whole.sessions]
        for bad in ({"page_size": -1}, {"page_token": "2"}):
            with pytest.raises(grpc.RpcError, match=next(iter(bad))) as raised:
                stub.ListSessions(sessions_pb2.ListSessionsRequest(**bad))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_session_is_the_same_in_process_and_behind_a_server(host, lm: LanguageModel) -> None:
    with host.session(ttl_s=600) as session:
        assert session.append(TEXT).num_tokens == len(lm.tokenize(TEXT))
        assert session.append(iter([" ", "it"])).num_tokens == session.info().num_tokens
        first = list(session.generate(" serves", temperature=0, max_tokens=5, use_store=False))
        with session.fork() as twin:
            second = list(twin.generate(temperature=0, max_tokens=4, use_store=False))
        assert session.name in [info.name for info in host.list_sessions()]
        twin_tokens = session.info().num_tokens
        with session.fork() as twin:
            for start, stop in ((1, 3), (4, 5)):
                twin_tokens -= stop - start
                assert twin.forget(start, stop).num_tokens == twin_tokens
            forgot = list(twin.generate(temperature=0, max_tokens=4, use_store=False))
            with pytest.raises(InvalidInput, match=f"ends at 999, and the session has {twin_tokens + 4} tokens"):
                twin.forget(0, 999)
            with pytest.raises(InvalidInput, match="has no token"):
                twin.forget(2, 2)
    with lm.session() as own:
        ids = [*lm.tokenize(TEXT), *lm.tokenize(" it"), *lm.tokenize(" serves"), *(token.id for token in first)]
        own.append(token_ids=[each for place, each in enumerate(ids) if place not in (1, 2, 6)])
        assert alike(own.generate(temperature=0, max_tokens=4, use_store=False), forgot)
    with lm.session() as own:
        own.append(TEXT)
        own.append(" it")
        assert alike(own.generate(" serves", temperature=0, max_tokens=5, use_store=False), first)
        assert alike(own.generate(temperature=0, max_tokens=4, use_store=False), second)
    with pytest.raises(NotFound, match="it was deleted"):
        host.get_session(session.name)
    with pytest.raises(NotFound, match="no session 'x'"):
        host.generate("a", session="x")
    with pytest.raises(NotFound, match="no session 'x'"):
        host.forget_in_session("x", 0, 1)
    with pytest.raises(InvalidInput, match="ttl_s"):
        host.session(ttl_s=-1.0)


async def test_the_async_session_gives_the_same(server: RunningServer, lm: LanguageModel) -> None:
    async with AsyncClient(server.address) as client, await client.session() as session:
        await session.append(TEXT)
        stream = await session.generate(temperature=0, max_tokens=5, use_store=False)
        tokens = [token async for token in stream]
        twin = await session.fork()
        assert (await twin.info()).num_tokens == (await session.info()).num_tokens == len(lm.tokenize(TEXT)) + 5
        assert {info.name for info in await client.list_sessions()} >= {twin.name, session.name}
        await twin.forget(2, 7)
        assert (await twin.info()).num_tokens == len(lm.tokenize(TEXT))
        await twin.delete()
    with lm.session() as own:
        own.append(TEXT)
        assert alike(own.generate(temperature=0, max_tokens=5, use_store=False), tokens)


def test_a_caller_that_leaves_gives_the_session_back(narrow_server: RunningServer) -> None:
    with Client(narrow_server.address, timeout_s=60) as client, client.session() as session:
        session.append(TEXT)
        before = session.info().num_tokens
        stream = session.generate(temperature=0)
        next(stream)
        with pytest.raises(Locked, match="being used"):
            session.fork()
        stream.close()
        wait_until(lambda: not session.info().busy)
        assert session.info().num_tokens == before
        assert len(list(session.generate(max_tokens=3, seed=1))) <= 3


async def test_an_append_tells_how_far_it_is_and_may_be_cancelled(narrow_server: RunningServer) -> None:
    async with AsyncClient(narrow_server.address, timeout_s=60) as client, await client.session() as session:
        appending = asyncio.create_task(session.append(TEXT * 2000))
        seen = set()
        while len(seen) < 3:
            info = await session.info()
            if info.reading:
                seen.add(info.reading_done)
                assert 0 <= info.reading_done < info.reading
        appending.cancel()
        with pytest.raises((asyncio.CancelledError, MemlmError)):
            await appending
        while (info := await session.info()).busy:
            await asyncio.sleep(0.02)
        assert info.num_tokens == 0


def test_what_was_acknowledged_survives_a_killed_worker_and_a_restart(
    long_model: Path, tmp_path: Path, lm: LanguageModel
) -> None:
    options = ("--threads", "1", "--session-dir", str(tmp_path / "kept"))  # not forked: all its processes die
    with (
        RunningServer(tmp_path / "log", long_model, options=options, forked=False) as server,
        Client(server.address) as client,
    ):
        client.wait_until_ready()
        session = client.session()
        session.append(TEXT)
        list(session.generate(temperature=0, max_tokens=4))
        held = session.info().num_tokens
        expected = list(session.fork().generate(temperature=0, max_tokens=4))
        stream = session.generate(temperature=0)
        next(stream)
        for child in family_of(server.process.pid):
            os.kill(child, signal.SIGKILL)
        with pytest.raises(MemlmError):
            list(stream)
        client.wait_until_ready()
        wait_until(lambda: _there(client, session.name))
        assert client.get_session(session.name).num_tokens == held
    with (
        RunningServer(tmp_path / "log", long_model, options=options, forked=False) as server,
        Client(server.address) as client,
    ):
        client.wait_until_ready()
        assert client.get_session(session.name).num_tokens == held
        info = list(client.generate("", session=session.name, temperature=0, max_tokens=4))
        assert [token.logprob for token in info] == [token.logprob for token in expected]


def _there(client: Client, name: str) -> bool:
    try:
        return bool(client.get_session(name))
    except MemlmError:
        return False


def test_sessions_from_a_shell(server: RunningServer, tmp_path: Path, lm: LanguageModel) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--target", server.address])
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    name = run("session", "create", "--ttl", "600")
    (tmp_path / "long.txt").write_text(TEXT)
    assert "tokens" in run("session", "append", name, str(tmp_path / "long.txt"))
    twin = run("session", "fork", name)
    assert f"{len(lm.tokenize(TEXT)) - 2} tokens" in run("session", "forget", twin, "1", "3")
    assert run("generate", " it", "--session", twin, "--max-tokens", "3", "--seed", "1")
    listed = run("session", "info")
    assert name in listed
    assert twin in listed
    assert name in run("session", "info", name)
    for each in (name, twin):
        assert each in run("session", "delete", each)
    assert name not in run("session", "info")
