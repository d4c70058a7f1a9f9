"""Our server against `generate` of `transformers`, on one checkpoint: GPT-2 small with random weights."""

from __future__ import annotations

import asyncio
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from memlm.base.progress import Progress
from memlm.bench.machine import multiplied_dtypes
from memlm.bench.texts import PROMPT, alternately, library_texts, median_ratio, workplace
from memlm.client import AsyncClient
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.server.local import started_server

CORPUS_BYTES = 900_000
VOCAB_SIZE = 8192  # of the tokenizer; the model has rows for all of GPT-2's, as theirs
NEW_TOKENS = 64
STREAMS = (1, 16)


def bench_versus_transformers(*, repeats: int, progress: Progress) -> dict[str, Any]:
    """`<dtype>_<streams>_over_transformers` is our tokens/s relative to theirs, prompts included, greedy on both sides.

    Theirs takes all prompts as one batch. `<dtype>_<streams>_over_one_by_one` is relative to theirs with one prompt at
    a time. Emulated dtypes are skipped, because theirs takes 38 times as long a step there. Raises InvalidInput without
    `transformers`.
    """
    if find_spec("transformers") is None:
        raise InvalidInput("this bench needs transformers; install it (pip install transformers)")
    figures: dict[str, Any] = {}
    with workplace() as folder, asyncio.Runner() as runner:
        reference = _gpt2(folder)
        for dtype, narrow in multiplied_dtypes().items():
            model = reference.to(narrow).eval()
            with started_server(folder / "model", options=("--dtype", dtype)) as target:
                for number, streams in enumerate(STREAMS):
                    runner.run(_server_speed(target, streams))  # warms both sides up
                    _transformers_speed(model, folder, streams)
                    server_speeds, reference_speeds = alternately(
                        repeats,
                        lambda streams=streams, target=target: runner.run(_server_speed(target, streams)),  # type: ignore[misc]
                        lambda streams=streams, model=model: _transformers_speed(model, folder, streams),  # type: ignore[misc]
                    )
                    key, (ratio, least, most) = f"{dtype}_{streams}", median_ratio(server_speeds, reference_speeds)
                    figures |= {
                        f"{key}_over_transformers": ratio,
                        f"{key}_tokens_per_s": statistics.median(server_speeds),
                    }
                    figures |= {f"{key}_over_transformers_least": least, f"{key}_over_transformers_most": most}
                    if streams == 1:
                        one_by_one = statistics.median(reference_speeds)
                    else:
                        figures |= {f"{key}_over_one_by_one": statistics.median(server_speeds) / one_by_one}
                    progress(dtype, number + 1, len(STREAMS))
    return figures


def _gpt2(folder: Path) -> Any:
    """A model of GPT-2's shape in the format of transformers, with a tokenizer of memlm."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    texts = library_texts(folder / "texts", CORPUS_BYTES)
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    model.save_pretrained(folder / "model")
    tokenizer = Tokenizer.train((document.text for document in Corpus([texts])), vocab_size=VOCAB_SIZE)
    tokenizer.save(folder / "model")
    return model


async def _server_speed(target: str, streams: int) -> float:
    """Tokens/s of concurrent requests."""

    async def ask(client: AsyncClient) -> int:
        async with await client.generate(PROMPT, temperature=0, max_tokens=NEW_TOKENS) as stream:
            return len([token async for token in stream])

    async with AsyncClient(target, timeout_s=600) as client:
        await client.wait_until_ready()
        begin_s = time.perf_counter()
        tokens = sum(await asyncio.gather(*(ask(client) for _ in range(streams))))
        return tokens / (time.perf_counter() - begin_s)


def _transformers_speed(model: Any, folder: Path, streams: int) -> float:
    """Tokens/s of prompts in one batch."""
    prompt = Tokenizer.load(folder / "model").prompt(PROMPT)
    options = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    prompts_BT = torch.tensor([prompt] * streams)
    begin_s = time.perf_counter()
    with torch.inference_mode():
        model.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), **options)
    return streams * NEW_TOKENS / (time.perf_counter() - begin_s)
