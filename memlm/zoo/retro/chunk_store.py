"""Chunks of documents with their continuations: the neighbors that RETRO reads (arXiv 2112.04426, section 2.3).

Shapes: N chunks that ask, m tokens of a chunk, k neighbors, r tokens of a neighbor, P chunks of the store, E width of
an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TypeAlias

import faiss
import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from memlm.errors import InvalidInput, check_range
from memlm.index.store.derived.chunk_vectors import chunks_of, texts_from
from memlm.index.threads import faiss_threads
from memlm.model.decoder import Decoder
from memlm.zoo.retro.encoder import NOTHING

# Chunks (N, m), with NOTHING behind short ones -> vectors (N, E).
Embed: TypeAlias = Callable[[np.ndarray], np.ndarray]
EMBEDDED = 1024  # chunks at once
SPARE = 8  # more candidates than neighbors, so that most searches go on without those that are left out
BASE = 0x9E3779B97F4A7C15  # of the hash of a run of tokens, odd


class ChunkStore:
    """Finds for each chunk the nearest chunks of some documents, and returns each with its continuation.

    It is a function as `decoder.cross.neighbors` takes. Documents are lists of token ids, in memory. Distances are
    squared differences of embeddings, by exact search. `vectors_PE` are those of the store's own chunks, where they are
    known. With `leaves_out_own`, as learning needs, no neighbor is of a document that has the first or the last m - 1
    tokens of the chunk that asks, at any place. Otherwise a model would learn to copy its own text. One token may
    differ, since a model's first chunk begins with the start token. Raises InvalidInput for documents without tokens.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int] | np.ndarray],
        embed: Embed,
        *,
        chunk: int = 64,
        neighbors: int = 2,
        length: int = 0,
        leaves_out_own: bool = False,
        vectors_PE: Float32[np.ndarray, "P E"] | None = None,
    ) -> None:
        check_range("chunk", chunk, least=2, whole=True)
        check_range("neighbors", neighbors, least=1, whole=True)
        check_range("length", length, least=0, whole=True)
        if not any(map(len, documents)):
            raise InvalidInput("the documents of a chunk store have no tokens; give some that have", field="documents")
        self.chunk, self.neighbors, self.length = chunk, neighbors, length or 2 * chunk
        self.leaves_out_own, self._embed = leaves_out_own, embed
        self._tokens = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])
        starts = np.cumsum([0, *map(len, documents)])
        self._ends = starts[1:]
        self._begin_P, self._document_P = chunks_of(starts, chunk)
        if vectors_PE is None:
            vectors_PE = self._vectors(self._texts(self._begin_P, chunk))
        self._index = faiss.IndexFlatL2(vectors_PE.shape[1])
        self._index.add(vectors_PE)
        hashes = _hashes(self._tokens, chunk - 1) if leaves_out_own else np.zeros(0, dtype=np.uint64)
        self._places = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._places]

    @property
    def num_chunks(self) -> int:
        """Chunks of all documents, the last of each perhaps short."""
        return len(self._begin_P)

    def __call__(self, chunk_Nm: Tensor) -> Tensor:
        """Returns the tokens of the neighbors (N, k, r), nearest first, with NOTHING behind short ones and for missing
        ones.
        """
        asked_Nm = chunk_Nm.cpu().numpy()
        found_Nk = self.search(asked_Nm)
        begin_Nk = np.where(found_Nk == NOTHING, len(self._tokens), self._begin_P[found_Nk])
        tokens = self._texts(begin_Nk.ravel(), self.length).reshape(*found_Nk.shape, self.length)
        return torch.from_numpy(tokens).to(chunk_Nm.device)

    def search(self, asked_Nm: Int64[np.ndarray, "N m"]) -> Int64[np.ndarray, "N k"]:
        """Returns the numbers of the nearest chunks, nearest first, NOTHING where there are no more.

        Raises InvalidInput for chunks of another length.
        """
        if asked_Nm.shape[1] != self.chunk:
            raise InvalidInput(
                f"the chunks that ask have {asked_Nm.shape[1]} tokens, and those of the store {self.chunk}; give it the"
                " model's",
                field="chunk",
            )
        vectors_NE = self._vectors(asked_Nm)
        found_Nk = np.full((len(asked_Nm), self.neighbors), NOTHING)
        own = [self._documents_with(asked_m) for asked_m in asked_Nm] if self.leaves_out_own else None
        left, count = np.arange(len(asked_Nm)), self.neighbors + (SPARE if own else 0)
        while len(left):
            count = min(count, self.num_chunks)
            with faiss_threads(len(left)):
                _, near_nc = self._index.search(vectors_NE[left], count)
            is_short = []
            for row, near_c in zip(left, near_nc, strict=True):
                kept = near_c if own is None else near_c[~np.isin(self._document_P[near_c], own[row])]
                found_Nk[row, : len(kept)] = kept[: self.neighbors]
                is_short.append(len(kept) < self.neighbors and count < self.num_chunks)
            left, count = left[is_short], 4 * count
        return found_Nk

    def _documents_with(self, asked_m: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " n"]:
        """The numbers of the documents with the first or the last m - 1 tokens of a chunk, at any place."""
        same = list[int]()
        for run, wanted in zip((asked_m[:-1], asked_m[1:]), _hashes(asked_m, self.chunk - 1), strict=True):
            first, last = (np.searchsorted(self._hashes, wanted, side=side) for side in ("left", "right"))
            places = self._places[first:last]
            same += [place for place in places if np.array_equal(self._tokens[place : place + len(run)], run)]
        return np.unique(np.searchsorted(self._ends, np.array(same, dtype=np.int64), side="right"))

    def _texts(self, begins: Int64[np.ndarray, " n"], length: int) -> Int64[np.ndarray, "n r"]:
        """The tokens from some places on, up to the end of the document."""
        document = np.searchsorted(self._ends, begins, side="right")
        return texts_from(self._tokens, begins, np.append(self._ends, 0)[document], length)

    def _vectors(self, chunks: Int64[np.ndarray, "n m"]) -> Float32[np.ndarray, "n E"]:
        vectors = [self._embed(chunks[first : first + EMBEDDED]) for first in range(0, max(1, len(chunks)), EMBEDDED)]
        return np.ascontiguousarray(np.concatenate(vectors), dtype=np.float32)


class TokenMeans:
    """The means of a decoder's token embeddings, as a function for `ChunkStore`. It keeps the embeddings as they are
    now, so that learning changes no distance.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._table_VE = decoder.embedding.table_VD.detach().float().cpu().numpy().copy()

    @cached_property
    def fingerprint(self) -> str:
        """Names the embeddings."""
        return blake2b(self._table_VE.tobytes(), digest_size=16).hexdigest()

    def __call__(self, chunks_Nm: np.ndarray) -> np.ndarray:
        is_there_Nm1 = (chunks_Nm != NOTHING)[..., None]
        total_NE = (self._table_VE[np.maximum(chunks_Nm, 0)] * is_there_Nm1).sum(axis=1)
        means_NE: np.ndarray = total_NE / np.maximum(is_there_Nm1.sum(axis=1), 1)
        return means_NE


def _hashes(tokens: Int64[np.ndarray, " n"], length: int) -> np.ndarray:
    """Returns a 64-bit hash of each run of some tokens."""
    count = max(0, len(tokens) - length + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        hashes = hashes * np.uint64(BASE) + tokens[offset : offset + count].astype(np.uint64) + np.uint64(1)
    return hashes
