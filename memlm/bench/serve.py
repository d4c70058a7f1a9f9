"""Overhead of the server: time per token at one stream and at many, shutdown, and the import of the client."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memlm.api.handles import TokenStream
from memlm.base.progress import Progress
from memlm.bench.texts import (
    PROMPT,
    TOKENS,
    alternately,
    library_texts,
    median_ratio,
    model_for,
    time_per_token,
    workplace,
)
from memlm.client import AsyncClient, Client
from memlm.data.corpus import Corpus
from memlm.generation.sessions.reading import PIECE_TOKENS
from memlm.language_model import load
from memlm.model import Decoder, decoding_threads
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.model.state.pool import UNBOUNDED
from memlm.server.local import started_server
from memlm.training.config import PRESETS

CORPUS_BYTES = 900_000
STREAMS = 32
LONG_CHARACTERS = 200_000
LOADS = {
    "import_grpc_ms": "import grpc",
    "import_client_ms": "import memlm.client",
    "import_and_connect_ms": "from memlm.client import Client; Client('localhost:1')",
}
LOADS_A_REPEAT = 3
CPU_SECONDS = "process_cpu_seconds_total "


def bench_serve(model: Path | None, *, repeats: int, progress: Progress) -> dict[str, Any]:
    """Measures the server's overhead, without a datastore.

    `grpc_over_in_process` is the time per token through gRPC relative to in process, without the first token.
    `front_us_per_token` is the processor time of the front end for a token at 32 streams, and `tokens_per_event` the
    number of tokens in an event, and `http_us_per_token` and `http_tokens_per_event` are the same for completions over
    HTTP. `append_over_prefill` is the tokens/s of a session's append relative to the bare
    decoder on equal pieces. `exit_idle_s` is the shutdown time of an idle server. `import_client_ms` is the import
    time of the client, `import_grpc_ms` of grpcio alone, and `import_and_connect_ms` of both.
    """
    with workplace() as folder:
        texts = library_texts(folder / "texts", CORPUS_BYTES)
        path = model_for(model, folder / "model", texts)
        with load(path) as lm, started_server(path) as target, Client(target) as client:
            client.wait_until_ready()
            for generate in (client.generate, lm.generate):
                time_per_token(generate, 0)
            seeds, count = iter(range(2, 10**6)), 0

            def measured(generate: Callable[..., TokenStream]) -> float:
                nonlocal count
                count += 1
                progress("generate", count, 2 * repeats)
                return time_per_token(generate, next(seeds) // 2)

            remote, local = alternately(repeats, lambda: measured(client.generate), lambda: measured(lm.generate))
        many = [asyncio.run(_at_many(path, number, repeats, progress)) for number in range(repeats)]
        over_http = [asyncio.run(_at_many_over_http(path, number, repeats, progress)) for number in range(repeats)]
        exits_s = [_exit_s(path) for _ in range(3)]
        appended, prefilled = _read_long(folder, texts, repeats, progress)
    loads_ms = _loads_ms(LOADS_A_REPEAT * repeats, progress)
    ratio, least, most = median_ratio(remote, local)
    reading, reading_least, reading_most = median_ratio(appended, prefilled)
    return {
        "grpc_over_in_process": ratio,
        "grpc_over_in_process_least": least,
        "grpc_over_in_process_most": most,
        "ms_per_token_grpc": statistics.median(remote),
        "ms_per_token_in_process": statistics.median(local),
        "streams": STREAMS,
        "front_us_per_token": statistics.median(us for us, _ in many),
        "tokens_per_event": statistics.median(tokens for _, tokens in many),
        "http_us_per_token": statistics.median(us for us, _ in over_http),
        "http_tokens_per_event": statistics.median(tokens for _, tokens in over_http),
        "append_over_prefill": reading,
        "append_over_prefill_least": reading_least,
        "append_over_prefill_most": reading_most,
        "append_tokens_per_s": statistics.median(appended),
        "exit_idle_s": statistics.median(exits_s),
        **loads_ms,
    }


async def _at_many(model: Path, number: int, repeats: int, progress: Progress) -> tuple[float, float]:
    """Microseconds of the front's processor time for a token of 32 streams, and tokens an event."""
    port = _free_port()
    with started_server(model, options=("--http-port", str(port))) as target:
        async with AsyncClient(target) as client:
            await client.wait_until_ready()
            await asyncio.gather(*(_drawn(client, seed) for seed in range(STREAMS)))
            before_s = await asyncio.to_thread(_cpu_seconds, port)
            counts = await asyncio.gather(*(_drawn(client, seed) for seed in range(STREAMS, 2 * STREAMS)))
            spent_s = await asyncio.to_thread(_cpu_seconds, port) - before_s
    progress("many streams", number + 1, repeats)
    tokens, events = (sum(each) for each in zip(*counts, strict=True))
    return 1e6 * spent_s / tokens, tokens / events


async def _at_many_over_http(model: Path, number: int, repeats: int, progress: Progress) -> tuple[float, float]:
    """The same for completions that are streamed over HTTP."""
    port = _free_port()
    with started_server(model, options=("--http-port", str(port))) as target:
        async with AsyncClient(target) as client:
            name = (await client.get_model()).name
        drawn = partial(_drawn_over_http, port, name)
        await asyncio.gather(*(drawn(seed) for seed in range(STREAMS)))
        before_s = await asyncio.to_thread(_cpu_seconds, port)
        counts = await asyncio.gather(*(drawn(seed) for seed in range(STREAMS, 2 * STREAMS)))
        spent_s = await asyncio.to_thread(_cpu_seconds, port) - before_s
    progress("many streams over HTTP", number + 1, repeats)
    tokens, events = (sum(each) for each in zip(*counts, strict=True))
    return 1e6 * spent_s / tokens, tokens / events


async def _drawn_over_http(port: int, model: str, seed: int) -> tuple[int, int]:
    """Tokens of some answers, and the events in which they came. The client is as small as can be."""
    tokens = events = 0
    while tokens < TOKENS:
        asked = {"model": model, "prompt": PROMPT, "seed": seed, "max_tokens": TOKENS, "stream": True}
        body = json.dumps({**asked, "stream_options": {"include_usage": True}})
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        answer = await reader.read()
        writer.close()
        *_, usage = (line for line in answer.split(b"\n") if b'"usage":' in line)
        tokens += json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
        events += answer.count(b"data: ") - 2  # the usage, and the end
        seed += 1_000_000
    return tokens, events


async def _drawn(client: AsyncClient, seed: int) -> tuple[int, int]:
    """Tokens of some answers, and the events in which they came."""
    tokens = events = 0
    while tokens < TOKENS:
        async with await client.generate(PROMPT, seed=seed, max_tokens=TOKENS) as stream:
            while (coming := await stream.take()) is not None:
                tokens, events = tokens + len(coming), events + 1
        seed += 1_000_000
    return tokens, events


def _read_long(folder: Path, texts: Path, repeats: int, progress: Progress) -> list[list[float]]:
    """Tokens/s of appends to a session, and of the bare decoder, for a model that reads any length."""
    path = folder / "long"
    checkpoint = load_checkpoint(model_for(None, folder / "short", texts))
    torch.manual_seed(0)
    decoder = Decoder(replace(PRESETS["tiny"], model_fields={"xl_length": 256}).model(checkpoint.tokenizer.vocab_size))
    save_checkpoint(path, decoder, checkpoint.tokenizer)
    decoder = load_checkpoint(path).decoder
    text = "".join(document.text for document in Corpus([texts]))[:LONG_CHARACTERS]
    tokens = torch.from_numpy(checkpoint.tokenizer.encode(text).astype("int64"))[None]

    def prefilled() -> float:
        state, begin_s = decoder.new_state(capacity=UNBOUNDED), time.perf_counter()
        for piece in tokens.split(PIECE_TOKENS, 1):
            with torch.inference_mode(), decoding_threads(decoder, piece.shape[1]):
                decoder.keys(piece, state)
        return tokens.shape[1] / (time.perf_counter() - begin_s)

    with started_server(path) as target, Client(target) as client:
        client.wait_until_ready()

        def appended() -> float:
            with client.session() as session:
                begin_s = time.perf_counter()
                session.append(text)
                return tokens.shape[1] / (time.perf_counter() - begin_s)

        alternately(1, appended, prefilled)
        figures = alternately(repeats, appended, prefilled)
    progress("long texts", repeats, repeats)
    return figures


def _cpu_seconds(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = answer.read().decode()
    return float(next(line for line in metrics.splitlines() if line.startswith(CPU_SECONDS)).split()[1])


def _exit_s(model: Path) -> float:
    with started_server(model) as target, Client(target) as client:
        client.wait_until_ready()
        begin_s = time.perf_counter()
    return time.perf_counter() - begin_s


def _loads_ms(repeats: int, progress: Progress) -> dict[str, float]:
    """Milliseconds of new processes that load something, in turns, beyond one that does nothing."""
    nothing, *loads = alternately(repeats, *(partial(_process_ms, code) for code in ("pass", *LOADS.values())))
    progress("new processes", repeats, repeats)
    median = statistics.median(nothing)
    return {name: statistics.median(each) - median for name, each in zip(LOADS, loads, strict=True)}


def _process_ms(code: str) -> float:
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return 1e3 * (time.perf_counter() - begin_s)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
