"""What the server adds to the time of a token, at one stream."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memlm.api import TokenStream
from memlm.bench.texts import alternately, library_texts, median_ratio, model_for, time_per_token, workplace
from memlm.client import Client
from memlm.demo import started_server
from memlm.language_model import load
from memlm.progress import Progress

CORPUS_BYTES = 900_000


def bench_serve(model: Path | None, *, repeats: int, progress: Progress) -> dict[str, Any]:
    """`grpc_over_in_process` is the time per token through gRPC over the time per token in process, without a
    datastore.

    The first token is left out on both sides. While one side is measured the other is idle.
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
    ratio, least, most = median_ratio(remote, local)
    return {
        "grpc_over_in_process": ratio,
        "grpc_over_in_process_least": least,
        "grpc_over_in_process_most": most,
        "ms_per_token_grpc": statistics.median(remote),
        "ms_per_token_in_process": statistics.median(local),
    }
