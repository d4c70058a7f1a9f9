"""The attention keys and values of a document's past, and the search among them (arXiv 2203.08913, section 3.2).

For each row of the batch, `add` appends pairs, `search` returns scores (inner products, best first) and ids of the best
pairs, and `read` adds up values by weight. Missing places have id -1 and score -inf. Ids count the pairs since the row
was cleared. The oldest pairs are dropped beyond `capacity`. Only `read` is differentiable, in its weights.

Shapes: G key-value heads, N pairs, Q queries per head, K neighbors, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import faiss
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memlm.index.threads import faiss_threads

P = ParamSpec("P")
T = TypeVar("T")

GROWTH, GROWTH_SHARE = 1024, 16  # places are added by the thousand, or by a sixteenth of those reserved
SEARCH_BLOCK = 16_384
UNBOUNDED = 1 << 40  # pairs
FAISS_FROM = 4096  # fewer pairs are searched exactly, which is as fast
CELL_SIZE = 256
NPROBE = 4
RETRAIN_AT = 4  # trains again at this many times the keys of the last training


def _as_stored(method: Callable[P, T]) -> Callable[P, T]:
    """Disables autocast, because the stored type (float16) is not one of autocast's."""

    @wraps(method)
    def computed(*args: P.args, **named: P.kwargs) -> T:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return method(*args, **named)

    return computed


class KnnCache:
    """The pairs of one row, in a ring that grows up to `capacity`."""

    def __init__(
        self, num_heads: int, head_dim: int, *, capacity: int, dtype: torch.dtype, search: str, device: torch.device
    ) -> None:
        self.capacity, self.count = capacity, 0
        self._ring_2GNd = torch.empty(2, num_heads, 0, head_dim, dtype=dtype, device=device)
        self._indexes = [FaissKeys(head_dim) for _ in range(num_heads)] if search == "faiss" else []

    @property
    def size(self) -> int:
        """Pairs held."""
        return min(self.count, self.capacity)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved, including Faiss' copies of the keys."""
        return self._ring_2GNd.numel() * self._ring_2GNd.itemsize + sum(index.num_bytes for index in self._indexes)

    @_as_stored
    def add(self, keys_GNd: Float[Tensor, "G N d"], values_GNd: Float[Tensor, "G N d"]) -> None:
        """Appends pairs, dropping the oldest beyond `capacity`."""
        new = torch.stack([keys_GNd.detach(), values_GNd.detach()])[:, :, -self.capacity :].to(self._ring_2GNd.dtype)
        self.count += keys_GNd.shape[1]
        self._reserve(self.size)
        first = self.count - new.shape[2]
        begin = first % self.capacity
        room = min(new.shape[2], self.capacity - begin)
        self._ring_2GNd[:, :, begin : begin + room] = new[:, :, :room]
        self._ring_2GNd[:, :, : new.shape[2] - room] = new[:, :, room:]
        for head, index in enumerate(self._indexes):
            index.add(new[0, head], first, oldest=self.count - self.size)

    @_as_stored
    def search(
        self, queries_GQd: Float[Tensor, "G Q d"], k: int
    ) -> tuple[Float[Tensor, "G Q K"], Int[Tensor, "G Q K"]]:
        """Returns scores and ids of each head's K = min(k, pairs) best pairs."""
        k = min(k, self.size)
        if self._indexes and self.size >= FAISS_FROM:
            found = [
                index.search(queries_Qd, k, self._ring_2GNd[0, head, : self.size], self.count - self.size)
                for head, (index, queries_Qd) in enumerate(zip(self._indexes, queries_GQd, strict=True))
            ]
            scores, ids = (torch.stack(each) for each in zip(*found, strict=True))
            return scores.to(queries_GQd), ids.to(queries_GQd.device)
        return self._search_exactly(queries_GQd, k)

    @_as_stored
    def search_within(
        self, queries_GQd: Float[Tensor, "G Q d"], k: int, spans_Q2: Int[Tensor, "Q 2"]
    ) -> tuple[Float[Tensor, "G Q K"], Int[Tensor, "G Q K"]]:
        """Returns scores and ids as `search`, exactly, of the pairs that each query may find: from an id up to
        another one.
        """
        return self._search_exactly(queries_GQd, min(k, self.size), spans_Q2)

    @_as_stored
    def read(self, ids_GQK: Int[Tensor, "G Q K"], weights_GQK: Float[Tensor, "G Q K"]) -> Float[Tensor, "G Q d"]:
        """Returns the weighted sum of the values of some ids. Missing places must have weight zero."""
        if not self.size:
            return weights_GQK.new_zeros(*ids_GQK.shape[:2], self._ring_2GNd.shape[3])
        if torch.is_grad_enabled() and weights_GQK.requires_grad:
            return torch.einsum("gqk,gqkd->gqd", weights_GQK, self.pairs(ids_GQK)[1].to(weights_GQK.dtype))
        values_Nd = self._ring_2GNd[1].flatten(0, 1)
        places_QK, weights_QK = self._places(ids_GQK).flatten(0, 1), weights_GQK.flatten(0, 1).to(values_Nd.dtype)
        read_Qd = F.embedding_bag(places_QK, values_Nd, per_sample_weights=weights_QK, mode="sum")
        return read_Qd.view(*ids_GQK.shape[:2], -1).to(weights_GQK.dtype)

    @_as_stored
    def pairs(self, ids_GQK: Int[Tensor, "G Q K"]) -> tuple[Float[Tensor, "G Q K d"], Float[Tensor, "G Q K d"]]:
        """Returns keys and values of some ids. Missing places get those of an arbitrary pair."""
        places = self._places(ids_GQK).flatten()
        keys, values = (each.flatten(0, 1).index_select(0, places).view(*ids_GQK.shape, -1) for each in self._ring_2GNd)
        return keys, values

    @_as_stored
    def replace(self, first: int, keys_GNd: Float[Tensor, "G N d"], values_GNd: Float[Tensor, "G N d"]) -> None:
        """Overwrites the N pairs from an id on. Needs exact search, and that none was dropped for the capacity."""
        self._ring_2GNd[:, :, first : first + keys_GNd.shape[1]] = torch.stack([keys_GNd, values_GNd])

    def crop(self, count: int) -> None:
        """Drops all pairs but the first `count`. Needs exact search, and that none was dropped for the capacity."""
        self.count = min(self.count, count)

    def clear(self) -> None:
        """Drops all pairs. Ids start at zero again."""
        self.count = 0
        for index in self._indexes:
            index.clear()

    def fork(self) -> KnnCache:
        """Returns an independent copy."""
        twin = copy(self)
        twin._ring_2GNd = self._ring_2GNd.clone()
        twin._indexes = [index.fork() for index in self._indexes]
        return twin

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that `restore` reads: the ring, the number of pairs ever added, and Faiss' indexes."""
        state = {"ring": self._ring_2GNd[:, :, : self.size].contiguous(), "count": torch.tensor(self.count)}
        for head, index in enumerate(self._indexes):
            state |= {f"index.{head}.{name}": tensor for name, tensor in index.state().items()}
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        """Loads the tensors of `state`."""
        self.clear()
        self.count = int(state["count"])
        self._reserve(self.size)
        self._ring_2GNd[:, :, : self.size] = state["ring"]
        for head, index in enumerate(self._indexes):
            prefix = f"index.{head}."
            index.restore({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})

    def _places(self, ids_GQK: Int[Tensor, "G Q K"]) -> Int[Tensor, "G Q K"]:
        """The places of ids in the ring, with the heads one behind the other."""
        heads_G11 = torch.arange(len(ids_GQK), device=ids_GQK.device)[:, None, None]
        return ids_GQK.clamp(min=0) % self.capacity + heads_G11 * self._ring_2GNd.shape[2]

    def _reserve(self, size: int) -> None:
        held = self._ring_2GNd.shape[2]
        if size > held:
            size = min(self.capacity, size + max(GROWTH, held // GROWTH_SHARE))
            more = self._ring_2GNd.new_zeros(*self._ring_2GNd.shape[:2], size - held, self._ring_2GNd.shape[3])
            self._ring_2GNd = torch.cat([self._ring_2GNd, more], dim=2)

    def _search_exactly(self, queries_GQd: Tensor, k: int, spans_Q2: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores all pairs, a block at a time, and merges the best of each block."""
        scores_GQK = queries_GQd.new_empty(*queries_GQd.shape[:2], 0)
        slots_GQK = torch.empty(scores_GQK.shape, dtype=torch.int64, device=queries_GQd.device)
        for begin in range(0, self.size, SEARCH_BLOCK):
            keys_GNd = self._ring_2GNd[0, :, begin : min(begin + SEARCH_BLOCK, self.size)].to(queries_GQd.dtype)
            scores_GQN = queries_GQd @ keys_GNd.mT
            if spans_Q2 is not None:
                ids_N = self._ids_of(torch.arange(begin, begin + keys_GNd.shape[1], device=queries_GQd.device))
                outside_QN = (ids_N < spans_Q2[:, :1]) | (ids_N >= spans_Q2[:, 1:])
                scores_GQN = scores_GQN.masked_fill(outside_QN, -torch.inf)
            best = scores_GQN.topk(min(k, scores_GQN.shape[2]), dim=2)
            scores_GQK = torch.cat([scores_GQK, best.values], dim=2)
            slots_GQK = torch.cat([slots_GQK, best.indices + begin], dim=2)
            if scores_GQK.shape[2] > k:
                best = scores_GQK.topk(k, dim=2)
                scores_GQK, slots_GQK = best.values, slots_GQK.gather(2, best.indices)
        return scores_GQK, self._ids_of(slots_GQK)

    def _ids_of(self, slots: Tensor) -> Tensor:
        """The latest id that was stored at each slot of the ring."""
        last = self.count - 1
        return last - (last - slots) % self.capacity


def all_positions(num_heads: int, head_dim: int, device: torch.device) -> KnnCache:
    """A cache of all positions of a text, whose ids are positions, for extended attention."""
    return KnnCache(num_heads, head_dim, capacity=UNBOUNDED, dtype=torch.float16, search="exact", device=device)


class FaissKeys:
    """An inverted file of Faiss over the keys of one head, trained once there are enough keys and again when they have
    multiplied.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._index: Any = None
        self._trained_on = 0
        self._oldest = 0

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of codes, ids and centroids."""
        if self._index is None:
            return 0
        return int(self._index.ntotal) * (2 * self.dim + 8) + 4 * self.dim * int(self._index.nlist)

    def add(self, keys_Nd: Float[Tensor, "N d"], first_id: int, *, oldest: int) -> None:
        """Adds keys with consecutive ids, and removes those before `oldest`."""
        if self._index is None:
            return
        with faiss_threads(len(keys_Nd)):
            if oldest > self._oldest:
                self._index.remove_ids(faiss.IDSelectorRange(self._oldest, oldest))
            keys = keys_Nd.float().cpu().contiguous().numpy()
            self._index.add_with_ids(keys, np.arange(first_id, first_id + len(keys_Nd)))
        self._oldest = oldest

    def search(
        self, queries_Qd: Float[Tensor, "Q d"], k: int, keys_Nd: Float[Tensor, "N d"], oldest: int
    ) -> tuple[Float[Tensor, "Q K"], Int[Tensor, "Q K"]]:
        """Returns scores and ids. `keys_Nd` are all keys in the order of the ring, to train the index on."""
        if self._index is None or len(keys_Nd) >= RETRAIN_AT * self._trained_on:
            self._train(keys_Nd, oldest)
        with faiss_threads(len(queries_Qd)):
            queries = queries_Qd.detach().float().contiguous().cpu().numpy()
            scores, ids = self._index.search(queries, k)
        found = torch.from_numpy(scores)
        return found.masked_fill(torch.from_numpy(ids) < 0, -torch.inf), torch.from_numpy(ids)

    def clear(self) -> None:
        """Drops the keys and the index, because another document has other keys."""
        self._index, self._trained_on, self._oldest = None, 0, 0

    def fork(self) -> FaissKeys:
        """Returns an independent copy."""
        twin = FaissKeys(self.dim)
        twin._index = None if self._index is None else faiss.clone_index(self._index)
        twin._trained_on, twin._oldest = self._trained_on, self._oldest
        return twin

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that `restore` reads, none if the index is not trained."""
        if self._index is None:
            return {}
        bounds = torch.tensor([self._trained_on, self._oldest])
        return {"index": torch.from_numpy(faiss.serialize_index(self._index)), "bounds": bounds}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Loads the tensors of `state`."""
        self.clear()
        if state:
            self._index = faiss.deserialize_index(state["index"].numpy())
            self._trained_on, self._oldest = state["bounds"].tolist()

    def _train(self, keys_Nd: Tensor, oldest: int) -> None:
        keys = keys_Nd.float().cpu().numpy()
        nlist = max(1, len(keys) // CELL_SIZE)
        slots = np.arange(len(keys))
        ids = oldest + (slots - oldest) % len(keys)
        with faiss_threads(len(keys)):
            index: Any = faiss.index_factory(self.dim, f"IVF{nlist},SQfp16", faiss.METRIC_INNER_PRODUCT)
            index.by_residual = False
            index.cp.min_points_per_centroid, index.cp.niter, index.cp.spherical = 1, 8, True
            index.nprobe = min(NPROBE, nlist)
            index.train(keys)
            index.add_with_ids(keys, ids)
        self._index, self._trained_on, self._oldest = index, len(keys), oldest
