"""Small stores of random keys, in clusters as a model's are: what the tests of the index build."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memlm.index.factory import NO_INDEX
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import KnnDefaults, StoreSpec
from memlm.index.store.writer import StoreWriter

DIM, IVF = 12, "IVF4,SQfp16"
DEFAULTS = KnnDefaults(k=8, lam=0.25, temperature=1.0, tuned_on=None)


def spec(index: str = "auto", **changes) -> StoreSpec:
    """Settings of keys that are indexed so. Of "none", which stands for entries without keys, those of "auto"."""
    return StoreSpec(**{"dim": DIM, "model_fingerprint": "m", "tokenizer_fingerprint": "t", "context": 8, "stride": 4,
                        "index": "auto" if index == NO_INDEX else index, **changes})  # fmt: skip


class Corpus:
    """Documents of random sizes: keys, values, and the names they go by."""

    def __init__(self, seed: int, num_documents: int = 12, prefix: str = "doc") -> None:
        rng = np.random.default_rng(seed)
        self.sizes = rng.integers(1, 60, num_documents)
        self.names = [f"{prefix}-{number}" for number in range(num_documents)]
        centres = rng.normal(size=(9, DIM)) * 3
        total = int(self.sizes.sum())
        self.keys_ND = (centres[rng.integers(9, size=total)] + rng.normal(size=(total, DIM))).astype(np.float32)
        self.values_N = rng.integers(0, 500, total)
        self.owner_N = np.repeat(np.arange(num_documents), self.sizes)

    def blocks(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Name, keys and values of each document."""
        ends = np.cumsum(self.sizes)
        for name, begin, end in zip(self.names, ends - self.sizes, ends, strict=True):
            yield name, self.keys_ND[begin:end], self.values_N[begin:end]


def fill(writer: StoreWriter, corpus: Corpus, *, stop_after: int | None = None) -> None:
    """Streams a corpus into a writer, a checkpoint after each document; may stop in the middle."""
    for number, (name, keys_ND, values_N) in enumerate(corpus.blocks()):
        if number == stop_after:
            return
        writer.begin_document(name, title=name.upper(), metadata={"number": number})
        if writer.is_resumed(len(values_N)):
            writer.verify_resumed(values_N)
        else:
            writer.append(keys_ND if writer.keyed else None, values_N)
            writer.checkpoint()


def build(path: Path, corpus: Corpus, index: str = "auto") -> Datastore:
    with StoreWriter.create(path, spec(index), keyed=index != NO_INDEX) as writer:
        fill(writer, corpus)
        return writer.commit(defaults=DEFAULTS)


def add(path: Path, corpus: Corpus, *, index: str = IVF, stop_after: int | None = None, replace: bool = False) -> None:
    """Adds a corpus, or replaces what it names; stopped early, it is left uncommitted."""
    with StoreWriter.extend(path, spec(index), keyed=index != NO_INDEX) as writer:
        if not replace:
            fill(writer, corpus, stop_after=stop_after)
        for name, keys_ND, values_N in corpus.blocks() if replace else ():
            writer.begin_document(name, title=name.upper(), metadata={"number": 0}, replace=True)
            writer.append(keys_ND if writer.keyed else None, values_N)
        if stop_after is None:
            writer.commit(defaults=DEFAULTS).close()
