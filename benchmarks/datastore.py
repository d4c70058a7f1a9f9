"""Cost and quality of each index type, on the keys of a real model and text.

Keys are computed once and kept in a folder, and every size takes the first of them. Queries are positions of held-out
text, so the change in nats is that of new text. The temperature is half the median nearest distance and lam is 0.25,
for every index.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import faiss
import numpy as np
from jaxtyping import Float16, Float32, Int64

from benchmarks.sources import known_source, note_source, source_of
from memlm.base.progress import Progress, silent
from memlm.bench.texts import median_ratio
from memlm.data.corpus import Corpus
from memlm.data.formats import PIPED_IN
from memlm.data.windows import blocks_of
from memlm.errors import InvalidInput
from memlm.index.arrays import GrowingArray
from memlm.index.exact import FlatIndex, exact_neighbors
from memlm.index.factory import FLAT
from memlm.index.ivf import PROBES, VALUE_BITS, Ivf, code_bytes, is_lossless, lists_for, open_index, train_ivf
from memlm.index.ivf_writer import write_ivf
from memlm.index.neighbors import Neighbors
from memlm.index.selection import RERANKS, agreement, mean_and_error
from memlm.index.threads import faiss_threads
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import Encoder, document_windows
from memlm.retrieval.result import RetrievalResult

NUM_QUERIES, K, LARGE_K, BATCH = 512, 32, 1024, 64
BLOCK_WINDOWS = 128
LAM = 0.25
TARGET = 0.99
TRIES = 20
ADDED = 200_000  # entries that the rates of adding are measured with

Search = Callable[[Float32[np.ndarray, "Q D"], int], Neighbors]
Built: TypeAlias = tuple[Ivf, dict[str, Any]]  # and what building it took


@dataclass(frozen=True)
class Questions:
    """Positions of held-out text: keys, the tokens that follow, and their log-probabilities in p_LM."""

    keys_QD: Float32[np.ndarray, "Q D"]
    targets_Q: Int64[np.ndarray, " Q"]
    lm_logprobs_Q: Float32[np.ndarray, " Q"]


def bench_datastore(
    model: Path | Checkpoint,
    texts: Corpus,
    held_out: Corpus,
    work: Path,
    *,
    sizes: Sequence[int],
    kinds: Sequence[str] = (),
    progress: Progress = silent,
) -> dict[str, Any]:
    """A row of figures for every size and index type.

    `work` keeps the keys for another run. `kinds` are factory strings with `*` for the number of lists, and the prefix
    `codes:` for an index without re-ranking. Raises InvalidInput if the texts have fewer tokens than the largest size.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    keys_ND, values_N, tokens_per_s = corpus_keys(checkpoint, texts, work, max(sizes), progress)
    if len(values_N) < max(sizes):
        raise InvalidInput(f"the texts have {len(values_N):,} tokens; {max(sizes):,} are wanted", field="entries")
    questions = held_out_questions(checkpoint, held_out)
    dim = keys_ND.shape[1]
    kinds = kinds or default_kinds(dim)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        exact = exact_neighbors(questions.keys_QD, keys_ND[:size], values_N[:size], LARGE_K)
        nearest_Q = exact.distances_QK[:, 0]
        temperature = float(np.median(nearest_Q[nearest_Q > 0])) / 2 if (nearest_Q > 0).any() else 1.0
        last: dict[str, Built] = {}
        for number, kind in enumerate(kinds):
            progress(f"{size:,} entries", number, len(kinds), kind)
            row = _figures(kind, keys_ND[:size], values_N[:size], questions, exact, temperature, work, last)
            rows.append({"entries": size, "temperature": temperature, **row})
        progress(f"{size:,} entries", len(kinds), len(kinds))
    return {"dim": dim, "queries": len(questions.targets_Q), "keys_per_s": tokens_per_s, "rows": rows}


def default_kinds(dim: int) -> list[str]:
    """Index types to compare at a width."""
    return [
        FLAT,
        "IVF*,SQfp16",
        f"PCA{dim // 2},IVF*,SQfp16",
        "IVF*,SQ8",
        "IVF*,RaBitQ",
        *(f"{behind}IVF*,PQ{dim // width}" for width in (2, 4) for behind in ("", "codes:")),
    ]


def corpus_keys(
    checkpoint: Checkpoint, texts: Corpus, work: Path, num_keys: int, progress: Progress
) -> tuple[Float16[np.ndarray, "N D"], np.ndarray, float | None]:
    """Keys and values of the first tokens of a corpus, `num_keys` or all that there are, and the tokens/s if they were
    not in the folder already. Raises InvalidInput if the folder has those of another model, number type or texts.
    """
    work.mkdir(parents=True, exist_ok=True)
    source = source_of(checkpoint, _digest_of(texts))
    known = known_source(work, source, "keys")
    paths, pace = (work / "keys.npy", work / "values.npy"), None
    have = len(np.load(paths[1], mmap_mode="r")) if all(path.exists() for path in paths) else 0
    if known is None or (have < num_keys and not known["all"]):
        note_source(work, {**source, "all": False})
        rows, pace = _compute_keys(checkpoint, texts, paths, num_keys, progress)
        note_source(work, {**source, "all": rows < num_keys})
    keys_ND, values_N = (np.load(path, mmap_mode="r") for path in paths)
    return keys_ND, values_N, pace


def _digest_of(texts: Corpus) -> str:
    digest = hashlib.sha256()
    for name, file in texts.files():
        digest.update(f"{len(name)} {name} ".encode(errors="surrogateescape"))
        if file is not PIPED_IN:  # which can be read only once
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    for document in texts.documents:
        digest.update(f"{len(document.text)} {document.text}".encode())
    return digest.hexdigest()


def _compute_keys(
    checkpoint: Checkpoint, texts: Corpus, paths: tuple[Path, Path], num_keys: int, progress: Progress
) -> tuple[int, float]:
    """Writes the keys and values, and returns their number and the tokens/s."""
    encoder, begin = Encoder(checkpoint.decoder), time.perf_counter()
    with (
        closing(GrowingArray(paths[0], "<f2", checkpoint.decoder.config.dim)) as keys,
        closing(GrowingArray(paths[1], "<u4", None)) as values,
    ):
        windows = (
            window
            for document in texts
            for window in document_windows(
                checkpoint.decoder, checkpoint.tokenizer.encode(document.text), checkpoint.tokenizer.start_id
            )
        )
        blocks, ahead = itertools.tee(blocks_of(windows, BLOCK_WINDOWS))
        for block, read in zip(blocks, encoder.keys_of_blocks(ahead), strict=True):
            for window, keys_ND in zip(block, read, strict=True):
                keys.append(keys_ND)
                values.append(window.targets_N)
            progress("compute keys", min(keys.rows, num_keys), num_keys)
            if keys.rows >= num_keys:
                break
        keys.sync()
        values.sync()
        return keys.rows, keys.rows / (time.perf_counter() - begin)


def held_out_questions(checkpoint: Checkpoint, held_out: Corpus) -> Questions:
    """Random positions of all held-out windows. Raises InvalidInput if there are none."""
    windows = [
        window
        for document in held_out
        for window in document_windows(
            checkpoint.decoder, checkpoint.tokenizer.encode(document.text), checkpoint.tokenizer.start_id
        )
    ]
    if not windows:
        raise InvalidInput("there is no held-out text to ask about", field="held_out")
    rng = np.random.default_rng(0)
    picked = windows
    if not checkpoint.decoder.config.is_segmented:
        picked = [windows[place] for place in np.sort(rng.choice(len(windows), min(64, len(windows)), replace=False))]
    read = Encoder(checkpoint.decoder).predictions(picked)
    targets_N = np.concatenate([window.targets_N for window in picked])
    keys_ND, logprobs_N = (np.concatenate([each[part] for each in read]) for part in (0, 1))
    rows = np.sort(rng.choice(len(targets_N), min(NUM_QUERIES, len(targets_N)), replace=False))
    return Questions(keys_ND[rows].astype(np.float16).astype(np.float32), targets_N[rows], logprobs_N[rows])


def _figures(
    kind: str,
    keys_ND: Float16[np.ndarray, "N D"],
    values_N: np.ndarray,
    questions: Questions,
    exact: Neighbors,
    temperature: float,
    work: Path,
    last: dict[str, Built],
) -> dict[str, Any]:
    """Cost and quality of one index of one size. `last` caches the previous index, which may serve again."""
    codes_only, dim = kind.startswith("codes:"), keys_ND.shape[1]
    factory = kind.removeprefix("codes:").replace("*", str(lists_for(len(keys_ND))))
    if factory == FLAT:
        costs: dict[str, Any] = {"bytes_per_entry": 4 * dim}
        search: Search = lambda queries_QD, k: exact_neighbors(queries_QD, keys_ND, values_N, k)  # noqa: E731
        if len(keys_ND) <= 1_000_000:
            search = FlatIndex(keys_ND, values_N).search
    else:
        if factory not in last:
            last.clear()
            last[factory] = _built(factory, keys_ND, values_N, work)
        index, costs = last[factory]
        index.keys_ND = None if codes_only or is_lossless(factory) else keys_ND
        nprobe, rerank = _settled(index, questions, exact, temperature)
        costs = {**costs, "nprobe": nprobe, "rerank": rerank}
        search = lambda queries_QD, k: index.search(queries_QD, k, nprobe, rerank)  # noqa: E731
    return {
        "index": kind,
        "lists": factory,
        **costs,
        **_times(search, questions),
        **_found(search, questions, exact, temperature),
    }


def _built(factory: str, keys_ND: Float16[np.ndarray, "N D"], values_N: np.ndarray, work: Path) -> Built:
    """The index on disk, mapped, and the cost of building it. Adding a part of the keys is compared with Faiss."""
    begin = time.perf_counter()
    trained = train_ivf(factory, keys_ND, seed=0, progress=silent)
    train_s = time.perf_counter() - begin
    path = work / "index.faiss"
    begin = time.perf_counter()
    write_ivf(path, trained, keys_ND, values_N, progress=silent)
    write_s = time.perf_counter() - begin
    part = min(ADDED, len(keys_ND))
    index_s, faiss_s = [], []
    for _ in range(3):
        index_s.append(
            _seconds(lambda: write_ivf(work / "part.faiss", trained, keys_ND[:part], values_N[:part], progress=silent))
        )
        faiss_s.append(_seconds(lambda: _add_barely(trained, keys_ND[:part], values_N[:part], work / "bare.faiss")))
    index = Ivf(open_index(path, len(keys_ND), keys_ND.shape[1]), factory, None)
    return index, {
        "bytes_per_entry": code_bytes(factory, keys_ND.shape[1]) + 8,
        "train_s": train_s,
        "add_per_s": len(keys_ND) / write_s,
        "add_over_bare_faiss": median_ratio(faiss_s, index_s)[0],
    }


def _add_barely(trained: Any, keys_ND: Float16[np.ndarray, "N D"], values_N: np.ndarray, path: Path) -> None:
    """Seconds of Faiss alone: adding from RAM and writing the file."""
    index = faiss.clone_index(trained)
    packed_N = (np.arange(len(keys_ND)) << VALUE_BITS) | np.asarray(values_N, np.int64)
    with faiss_threads(len(keys_ND)):
        index.add_with_ids(np.asarray(keys_ND, np.float32), packed_N)
    faiss.write_index(index, str(path))


def _settled(index: Ivf, questions: Questions, exact: Neighbors, temperature: float) -> tuple[int, int]:
    """The fewest lists that find the target softmax mass among K, or the largest number tried."""
    rerank = 0 if index.keys_ND is None else RERANKS[-1]
    nprobe = min(PROBES[0], index.nlist)
    for nprobe in sorted({min(nprobe, index.nlist) for nprobe in PROBES}):
        _, mass_Q = agreement(index.search(questions.keys_QD, K, nprobe, rerank), exact.first(K), temperature)
        if mass_Q.mean() >= TARGET:
            break
    return nprobe, rerank


def _found(search: Search, questions: Questions, exact: Neighbors, temperature: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for k in (K, LARGE_K):
        found, truth = search(questions.keys_QD, k), exact.first(k)
        recall_Q, mass_Q = agreement(found, truth, temperature)
        change_Q = _nats(questions, found, temperature) - _nats(questions, truth, temperature)
        for name, each_Q in (("recall", recall_Q), ("softmax_mass", mass_Q), ("nats_change", change_Q)):
            figures[f"{name}_k{k}"], figures[f"{name}_k{k}_error"] = mean_and_error(each_Q)
    return figures


def _nats(questions: Questions, found: Neighbors, temperature: float) -> Float32[np.ndarray, " Q"]:
    weighed = RetrievalResult.of(found, temperature, LAM)
    return -weighed.mix_targets(questions.lm_logprobs_Q, questions.targets_Q)[1]


def _times(search: Search, questions: Questions) -> dict[str, float]:
    """Median milliseconds of a query, over tries with different queries."""
    figures = {}
    for k in (K, LARGE_K):
        for batch in (1, BATCH):
            tries = [_seconds(partial(search, queries, k)) for queries in _batches(questions.keys_QD, batch)]
            figures[f"ms_per_query_k{k}_batch{batch}"] = 1e3 * statistics.median(tries) / batch
    return figures


def _batches(keys_QD: Float32[np.ndarray, "Q D"], size: int) -> Iterator[Float32[np.ndarray, "B D"]]:
    for number in range(min(TRIES, len(keys_QD) // size)):
        yield keys_QD[number * size : (number + 1) * size]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
