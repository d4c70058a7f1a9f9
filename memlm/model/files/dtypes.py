"""Types of weights compared on a sample of text: perplexity, size, and the time of a token."""

from __future__ import annotations

import math
import pydoc_data.topics
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from memlm.base.compute import AUTO
from memlm.base.progress import Progress, silent
from memlm.model.device import dtype_of
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint

REFERENCE = "float32"
SAME = 1.001  # a ratio of perplexities that a reader does not notice
WINDOW, STEPS = 512, 24


def check_dtypes(
    model: str | Path, *, max_tokens: int = 8192, repeats: int = 3, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Returns a row for each type that predicts on the processor: its bytes, milliseconds a token of one text, and the
    perplexity of a sample over that of float32, with the standard error of the paired difference.

    The sample is Python's own reference, in English. One model is in memory at a time, so the times of a type come from
    one stretch: measure on a quiet machine.
    """
    names = [REFERENCE, AUTO, "int8", "int4"]
    if dtype_of(AUTO, torch.device("cpu")) == torch.bfloat16:
        names.insert(2, "bfloat16")
    rows, expected_N = list[dict[str, Any]](), np.empty(0)
    for number, dtype in enumerate(names):
        progress("check", number, len(names), dtype)
        checkpoint = load_checkpoint(model, dtype=dtype, device="cpu")
        nats_N = _nats(checkpoint, max_tokens)
        expected_N = nats_N if dtype == REFERENCE else expected_N
        difference_N = nats_N - expected_N
        rows.append({
            "dtype": dtype,
            "weights": checkpoint.decoder.dtype_name,
            "bytes": checkpoint.decoder.num_bytes,
            "ms_per_token": median(_ms_per_token(checkpoint) for _ in range(repeats)),
            "perplexity": math.exp(nats_N.mean()),
            "ratio": math.exp(difference_N.mean()),
            "ratio_error": float(difference_N.std() / math.sqrt(len(nats_N))),
            "tokens": len(nats_N),
        })  # fmt: skip
    progress("check", len(names), len(names))
    return rows


def recommended(rows: list[dict[str, Any]]) -> str:
    """The fastest type whose perplexity differs from float32's by at most 0.1 %."""
    return str(min((row for row in rows if row["ratio"] <= SAME), key=lambda row: row["ms_per_token"])["dtype"])


def _nats(checkpoint: Checkpoint, max_tokens: int) -> Float64[np.ndarray, " N"]:
    """Nats of each token of the sample, in windows that begin anew."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    window = min(WINDOW, checkpoint.decoder.config.context_length)
    ids = torch.from_numpy(checkpoint.tokenizer.encode(text)[:max_tokens].astype(np.int64))
    nats = []
    with torch.inference_mode():
        for ids_T in ids.split(window):
            if len(ids_T) > 1:
                logprobs_TV = checkpoint.decoder.logprobs(checkpoint.decoder(ids_T[None, :-1])[0][0])
                nats.append(-logprobs_TV.gather(1, ids_T[1:, None])[:, 0].double().numpy())
    return np.concatenate(nats)


def _ms_per_token(checkpoint: Checkpoint) -> float:
    """Milliseconds of a step of one text, after the first ones."""
    decoder, times = checkpoint.decoder, []
    token_11 = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        state = decoder.new_state(capacity=STEPS)
        for _ in range(STEPS):
            begin = time.perf_counter()
            decoder.logprobs(decoder(token_11, state)[0])
            times.append(1000 * (time.perf_counter() - begin))
    return median(times[STEPS // 3 :])
