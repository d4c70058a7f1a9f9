"""Indexes of several sizes on disk, what they find, and how long searches take, for `python -m benchmarks scale`.

Where the texts have fewer tokens than a store has entries, the further keys are copies of the real ones, each rotated
about their mean by another random rotation. A rotated copy is as dense as the real keys, and lies elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Float16, Float32

from benchmarks.datastore import corpus_keys
from benchmarks.scale.law import Shape
from memlm.base.files import write_atomic
from memlm.base.progress import Progress
from memlm.bench.machine import seconds
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.arrays import GrowingArray
from memlm.index.exact import exact_neighbors
from memlm.index.ivf import Ivf, code_bytes, lists_for, open_index, train_ivf
from memlm.index.ivf_writer import write_ivf
from memlm.index.selection import agreement
from memlm.model.files.checkpoint import Checkpoint

K = 32
BATCHES = (1, 8, 64)
PROBED = (4, 8, 16, 32, 64, 128, 256)
BLOCK_ROWS = 65_536

Times: TypeAlias = dict[tuple[int, int], list[float]]  # seconds a query by (batch, nprobe), one of each repeat


@dataclass(frozen=True)
class Built:
    """Facts of an index on disk that stay the same: its bytes, the seconds of its build, and the share of the exact
    neighbors' softmax mass that it finds at each number of lists.
    """

    entries: int
    index: str
    lists: int
    dim: int
    code_bytes: int
    bytes: int
    build_s: float
    mass_at: dict[int, float]

    @property
    def shape(self) -> Shape:
        """Its sizes, for the laws."""
        return Shape(self.entries, self.lists, self.code_bytes, self.dim)

    def enough_lists(self, target: float) -> int:
        """The number of lists that find `target` of the mass that the most lists find. It is interpolated between those
        that were tried, because each of them is twice the one before.
        """
        probed = sorted(self.mass_at)
        found = np.maximum.accumulate([self.mass_at[nprobe] for nprobe in probed])
        if found[-1] <= 0:
            return probed[-1]
        return round(float(np.exp(np.interp(target, found / found[-1], np.log(probed)))))

    def mass(self, nprobe: int) -> float:
        """The mass found at a number of lists, between those that were tried."""
        probed = sorted(self.mass_at)
        return float(np.interp(np.log(nprobe), np.log(probed), [self.mass_at[each] for each in probed]))


def factory_of(kind: str, entries: int) -> str:
    """The factory string of a kind, with `*` for the number of lists."""
    return kind.replace("*", str(lists_for(entries)))


def scaled_keys(
    checkpoint: Checkpoint, texts: Corpus, work: Path, entries: int, progress: Progress
) -> tuple[Float16[np.ndarray, "N D"], np.ndarray, int]:
    """Keys and values of `entries` entries, and how many of them are of the texts. The others are rotated copies.

    Raises InvalidInput if the texts are empty, or if the folder has the keys of another model or of other texts.
    """
    real_ND, real_N, _ = corpus_keys(checkpoint, texts, work, entries, progress)
    if not (real := len(real_N)):
        raise InvalidInput("there is no token to make keys of; the texts are empty", field="texts")
    if real >= entries:
        return real_ND[:entries], real_N[:entries], entries
    paths = work / f"{real}-keys.npy", work / f"{real}-values.npy"
    if not all(path.exists() for path in paths) or len(np.load(paths[1], mmap_mode="r")) < entries:
        _write_copies(real_ND, np.asarray(real_N), paths, entries, progress)
    keys_ND, values_N = (np.load(path, mmap_mode="r") for path in paths)
    return keys_ND[:entries], values_N[:entries], real


def _write_copies(
    keys_ND: Float16[np.ndarray, "N D"],
    values_N: np.ndarray,
    paths: tuple[Path, Path],
    entries: int,
    progress: Progress,
) -> None:
    """Writes the keys and as many rotated copies as fill `entries` rows."""
    with (
        closing(GrowingArray(paths[0], "<f2", keys_ND.shape[1])) as keys,
        closing(GrowingArray(paths[1], "<u4", None)) as values,
    ):
        for copy_ND in rotated_copies(keys_ND):
            left = entries - keys.rows
            keys.append(copy_ND[:left])
            values.append(values_N[:left])
            progress("rotate keys", keys.rows, entries)
            if keys.rows >= entries:
                break
        keys.sync()
        values.sync()


def rotated_copies(keys_ND: Float16[np.ndarray, "N D"]) -> Iterator[Float16[np.ndarray, "N D"]]:
    """The keys, and then, without end, copies of them. Each is rotated about their mean by another random rotation."""
    yield keys_ND
    rng, dim = np.random.default_rng(0), keys_ND.shape[1]
    mean_D = keys_ND.mean(axis=0, dtype=np.float64).astype(np.float32)
    while True:
        rotation_DD = _random_rotation(rng, dim)
        copy_ND = np.empty_like(keys_ND)
        for begin in range(0, len(keys_ND), BLOCK_ROWS):
            rows = slice(begin, begin + BLOCK_ROWS)
            copy_ND[rows] = (keys_ND[rows].astype(np.float32) - mean_D) @ rotation_DD + mean_D
        yield copy_ND


def _random_rotation(rng: np.random.Generator, dim: int) -> Float32[np.ndarray, "D D"]:
    """Uniform over all orthogonal matrices: QR of a Gaussian matrix, with R's diagonal made positive
    (arXiv math-ph/0609050).
    """
    q_DD, r_DD = np.linalg.qr(rng.normal(size=(dim, dim)))
    return (q_DD * np.sign(np.diag(r_DD))).astype(np.float32)


def build(
    kind: str,
    keys_ND: Float16[np.ndarray, "N D"],
    values_N: np.ndarray,
    queries_QD: Float32[np.ndarray, "Q D"],
    work: Path,
    progress: Progress,
) -> Built:
    """Builds an index of all keys in the folder and measures what it finds, unless it is there already.

    Raises InvalidInput if the index that is there has keys of another width.
    """
    entries, dim = keys_ND.shape
    path, facts = _paths(work, kind, entries)
    if facts.exists():
        return _read_facts(facts, dim)
    factory, begin = factory_of(kind, entries), time.perf_counter()
    write_ivf(path, train_ivf(factory, keys_ND, seed=0, progress=progress), keys_ND, values_N, progress=progress)
    build_s = time.perf_counter() - begin
    index = Ivf(open_index(path, entries, dim), factory, None)
    exact = exact_neighbors(queries_QD, keys_ND, values_N, K)
    nearest_Q = exact.distances_QK[:, 0]
    temperature = float(np.median(nearest_Q[nearest_Q > 0])) / 2 if (nearest_Q > 0).any() else 1.0
    mass_at = {}
    for nprobe in sorted({min(nprobe, index.nlist) for nprobe in PROBED}):
        _, mass_Q = agreement(index.search(queries_QD, K, nprobe), exact, temperature)
        mass_at[nprobe] = float(mass_Q.mean())
    code, size = code_bytes(factory, dim), path.stat().st_size
    built = Built(entries, kind, index.nlist, dim, code, size, build_s, mass_at)
    write_atomic(facts, json.dumps(asdict(built)).encode())
    return built


def _read_facts(facts: Path, dim: int) -> Built:
    read = json.loads(facts.read_text(encoding="utf-8"))
    built = Built(**{**read, "mass_at": {int(nprobe): mass for nprobe, mass in read["mass_at"].items()}})
    if built.dim != dim:
        raise InvalidInput(
            f"work has indexes of keys of {built.dim} numbers, and the model's have {dim}; give another folder",
            field="work",
        )
    return built


def time_searches(
    built: Sequence[Built],
    queries_QD: Float32[np.ndarray, "Q D"],
    work: Path,
    *,
    target: float,
    repeats: int,
    progress: Progress,
) -> list[Times]:
    """Seconds a query of each index, in batches of each size, at each number of lists that was tried and at the number
    that finds the target. In each repeat the indexes take turns, so that a slow minute hits them all.
    """
    opened = [
        Ivf(open_index(_paths(work, each.index, each.entries)[0], each.entries, each.dim), each.index, None)
        for each in built
    ]
    times: list[Times] = [{} for _ in built]
    for repeat in range(-1, repeats):  # the first turn reads the pages that later ones find in RAM
        progress(f"search {built[0].index}", repeat + 1, repeats + 1)
        for facts, index, taken in zip(built, opened, times, strict=True):
            for nprobe in sorted({*facts.mass_at, facts.enough_lists(target)}):
                for batch in BATCHES:
                    spent_s = _seconds_per_query(index, queries_QD, nprobe, batch)
                    if repeat >= 0:
                        taken.setdefault((batch, nprobe), []).append(spent_s)
    progress(f"search {built[0].index}", repeats + 1, repeats + 1)
    return times


def _seconds_per_query(index: Ivf, queries_QD: Float32[np.ndarray, "Q D"], nprobe: int, batch: int) -> float:
    """Searches whole batches of the queries, one after the other."""
    begins = range(0, len(queries_QD) - batch + 1, batch)

    def search() -> None:
        for begin in begins:
            index.search(queries_QD[begin : begin + batch], K, nprobe)

    return seconds(search) / (len(begins) * batch)


def _paths(work: Path, kind: str, entries: int) -> tuple[Path, Path]:
    """The index of a kind and size in the folder, and its facts."""
    name = f"{entries}-{kind.replace('*', '').replace(',', '-')}"
    return work / f"{name}.faiss", work / f"{name}.json"
