"""The chunks of a datastore's documents as the neighbors of a RETRO model (arXiv 2112.04426).

The vectors of a segment's chunks lie beside its files (`memlm.index.store.derived.chunk_vectors`). They are made when
they are first wanted, and go with their segment.

Shapes: N chunks that ask, m tokens of a chunk, k neighbors, r tokens of a neighbor.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int
from torch import Tensor

from memlm.base.progress import Progress, silent
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Incompatible, InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.chunk_vectors import SegmentChunks
from memlm.index.store.manifest import Manifest, read_manifest
from memlm.index.store.snapshot import Snapshot
from memlm.model.decoder import Decoder
from memlm.zoo.retro.chunk_store import ChunkStore, TokenMeans
from memlm.zoo.retro.cross import Retrieval
from memlm.zoo.retro.encoder import NOTHING

if TYPE_CHECKING:
    from memlm.language_model import LanguageModel


def read_chunks(lm: LanguageModel, store: str | Path) -> DatastoreChunks:
    """Lets a model with the cross retro read the chunks of a datastore's documents, added and deleted ones from their
    commit on. Without, it reads none. Close the chunks after their last use.

    Raises InvalidInput for a model without this cross, and where a datastore has keys, since those were made without
    neighbors. Raises Incompatible for a datastore of another tokenizer.
    """
    if keyed := [each.name for each in lm.stores if each.num_keyed_entries]:
        raise InvalidInput(
            f"the keys of the datastore {keyed[0]!r} were made without a chunk store, and would not be found with one;"
            " leave out either",
            field="chunk_store",
        )
    found = DatastoreChunks(store, lm.checkpoint.decoder, lm.tokenizer)
    lm.checkpoint.decoder.cross.neighbors = found
    return found


def check_chunk_store(path: str | Path, tokenizer: Tokenizer) -> None:
    """Raises Incompatible for a datastore of another tokenizer, and NotFound or Corrupt where none can be read."""
    _check_tokenizer(read_manifest(Path(path)), path=Path(path), tokenizer=tokenizer)


class DatastoreChunks:
    """Finds for each chunk the nearest chunks of a datastore, by the means of a decoder's token embeddings. It is a
    function as `decoder.cross.neighbors` takes, for any number of threads.

    A search sees the last commit: added documents are found, and deleted ones are not. Only tokens are read, so a
    datastore of any model of this tokenizer serves, also one without keys. With `leaves_out_own`, as learning needs, no
    neighbor is of a document that has the chunk in it (`ChunkStore`).
    """

    def __init__(
        self,
        path: str | Path,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        leaves_out_own: bool = False,
        progress: Progress = silent,
    ) -> None:
        """Opens the datastore, and makes the vectors that it lacks. Raises InvalidInput for a decoder without the cross
        retro, and for a datastore without documents. Raises Incompatible for one of another tokenizer.
        """
        if not isinstance(decoder.cross, Retrieval):
            raise InvalidInput(
                "a chunk store is read by a model with the cross retro, and this one has none; leave it out",
                field="chunk_store",
            )
        self._cross = decoder.cross
        self._part, self._leaves_out_own = decoder.cross.part, leaves_out_own
        self._embed, self._lock = TokenMeans(decoder), threading.Lock()
        self._segments = dict[object, SegmentChunks]()
        self._datastore = Datastore.open(path)
        try:
            self._datastore.require(partial(_check_tokenizer, path=self._datastore.path, tokenizer=tokenizer))
            self._snapshot, self._store = self._datastore.snapshot, self._opened(progress)
            if self._store is None:
                raise InvalidInput(f"the datastore {path} has no documents; add some", field="chunk_store")
        except BaseException:
            self.close()
            raise

    @property
    def num_chunks(self) -> int:
        """Chunks of the documents at the last search."""
        return 0 if self._store is None else self._store.num_chunks

    def __call__(self, chunk_Nm: Int[Tensor, "N m"]) -> Int[Tensor, "N k r"]:
        """Returns the tokens of the neighbors, nearest first, with NOTHING behind short ones and for missing ones."""
        with self._lock:
            self._datastore.refresh()
            if self._datastore.snapshot is not self._snapshot:
                self._snapshot, self._store = self._datastore.snapshot, self._opened()
            store = self._store
        if store is None:
            return chunk_Nm.new_full((len(chunk_Nm), self._part.neighbors, self._part.length), NOTHING)
        return store(chunk_Nm)

    def close(self) -> None:
        """Closes the files. The decoder reads no chunks then."""
        if self._cross.neighbors is self:
            self._cross.neighbors = None
        for chunks in self._segments.values():
            chunks.close()
        self._datastore.close()

    def __enter__(self) -> DatastoreChunks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, progress: Progress = silent) -> ChunkStore | None:
        """The chunks of the live documents, None if there are none. Closes those of segments that are gone."""
        snapshot: Snapshot = self._datastore.snapshot
        documents, vectors = list[np.ndarray](), list[np.ndarray]()
        for segment in snapshot.segments:
            chunks = self._segments.get(segment.core)
            if chunks is None:
                chunks = SegmentChunks(snapshot.path, segment, self._part.chunk, self._embed)
                self._segments[segment.core] = chunks
            while not chunks.is_complete:
                chunks.build()
                progress("embed chunks", chunks.num_done, len(chunks.begin_P))
            is_live, starts = ~segment.deleted_mask, segment.starts
            documents += [segment.values_N[starts[row] : starts[row + 1]] for row in is_live.nonzero()[0]]
            if (is_live_P := is_live[chunks.document_P]).any():
                vectors.append(chunks.vectors_PE[is_live_P])
        current = {segment.core for segment in snapshot.segments}
        for core in self._segments.keys() - current:
            self._segments.pop(core).close()
        if not vectors:
            return None
        part = self._part
        return ChunkStore(
            documents, self._embed, chunk=part.chunk, neighbors=part.neighbors, length=part.length,
            leaves_out_own=self._leaves_out_own, vectors_PE=np.concatenate(vectors),
        )  # fmt: skip


def _check_tokenizer(manifest: Manifest, *, path: Path, tokenizer: Tokenizer) -> None:
    if manifest.spec.tokenizer_fingerprint != tokenizer.fingerprint:
        raise Incompatible(
            f"the datastore {path} was built with another tokenizer than the model has; build it anew with a model of"
            " this tokenizer, as `memlm index build --keys none`"
        )
