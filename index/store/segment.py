"""An open segment of a store: keys, values, documents, an index, and the mask of deleted documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float16, Float32, Int64

from memlm.base.files import checksum
from memlm.errors import Corrupt, Incompatible
from memlm.index.arrays import RowSubset
from memlm.index.exact import FlatIndex, exact_neighbors
from memlm.index.ivf import Ivf, is_lossless, open_index
from memlm.index.neighbors import Neighbors, RawSearch, deeper, merge_nearest, search_filtered
from memlm.index.store.derived.metadata import SegmentMetadata
from memlm.index.store.derived.versions import SegmentVersions
from memlm.index.store.documents import DocumentRow, DocumentTable
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import RESTORE, ROW_BITS, FileRecord, SegmentRecord

KEYS, VALUES, STARTS, DOCUMENTS, INDEX = "keys.npy", "values.npy", "starts.npy", "documents.sqlite", "index.faiss"
PRUNED = "pruned.npy"
SMALL_BYTES = 1 << 20
SMALL_ENTRIES = 1 << 16  # of the largest segment that is merged with others without being asked for
SMALL_DOCUMENTS = 1024
EXACT_ENTRIES = 1 << 20  # of chosen documents, compared one by one; of more, those that the index finds

# Takes the document of each entry that a search found for some of the queries, and the numbers of these queries.
Wanted: TypeAlias = Callable[[Int64[np.ndarray, "R K"], Int64[np.ndarray, " R"]], Bool[np.ndarray, "R K"]]


class Segment:
    """Maps the files of a segment. Raises Corrupt, with the file's name, for a file that differs from the manifest.

    Opening compares every byte of small files with the checksum, and the size of large ones. `problems` checks the
    rest. The id of an entry is the segment's number above the row.
    """

    def __init__(self, store: Path, record: SegmentRecord, dim: int) -> None:
        self.record, self._folder = record, store / record.folder
        for name, expected in record.files.items():
            if problem := self._problem_of(name, expected, whole=expected.bytes <= SMALL_BYTES):
                raise Corrupt(f"{problem}; {RESTORE}")
        self._inodes = _inodes_of(self._folder, record)
        self.keys_ND: Float16[np.ndarray, "N D"] | None = None
        if KEYS in record.files:
            self.keys_ND = np.load(self._folder / KEYS, mmap_mode="r")
        self.values_N = np.load(self._folder / VALUES, mmap_mode="r")
        self.starts: Int64[np.ndarray, " docs+1"] = np.load(self._folder / STARTS)
        self.pruned_N: Bool[np.ndarray, " N"] | None = None
        if PRUNED in record.files:
            self.pruned_N = np.load(self._folder / PRUNED, mmap_mode="r")
        self.documents = DocumentTable(self._folder / DOCUMENTS)
        self._index: Ivf | None = None
        self._shared_flat: list[FlatIndex] = []
        self.metadata = SegmentMetadata()
        if INDEX in record.files:
            self._index = Ivf(open_index(self._folder / INDEX, self.num_indexed, dim), record.index, self.keys_ND)
        self.deleted_mask: Bool[np.ndarray, " docs"] = np.zeros(record.documents, bool)
        if record.deleted:
            self.deleted_mask[np.load(self._folder / record.deleted)] = True
        self.any_deleted = bool(self.deleted_mask.any())
        if (self.keys_ND is not None and self.keys_ND.shape != (record.entries, dim)) or len(
            self.starts
        ) != record.documents + 1:
            raise Corrupt(f"{self._folder} does not hold {record.entries} entries of {dim} dimensions; {RESTORE}")

    def is_at(self, store: Path, record: SegmentRecord) -> bool:
        """Whether a record of the store at a path describes the open files, and not other files of these names."""
        inodes = _inodes_of(store / record.folder, record)
        return inodes is not None and (record, inodes) == (self.record, self._inodes)

    def share_metadata(self, other: Segment) -> None:
        """Takes all that was or will be read of the metadata of another segment, if that has the same documents."""
        if other.core == self.core:
            self.metadata = other.metadata

    @property
    def versions(self) -> SegmentVersions:
        """What its documents say of versions: read once, for all that share the segment."""
        return self.metadata.versions(self.documents)

    @property
    def is_small(self) -> bool:
        """Whether comparing each of its documents takes a moment."""
        return self.record.entries <= SMALL_ENTRIES and self.record.documents <= SMALL_DOCUMENTS

    @property
    def core(self) -> tuple[int, FileRecord, FileRecord]:
        """The identity of a segment's content, independent of later deletions."""
        return self.record.number, self.record.files[VALUES], self.record.files[DOCUMENTS]

    @cached_property
    def num_live_entries(self) -> int:
        """Entries that are not pruned, of documents that are not deleted."""
        return int(self.sizes[~self.deleted_mask].sum())

    @cached_property
    def num_kept_entries(self) -> int:
        """Entries of documents that are not deleted, pruned ones too."""
        return int(np.diff(self.starts)[~self.deleted_mask].sum())

    @property
    def num_linked_files(self) -> int:
        """Files that another hard link keeps, as in a copy of the store."""
        return sum(file.stat().st_nlink > 1 for file in self._folder.iterdir() if file.is_file())

    @property
    def num_indexed(self) -> int:
        """Entries that are not pruned."""
        return self.record.entries if self.pruned_N is None else len(self.kept)

    @cached_property
    def kept(self) -> Int64[np.ndarray, " N"]:
        """Of a segment that is pruned, the rows that are not."""
        return np.flatnonzero(~np.asarray(self.pruned_N))

    @cached_property
    def sizes(self) -> Int64[np.ndarray, " docs"]:
        """How many entries of each document are not pruned."""
        return np.diff(self.starts if self.pruned_N is None else np.searchsorted(self.kept, self.starts))

    def live_rows(self, places: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """The rows of live entries, given by their places among the live ones."""
        sizes = np.where(self.deleted_mask, 0, self.sizes)
        ends = np.cumsum(sizes)
        document = np.searchsorted(ends, places, side="right")
        inside = places - (ends[document] - sizes[document])
        if self.pruned_N is None:
            return self.starts[document] + inside
        return self.kept[np.searchsorted(self.kept, self.starts[document]) + inside]

    @property
    def has_keys(self) -> bool:
        """Whether its keys are there: it was given some, and they were kept."""
        return self.keys_ND is not None

    @property
    def distances(self) -> str:
        """The precision of distances, as `Snapshot.distances`."""
        if is_lossless(self.record.index):
            return "exact"
        return "re-ranked" if self.record.rerank and self.has_keys else "approximate"

    @property
    def base_id(self) -> int:
        """The id of row 0."""
        return self.record.number << ROW_BITS

    def search(
        self,
        queries_QD: Float32[np.ndarray, "Q D"],
        k: int,
        nprobe: int | None,
        chosen: Bool[np.ndarray, " docs"] | None = None,
    ) -> Neighbors:
        """Finds the k nearest live entries by the index, of all documents or of those `chosen`: none in a segment
        without keys. A million entries of chosen documents are compared one by one.
        """
        if not self.record.is_keyed:
            return Neighbors.none(len(queries_QD), k)
        if chosen is not None and self.has_keys and self.sizes[chosen & ~self.deleted_mask].sum() <= EXACT_ENTRIES:
            return self._search_chosen(queries_QD, k, chosen & ~self.deleted_mask)
        if chosen is None:
            return self._live(self._by_index(nprobe), queries_QD, k, self._is_live)
        live = chosen & ~self.deleted_mask
        return self._live(self._by_index(nprobe), queries_QD, k, lambda documents_RK, _: live[documents_RK])

    def search_views(
        self, views_Q: Sequence[Segment], queries_QD: Float32[np.ndarray, "Q D"], k: int, nprobe: int | None
    ) -> Neighbors:
        """Searches for Q queries, each of which sees the segment `without` other documents, as its view would. The
        index is searched at most twice: for the views without deleted documents, and for those with some.
        """
        views = dict.fromkeys(views_Q)
        if len(views) == 1 or not self.record.is_keyed:
            return views_Q[0].search(queries_QD, k, nprobe)
        found, number_Q = Neighbors.none(len(queries_QD), k), np.array([list(views).index(view) for view in views_Q])

        def is_wanted(documents_RK: Int64[np.ndarray, "R K"], rows_R: Int64[np.ndarray, " R"]) -> np.ndarray:
            wanted_RK = np.empty(documents_RK.shape, bool)
            for number, view in enumerate(views):
                mine_R = number_Q[filtered_R[rows_R]] == number
                wanted_RK[mine_R] = ~view.deleted_mask[documents_RK[mine_R]]
            return wanted_RK

        is_filtered_Q = np.array([view.any_deleted for view in views])[number_Q]
        whole_R, filtered_R = np.flatnonzero(~is_filtered_Q), np.flatnonzero(is_filtered_Q)
        if len(whole_R):
            found.put(whole_R, self._live(self._by_index(nprobe), queries_QD[whole_R], k, None))
        if len(filtered_R):
            found.put(filtered_R, self._live(self._by_index(nprobe), queries_QD[filtered_R], k, is_wanted))
        return found

    def _by_index(self, nprobe: int | None) -> RawSearch:
        """The search of all entries, deleted ones too."""
        if (index := self._index) is None:
            return self._search_flat
        probes, rerank = nprobe or self.record.nprobe, self.record.rerank
        return lambda queries_QD, most: index.search(queries_QD, most, probes, rerank)

    def _search_chosen(
        self, queries_QD: Float32[np.ndarray, "Q D"], k: int, chosen: Bool[np.ndarray, " docs"]
    ) -> Neighbors:
        rows = np.flatnonzero(np.repeat(chosen, np.diff(self.starts)))
        if self.pruned_N is not None:
            rows = rows[~self.pruned_N[rows]]
        if not len(rows):
            return Neighbors.none(len(queries_QD), k)
        found = exact_neighbors(queries_QD, RowSubset(self.stored_keys(), rows), self.values_N[rows], k)
        ids_QK = np.where(found.ids_QK < 0, -1, self.base_id + rows[np.maximum(found.ids_QK, 0)])
        return Neighbors(found.distances_QK, ids_QK, found.values_QK)

    def search_exactly(self, queries_QD: Float32[np.ndarray, "Q D"], k: int, *, pruned: bool = False) -> Neighbors:
        """Finds the k nearest live entries, by default without the pruned ones."""
        keys_ND = self.stored_keys()
        if self.pruned_N is None or pruned:
            exact: RawSearch = lambda q, most: exact_neighbors(q, keys_ND, self.values_N, most)  # noqa: E731
            return self._live(exact, queries_QD, k, self._is_live)
        some_ND, values_N = RowSubset(keys_ND, self.kept), self.values_N[self.kept]
        some: RawSearch = lambda q, most: self._at_kept(exact_neighbors(q, some_ND, values_N, most))  # noqa: E731
        return self._live(some, queries_QD, k, self._is_live)

    def stored_keys(self) -> Float16[np.ndarray, "N D"]:
        """The keys. Raises Incompatible where there are none."""
        if self.keys_ND is None:
            raise Incompatible(
                f"{self._folder} was built without keeping its keys, which this needs; build the store anew with them"
                " (--keep-keys)"
            )
        return self.keys_ND

    def document_at(self, rows: Int64[np.ndarray, "*S"]) -> Int64[np.ndarray, "*S"]:
        """The document row of each entry row."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def values_around(
        self, rows: Int64[np.ndarray, " N"], steps_C: Int64[np.ndarray, " C"]
    ) -> Int64[np.ndarray, "N C"]:
        """The values at some steps from each entry row. -1 outside its document."""
        documents, positions_NC = self.document_at(rows), rows[:, None] + steps_C
        is_inside_NC = positions_NC >= self.starts[documents][:, None]
        is_inside_NC &= positions_NC < self.starts[documents + 1][:, None]
        return np.where(is_inside_NC, self.values_N[np.where(is_inside_NC, positions_NC, 0)].astype(np.int64), -1)

    def is_live(self, rows: Int64[np.ndarray, "*S"]) -> Bool[np.ndarray, "*S"]:
        """Whether rows are not pruned, and of documents that are not deleted."""
        rows = np.maximum(rows, 0)
        live = ~self.deleted_mask[self.document_at(rows)]
        return live if self.pruned_N is None else live & ~self.pruned_N[rows]

    def chosen(self, only: DocumentFilter) -> Bool[np.ndarray, " docs"]:
        """Whether a filter chooses each document. A field of metadata is read from the table when it is first named."""
        num = self.record.documents
        mask = self.named(only.documents) if only.documents else np.ones(num, bool)
        for name, value in only.where:
            mask &= self.metadata.having(self.documents, num, name, value)
        return mask

    def named(self, names: Sequence[str]) -> Bool[np.ndarray, " docs"]:
        """Whether any of some names, as of a `DocumentFilter`, stands for each document."""
        mask = np.zeros(self.record.documents, bool)
        for name in names:
            mask[self.documents.rows_named(name)] = True
        return mask

    def without(self, documents: Bool[np.ndarray, " docs"]) -> Segment:
        """The segment as it is with some documents deleted too. It shares all but the mask of deleted documents."""
        if not (documents & ~self.deleted_mask).any():
            return self
        view = copy(self)
        for name in ("num_live_entries", "num_kept_entries"):
            vars(view).pop(name, None)
        view.deleted_mask, view.any_deleted = self.deleted_mask | documents, True
        return view

    def live_documents(self) -> Iterator[DocumentRow]:
        """The documents that are not deleted, in order."""
        return (document for document in self.documents if not self.deleted_mask[document.row])

    def text_of(self, row: int, most: int | None = None) -> Int64[np.ndarray, " N"]:
        """The values of the document in a row, or its first `most`."""
        return self.values_N[self.starts[row] : self.starts[row + 1]][:most].astype(np.int64)

    def entries_of(self, row: int) -> tuple[np.ndarray | None, Int64[np.ndarray, " N"], np.ndarray | None]:
        """The keys, values and pruned marks of the document in a row, each None where the store has none."""
        rows = slice(self.starts[row], self.starts[row + 1])
        keys_ND = None if self.keys_ND is None else self.keys_ND[rows]
        return keys_ND, self.text_of(row), None if self.pruned_N is None else np.array(self.pruned_N[rows])

    def lost_in(self, others: Sequence[Segment], rows: Sequence[int] | None = None) -> Iterator[str]:
        """The ids of documents that none of some segments has alive with the same values, of those that are live or of
        those in some `rows`.
        """
        for document in self.live_documents() if rows is None else self.documents.at_each(rows).values():
            places = ((other, other.documents.row_of(document.id)) for other in reversed(others))  # the newest first
            if not any(
                row is not None
                and not other.deleted_mask[row]
                and np.array_equal(other.text_of(row), self.text_of(document.row))
                for other, row in places
            ):
                yield document.id

    def problems(self) -> list[str]:
        """Compares every file with its checksum, and all values and spans with the counts. Returns the differences."""
        found = [self._problem_of(name, expected, whole=True) for name, expected in self.record.files.items()]
        if (np.diff(self.starts) < 0).any() or self.starts[0] != 0 or self.starts[-1] != self.record.entries:
            found.append(f"{self._folder / STARTS}: the documents do not cover the entries")
        if sum(1 for _ in self.documents) != self.record.documents:
            found.append(f"{self._folder / DOCUMENTS}: expected {self.record.documents} documents")
        return [f"{problem}; {RESTORE}" for problem in found if problem]

    def close(self) -> None:
        """Closes the document table. The maps close with their last user."""
        self.documents.close()

    @property
    def _is_live(self) -> Wanted | None:
        """Whether documents are not deleted. None if none is."""
        return (lambda documents_RK, _: ~self.deleted_mask[documents_RK]) if self.any_deleted else None

    def _live(
        self, search: RawSearch, queries_QD: Float32[np.ndarray, "Q D"], k: int, wanted: Wanted | None
    ) -> Neighbors:
        """Runs a raw search, removes the entries of documents that are not wanted, and turns rows into ids."""
        if wanted is None:
            found = search(queries_QD, k)
        else:
            keep = lambda rows_RK, queries_R: wanted(self.document_at(np.maximum(rows_RK, 0)), queries_R)  # noqa: E731
            found = search_filtered(search, queries_QD, k, keep, deeper(k, self.record.entries))
        np.add(found.ids_QK, self.base_id, out=found.ids_QK, where=found.ids_QK >= 0)
        return found

    def _search_flat(self, queries_QD: Float32[np.ndarray, "Q D"], k: int) -> Neighbors:
        found = self._resident.search(queries_QD, k)
        return found if self.pruned_N is None else self._at_kept(found)

    def _at_kept(self, found: Neighbors) -> Neighbors:
        """Neighbors among the entries that are not pruned, as rows of all."""
        if not len(self.kept):
            return found
        rows_QK = np.where(found.ids_QK < 0, -1, self.kept[np.maximum(found.ids_QK, 0)])
        return Neighbors(found.distances_QK, rows_QK, found.values_QK)

    @property
    def _resident(self) -> FlatIndex:
        """A small segment's keys, as searching wants them: made once, for all that share the segment."""
        if self._shared_flat:
            return self._shared_flat[0]
        keys_ND = self.stored_keys()
        if self.pruned_N is None:
            flat = FlatIndex(keys_ND, self.values_N)
        else:
            flat = FlatIndex(RowSubset(keys_ND, self.kept), self.values_N[self.kept])
        self._shared_flat.append(flat)  # another thread may have been sooner, with an equal one
        return self._shared_flat[0]

    def _problem_of(self, name: str, expected: FileRecord, *, whole: bool) -> str | None:
        path = self._folder / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != expected.bytes:
            return f"{path} has {size} bytes, expected {expected.bytes}"
        if whole and checksum(path) != expected.checksum:
            return f"{path} was changed (wrong checksum)"
        return None


def search_segments(
    views_Q: Sequence[tuple[Segment, ...]],
    queries_QD: Float32[np.ndarray, "Q D"],
    k: int,
    nprobe: int | None = None,
    only: DocumentFilter | None = None,
) -> Neighbors:
    """Finds the k nearest entries to each query, which is rounded to float16, in its own view of some segments. `only`
    chooses documents of equal views.
    """
    if not views_Q:
        return Neighbors.none(0, k)
    if len(set(views_Q)) == 1:
        found = [
            segment.search(queries_QD, k, nprobe, segment.chosen(only) if only else None) for segment in views_Q[0]
        ]
    elif only:
        raise ValueError("different views take no filter")
    else:
        segments = zip(*views_Q, strict=True)
        found = [segments_Q[0].search_views(segments_Q, queries_QD, k, nprobe) for segments_Q in segments]
    return merge_nearest(found, k) if found else Neighbors.none(len(queries_QD), k)


def _inodes_of(folder: Path, record: SegmentRecord) -> list[tuple[int, int]] | None:
    """The identities of a segment's files on this machine, or None if a file is missing."""
    try:
        found = [(folder / name).stat() for name in record.files]
    except OSError:
        return None
    return [(each.st_dev, each.st_ino) for each in found]
