"""The context cache: nats per token with a text's own past, a datastore, and both, and the time of a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.needles import bench_needles
from benchmarks.per_token import per_token
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.bench.texts import time_per_token
from memlm.data.corpus import Corpus, Document
from memlm.data.windows import Window, WindowSize
from memlm.errors import InvalidInput
from memlm.generation.scoring import score_windows
from memlm.indexing.tune_context import LEAST_DOCUMENTS, fit_past, read_past
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.encoder import Encoder, text_windows, window_size
from memlm.retrieval.own_past import ContextSettings, OwnPast
from memlm.retrieval.retriever import Retriever

WINDOW = 512
SIZES = (8192, 65_536, 262_144)  # positions of a text that a token is searched in
SEARCHES = 20


def bench_context(
    model: Path,
    texts: Corpus,
    store: Path | None,
    *,
    window: int = WINDOW,
    max_tokens: int = 60_000,
    document_tokens: int = 8192,
    needles: int = 0,
    extended_attention: int = 16,
    repeats: int,
    progress: Progress,
) -> dict[str, Any]:
    """Nats per token of a model that reads windows, alone, and how many fewer with a datastore, with the text's own
    past, and with both. `time_a_token_<N>_over_none` is the time of a token with a past of N positions over that of one
    without.

    The past is tuned on every other document, and the figures are of the rest. Errors are standard errors over
    documents. With `needles`, `rows` tells how often keys in so many texts are found (benchmarks/needles.py). Raises
    InvalidInput for fewer than eight documents.
    """
    with LanguageModel(load_checkpoint(model), [] if store is None else [store]) as lm:
        size = window_size(lm.checkpoint.decoder, window)
        documents = list(_documents(lm, texts, max_tokens, document_tokens))
        if len(documents) < 2 * LEAST_DOCUMENTS:
            raise InvalidInput(
                f"there are {len(documents)} documents to read; give {2 * LEAST_DOCUMENTS} of held-out text at least,"
                " or raise max_tokens",
                field="texts",
            )
        evidence = read_past(
            lm.checkpoint, documents[::2], max_tokens=max_tokens, document_tokens=document_tokens, size=size,
            progress=progress,
        )  # fmt: skip
        settings = fit_past(evidence, texts.label).settings
        figures: dict[str, Any] = dict(_nats(lm, documents[1::2], settings, size, document_tokens, progress))
        figures |= {"k": settings.k, "temperature": settings.temperature, "lam": settings.lam}
        figures |= times_of(lm, documents[:2], settings, repeats)
    if needles:
        figures["rows"] = bench_needles(
            model, texts, settings, window=window, extended_attention=extended_attention, trials=needles,
            progress=progress,
        )  # fmt: skip
    return figures


def _documents(lm: LanguageModel, texts: Corpus, max_tokens: int, document_tokens: int) -> Iterator[Document]:
    """The longest documents, each counted up to `document_tokens`."""
    taken = 0
    for document in sorted(texts, key=lambda each: len(each.text), reverse=True):
        if taken >= max_tokens:
            return
        yield document
        taken += min(len(lm.tokenize(document.text)), document_tokens)


def _nats(
    lm: LanguageModel,
    documents: Sequence[Document],
    settings: ContextSettings,
    size: WindowSize,
    document_tokens: int,
    progress: Progress,
) -> dict[str, float]:
    """Nats of all documents in each way."""
    retriever = lm.engine.stores.retriever(RetrievalParams())
    ways: dict[str, tuple[Retriever | None, bool]] = {"context_cache": (None, True)}
    if retriever is not None:
        ways |= {"datastore": (retriever, False), "both": (retriever, True)}
    nats = {way: np.zeros(len(documents)) for way in ("alone", *ways)}
    sizes_N = np.zeros(len(documents))
    for number, document in enumerate(documents):
        for way, (searched, with_past) in ways.items():
            past = OwnPast(settings, ContextCache(lm.checkpoint.decoder.config.dim)) if with_past else None
            windows: Iterator[Window] = text_windows(lm.checkpoint, document.text, size)
            num_windows = 1 + max(0, document_tokens - size.window) // size.stride
            scored = list(score_windows(lm.checkpoint, islice(windows, num_windows), searched, past))
            mixed = [each.logprobs_N for each in scored if each.logprobs_N is not None]
            nats[way][number] = -float(np.concatenate(mixed).sum(dtype=np.float64))
        nats["alone"][number] = -sum(float(each.lm_logprobs_N.sum(dtype=np.float64)) for each in scored)
        sizes_N[number] = sum(len(each.targets_N) for each in scored)
        progress("score", number + 1, len(documents))
    figures: dict[str, float] = {"documents": len(documents), "tokens": int(sizes_N.sum())}
    figures["nats_per_token"] = nats["alone"].sum() / sizes_N.sum()
    for way in ways:
        less, error = per_token(nats["alone"] - nats[way], sizes_N)
        figures |= {f"nats_less_{way}": less, f"nats_less_{way}_error": error}
    return figures


def times_of(
    lm: LanguageModel, documents: Sequence[Document], settings: ContextSettings, repeats: int
) -> dict[str, float]:
    """The time of a search in pasts of several lengths, beside that of a token without. A past is made of the keys of
    documents, again and again with a tenth of their spread as noise.
    """
    token_ms = median(time_per_token(lm.generate, seed, use_store=False) for seed in range(repeats))
    figures, generator = {"token_ms": token_ms}, np.random.default_rng(0)
    windows = [window for each in documents for window in text_windows(lm.checkpoint, each.text, None)]
    keys_ND = np.concatenate(Encoder(lm.checkpoint.decoder).keys(windows)).astype(np.float32)
    noise = 0.1 * keys_ND.std()
    for size in SIZES:
        cache = ContextCache(keys_ND.shape[1])
        while len(cache) < size:
            near_ND = keys_ND + noise * generator.standard_normal(keys_ND.shape, np.float32)
            cache.append(near_ND[: size - len(cache)], np.zeros(min(len(keys_ND), size - len(cache)), np.int64))
        past, times = OwnPast(settings, cache), list[float]()
        for key_1D in keys_ND[:: max(1, len(keys_ND) // SEARCHES), None]:
            begin = perf_counter()
            past.search(key_1D, np.zeros(1, np.float32))
            times.append(1000 * (perf_counter() - begin))
        figures |= {f"search_ms_{size}": median(times), f"time_a_token_{size}_over_none": 1 + median(times) / token_ms}
    return figures
