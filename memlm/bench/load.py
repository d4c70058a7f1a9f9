"""A server under load: tokens/s, time to the first token and between tokens.

Closed loop: a number of streams, each of which sends its next request after the last answer. Open loop: requests arrive
at random (Poisson) at a share of the closed loop's rate, and latency counts from their arrival. The client shares the
cores with the server.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memlm.base.progress import Progress
from memlm.bench.machine import measured_bandwidth, measured_peak
from memlm.bench.texts import PROMPT
from memlm.client import AsyncClient
from memlm.errors import Overloaded
from memlm.language_model import load
from memlm.server.local import started_server

MAX_TOKENS = 64
OPEN_LOAD = 0.7  # of what the closed loop got through
PERCENTILES = (50, 95, 99)
TRIES = 20


@dataclass
class Seen:
    """Tokens, seconds to the first token of each answer, and seconds between tokens."""

    tokens: int = 0
    answers: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def figures(self, prefix: str, seconds: float) -> dict[str, float]:
        """By name."""
        found = {f"{prefix}_tokens_per_s": self.tokens / seconds, f"{prefix}_answers_per_s": self.answers / seconds}
        for name, times in (("first_token", self.first_s), ("between_tokens", self.gaps_s)):
            for percent in PERCENTILES:
                found[f"{prefix}_{name}_ms_p{percent}"] = 1000 * _percentile(times, percent)
        return found


def bench_load(
    model: Path,
    stores: Sequence[Path],
    *,
    streams: Sequence[int],
    seconds: float,
    repeats: int,
    workers: int = 1,
    progress: Progress,
) -> dict[str, Any]:
    """`speedup` is the tokens/s of the most streams relative to one stream. Medians of `repeats` turns."""
    figures: dict[str, Any] = {}
    with started_server(model, *stores, options=("--workers", str(workers))) as target:
        kinds = {"plain": False, "store": True} if stores else {"plain": False}
        for kind, use_store in kinds.items():
            figures |= asyncio.run(_closed(target, kind, use_store, streams, seconds, repeats, progress))
        rate = OPEN_LOAD * figures[f"plain_{streams[-1]}_answers_per_s"]
        figures |= asyncio.run(_open(target, rate, seconds))
    return figures | _when_full(model) | _bounds(model, figures, max(streams))


async def _closed(
    target: str, kind: str, use_store: bool, streams: Sequence[int], seconds: float, repeats: int, progress: Progress
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    speeds: dict[int, list[float]] = {count: [] for count in streams}
    async with _client(target) as client:
        await _loop(client, max(streams), min(2.0, seconds), use_store)
        for repeat in range(repeats):
            for number, count in enumerate(streams):
                seen = await _loop(client, count, seconds, use_store)
                measured = seen.figures(f"{kind}_{count}", seconds)
                speeds[count].append(measured[f"{kind}_{count}_tokens_per_s"])
                figures |= measured
                progress(f"closed loop, {kind}", repeat * len(streams) + number + 1, repeats * len(streams))
    for count in streams:
        figures[f"{kind}_{count}_tokens_per_s"] = statistics.median(speeds[count])
    ratios = [most / one for most, one in zip(speeds[streams[-1]], speeds[streams[0]], strict=True)]
    key = f"{kind}_speedup"
    return {**figures, key: statistics.median(ratios), f"{key}_least": min(ratios), f"{key}_most": max(ratios)}


async def _loop(client: AsyncClient, count: int, seconds: float, use_store: bool) -> Seen:
    """Runs a number of streams for some seconds. Later tokens do not count."""
    seen, end_s = Seen(), time.perf_counter() + seconds

    async def one(number: int) -> None:
        seed = number
        while time.perf_counter() < end_s:
            await _ask(client, seed, time.perf_counter(), end_s, seen, use_store)
            seed += 1000

    await asyncio.gather(*(one(number) for number in range(count)))
    return seen


async def _open(target: str, rate: float, seconds: float) -> dict[str, float]:
    """Requests that arrive at random, `rate` a second."""
    rng, seen, begin_s = random.Random(0), Seen(), time.perf_counter()
    tasks: list[asyncio.Task[None]] = []
    arrival_s = begin_s
    async with _client(target) as client:
        while arrival_s < begin_s + seconds:
            await asyncio.sleep(max(0.0, arrival_s - time.perf_counter()))
            tasks.append(asyncio.create_task(_ask(client, len(tasks), arrival_s, float("inf"), seen, False)))
            arrival_s += rng.expovariate(rate)
        await asyncio.gather(*tasks)
    elapsed = time.perf_counter() - begin_s
    return {"open_requests_per_s": rate, **seen.figures("open", elapsed)}


async def _ask(client: AsyncClient, seed: int, begin_s: float, end_s: float, seen: Seen, use_store: bool) -> None:
    last_s = None
    async with await client.generate(PROMPT, seed=seed, max_tokens=MAX_TOKENS, use_store=use_store) as stream:
        async for _ in stream:
            now_s = time.perf_counter()
            if now_s > end_s:
                return
            if last_s is None:
                seen.first_s.append(now_s - begin_s)
            else:
                seen.gaps_s.append(now_s - last_s)
            last_s = now_s
            seen.tokens += 1
        seen.answers += 1


def _when_full(model: Path) -> dict[str, float]:
    """Milliseconds until a full server refuses, and until a cancelled request frees its place."""
    with started_server(model, options=("--max-running", "1", "--max-queued", "1")) as target:
        return asyncio.run(_fill(target))


async def _fill(target: str) -> dict[str, float]:
    refused_s, freed_s = [], []
    async with _client(target) as client:
        for number in range(TRIES):
            running = await client.generate(PROMPT, seed=number)
            waiting = asyncio.create_task(client.generate(PROMPT, seed=number, max_tokens=1))
            await asyncio.sleep(0.02)
            if waiting.done():  # the first one ended by itself
                continue
            begin_s = time.perf_counter()
            try:
                await client.generate(PROMPT)
            except Overloaded:
                refused_s.append(time.perf_counter() - begin_s)
            begin_s = time.perf_counter()
            await running.aclose()
            async with await waiting:
                freed_s.append(time.perf_counter() - begin_s)
    return {
        "refused_ms": 1000 * statistics.median(refused_s) if refused_s else float("nan"),
        "cancel_to_next_accepted_ms": 1000 * statistics.median(freed_s) if freed_s else float("nan"),
    }


def _bounds(model: Path, figures: dict[str, Any], streams: int) -> dict[str, float]:
    """Shares of the physical bound: each step reads the weights once and multiplies once for each stream."""
    with load(model) as lm:
        decoder = lm.checkpoint.decoder
        reading_s = decoder.num_bytes / measured_bandwidth()
        product_s = 2 * decoder.num_parameters / measured_peak(torch.float32)
    one, many = 1 / max(reading_s, product_s), streams / max(reading_s, streams * product_s)
    return {
        "parameters": decoder.num_parameters,
        "plain_1_share_of_bound": figures["plain_1_tokens_per_s"] / one,
        f"plain_{streams}_share_of_bound": figures[f"plain_{streams}_tokens_per_s"] / many,
    }


@asynccontextmanager
async def _client(target: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(target, timeout_s=600) as client:
        await client.wait_until_ready()
        yield client


def _percentile(values: Sequence[float], percent: int) -> float:
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
