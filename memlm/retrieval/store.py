"""A datastore, opened for one model: entries -> neighbors with their document, line and surrounding text.

A store of another model or tokenizer is refused.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Float32, Int64

from memlm.api.datastores import StoreInfo
from memlm.api.generation import Neighbor
from memlm.base.search_counts import SearchCounter
from memlm.base.steps import Offload, Steps
from memlm.errors import Incompatible
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.passage_vectors import PASSAGES_AT_ONCE, PassageEncoder, SegmentVectors
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.derived.suffixes import SegmentSuffixes
from memlm.index.store.exclusion import Exclusion, search_views
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import Manifest
from memlm.index.store.segment import Segment
from memlm.index.store.snapshot import Place, Snapshot
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.passages import Passage
from memlm.retrieval.phrases import Phrases
from memlm.retrieval.segment_cache import SegmentCache


class ViewSearch(Protocol):
    """Searches for each key in its view of a snapshot, as `memlm.index.store.exclusion.search_views` does."""

    def __call__(
        self,
        views_Q: Sequence[Snapshot],
        queries_QD: Float32[np.ndarray, "Q D"],
        k: int,
        *,
        nprobe: int | None = None,
        only: DocumentFilter | None = None,
    ) -> Neighbors:
        """Finds the k nearest entries to each query."""


class Made(Protocol):
    """A derived file that is made piece by piece."""

    is_complete: bool

    def build(self) -> None: ...


# Takes a datastore's name and the documents that it lost in a switch to another snapshot (None: unknown).
OnLost: TypeAlias = Callable[[str, Sequence[str] | None], None]

Derived = TypeVar("Derived", bound=Made)

SNIPPET_TOKENS = 12
OTHERS_S = 0.2
MARK_TOKENS = 128
MARKED_DOCUMENTS = 1024


class ModelStore:
    """One loaded datastore. Raises Incompatible for a store that another model or tokenizer built. A store
    without keys serves every model of its tokenizer.
    """

    def __init__(self, datastore: Datastore, checkpoint: Checkpoint, name: str = "") -> None:
        """Takes an open datastore, which from now on switches to no store of another model. Its default name is that of
        its folder.
        """
        datastore.require(partial(check_fingerprints, path=datastore.path, checkpoint=checkpoint))
        self.datastore, self.name = datastore, name or datastore.path.name
        self.model_folder, self._tokenizer = checkpoint.path, checkpoint.tokenizer
        self.on_lost: OnLost = lambda store, document_ids: None
        self.search_views: ViewSearch = search_views  # or that of shards
        self.has_remembered = False  # documents, whose small segments may want to be merged
        # A cache of its own method would keep the store, with its files, until a garbage collection.
        self._marks = lru_cache(maxsize=MARKED_DOCUMENTS)(partial(ModelStore._count, weakref.proxy(self)))
        self._phrases = Phrases(datastore, checkpoint.tokenizer)
        self._suffixes = SegmentCache[SegmentSuffixes](datastore)
        self._segment_cuts = SegmentCache[SegmentCuts](datastore)
        self._segment_passages = SegmentCache[SegmentPassages](datastore)
        self._segment_vectors = SegmentCache[SegmentVectors](datastore)
        self.counter = SearchCounter()

    @classmethod
    def open(cls, path: str | Path, checkpoint: Checkpoint, name: str = "") -> ModelStore:
        """Opens the datastore at `path` for a model."""
        return cls(Datastore.open(path), checkpoint, name)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot in use; a caller that reads twice keeps it, since another thread may refresh in between."""
        return self.datastore.snapshot

    def search(
        self,
        views_Q: Sequence[Snapshot],
        keys_QD: Float32[np.ndarray, "Q D"],
        k: int,
        *,
        nprobe: int | None = None,
        only: DocumentFilter | None = None,
    ) -> Neighbors:
        """Searches for each key in its view of a snapshot, and counts the search. With shards of which some may be
        missing, the result has `shares_Q`.
        """
        begin_s = time.perf_counter()
        found = self.search_views(views_Q, keys_QD, k, nprobe=nprobe, only=only)
        self.counter.add_search(time.perf_counter() - begin_s, is_partial=found.shares_Q is not None)
        return found

    def refresh(self) -> bool:
        """Switches to the newest snapshot, as `Datastore.refresh` does. Raises Incompatible for a store that another
        model or tokenizer built.
        """
        newer = self.datastore.open_latest()
        return newer is not None and self.switch_to(newer)

    def switch_to(self, newer: Snapshot) -> bool:
        """Switches to another snapshot, possibly of another store. Returns False for one older than that in use. Files
        of segments that are gone are closed once no search uses them.
        """
        before = self.snapshot
        lost = before.missing_from(newer)
        moved = self.datastore.switch_to(newer)
        if moved and lost != []:
            self.on_lost(self.name, lost)
        if moved and any(
            segment not in newer.segments for segment in before.segments
        ):  # ids may stand for other entries now
            self._marks.cache_clear()
            for cache in self._caches:
                cache.drop_gone()
        return moved

    def close(self) -> None:
        """Closes the files of the snapshot in use, and those that were made of its segments."""
        for cache in self._caches:
            cache.clear()
        self.datastore.close()

    @property
    def _caches(self) -> tuple[SegmentCache[Any], ...]:
        passages = self._segment_cuts, self._segment_passages, self._segment_vectors
        return self._phrases.words, self._suffixes, *passages

    def info(self, *, problem: str = "") -> StoreInfo:
        """Describes the snapshot in use: size and defaults. `problem` is the reason if it cannot be used."""
        snapshot = self.snapshot
        quality = snapshot.manifest.quality or {}
        return StoreInfo(
            name=self.name,
            path=str(snapshot.path),
            manifest=snapshot.manifest.number,
            num_entries=snapshot.num_entries,
            num_documents=snapshot.num_documents,
            num_deleted_documents=snapshot.num_deleted_documents,
            dim=snapshot.dim,
            index=snapshot.index_kind,
            bytes_per_entry=snapshot.bytes_on_disk / max(1, snapshot.num_entries),
            k=snapshot.defaults.k,
            lam=snapshot.defaults.lam,
            knn_temperature=snapshot.defaults.temperature,
            tuned_on=snapshot.defaults.tuned_on,
            store_id=snapshot.manifest.store_id,
            problem=problem,
            recall=quality.get("recall"),
            nats_change=quality.get("nats_change"),
            lam_adapts=snapshot.defaults.adaptive is not None,
            num_keyed_entries=snapshot.keyed.num_entries,
            num_keyed_documents=snapshot.keyed.num_documents,
        )

    def find_phrase(
        self, text: str, k: int, only: DocumentFilter, as_of: str | None = None
    ) -> Steps[tuple[Neighbor, ...]]:
        """Describes the first k places in the order of the documents where the words of a text follow each other, with
        distance and weight 0. With `as_of`, in documents that held then.
        """
        while True:
            snapshot = self.snapshot
            (view,) = yield from views_as_of(as_of, [snapshot])
            ids_K = yield from self._phrases.find(view, text, k, only)
            if self.snapshot is snapshot:  # no document was deleted meanwhile
                zeros_K = np.zeros(len(ids_K), np.float32)
                return self.describe(ids_K, zeros_K, zeros_K - np.inf, snapshot.values(ids_K))

    def suffixes_of(self, segment: Segment) -> SegmentSuffixes:
        """The suffix array of a segment, which may be incomplete."""
        return self._suffixes.get(segment, lambda: SegmentSuffixes(self.snapshot.path, segment))

    def whole_suffixes_of(self, segment: Segment) -> Steps[SegmentSuffixes]:
        """The complete suffix array of a segment. One that is missing is made, one piece a step."""
        return (yield from _completed(partial(self.suffixes_of, segment)))

    def whole_cuts_of(self, segment: Segment) -> Steps[SegmentCuts]:
        """Where all passages of a segment begin. Its documents are cut some a step, where they are not yet."""
        path, decode_bytes = self.snapshot.path, self._tokenizer.decode_bytes
        make = partial(self._segment_cuts.get, segment, lambda: SegmentCuts(path, segment, decode_bytes))
        return (yield from _completed(make))

    def whole_passages_of(self, segment: Segment) -> Steps[SegmentPassages]:
        """The complete index of a segment's passages. They are indexed some a step, where they are not yet."""
        cuts, path = (yield from self.whole_cuts_of(segment)), self.snapshot.path
        make = partial(self._segment_passages.get, segment, lambda: SegmentPassages(path, segment, cuts))
        return (yield from _completed(make))

    def vectors_of(self, segment: Segment, encoder: PassageEncoder) -> Steps[SegmentVectors]:
        """An encoder's vectors of the first passages of a segment. A store has one encoder."""
        cuts, path = (yield from self.whole_cuts_of(segment)), self.snapshot.path
        make = partial(self._segment_vectors.get, segment, lambda: SegmentVectors(path, segment, cuts, encoder))
        vectors: SegmentVectors = yield Offload(make)
        return vectors

    def whole_vectors_of(self, segment: Segment, encoder: PassageEncoder) -> Steps[SegmentVectors]:
        """The vectors of all passages of a segment. They are encoded some a step, where they are not yet."""
        vectors = yield from self.vectors_of(segment, encoder)
        while not vectors.is_complete:
            if not (yield Offload(vectors.build, is_long=True)):
                yield Offload(partial(time.sleep, OTHERS_S), is_long=True)  # another process makes them
        return vectors

    def known_vectors_of(self, segment: Segment, encoder: PassageEncoder) -> Steps[SegmentVectors]:
        """The vectors that are there, with those that take a moment."""
        vectors = yield from self.vectors_of(segment, encoder)
        if 0 < len(vectors) - len(vectors.vectors_PD) <= PASSAGES_AT_ONCE:
            yield Offload(vectors.build, is_long=True)
        return vectors

    def passage_after(self, view: Snapshot, text: Sequence[int], least: int) -> Passage | None:
        """Finds the longest end of a text that stands in a document of a view and goes on there, of at least `least`
        and at most 16 tokens. None if there is none, or in segments whose suffix array is not made yet.
        """
        best: Passage | None = None
        for segment in view.segments:
            suffixes = self.suffixes_of(segment)
            if suffixes.is_complete:
                deleted = segment.deleted_mask if segment.any_deleted else None
                if match := suffixes.lookup.longest(text, least, deleted):
                    best, least = Passage.of(segment, match), match.length + 1
        return best

    def describe(
        self,
        ids_K: Int64[np.ndarray, " K"],
        distances_K: Float32[np.ndarray, " K"],
        logweights_K: Float32[np.ndarray, " K"],
        values_K: Int64[np.ndarray, " K"],
        ahead: int = SNIPPET_TOKENS,
    ) -> tuple[Neighbor, ...]:
        """Describes neighbors: document, line, and the text around each, up to `ahead` tokens on. Missing places are
        left out.
        """
        found_K = ids_K >= 0
        places = self.snapshot.locate(ids_K[found_K])
        if not places:
            return ()
        passages = self._passages(places, ahead)
        values = values_K[found_K].tolist()
        rows = zip(distances_K[found_K], logweights_K[found_K], values, places, passages, strict=True)
        return tuple(
            Neighbor(
                store=self.name,
                document_id=place.document_id,
                title=place.title,
                token_offset=place.token_offset,
                char_offset=max(0, characters - self._tokenizer.prepends_space),
                line=1 + line_ends,
                token_id=value,
                token_text=self._tokenizer.decode((value,)),
                distance=float(distance),
                weight=float(np.exp(logweight)),
                snippet=snippet,
                metadata=place.metadata,
            )
            for distance, logweight, value, place, (line_ends, characters, snippet) in rows
        )

    def _passages(self, places: Sequence[Place], ahead: int) -> list[tuple[int, int, str]]:
        """Returns the line ends and characters before each place in its document, and the text around it.

        All places are read at once, each with the MARK_TOKENS before it, because a request for many neighbors shares
        the engine's loop with all others.
        """
        offsets_K = np.array([place.token_offset for place in places])
        first_ids_K, sizes_K = np.array([(place.first_id, place.num_tokens) for place in places]).T
        steps_W = np.arange(-MARK_TOKENS, ahead)
        positions_KW = offsets_K[:, None] + steps_W
        ids_KW = first_ids_K[:, None] + positions_KW.clip(0, sizes_K[:, None] - 1)
        tokens_KW = self.snapshot.values(ids_KW.ravel()).reshape(ids_KW.shape)
        since_mark_KW = (steps_W < 0) & (steps_W >= -(offsets_K % MARK_TOKENS)[:, None])
        marks = [self._marks(place.first_id, place.num_tokens)[place.token_offset // MARK_TOKENS] for place in places]
        marks_K2 = np.stack(marks)
        line_ends_K = marks_K2[:, 0] + (self._tokenizer.newlines[tokens_KW] * since_mark_KW).sum(axis=1)
        characters_K = marks_K2[:, 1] + (self._tokenizer.characters[tokens_KW] * since_mark_KW).sum(axis=1)
        begins_K = MARK_TOKENS - np.minimum(offsets_K, SNIPPET_TOKENS)
        ends_K = MARK_TOKENS + np.minimum(sizes_K - offsets_K, ahead)
        rows = zip(tokens_KW.tolist(), begins_K.tolist(), ends_K.tolist(), strict=True)
        snippets = [self._tokenizer.decode(tokens[begin:end]) for tokens, begin, end in rows]
        return list(zip(line_ends_K.tolist(), characters_K.tolist(), snippets, strict=True))

    def _count(self, first_id: int, num_tokens: int) -> Int64[np.ndarray, "M 2"]:
        """Counts line ends and characters before every MARK_TOKENSth token of a document."""
        tokens = self.snapshot.values_range(first_id, num_tokens)
        counts_N2 = np.stack([self._tokenizer.newlines[tokens], self._tokenizer.characters[tokens]], axis=1)
        blocks = np.add.reduceat(counts_N2, np.arange(0, num_tokens, MARK_TOKENS), axis=0)
        return np.concatenate([np.zeros((1, 2), np.int64), blocks.cumsum(axis=0)])


def _completed(make: Callable[[], Derived]) -> Steps[Derived]:
    derived: Derived = yield Offload(make)
    while not derived.is_complete:
        yield Offload(derived.build, is_long=True)
    return derived


def views_as_of(as_of: str | None, snapshots: Sequence[Snapshot]) -> Steps[Sequence[Snapshot]]:
    """The snapshots without the documents that do not hold at a time. None counts all. The first time reads the tables
    of documents.
    """
    if as_of is None:
        return snapshots
    exclusion = Exclusion((), as_of)
    views: list[Snapshot] = yield Offload(lambda: [*map(exclusion.view_of, snapshots)], is_long=True)
    return views


def check_fingerprints(manifest: Manifest, *, path: Path, checkpoint: Checkpoint) -> None:
    """Raises Incompatible, naming the difference, unless the store was built by this model and tokenizer. Of a store
    without keys, the tokenizer alone counts.
    """
    spec = manifest.spec
    if spec.tokenizer_fingerprint != checkpoint.tokenizer.fingerprint:
        raise Incompatible(
            f"the datastore {path} was built with another tokenizer than {checkpoint.path} has; build it anew with this"
            " model, or load the model it was built with"
        )
    if not manifest.is_keyed:
        return
    if spec.start_id not in (None, checkpoint.tokenizer.start_id):
        raise Incompatible(
            f"the documents of the datastore {path} begin with the token {spec.start_id}, texts of {checkpoint.path}"
            f" with {checkpoint.tokenizer.start_id}; build it anew with this model, or restore the model's settings"
        )
    if spec.model_fingerprint != checkpoint.fingerprint:
        raise Incompatible(
            f"the datastore {path} was built by another model ({_named(spec.model, spec.model_fingerprint)}) than"
            f" {checkpoint.path} (fingerprint {checkpoint.fingerprint}); build it anew, or load the model that it was"
            " built with"
        )


def _named(model: str | None, fingerprint: str) -> str:
    return f"fingerprint {fingerprint}" if model is None else f"{model}, fingerprint {fingerprint}"
