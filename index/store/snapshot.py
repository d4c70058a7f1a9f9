"""One version of a datastore, open for reading. It never changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Float32, Int64

from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound, check_range
from memlm.index.exact import rounding_of
from memlm.index.factory import FLAT, NO_INDEX
from memlm.index.ivf import nlist_of
from memlm.index.neighbors import Neighbors, merge_nearest
from memlm.index.store.derived.versions import Versions
from memlm.index.store.documents import DocumentRow
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.journal import is_being_extended
from memlm.index.store.manifest import KnnDefaults, Manifest
from memlm.index.store.segment import Segment, search_segments

SELF_QUERIES, SELF_K, MOST_LOST = 256, 32, 0.25
GROWTH = 4  # in entries, past which a tuning is outgrown


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an entry. `token_offset` counts from the start of the document, which has `num_tokens` and begins at
    entry `first_id`.
    """

    document_id: str
    title: str
    metadata: Mapping[str, Any]
    token_offset: int
    first_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Span:
    """The consecutive ids of a document's entries."""

    document_id: str
    first_id: int
    num_entries: int


_reads = itertools.count(1)


def next_read() -> int:
    """A number for a read of `CURRENT`, drawn before the read. Of two snapshots, the one with the higher number is at
    least as new, whichever numbers their manifests have.
    """
    return next(_reads)


class Snapshot:
    """A store at one manifest. It is immutable, and any thread may search it."""

    def __init__(
        self, path: Path, manifest: Manifest, known: Sequence[Segment] = (), *, read: int | None = None
    ) -> None:
        """Opens the segments of a manifest, and reuses those of `known` with unchanged files. `read` is `next_read()`
        from before the manifest was read. By default it is drawn now.
        """
        self.path, self.manifest, self.read = path, manifest, next_read() if read is None else read
        known_by_number = {segment.record.number: segment for segment in known}
        segments = list[Segment]()
        for record in manifest.segments:
            before = segment = known_by_number.get(record.number)
            if segment is None or not segment.is_at(path, record):
                segment = Segment(path, record, manifest.spec.dim)
            if before is not None:
                segment.share_metadata(before)
            segments.append(segment)
        self.segments = tuple(segments)  # oldest first

    @property
    def dim(self) -> int:
        """Width of a key."""
        return self.manifest.spec.dim

    @cached_property
    def keyed(self) -> Snapshot:
        """The part of it whose entries have keys, where neighbors are found. Words, passages and drafts are of all."""
        view = copy(self)  # one that held itself would keep its files until a garbage collection
        vars(view).pop("versions", None)
        view.segments = tuple(segment for segment in self.segments if segment.record.is_keyed)
        return view

    @cached_property
    def versions(self) -> Versions:
        """Which of its documents supersede which. A view with more documents deleted has the same."""
        return self.segments[0].metadata.versions_with(self.segments) if self.segments else Versions(())

    @property
    def newest(self) -> Segment:
        """The segment that was written last. Segments lie in the order of their documents."""
        return max(self.segments, key=lambda segment: segment.record.number)

    @property
    def is_keyed(self) -> bool:
        """Whether it is searched for neighbors. A store without keys gives text, passages and drafts."""
        return self.manifest.is_keyed

    @property
    def defaults(self) -> KnnDefaults:
        """The defaults of a request."""
        return self.manifest.defaults

    @property
    def outgrown(self) -> str | None:
        """Says that the store has more than `GROWTH` times as many entries as when its defaults were tuned, with the
        remedy. None otherwise, and where that is not known.
        """
        then, now = self.defaults.tuned_entries, self.keyed.num_entries
        if then is None or now <= GROWTH * then:
            return None
        path, remedy = quote(str(self.path)), "memlm tune HELDOUT --model MODEL --store {}"
        if self.defaults.tuned_itself and self.manifest.spec.keep_keys:
            remedy = "memlm index compact {} --model MODEL"
        return f"it had {then:,} entries when it was tuned, and has {now:,} now; {remedy.format(path)} tunes it again"

    @property
    def num_entries(self) -> int:
        """Live entries."""
        return sum(segment.num_live_entries for segment in self.segments)

    @property
    def num_pruned_entries(self) -> int:
        """Entries that the index leaves out, because the model alone predicts them."""
        return sum(segment.record.entries - segment.num_indexed for segment in self.segments)

    @property
    def num_documents(self) -> int:
        """Live documents."""
        return sum(len(segment.deleted_mask) for segment in self.segments) - self.num_deleted_documents

    @property
    def num_deleted_documents(self) -> int:
        """Deleted documents that still take room."""
        return sum(int(segment.deleted_mask.sum()) for segment in self.segments)

    @property
    def index_kind(self) -> str:
        """The Faiss factory strings of the segments with keys, each once. none for a store without keys, and Flat where
        those with some are gone.
        """
        kinds = " + ".join(dict.fromkeys(segment.record.index for segment in self.keyed.segments))
        return kinds or (FLAT if self.is_keyed else NO_INDEX)

    @property
    def nlist(self) -> int:
        """The most inverted lists of a segment's index. 0 if all segments are searched exactly."""
        return max((nlist_of(segment.record.index) for segment in self.keyed.segments), default=0)

    @property
    def distances(self) -> str:
        """The precision of distances: "exact" (float16 keys), "re-ranked" (found by codes, ranked by float16 keys),
        "approximate" (codes alone), or "none" (no keys).
        """
        if not self.is_keyed:
            return "none"
        kinds = {segment.distances for segment in self.keyed.segments}
        return next((kind for kind in ("approximate", "re-ranked") if kind in kinds), "exact")

    @property
    def bytes_on_disk(self) -> int:
        """Size of all segments' files."""
        return sum(file.bytes for segment in self.segments for file in segment.record.files.values())

    def search(
        self,
        queries_QD: Float32[np.ndarray, "Q D"],
        k: int,
        *,
        nprobe: int | None = None,
        only: DocumentFilter | None = None,
    ) -> Neighbors:
        """Finds the k nearest entries to each query. `nprobe` lists are searched, by default the index's own number.

        `only` chooses documents, and reads the table of documents for it.
        """
        queries_QD = self.rounded(queries_QD, k)
        return search_segments([self.segments] * len(queries_QD), queries_QD, k, nprobe, only)

    def exact(self, *, pruned: bool = False) -> Exact:
        """Exact search over the live entries. With `pruned`, also over the pruned ones."""
        return Exact(self, pruned=pruned)

    def locate(self, ids: Int64[np.ndarray, " K"]) -> list[Place]:
        """The places of entries. Raises NotFound for an id of another store."""
        found: list[Place | None] = [None] * len(ids)
        for segment, mask in self._group_by_segment(ids):
            rows = ids[mask] - segment.base_id
            numbers = segment.document_at(rows).tolist()
            documents = segment.documents.at_each(numbers)
            for position, row, number in zip(np.flatnonzero(mask), rows.tolist(), numbers, strict=True):
                found[position] = _place(segment, documents[number], row)
        for id_, place in zip(ids.tolist(), found, strict=True):
            if place is None:
                raise NotFound(
                    f"no entry {id_} in {self.path}; it may be of another manifest", kind="entry", name=str(id_)
                )
        return cast("list[Place]", found)

    def values_range(self, first_id: int, num_entries: int) -> Int64[np.ndarray, " N"]:
        """The values of consecutive entries. Raises NotFound for an id of another store."""
        for segment in self.segments:
            if 0 <= (row := first_id - segment.base_id) < segment.record.entries:
                return segment.values_N[row : row + num_entries].astype(np.int64)
        raise self._no_entry(first_id)

    def tokens(self, document_id: str, start: int = 0, stop: int | None = None) -> Int64[np.ndarray, " N"]:
        """The stored values of a document from token `start` to `stop`. Raises NotFound for a document that is not
        there.
        """
        segment, row = self._find(document_id)
        first, last = segment.starts[row : row + 2]
        stop = last - first if stop is None else min(stop, last - first)
        return segment.values_N[first + max(0, start) : first + stop].astype(np.int64)

    @property
    def has_keys(self) -> bool:
        """Whether there are keys, and all were kept."""
        return self.is_keyed and all(segment.has_keys for segment in self.keyed.segments)

    def check_searchable(self, name: str = "") -> None:
        """Raises Incompatible for a store without keys, under its name, or else its path."""
        if not self.is_keyed:
            called = name or str(self.path)
            raise Incompatible(
                f"the datastore {called!r} has no keys yet, and this searches keys; `memlm index keys {quote(called)}"
                " --model MODEL` makes them. Answers, passages, search by words and trace need none"
            )

    def live(self, ids: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " M"]:
        """The ids of live entries of this store among `ids`."""
        return np.concatenate(
            [
                ids[:0],
                *(
                    ids[mask][segment.is_live(ids[mask] - segment.base_id)]
                    for segment, mask in self._group_by_segment(ids)
                ),
            ]
        )

    def values(self, ids: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """The values of entries. Raises NotFound, with the id, for an entry of another store."""
        values_N = np.empty(len(ids), np.int64)
        for segment, mask in self._group_by_segment(ids, every=True):
            values_N[mask] = segment.values_N[ids[mask] - segment.base_id]
        return values_N

    def tokens_before(self, ids: Int64[np.ndarray, " N"], count: int) -> Int64[np.ndarray, "N C"]:
        """The values of the `count` entries before each entry in its document. -1 before the first."""
        return self._tokens_around(ids, np.arange(-count, 0))

    def tokens_after(self, ids: Int64[np.ndarray, " N"], count: int) -> Int64[np.ndarray, "N C"]:
        """The values of the `count` entries after each entry in its document. -1 past the last, and for missing ids."""
        return self._tokens_around(ids, np.arange(1, count + 1))

    def _tokens_around(self, ids: Int64[np.ndarray, " N"], steps_C: Int64[np.ndarray, " C"]) -> np.ndarray:
        around_NC = np.full((len(ids), len(steps_C)), -1)
        for segment, mask in self._group_by_segment(ids):
            around_NC[mask] = segment.values_around(ids[mask] - segment.base_id, steps_C)
        return around_NC

    def document_of(self, ids: Int64[np.ndarray, "*S"]) -> Int64[np.ndarray, "*S"]:
        """A number for each entry's document, unique in the store. -1 for missing ids."""
        documents = np.full(ids.shape, -1, np.int64)
        for segment, mask in self._group_by_segment(ids):
            documents[mask] = segment.base_id + segment.document_at(ids[mask] - segment.base_id)
        return documents

    def documents(self) -> Iterator[DocumentRow]:
        """The live documents, in order."""
        for segment in self.segments:
            yield from segment.live_documents()

    def has_document(self, document_id: str) -> bool:
        """Whether a live document has this id."""
        return self._seek(document_id) is not None

    def find_each(self, document_ids: Sequence[str]) -> list[tuple[Segment, int]]:
        """The segments and rows of documents, each once. Raises NotFound, with the id, for a missing document."""
        return [self._find(document_id) for document_id in dict.fromkeys(document_ids)]

    def sample(self, n: int, seed: int) -> Int64[np.ndarray, " N"]:
        """Ids of n live entries drawn without replacement, or of all if there are fewer."""
        total = self.num_entries
        picks = np.sort(np.random.default_rng(seed).choice(total, min(n, total), replace=False))
        ids, before = [], 0
        for segment in self.segments:
            chosen = picks[(picks >= before) & (picks < before + segment.num_live_entries)] - before
            before += segment.num_live_entries
            ids.append(segment.base_id + segment.live_rows(chosen))
        return np.concatenate([picks[:0], *ids])

    def matching(self, where: Mapping[str, str]) -> list[str]:
        """The ids of the documents that match all metadata fields, as `DocumentFilter` does."""
        only = DocumentFilter(where=tuple(where.items()))
        return [document.id for document in self.documents() if only.accepts(document)]

    def sample_documents(self, n: int, seed: int, *, newest: bool = False) -> list[Span]:
        """n live documents, of the store or its `newest` segment, drawn without replacement, or all, in order."""
        segments = (self.newest,) if newest else self.segments
        live = [(segment, row) for segment in segments for row in np.flatnonzero(~segment.deleted_mask).tolist()]
        picks = np.sort(np.random.default_rng(seed).choice(len(live), min(n, len(live)), replace=False))
        return [_span(*live[pick]) for pick in picks]

    def is_continued_by(self, later: Snapshot) -> bool:
        """Whether a later snapshot begins with the same segments, with at most more deleted documents."""
        return [each.core for each in self.segments] == [
            each.core for each in later.segments[: len(self.segments)]
        ] and not any((before.deleted_mask & ~after.deleted_mask).any() for before, after in self._beside(later))

    def names_added_since(self, earlier: Snapshot) -> Iterator[str]:
        """The ids of live documents in segments that were added since an earlier snapshot, which this one continues."""
        for segment in self.segments[len(earlier.segments) :]:
            yield from (document.id for document in segment.live_documents())

    def deleted_between(self, later: Snapshot) -> Iterator[str]:
        """The ids of documents that are deleted in a later snapshot, which continues this one."""
        for before, after in self._beside(later):
            yield from (
                before.documents.at(row).id
                for row in np.flatnonzero(after.deleted_mask & ~before.deleted_mask).tolist()
            )

    def _beside(self, later: Snapshot) -> Iterator[tuple[Segment, Segment]]:
        return zip(self.segments, later.segments[: len(self.segments)], strict=True)

    def missing_from(self, later: Snapshot) -> list[str] | None:
        """The ids of live documents that a later snapshot lacks, or has with another text. None if it lacks a large
        segment, as after a compaction, or cannot be read.
        """
        later_segments = {segment.core: segment for segment in later.segments}
        known = {segment.core for segment in self.segments}
        added = [segment for segment in later.segments if segment.core not in known]
        lost = list[str]()
        try:
            for before in self.segments:
                if (after := later_segments.get(before.core)) is not None:
                    rows = np.flatnonzero(after.deleted_mask & ~before.deleted_mask).tolist()
                    lost += before.lost_in(added, rows)  # or moved to a new segment
                elif before.is_small:  # merged with others
                    lost += before.lost_in(later.segments)
                else:
                    return None
        except Corrupt:
            return None
        return lost

    def keys(self, ids: Int64[np.ndarray, " N"]) -> Float32[np.ndarray, "N D"]:
        """The stored keys of entries. Raises NotFound, with the id, for an entry of another store, and Incompatible for
        a store without keys.
        """
        self.check_searchable()
        keys_ND = np.empty((len(ids), self.dim), np.float32)
        for segment, mask in self._group_by_segment(ids, every=True):
            keys_ND[mask] = segment.stored_keys()[ids[mask] - segment.base_id]
        return keys_ND

    def verify(self) -> list[str]:
        """Checks every byte against its checksum, the counts, and whether stored positions find themselves. Each
        problem names the file and a remedy.
        """
        problems = [problem for segment in self.segments for problem in segment.problems()]
        return problems or self._self_recall_failures()

    def close(self) -> None:
        """Closes the files."""
        for segment in self.segments:
            segment.close()

    def _self_recall_failures(self) -> list[str]:
        """The self-query test: in a sound index, a position is its own nearest neighbor, or as near as it, but for
        rounding. With lossy codes, most positions must be among their nearest few. Without keys there is no test.
        """
        if not self.keyed.num_entries or not self.has_keys:
            return []
        ids = self.keyed.sample(SELF_QUERIES, 0)
        exact = self.distances == "exact"
        keys_QD = self.keys(ids)
        nearest_Q = self.search(keys_QD, 1 if exact else SELF_K).distances_QK[:, 0]
        lost = int((nearest_Q > rounding_of(keys_QD)).sum())
        if lost <= (0 if exact else MOST_LOST * len(ids)):
            return []
        return [f"{self.path}: {lost} of {len(ids)} stored positions do not find themselves; build the store anew"]

    def _group_by_segment(
        self, ids: Int64[np.ndarray, "*S"], *, every: bool = False
    ) -> Iterator[tuple[Segment, Bool[np.ndarray, "*S"]]]:
        """Yields each segment that has some of the entries, with the mask of these. With `every`, raises NotFound for
        an entry of another store.
        """
        unknown = np.ones(ids.shape, bool)
        for segment in self.segments:
            mask = (ids >= segment.base_id) & (ids < segment.base_id + segment.record.entries)
            if mask.any():
                unknown &= ~mask
                yield segment, mask
        if every and unknown.any():
            raise self._no_entry(int(ids[unknown][0]))

    def _no_entry(self, entry_id: int) -> NotFound:
        return NotFound(f"no entry {entry_id} in {self.path}", kind="entry", name=str(entry_id))

    def rounded(self, queries_QD: Float32[np.ndarray, "Q D"], k: int) -> Float32[np.ndarray, "Q D"]:
        """Rounds queries to float16, as the keys were. Raises Incompatible for a store without keys."""
        self.check_searchable()
        check_range("k", k, least=1)
        if queries_QD.ndim != 2 or queries_QD.shape[1] != self.dim:
            raise InvalidInput(f"queries of shape {queries_QD.shape}; expected (Q, {self.dim})", field="queries")
        return queries_QD.astype(np.float16).astype(np.float32)

    def _find(self, document_id: str) -> tuple[Segment, int]:
        if found := self._seek(document_id):
            return found
        pending = (
            f"; documents that are being added to it cannot be deleted yet: finish the same `memlm index add`, or give"
            f" it up with `memlm index compact {quote(str(self.path))} --purge`"
        ) * is_being_extended(self.path)
        raise NotFound(
            f"no document {document_id!r} in {self.path}; nothing was changed{pending}",
            kind="document",
            name=document_id,
        )

    def _seek(self, document_id: str) -> tuple[Segment, int] | None:
        for segment in self.segments:
            row = segment.documents.row_of(document_id)
            if row is not None and not segment.deleted_mask[row]:
                return segment, row
        return None


def _place(segment: Segment, document: DocumentRow, row: int) -> Place:
    first, last = segment.starts[document.row : document.row + 2].tolist()
    return Place(document.id, document.title, document.metadata, row - first, segment.base_id + first, last - first)


def _span(segment: Segment, row: int) -> Span:
    first, last = segment.starts[row : row + 2].tolist()
    return Span(segment.documents.at(row).id, segment.base_id + first, last - first)


class Exact:
    """Exact search over a store's live entries, slow and in bounded RAM."""

    def __init__(self, view: Snapshot, *, pruned: bool = False) -> None:
        self._view, self._pruned = view, pruned

    def search(self, queries_QD: Float32[np.ndarray, "Q D"], k: int) -> Neighbors:
        """The k nearest entries to each query."""
        queries_QD = self._view.rounded(queries_QD, k)
        found = [segment.search_exactly(queries_QD, k, pruned=self._pruned) for segment in self._view.keyed.segments]
        return merge_nearest(found, k) if found else Neighbors.none(len(queries_QD), k)
