"""Cost and gain of retrieval modes: fixed lam, adaptive lam, pruning.

Each mode is tuned on one text and evaluated on another, which neither datastore nor model contains. Positions are
searched one by one, as in decoding. The modes take turns, so that a slow minute hits them all. Gains are relative to
a fixed lam over the whole datastore, with the standard error over documents.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.indexing.option_trials import EncodedText
from memlm.indexing.tune import tune
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import Encoder, text_windows
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore


@dataclass(frozen=True, slots=True)
class Way:
    """One way of asking one store."""

    store: str
    name: str
    retriever: Retriever
    pruned: float


def bench_retrieval(
    model: str | Path | Checkpoint,
    stores: Sequence[str | Path],
    tuned_on: Corpus,
    judged_by: Corpus,
    *,
    max_tokens: int = 20_000,
    repeats: int = 3,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Tunes every mode on one text and evaluates it on another. Tuning changes the defaults of the datastores.

    Others, such as pruned ones, are compared with the first datastore.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    reads = _read(checkpoint, judged_by, max_tokens)
    ways = [way for store in stores for way in _ways(checkpoint, store, tuned_on, progress)]
    nats: dict[int, list[np.ndarray]] = {}
    seconds: dict[int, list[float]] = {id(way): [] for way in ways}
    for repeat in range(repeats):
        for number, way in enumerate(ways):
            progress("ask", repeat * len(ways) + number, repeats * len(ways), f"{way.store}, {way.name}")
            nats[id(way)], elapsed = _ask(reads, way.retriever)
            seconds[id(way)].append(elapsed)
    progress("ask", repeats * len(ways), repeats * len(ways))
    tokens = sum(len(read.targets_N) for read in reads)
    alone = [-read.lm_logprobs_N.astype(np.float64) for read in reads]
    base = nats[id(ways[0])]
    rows = [
        {
            "store": way.store,
            "way": way.name,
            "pruned": way.pruned,
            "nats": float(np.concatenate(nats[id(way)]).mean()),
            **_against(base, nats[id(way)]),
            "ms_per_token": 1000 * statistics.median(seconds[id(way)]) / tokens,
            "time_over_one_lam": statistics.median(
                way_s / first_s for way_s, first_s in zip(seconds[id(way)], seconds[id(ways[0])], strict=True)
            ),
        }
        for way in ways
    ]
    return {"tokens": tokens, "model_nats": float(np.concatenate(alone).mean()), "repeats": repeats, "rows": rows}


def _ways(checkpoint: Checkpoint, store: str | Path, text: Corpus, progress: Progress) -> list[Way]:
    """Fixed lam, and adaptive lam if tuning kept it."""
    tune(checkpoint, store, text, progress=progress)
    datastore = Datastore.open(store)
    snapshot = datastore.snapshot
    pruned = snapshot.num_pruned_entries / max(1, snapshot.num_entries + snapshot.num_pruned_entries)
    tuned = Retriever.of([ModelStore(datastore, checkpoint)], RetrievalParams())
    ways = [Way(snapshot.path.name, "one lam", replace(tuned, knn=replace(tuned.knn, adaptive=None)), pruned)]
    if tuned.knn.adaptive is not None:
        ways.append(Way(snapshot.path.name, "a lam that adapts", tuned, pruned))
    return ways


def _read(checkpoint: Checkpoint, texts: Corpus, max_tokens: int) -> list[EncodedText]:
    """The beginnings of the texts' documents, read once for all ways."""
    reads, count = [], 0
    encoder = Encoder(checkpoint.decoder)
    for document in texts:
        windows = list(text_windows(checkpoint, document.text))
        if not windows or count >= max_tokens:
            continue
        parts = list(map(EncodedText.of, windows, encoder.predictions(windows)))
        reads.append(EncodedText.joined(parts))
        count += len(reads[-1].targets_N)
    if not count:
        raise InvalidInput("there is no token to judge by; give some held-out text", field="texts")
    return reads


def _ask(reads: Sequence[EncodedText], retriever: Retriever) -> tuple[list[Float64[np.ndarray, " _"]], float]:
    """Nats of every token of every document, and seconds."""
    nats, seconds = [], 0.0
    for read in reads:
        mixed = np.empty(len(read.targets_N), np.float64)
        for place in range(len(mixed)):
            one = slice(place, place + 1)
            begin = time.perf_counter()
            found = retriever.search(read.keys_ND[one], read.max_logprobs_N[one])
            seconds += time.perf_counter() - begin
            mixed[place] = found.mix_targets(read.lm_logprobs_N[one], read.targets_N[one])[1][0]
        nats.append(-mixed)
    return nats, seconds


def _against(base: Sequence[np.ndarray], nats: Sequence[np.ndarray]) -> dict[str, float]:
    """Nats per token that are saved, and the standard error over documents."""
    saved = [float((old - new).sum()) for old, new in zip(base, nats, strict=True)]
    sizes = [len(each) for each in base]
    gain = sum(saved) / sum(sizes)
    spread = np.array([each - gain * size for each, size in zip(saved, sizes, strict=True)])
    error = float(np.sqrt((spread**2).sum() * len(sizes) / max(1, len(sizes) - 1)) / sum(sizes))
    return {"gain": gain, "gain_error": error}
