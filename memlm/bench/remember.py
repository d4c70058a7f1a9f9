"""Seconds until a text is remembered, over the bare prefill of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model.checkpoint import Checkpoint

SHORT_TOKENS = 8


def bench_remember(
    checkpoint: Checkpoint,
    texts: Corpus,
    work: str | Path,
    *,
    num_tokens: int = 1000,
    repeats: int = 5,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Remembers pieces of `num_tokens` tokens in a new datastore in the folder `work`, and reads each as a prompt for
    one token of the model alone, by turns. `short_s` is the time to remember a few tokens, which is mostly the commit.
    """
    tokenizer, texts_left = checkpoint.tokenizer, iter(texts)
    first = next(texts_left)
    build_index(checkpoint, [first], Path(work) / "store", check="none")
    needed = repeats * (num_tokens + SHORT_TOKENS)
    ids = list[int]()
    while len(ids) < needed and (document := next(texts_left, None)) is not None:
        ids += tokenizer.encode(document.text).tolist()
    if len(ids) < needed:
        raise InvalidInput(f"the texts behind the first have {len(ids):,} tokens, and this needs {needed:,}; give more")
    rows = list[tuple[float, float, float]]()
    with LanguageModel(checkpoint, [Path(work) / "store"]) as lm:

        def remember_s(token_ids: Sequence[int], name: str) -> float:
            text = lm.detokenize(token_ids)
            return _seconds(lambda: lm.remember(text, document_id=name))

        for number in range(repeats):
            piece, ids = ids[:num_tokens], ids[num_tokens:]
            short, ids = ids[:SHORT_TOKENS], ids[SHORT_TOKENS:]
            prefill_s = _seconds(partial(_read, lm, piece))
            rows.append((prefill_s, remember_s(piece, f"long {number}"), remember_s(short, f"short {number}")))
            progress("remember", number + 1, repeats)
        segments = len(lm.engine.stores.model_store().snapshot.segments)
    prefills, remembers, shorts = zip(*rows, strict=True)
    return {
        "tokens": num_tokens,
        "prefill_s": median(prefills),
        "remember_s": median(remembers),
        "over_prefill": median(remember / prefill for prefill, remember, _ in rows),
        "short_s": median(shorts),
        "slowest_remember_s": max(remembers),
        "segments": segments,
    }


def _read(lm: LanguageModel, ids: Sequence[int]) -> None:
    lm.generate(ids, max_tokens=1, use_store=False, drafts=0).result()


def _seconds(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s
