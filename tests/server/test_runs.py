"""What is kept of generations for their clients, and how much of it."""

import asyncio
import pickle
import queue
from contextlib import aclosing
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from running import PATIENCE_S

from memlm.api.datastores import ListDatastoresRequest
from memlm.api.generation import Accepted, Finished, FinishReason, Usage
from memlm.api.params import GenerateRequest
from memlm.api.passages import AnswerPrompt, Passage
from memlm.errors import Incompatible, InternalError, InvalidInput, NotFound, Overloaded
from memlm.server.config import ServerConfig
from memlm.server.frontend.streams import ResumableGeneration, ResumableGenerationRegistry
from memlm.server.inference.deletions import Deletions
from memlm.server.inference.handle import WorkerHandle, _start_and_write
from memlm.server.inference.messages import MAX_EVENT_BYTES, Cancel, Events, Failed, Submission
from memlm.server.inference.requests import PendingRequest
from memlm.server.quota import Quota

FINISHED = Finished(FinishReason.LENGTH, None, Usage())
TOKEN = b"t" * 100


def runs_of(total: int, most: int, per_caller: int | None = None) -> tuple[ResumableGenerationRegistry, Quota]:
    quota = Quota("bytes", total, per_caller or total)
    return ResumableGenerationRegistry(quota, most), quota


def begun(
    runs: ResumableGenerationRegistry, name: str, caller: str = "ann", num_tokens: int = 0
) -> ResumableGeneration:
    """A generation that has drawn so many tokens."""
    run = runs.new(caller, caller, 60.0, Deletions().latest)
    runs.add(run, Accepted(name, 1, None, 0, 0.0, 0.0))
    for _ in range(num_tokens):
        runs.add(run, (TOKEN,))
    return run


def ended(
    runs: ResumableGenerationRegistry, name: str, caller: str = "ann", num_tokens: int = 0
) -> ResumableGeneration:
    run = begun(runs, name, caller, num_tokens)
    runs.add(run, FINISHED)
    return run


async def test_a_generation_that_nobody_follows_ends_when_what_is_kept_is_full() -> None:
    runs, quota = runs_of(10_000, 1_000)
    run = begun(runs, "a", num_tokens=10)
    with pytest.raises(Overloaded, match="1,000 bytes"):
        runs.add(run, (TOKEN,))
    runs.drop(run, "why")
    assert quota.taken == 0


async def test_a_follower_that_reads_along_never_fills_what_is_kept() -> None:
    """The oldest tokens are dropped; who comes back for them hears why they are gone, others go on."""
    runs, _ = runs_of(10_000, 1_000)
    run = begun(runs, "a", num_tokens=10)
    async with aclosing(run.follow(0)) as events:
        assert isinstance(await anext(events), Accepted)
        seen = len(await anext(events))
        for _ in range(40):
            reading = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            runs.add(run, (TOKEN,))
            seen += len(await reading)
        assert seen == run.num_generated == 50
        assert run.num_bytes <= 1_000
    with pytest.raises(Incompatible, match="tokens are kept from"):
        await anext(run.follow(0))
    resumed = run.follow(50)
    assert isinstance(await anext(resumed), Accepted)
    await resumed.aclose()


async def test_the_oldest_that_ended_gives_way_and_its_owner_hears_why() -> None:
    runs, quota = runs_of(2_000, 1_000)
    ended(runs, "a", num_tokens=8)
    ended(runs, "b", num_tokens=8)
    ended(runs, "c", num_tokens=8)
    with pytest.raises(NotFound, match="memory was needed for others"):
        runs.find("a", "ann")
    with pytest.raises(NotFound) as of_another:
        runs.find("a", "bob")
    assert "memory" not in str(of_another.value)
    assert [runs.find(name, "ann").num_bytes for name in ("b", "c")] == [800, 800]
    assert quota.taken == 1_600


async def test_a_caller_with_too_much_displaces_none_but_its_own() -> None:
    runs, _ = runs_of(4_000, 1_000, per_caller=1_000)
    ended(runs, "of bob", "bob", num_tokens=8)
    for number in range(5):
        ended(runs, str(number), "ann", num_tokens=8)
    assert runs.find("of bob", "bob").num_bytes == 800
    assert runs.find("4", "ann").num_bytes == 800
    with pytest.raises(NotFound):
        runs.find("3", "ann")


def accepted(num_characters: int) -> Accepted:
    """The first event of an answer whose prompt has so many characters, with its passages."""
    passages = [Passage("s", "d", "", 0, 9, "a" * (num_characters // 4 - 2), 1.0) for _ in range(2)]
    prompt = AnswerPrompt("a" * (num_characters // 2), 9, (passages[0],), (1,), (passages[1],))
    return Accepted("a", 1, None, 0, 0.0, 0.0, prompt)


async def test_the_prompt_of_an_answer_counts_with_its_passages() -> None:
    runs, quota = runs_of(2_000, 1_000)
    run = runs.new("ann", "ann", 60.0, Deletions().latest)
    runs.add(run, accepted(600))
    assert quota.of("ann") == run.num_bytes == 600
    async with aclosing(run.follow(0)) as events:
        assert isinstance(await anext(events), Accepted)
        for _ in range(20):  # tokens that were delivered give way, the prompt stays
            runs.add(run, (TOKEN,))
            await anext(events)
        assert 600 < run.num_bytes <= 1_000
    runs.add(run, (TOKEN * ((1_000 - run.num_bytes) // 100),))
    with pytest.raises(Overloaded, match="1,000 bytes"):
        runs.add(run, (TOKEN,))
    runs.drop(run, "why")
    assert quota.taken == 0
    with pytest.raises(Overloaded):
        runs.add(runs.new("ann", "ann", 60.0, Deletions().latest), accepted(1_200))
    with quota.hold("ann") as holding:
        call = PendingRequest(holding, 1_000)
        call.put(Events("a", (accepted(800),)))
        assert quota.taken == 800
        with pytest.raises(Overloaded, match="1,000 bytes of this generation waited"):
            call.put(Events("a", ((TOKEN,) * 3,)))
        with pytest.raises(InvalidInput, match="1,200 bytes, and 1,000 may wait"):  # asked again, it would be as large
            call.put(Events("a", (accepted(1_200),)))


async def test_what_a_follower_still_reads_is_counted_until_it_leaves() -> None:
    runs, quota = runs_of(10_000, 1_000)
    run = ended(runs, "a", num_tokens=10)
    events = run.follow(0)
    await anext(events)
    runs.stop("a", run)
    assert quota.taken == 1_000
    assert len(await anext(events)) == 10
    await events.aclose()
    assert quota.taken == 0


async def test_what_piled_up_is_sent_in_events_of_bounded_size() -> None:
    runs, _ = runs_of(1 << 30, 1 << 30)
    run = begun(runs, "a")
    runs.add(run, (b"t" * 100_000,) * 100)
    runs.add(run, FINISHED)
    sizes = [sum(map(len, event)) async for event in run.follow(0) if isinstance(event, tuple)]
    assert sum(sizes) == 10_000_000
    assert max(sizes) < MAX_EVENT_BYTES + 100_000


async def test_answers_are_taken_together_in_order_and_give_back_their_bytes() -> None:
    quota = Quota("bytes", 1_000, 1_000)
    with quota.hold("ann") as holding:
        call = PendingRequest(holding, 1_000)
        ones, others = Events("a", ((TOKEN,),)), Events("a", ((TOKEN, TOKEN), FINISHED))
        for answers in ([ones], [ones, others]):  # before somebody waits
            for answer in answers:
                call.put(answer)
            assert quota.of("ann") == sum(len(TOKEN) * len(answer.events[0]) for answer in answers)
            assert await asyncio.wait_for(call.take(), PATIENCE_S) == answers
            assert quota.taken == 0
        taking = asyncio.create_task(call.take())
        await asyncio.sleep(0)
        assert not taking.done()
        call.put(ones)  # while somebody waits
        call.put(others)
        assert await asyncio.wait_for(taking, PATIENCE_S) == [ones, others]
        leaving = asyncio.create_task(call.take())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        call.put(ones)  # after somebody has stopped to wait
        assert await asyncio.wait_for(call.take(), PATIENCE_S) == [ones]
        assert quota.taken == 0
    assert pickle.loads(pickle.dumps(others)) == others


async def test_an_event_that_can_never_fit_ends_its_generation() -> None:
    handle = WorkerHandle(ServerConfig(Path("m"), max_stream_bytes=20_000), 0, dict)
    with handle._event_bytes.hold("ann") as holding:
        handle._pending["a"] = call = PendingRequest(holding, 20_000)
        handle._on_answer(Events("a", (accepted(30_000),)))
        (failed,) = await call.take()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidInput)
    assert handle.num_open == 0


def test_a_request_that_cannot_be_pickled_fails_alone() -> None:
    """The thread goes on with those of others."""
    here, there = Pipe()
    deep, failed, started = dict[str, Any](), list[Failed](), list[bool]()
    for _ in range(5_000):
        deep = {"a": deep}
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    messages = [Submission("deep", cast("Any", deep), 0.0, None), Submission("odd", cast("Any", lambda: 0), 0.0, None)]
    for message in (*messages, Cancel("next"), None):
        outgoing.put(message)
    process = cast("Any", SimpleNamespace(start=lambda: started.append(True)))
    _start_and_write(process, Pipe()[1], here, outgoing, failed.append)
    assert started
    assert there.poll()
    assert there.recv() == Cancel("next")
    assert [each.id for each in failed] == ["deep", "odd"]
    assert all(isinstance(each.error, InternalError) for each in failed)
    assert "RecursionError" in str(failed[0].error)


async def test_a_worker_answers_after_a_request_that_could_not_be_sent(long_model: Path) -> None:
    handle = WorkerHandle(ServerConfig(long_model, num_threads=1), 0, dict)
    await handle.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(InternalError, match="could not be sent to a worker"):
                await handle.ask(cast("Any", lambda: 0))
            assert await handle.ask(ListDatastoresRequest()) == ()
        assert handle.num_open == 0
    finally:
        await handle.stop(5)


async def test_a_generation_whose_client_does_not_read_ends(long_model: Path) -> None:
    """Instead of filling the front's memory; its place in the worker is free again."""
    link = WorkerHandle(ServerConfig(long_model, num_threads=1, max_stream_bytes=20_000), 0, dict)
    await link.start()
    try:
        with link.submit(GenerateRequest.of("a", {"temperature": 0.0, "max_tokens": 30_000}), None) as call:
            async with asyncio.timeout(60):
                while link.num_open:
                    await asyncio.sleep(0.05)
                while link.stats.running or not link.is_serving:
                    await asyncio.sleep(0.05)
            *answers, last = await call.take()
        assert isinstance(last, Failed)
        assert isinstance(last.error, Overloaded)
        waited = [event for each in answers if isinstance(each, Events) for event in each.events]
        assert 0 < sum(len(token) for event in waited if isinstance(event, tuple) for token in event) <= 20_000
    finally:
        await link.stop(5)
