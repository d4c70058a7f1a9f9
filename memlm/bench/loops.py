"""Loops of greedy text, and verbatim continuations: the model alone, with memory, and with the guard against loops.

Prompts of held-out text show whether memory makes a text go round in circles. Prompts of texts that stand in the
datastore must still be continued by what follows there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel, load

PROMPT_TOKENS, TOKENS, RUN = 100, 60, 4
LOOPING = 0.5  # a text with fewer distinct runs than this share
AT_ONCE = 25
MAX_TRIES = 200  # of a prompt


def bench_loops(
    model: str | Path,
    store: str | Path,
    held_out: Corpus,
    *,
    settings: Mapping[str, Any],
    prompts: int = 100,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """`distinct` is the mean share of different runs of 4 tokens in 60 greedy ones, `looping` the share of texts in
    which fewer than half of the runs differ. `verbatim` is the share of the tokens of a stored text that are continued
    right before the first wrong one.

    `settings` are fields of `RetrievalParams` that replace the datastore's own.
    """
    with load(model, [store], dtype=dtype, device=device) as lm:
        rng = np.random.default_rng(0)
        held = [lm.checkpoint.tokenizer.encode(document.text).tolist() for document in held_out]
        snapshot = lm.engine.stores.model_store().snapshot
        stored = [snapshot.tokens(document.id).tolist() for document in snapshot.documents()]
        starts = list(_prompts(lm, held, prompts, rng))
        known = list(_prompts(lm, stored, prompts, rng))
        figures: dict[str, Any] = {"prompts": prompts, "tokens": TOKENS}
        ways = {"model": {"use_store": False}, "memory": {**settings, "loop_guard": False}, "guarded": {**settings}}
        for number, (way, options) in enumerate(ways.items()):
            progress("generate", number, len(ways), way)
            texts = _continued(lm, [prompt for prompt, _ in starts], options)
            shares = np.array([distinct_runs(ids) for ids in texts])
            figures |= {f"{way}_distinct": float(shares.mean()), f"{way}_looping": float((shares < LOOPING).mean())}
            texts = _continued(lm, [prompt for prompt, _ in known], options)
            pairs = zip(texts, [truth for _, truth in known], strict=True)
            figures[f"{way}_verbatim"] = float(np.mean([right_before_wrong(ids, truth) for ids, truth in pairs]))
        progress("generate", len(ways), len(ways))
    return figures


def distinct_runs(ids: Sequence[int]) -> float:
    """The share of different runs of `RUN` tokens in a text."""
    runs = [tuple(ids[begin : begin + RUN]) for begin in range(len(ids) - RUN + 1)]
    return len(set(runs)) / max(1, len(runs))


def right_before_wrong(ids: Sequence[int], truth: Sequence[int]) -> float:
    """The share of the true tokens that were generated before the first wrong one."""
    equal = [one == other for one, other in zip(ids, truth, strict=False)]
    return (equal.index(False) if False in equal else len(equal)) / len(truth)


def _prompts(
    lm: LanguageModel, documents: Sequence[list[int]], count: int, rng: np.random.Generator
) -> Iterator[tuple[str, list[int]]]:
    """Places drawn at random: a text, which has the tokens that it was cut from, and the tokens that follow it."""
    tokenizer, needed = lm.checkpoint.tokenizer, PROMPT_TOKENS + TOKENS
    long = [ids for ids in documents if len(ids) > needed]
    if not long:
        raise InvalidInput(f"no text has more than {needed} tokens; give longer ones", field="texts")
    for _ in range(count):
        for _ in range(MAX_TRIES):
            ids = long[int(rng.integers(len(long)))]
            begin = int(rng.integers(len(ids) - needed))
            middle = begin + PROMPT_TOKENS
            prompt = tokenizer.decode(ids[begin:middle])
            if tokenizer.encode(prompt).tolist() == ids[begin:middle]:
                break
        yield prompt, ids[middle : middle + TOKENS]


def _continued(lm: LanguageModel, prompts: Sequence[str], options: dict[str, Any]) -> list[list[int]]:
    texts = []
    for begin in range(0, len(prompts), AT_ONCE):
        batch = prompts[begin : begin + AT_ONCE]
        completions = lm.generate_batch(batch, temperature=0, max_tokens=TOKENS, **options)
        texts += [[token.id for token in completion.tokens] for completion in completions]
    return texts
