"""Estimates the entries, disk, RAM and time of a build from a few documents and a short measurement."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import faiss
import numpy as np
import torch

from memlm.data.corpus import Corpus
from memlm.data.windows import Window, WindowSize, blocks_of
from memlm.errors import InvalidInput, StorageFull
from memlm.index.factory import FLAT, NO_INDEX, Factory
from memlm.index.ivf import POINTS_FOR_CODES, POINTS_PER_LIST, code_bytes, is_lossless, nlist_of, resolve_index
from memlm.index.ivf_writer import GROUP_ROWS, beside_bytes
from memlm.index.store.datastore import Datastore
from memlm.index.threads import faiss_threads
from memlm.indexing.keys import spec_of_keys, unkeyed
from memlm.indexing.known_texts import StoredText, sources_of
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import Encoder, document_windows, window_size

SAMPLE_DOCUMENTS, SAMPLE_BYTES = 64, 400_000
MEASURED_S, MEASURED_INPUTS, MEASURED_KEYS = 1.5, 256, 2048
VALUE_BYTES, PLACE_BYTES, ID_BYTES, DOCUMENT_BYTES = 4, 4, 8, 300  # a place in the order of passages
TEXT_TOKENS_PER_S = 200_000  # benchmarks/log/2026-11-26-draft-only-datastores.md
SAMPLE_TOKENS = 1 << 14  # of a document that may be a library
SURELY_QUICK = 1e11  # tokens times parameters, which the slowest machine multiplies in seconds
BASE_BYTES = 300 << 20  # Python, torch and Faiss themselves


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of one build. `disk_bytes` is its largest size on the disk at any time, `ram_bytes` the RAM of the
    build, and `search_bytes` the RAM for searching the store. `seconds` is None if nothing was measured.
    """

    documents_read: int
    entries: int
    index: str
    disk_bytes: int
    free_bytes: int
    ram_bytes: int
    search_bytes: int
    tokens_per_s: float | None
    seconds: float | None

    def check(self, out: str | Path) -> None:
        """Raises StorageFull where the disk will not hold the store."""
        if self.disk_bytes > self.free_bytes:
            raise StorageFull(
                f"a datastore of about {self.entries:,} entries takes {self.disk_bytes:,} bytes, and the disk of {out}"
                f" has {self.free_bytes:,} left; make room, choose another place, or give --no-keep-keys and an index"
                " of smaller codes"
            )


def estimate_build(
    checkpoint: Checkpoint,
    corpus: Corpus,
    out: str | Path,
    *,
    keys: bool = True,
    index: str = "auto",
    size: WindowSize | None = None,
    measure: bool = True,
) -> Estimate:
    """Reads some documents, measures for at most two seconds, and extrapolates to the whole corpus. The speed of a
    build without `keys` is not measured. Raises InvalidInput if there is no text.
    """
    texts, read = [], 0
    for document in replace(corpus, on_problem=lambda problem: None):  # the build itself reports problems
        texts.append(document)
        read += document.num_bytes
        if len(texts) >= SAMPLE_DOCUMENTS or read >= SAMPLE_BYTES:
            break
    tokens = [checkpoint.tokenizer.encode(document.text) for document in texts]
    sampled = sum(map(len, tokens))
    if not sampled:
        raise InvalidInput("there is no token to store; the corpus has no text", field="corpus")
    entries = round(sampled * max(1.0, corpus.num_bytes / max(1, read)))
    dim = checkpoint.decoder.config.dim if keys else 0
    factory = resolve_index(index, entries, dim) if keys else NO_INDEX
    has_lists = factory not in (FLAT, NO_INDEX)
    if has_lists:
        Factory.parse(factory).check_lists(entries)
    documents = round(len(texts) * entries / sampled)
    code = code_bytes(factory, dim) + ID_BYTES if has_lists else 0
    beside = beside_bytes(factory, dim) if has_lists else 0
    lists = nlist_of(factory)
    entry = 2 * dim + VALUE_BYTES + PLACE_BYTES + code + beside
    disk = entries * entry + documents * DOCUMENT_BYTES + 4 * dim * lists
    trained = min(entries, max(lists * POINTS_PER_LIST, 0 if is_lossless(factory) else POINTS_FOR_CODES))
    working = 4 * dim * trained + min(entries, GROUP_ROWS) * (6 * dim + code)
    place = next(folder for folder in (Path(out), *Path(out).absolute().parents) if folder.is_dir())
    pace = _tokens_per_s(checkpoint, tokens, size or window_size(checkpoint.decoder)) if measure and keys else None
    return Estimate(
        documents_read=len(texts),
        entries=entries,
        index=factory,
        disk_bytes=disk,
        free_bytes=shutil.disk_usage(place).free,
        ram_bytes=BASE_BYTES + checkpoint.decoder.num_bytes + working,
        search_bytes=entries * (code or 4 * dim) + 4 * dim * lists,
        tokens_per_s=pace,
        seconds=None if pace is None else entries / pace + entries * _seconds_per_key(dim, lists),
    )


def seconds_of_text(entries: int) -> float:
    """The time until text is committed, which no model reads."""
    return entries / TEXT_TOKENS_PER_S


def seconds_of_keys(datastore: Datastore, checkpoint: Checkpoint, segment: int | None = None) -> float:
    """Measures for at most two seconds how long the keys of all documents without take, or of those in a segment, given
    by its number. 0 for few, which are quick on any machine. Equal texts are read once.
    """
    spec = spec_of_keys(datastore, checkpoint)
    texts = [StoredText(each, row) for each, rows in unkeyed(datastore.snapshot, number=segment) for row in rows]
    entries = sum(text.num_tokens for text in texts)
    if entries * checkpoint.decoder.num_parameters < SURELY_QUICK:
        return 0.0
    sources = sources_of(texts, datastore.snapshot.segments)
    if not (new := [text for text, source in zip(texts, sources, strict=True) if source is None]):
        return 0.0
    tokens = [text.segment.text_of(text.row, SAMPLE_TOKENS) for text in new[:SAMPLE_DOCUMENTS]]
    lists = nlist_of(resolve_index(spec.index, entries, spec.dim))
    pace = _tokens_per_s(checkpoint, tokens, WindowSize(spec.context, spec.stride))
    return sum(text.num_tokens for text in new) / pace + entries * _seconds_per_key(spec.dim, lists)


def _tokens_per_s(checkpoint: Checkpoint, tokens: list[np.ndarray], size: WindowSize) -> float:
    """Measures the speed of encoding on the beginnings of windows, after a first one to warm up.

    Inputs are counted, of which overlapping windows have more than there are tokens. A long window takes longer than
    its beginnings, because attention does.
    """
    decoder, windows = checkpoint.decoder, list[Window]()
    for tokens_n in tokens:
        windows += document_windows(decoder, tokens_n, checkpoint.tokenizer.start_id, size)
    beginnings = [Window(each.inputs_T[:MEASURED_INPUTS], each.targets_N[:MEASURED_INPUTS]) for each in windows]
    beginnings = [replace(each, targets_N=each.targets_N[: len(each.inputs_T)]) for each in beginnings]
    Encoder(decoder).keys([Window(beginnings[0].inputs_T[:8], beginnings[0].targets_N[:1])])
    inputs, begin_s = 0, time.perf_counter()
    for block in blocks_of(beginnings, torch.get_num_threads()):
        Encoder(decoder).keys(block)
        inputs += sum(len(each.inputs_T) for each in block)
        if time.perf_counter() - begin_s > MEASURED_S / 2:  # another block might take as long
            break
    inputs_per_s = inputs / (time.perf_counter() - begin_s)
    num_inputs, num_tokens = (sum(len(getattr(each, name)) for each in windows) for name in ("inputs_T", "targets_N"))
    return inputs_per_s * num_tokens / num_inputs


def _seconds_per_key(dim: int, lists: int) -> float:
    """Measures the time of filling an index: assigning a key to a list, and twice as long for training, writing and
    measuring.
    """
    if not lists:
        return 0.0
    rng = np.random.default_rng(0)
    shapes = (lists, dim), (MEASURED_KEYS, dim)
    centroids, keys_ND = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    with faiss_threads(MEASURED_KEYS):
        begin = time.perf_counter()
        faiss.knn(keys_ND, centroids, 1)
        return 3 * (time.perf_counter() - begin) / MEASURED_KEYS
