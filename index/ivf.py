"""Inverted-file indexes in Faiss: choosing, training, opening and searching them.

The value is part of Faiss' 64-bit id, below the row, so that a search needs no other lookup. Scalar codes encode the
keys themselves, not residuals, so that float16 codes give exact distances to all entries of the probed lists. With
lossy codes, a search finds more entries than requested and ranks them by the stored keys, where these are kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float, Float16, Float32, Int64

from memlm.base.progress import Progress
from memlm.errors import Corrupt, InvalidInput
from memlm.index.arrays import RowSubset
from memlm.index.exact import exact_distances, to_float32
from memlm.index.factory import FLAT, Factory, check_factory
from memlm.index.neighbors import Neighbors
from memlm.index.threads import faiss_threads

FLAT_NUMBERS = 1 << 23  # of keys that are searched exactly: 3 ms a query, as a step of a small model takes 10
VALUE_BITS = 24
POINTS_FOR_CODES = 65_536  # as many as Faiss' product quantizers learn from
PROBES = (4, 8, 16, 32, 64, 128, 256)
SHARED_ENTRIES = 65_536  # from so many entries on the lists of a single query are searched by all cores
BY_QUERIES, BY_LISTS = 0, 1  # Faiss' parallel_mode
KMEANS_ROUNDS = 10
POINTS_PER_LIST = 39  # Faiss warns below that


def is_searched_exactly(entries: int, dim: int) -> bool:
    """Whether "auto" searches that many keys one by one."""
    return entries * dim <= FLAT_NUMBERS


def resolve_index(factory: str, entries: int, dim: int) -> str:
    """The factory string for "auto", by size. Other strings are checked and returned. Raises InvalidInput for an index
    that cannot be built.
    """
    if factory == "auto":
        return FLAT if is_searched_exactly(entries, dim) else f"IVF{lists_for(entries)},SQfp16"
    check_factory(factory)
    return factory


def lists_for(entries: int) -> int:
    """The number of lists: twice the square root of the entries, so that a list has half of it."""
    return max(1, round(2 * np.sqrt(entries)))


def nlist_of(factory: str) -> int:
    """How many lists a factory string asks for."""
    found = re.search(r"IVF(\d+)", factory)
    return int(found[1]) if found else 0


def is_lossless(factory: str) -> bool:
    """Whether distances to codes equal those to float16 keys."""
    return factory == FLAT or bool(re.fullmatch(r"IVF\d+(_HNSW\d*)?,(SQfp16|Flat)", factory))


def code_bytes(factory: str, dim: int) -> int:
    """Bytes of one key's code, in memory."""
    return 4 * dim if factory == FLAT else int(inner(create_index(factory, dim)).code_size)


def inner(index: Any) -> Any:
    """The inverted file, behind a transform or not."""
    return faiss.downcast_index(faiss.extract_index_ivf(index))


def transformed(index: Any, keys_ND: Float[np.ndarray, "N D"]) -> Float32[np.ndarray, "N d"]:
    """Applies an index's transforms to keys."""
    keys: np.ndarray = to_float32(keys_ND)
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain  # its stubs take it for a list
        for number in range(chain.size()):
            keys = faiss.downcast_VectorTransform(chain.at(number)).apply(keys)
    return keys


def keys_are_codes(index: Any) -> bool:
    """Whether a key's float16 bytes are its code."""
    codes = getattr(index, "sq", None)
    return codes is not None and codes.qtype == faiss.ScalarQuantizer.QT_fp16 and not index.by_residual


class Ivf:
    """A filled index, with the stored keys for re-ranking if there are any."""

    def __init__(self, index: Any, factory: str, keys_ND: Float16[np.ndarray, "N D"] | None) -> None:
        """Takes an index of Faiss. Its ids hold rows of `keys_ND` and values."""
        self.index, self.factory = index, factory
        self.keys_ND = None if is_lossless(factory) else keys_ND

    @property
    def dim(self) -> int:
        """Width of a key."""
        return int(self.index.d)

    @property
    def nlist(self) -> int:
        """How many lists there are."""
        return int(inner(self.index).nlist)

    @property
    def ntotal(self) -> int:
        """How many entries there are."""
        return int(self.index.ntotal)

    def search(self, queries_QD: Float32[np.ndarray, "Q D"], k: int, nprobe: int, rerank: int = 0) -> Neighbors:
        """Finds the k nearest entries in the `nprobe` nearest lists. Ids are row numbers. With `rerank`, the `rerank`
        times k nearest by their codes are ranked by their stored keys.
        """
        if not rerank or self.keys_ND is None:
            return search_ivf(self.index, queries_QD, k, nprobe)
        found = search_ivf(self.index, queries_QD, max(k, min(rerank * k, self.ntotal)), nprobe)
        distances_QK = exact_distances(queries_QD, self.keys_ND, np.maximum(found.ids_QK, 0))
        distances_QK[found.ids_QK < 0] = np.inf
        order_QK = np.argsort(distances_QK, axis=1, kind="stable")[:, :k]
        return Neighbors(distances_QK, found.ids_QK, found.values_QK).take(order_QK)

    def places_of_lists(
        self, queries_QD: Float32[np.ndarray, "Q D"], keys_QKD: Float16[np.ndarray, "Q K D"], most: int
    ) -> Int64[np.ndarray, "Q K"]:
        """The rank of each key's list among the `most` nearest lists of its query, or `most` if it is farther. A search
        with a larger nprobe than the rank finds the key.
        """
        flat_ND = keys_QKD.reshape(-1, self.dim)
        with faiss_threads(len(flat_ND)):
            lists_N = nearest_lists(self.index, transformed(self.index, flat_ND))
            _, probed_QP = inner(self.index).quantizer.search(transformed(self.index, queries_QD), most)
        here_QKP = probed_QP[:, None] == lists_N.reshape(*keys_QKD.shape[:2], 1)
        return np.where(here_QKP.any(axis=2), here_QKP.argmax(axis=2), most)


def train_ivf(factory: str, keys_ND: Float16[np.ndarray, "N D"] | RowSubset, *, seed: int, progress: Progress) -> Any:
    """Trains the lists and codes of an empty index on a random sample of the keys."""
    index = create_index(factory, keys_ND.shape[1])
    lists = inner(index)
    wanted = lists.nlist * POINTS_PER_LIST
    sample = min(len(keys_ND), wanted if is_lossless(factory) else max(wanted, POINTS_FOR_CODES))
    progress("train index", 0, sample)
    rows = np.sort(np.random.default_rng(seed).choice(len(keys_ND), sample, replace=False))
    lists.cp.seed, lists.cp.niter = seed + 1, KMEANS_ROUNDS
    lists.cp.max_points_per_centroid, lists.cp.min_points_per_centroid = POINTS_PER_LIST, 1
    with faiss_threads(sample):
        index.train(to_float32(keys_ND[rows]))
    progress("train index", sample, sample)
    return index


def nearest_lists(index: Any, keys_ND: Float32[np.ndarray, "N d"]) -> Int64[np.ndarray, " N"]:
    """The list of each key, given as the inverted file sees it, behind its transforms."""
    return inner(index).quantizer.search(keys_ND, 1)[1][:, 0]


def add(index: Any, keys_ND: Float16[np.ndarray, "N D"], packed_N: Int64[np.ndarray, " N"]) -> None:
    """Fills a trained index in RAM. `packed_N` are Faiss' ids, made of rows and values."""
    with faiss_threads(len(keys_ND)):
        index.add_with_ids(to_float32(keys_ND), packed_N)


def search_ivf(index: Any, queries_QD: Float32[np.ndarray, "Q D"], k: int, nprobe: int) -> Neighbors:
    """Finds the k nearest entries in the `nprobe` nearest lists. Ids are row numbers."""
    lists = inner(index)
    shared = len(queries_QD) == 1 and nprobe * lists.ntotal >= SHARED_ENTRIES * lists.nlist
    lists.parallel_mode = BY_LISTS if shared else BY_QUERIES
    numbers = (lists.nlist + nprobe * lists.ntotal / lists.nlist) * lists.d
    with faiss_threads(len(queries_QD), numbers, shared=shared):
        params: Any = faiss.SearchParametersIVF(nprobe=nprobe)  # type: ignore[call-arg]  # its stubs know no keywords
        if isinstance(index, faiss.IndexPreTransform):
            params = faiss.SearchParametersPreTransform(index_params=params)  # type: ignore[call-arg]
        distances_QK, packed_QK = index.search(queries_QD, k, params=params)
    found = Neighbors(distances_QK, packed_QK >> VALUE_BITS, packed_QK & ((1 << VALUE_BITS) - 1))
    if (distances_QK[:, 1:] < distances_QK[:, :-1]).any():  # Faiss promises no order for every index
        found = found.take(np.argsort(distances_QK, axis=1, kind="stable"))
    if (found.ids_QK[:, -1] < 0).any():
        found = found.keep(found.ids_QK >= 0)
    return found


def open_index(path: Path, entries: int, dim: int) -> Any:
    """Maps an index from disk without reading all of it. Raises Corrupt if it has another size than expected."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise Corrupt(f"{path} cannot be read by Faiss; build the store anew") from error
    if index.ntotal != entries or index.d != dim:
        raise Corrupt(
            f"{path} has {index.ntotal} entries of {index.d} dimensions, not {entries} of {dim}; build it anew"
        )
    return index


def create_index(factory: str, dim: int) -> Any:
    """Creates an untrained index. Raises InvalidInput if Faiss cannot create it, or cannot map it from disk."""
    Factory.parse(factory).check_width(dim)  # before Faiss allocates what it asks for
    try:
        index: Any = faiss.index_factory(dim, factory)
    except RuntimeError as error:
        reason = str(error).rpartition(":")[2].strip()
        raise InvalidInput(
            f"Faiss makes no index of {factory!r} over {dim} dimensions ({reason})", field="index"
        ) from error
    lists = faiss.try_extract_index_ivf(index)
    stored = None if lists is None else inner(index).invlists
    if stored is None or not isinstance(faiss.downcast_InvertedLists(stored), faiss.ArrayInvertedLists):
        raise InvalidInput(f"an index {factory!r} cannot be mapped from disk; give IVF<lists>,<codes>", field="index")
    if ",SQ" in factory:
        inner(index).by_residual = False
    return index
