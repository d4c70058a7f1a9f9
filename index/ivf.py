"""Inverted-file indexes in Faiss: choosing, training, filling, writing, searching.

The value travels in Faiss' 64-bit id, below the row, so that a search looks up nothing else. Codes are of the keys
themselves, not of residuals, so that with float16 codes distances are exact for whatever the probed lists hold.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float16, Float32

from memlm.index.errors import Corrupt, InvalidInput
from memlm.index.exact import exact_neighbours
from memlm.index.neighbours import Neighbours
from memlm.index.progress import Progress
from memlm.index.threads import faiss_threads

FLAT = "Flat"
FLAT_BELOW = 100_000
VALUE_BITS = 24
POINTS_PER_LIST = 48  # Faiss warns below 39 and drops what is above 256
KMEANS_ROUNDS = 5
PROBES = (4, 8, 16, 32, 64, 128, 256)
WANTED_RECALL = 0.95
JUDGED_QUERIES = 128
JUDGED_K = 32
TOUCHED_BYTES = 1 << 30
PAGE_BYTES = 4096


def choose_index(wanted: str, entries: int) -> str:
    """The factory string for "auto", by size; any other is kept. Raises InvalidInput for what cannot be built."""
    if wanted == "auto":
        if entries < FLAT_BELOW:
            return FLAT
        lists = 2 ** round(np.log2(2 * np.sqrt(entries)) - 0.25)
        return f"IVF{lists},SQfp16"
    if wanted == FLAT:
        return FLAT
    if not re.match(r"^IVF\d+(_HNSW\d*)?,", wanted):
        raise InvalidInput(
            f"index is {wanted!r}; expected auto, Flat, or IVF<lists>,<codes> as Faiss spells it", field="index"
        )
    return wanted


def train_ivf(factory: str, keys_ND: Float16[np.ndarray, "N D"], *, seed: int, progress: Progress) -> Any:
    """An index that knows its lists and codes, and holds nothing. Trains on a random sample of all the keys."""
    index = _create(factory, keys_ND.shape[1])
    sample = min(len(keys_ND), index.nlist * POINTS_PER_LIST)
    progress("train index", 0, sample)
    index.cp.seed, index.cp.niter = seed + 1, KMEANS_ROUNDS
    index.cp.min_points_per_centroid = 1
    rows = np.sort(np.random.default_rng(seed).choice(len(keys_ND), sample, replace=False))
    with faiss_threads(sample):
        index.train(keys_ND[rows].astype(np.float32))
    progress("train index", sample, sample)
    return index


def choose_nprobe(index: Any, keys_ND: Float16[np.ndarray, "N D"], values_N: np.ndarray, *, seed: int) -> int:
    """The fewest lists that find 95 % of the nearest entries of some stored keys."""
    rng = np.random.default_rng(seed + 1)
    queries_QD = keys_ND[np.sort(rng.choice(len(keys_ND), min(JUDGED_QUERIES, len(keys_ND)), replace=False))]
    queries_QD = queries_QD.astype(np.float32)
    k = min(JUDGED_K, len(keys_ND))
    exact = exact_neighbours(queries_QD, keys_ND, values_N, k)
    lists = index.nlist
    for nprobe in PROBES:
        found = search_ivf(index, queries_QD, k, min(nprobe, lists))
        hits = sum(len(np.intersect1d(e, f)) for e, f in zip(exact.ids_QK, found.ids_QK, strict=True))
        if hits >= WANTED_RECALL * exact.ids_QK.size:
            break
    return min(nprobe, lists)


def search_ivf(index: Any, queries_QD: Float32[np.ndarray, "Q D"], k: int, nprobe: int) -> Neighbours:
    """The k nearest entries in the `nprobe` nearest lists; ids are row numbers."""
    with faiss_threads(len(queries_QD)):
        distances_QK, packed_QK = index.search(queries_QD, k, params=_search_params(nprobe))
    found = Neighbours(distances_QK, packed_QK >> VALUE_BITS, packed_QK & ((1 << VALUE_BITS) - 1))
    if (distances_QK[:, 1:] < distances_QK[:, :-1]).any():  # Faiss promises no order for every index
        found = found.take(np.argsort(distances_QK, axis=1, kind="stable"))
    if (found.ids_QK[:, -1] < 0).any():
        found = found.keep(found.ids_QK >= 0)
    return found


@lru_cache(maxsize=64)
def _search_params(nprobe: int) -> Any:
    """Kept, since making one takes as long as a tenth of a search."""
    return faiss.SearchParametersIVF(nprobe=nprobe)  # type: ignore[call-arg]  # its stubs know no keywords


def open_index(path: Path, entries: int, dim: int) -> Any:
    """Maps an index into memory; a large one is not read. Raises Corrupt where it is not of this size."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise Corrupt(f"{path} cannot be read by Faiss; build the store anew") from error
    _touch(index)
    if index.ntotal != entries or index.d != dim:
        raise Corrupt(
            f"{path} has {index.ntotal} entries of {index.d} dimensions, not {entries} of {dim}; build it anew"
        )
    return index


def _touch(index: Any) -> None:
    """Reads a byte of each page of a mapped index of moderate size, so that first searches need not wait for them."""
    lists = index.invlists
    if index.ntotal * (index.code_size + 8) > TOUCHED_BYTES:
        return
    for number in range(index.nlist):
        if size := lists.list_size(number):
            faiss.rev_swig_ptr(lists.get_codes(number), size * index.code_size)[::PAGE_BYTES].sum()
            faiss.rev_swig_ptr(lists.get_ids(number), size)[:: PAGE_BYTES // 8].sum()


def _create(factory: str, dim: int) -> Any:
    try:
        index: Any = faiss.index_factory(dim, factory)
    except RuntimeError as error:
        reason = str(error).rpartition(":")[2].strip()
        raise InvalidInput(
            f"Faiss makes no index of {factory!r} over {dim} dimensions ({reason})", field="index"
        ) from error
    lists = getattr(index, "invlists", None)
    if lists is None or not isinstance(faiss.downcast_InvertedLists(lists), faiss.ArrayInvertedLists):
        raise InvalidInput(f"an index {factory!r} cannot be mapped from disk; give IVF<lists>,<codes>", field="index")
    index.by_residual = index.by_residual and "SQ" not in factory
    return index
