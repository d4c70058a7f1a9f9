"""Speculative retrieval: how much faster text comes from datastores whose search takes its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from memlm.api.generation import Completion
from memlm.api.params import GenerateRequest
from memlm.base.progress import Progress
from memlm.base.steps import run_steps
from memlm.bench.texts import alternately, median_ratio
from memlm.data.corpus import Corpus
from memlm.generation.batch import complete_all
from memlm.index.neighbors import Neighbors
from memlm.index.store.exclusion import search_views
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.snapshot import Snapshot
from memlm.language_model import LanguageModel
from memlm.model.checkpoint import load_checkpoint

PROMPT_CHARACTERS, TOKENS = 600, 96
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8}}
WAYS = ("speculation", "copies", "none")  # all drafts, without those of the model itself, and no drafts


class DelayedSearch:
    """A search that takes `delay_s` longer, as one on another machine does. Counts the searches."""

    def __init__(self) -> None:
        self.delay_s, self.num_searches = 0.0, 0

    def __call__(
        self,
        views_Q: Sequence[Snapshot],
        queries_QD: Float32[np.ndarray, "Q D"],
        k: int,
        *,
        nprobe: int | None = None,
        only: DocumentFilter | None = None,
    ) -> Neighbors:
        """Searches in this process, after the delay."""
        time.sleep(self.delay_s)
        self.num_searches += 1
        return search_views(views_Q, queries_QD, k, nprobe=nprobe, only=only)


def bench_speculation(
    model: Path,
    store: Path,
    held_out: Corpus,
    *,
    prompts: int,
    delays_ms: Sequence[float],
    repeats: int,
    dtype: str,
    progress: Progress,
) -> dict[str, Any]:
    """Each row has a kind of text, a delay of each search, and ratios of tokens/s over all prompts, one after another:
    with speculative retrieval over copied drafts alone, and over no drafts. `identical` is the share of texts that it
    did not change.
    """
    texts = [document.text for document in held_out if len(document.text) > 2 * PROMPT_CHARACTERS][:prompts]
    middles = [text[len(text) // 2 :][:PROMPT_CHARACTERS] for text in texts]
    rows = []
    with LanguageModel(load_checkpoint(model, dtype=dtype), [store]) as lm:
        search = DelayedSearch()
        for loaded in lm.engine.stores:
            loaded.usable.search_views = search
        for number, (delay_ms, kind) in enumerate((delay_ms, kind) for delay_ms in delays_ms for kind in KINDS):
            progress("delays", number, len(delays_ms) * len(KINDS))
            search.delay_s = delay_ms / 1000
            rows.append({"prompts": kind, "delay_ms": delay_ms, **_compared(lm, search, middles, KINDS[kind], repeats)})
    return {"rows": rows, "model": lm.info.name}


def _compared(
    lm: LanguageModel, search: DelayedSearch, prompts: Sequence[str], options: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """The three ways in turns, after one round that is not measured and in which they learn what pays."""
    written: dict[str, list[Completion]] = {}
    searches: dict[str, int] = {}

    def tokens_per_s(way: str) -> float:
        before = search.num_searches
        written[way] = [_write(lm, prompt, way, options) for prompt in prompts]
        searches[way] = search.num_searches - before
        usages = [text.finished.usage for text in written[way]]
        return 1000 * sum(usage.generated_tokens - 1 for usage in usages) / sum(usage.decode_ms for usage in usages)

    for way in WAYS:
        tokens_per_s(way)
    speeds = dict(zip(WAYS, alternately(repeats, *(partial(tokens_per_s, way) for way in WAYS)), strict=True))
    over_copies, least, most = median_ratio(speeds["speculation"], speeds["copies"])
    drafts = [each for text in written["speculation"] for each in text.finished.usage.drafts if each.source == "nearby"]
    same = [a.text == b.text for a, b in zip(written["speculation"], written["none"], strict=True)]
    num_tokens = sum(text.finished.usage.generated_tokens for text in written["none"])
    return {
        "speculation_over_copies": over_copies,
        "speculation_over_copies_least": least,
        "speculation_over_copies_most": most,
        "speculation_over_none": median_ratio(speeds["speculation"], speeds["none"])[0],
        **{f"tokens_per_s_{way}": statistics.median(speeds[way]) for way in WAYS},
        **{f"searches_per_token_{way}": searches[way] / num_tokens for way in WAYS},
        "drafted": sum(each.drafted for each in drafts),
        "accepted": sum(each.accepted for each in drafts),
        "identical": sum(same) / len(same),
    }


def _write(lm: LanguageModel, prompt: str, way: str, options: dict[str, Any]) -> Completion:
    drafts = {"drafts": 0} if way == "none" else {}
    request = GenerateRequest.of(prompt, {"max_tokens": TOKENS, "seed": 1, "stop": (), **options, **drafts})
    generation = run_steps(lm.engine.start(request))
    if way == "copies":
        generation.guesser = None
    (completion,) = complete_all(lm.checkpoint, [generation])
    return completion
