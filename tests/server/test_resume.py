"""Streams that break and are taken up again: nothing is lost, doubled, or left running."""

import asyncio
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from running import RunningServer, Wire, alike, wait_until

from memlm.api.generation import Accepted, Finished, ResumeGenerationRequest
from memlm.api.params import GenerateRequest
from memlm.client import AsyncClient, Client
from memlm.errors import InvalidInput, NotFound, Unavailable
from memlm.language_model import LanguageModel
from memlm.v1.generation_pb2_grpc import GenerationStub
from memlm.wire import codec

OPTIONS = {"temperature": 0, "max_tokens": 40, "neighbors": 2, "seed": 1}


@pytest.fixture
def cuttable(server: RunningServer) -> Iterator[Wire]:
    way = Wire(server.address)
    yield way
    way.close()


def test_a_stream_that_breaks_is_taken_up_where_it_was(cuttable: Wire, lm: LanguageModel) -> None:
    with Client(cuttable.address) as client, client.generate("the memory", resume_s=20, **OPTIONS) as stream:
        tokens = [next(stream) for _ in range(3)]
        cuttable.cut()
        threading.Timer(0.5, cuttable.mend).start()
        tokens += list(stream)
        assert stream.finished is not None
    assert alike(tokens, lm.generate("the memory", **OPTIONS))


async def test_the_async_client_does_the_same(cuttable: Wire, lm: LanguageModel) -> None:
    async with AsyncClient(cuttable.address) as client:
        stream = await client.generate("the memory", resume_s=20, **OPTIONS)
        tokens = list(await stream.take() or ())
        cuttable.cut()
        asyncio.get_running_loop().call_later(0.5, cuttable.mend)
        tokens += [token async for token in stream]
        assert await stream.take() is None
    assert alike(tokens, lm.generate("the memory", **OPTIONS))


def test_without_being_asked_for_a_break_is_an_end(cuttable: Wire) -> None:
    with Client(cuttable.address) as client, client.generate("the memory", **OPTIONS) as stream:
        next(stream)
        cuttable.cut()
        cuttable.mend()
        with pytest.raises(Unavailable):
            list(stream)


def test_any_token_can_be_gone_on_from_while_it_is_kept(server: RunningServer, client: Client) -> None:
    request = GenerateRequest.of("the memory", {**OPTIONS, "resume_s": 1.0})
    with grpc.insecure_channel(server.address) as channel:
        stub = GenerationStub(channel)
        events = [codec.event_from_wire(event) for event in stub.Generate(codec.to_wire(request))]
        accepted, *token_events, finished = events
        assert isinstance(accepted, Accepted)
        assert isinstance(finished, Finished)
        whole = [token for tokens in token_events for token in tokens]

        def resumed(offset: int, request_id: str = accepted.request_id) -> list:
            request = codec.to_wire(ResumeGenerationRequest(request_id, offset))
            return [codec.event_from_wire(event) for event in stub.ResumeGeneration(request)]

        for offset in (0, 1, len(whole)):
            first, *rest, last = resumed(offset)
            assert (first, last) == (accepted, finished)
            assert [token for tokens in rest for token in tokens] == whole[offset:]
        with pytest.raises(grpc.RpcError, match=f"{len(whole)} tokens have been drawn"):
            resumed(len(whole) + 1)
        with pytest.raises(grpc.RpcError, match="no generation 'x'"):
            resumed(0, "x")
        time.sleep(1.5)
        with pytest.raises(grpc.RpcError, match="could be resumed"):
            resumed(0)
    with pytest.raises(InvalidInput, match="resume_s"):
        client.generate("a", resume_s=1e9)
    with pytest.raises(InvalidInput, match="offset"):
        ResumeGenerationRequest("x", -1)


@pytest.mark.parametrize("how", ["closed", "abandoned"])
def test_what_nobody_comes_back_to_is_stopped(narrow_server: RunningServer, how: str) -> None:
    """Its only place is free again: at once where the client closed it, in time where it vanished."""
    way = Wire(narrow_server.address)
    with Client(way.address) as client:
        stream = client.generate("the memory", resume_s=60.0 if how == "closed" else 1.0, temperature=0)
        next(stream)
        if how == "closed":
            stream.close()
        else:
            way.cut()
        begin_s = time.monotonic()
        with Client(narrow_server.address) as other:
            assert len(list(other.generate("the memory", max_tokens=2, temperature=0))) == 2
        assert time.monotonic() - begin_s < 10
        if how == "abandoned":
            way.mend()
            with pytest.raises((NotFound, Unavailable)):
                list(stream)
    way.close()
    wait_until(lambda: "Traceback" not in narrow_server.output)
