"""Writes the files of one segment into a folder: keys, values, pruned marks, and the table of documents.

The caller decides when the files count: `StoreWriter` fills a folder for hours and resumes it after a
kill, `memlm.index.store.small_segments` writes one at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float16, Int64

from memlm.base.files import sync_folder
from memlm.base.progress import Progress, silent
from memlm.errors import InvalidInput
from memlm.index.arrays import GrowingArray
from memlm.index.ivf import VALUE_BITS
from memlm.index.store.documents import DocumentTableWriter
from memlm.index.store.manifest import SegmentRecord, StoreSpec
from memlm.index.store.segment import DOCUMENTS, KEYS, PRUNED, VALUES
from memlm.index.store.segment_files import finish_segment

BLOCK_ENTRIES = 1 << 16  # that are copied at once


class SegmentWriter:
    """The growing files of a segment. `num_entries` counts the entries that were appended or passed by."""

    def __init__(self, folder: Path, spec: StoreSpec, *, keyed: bool = True, rows: int = 0) -> None:
        """Starts the files in a folder that is there, or continues them after their first `rows` entries. Unless
        `keyed`, the entries have no keys.
        """
        self._folder, self._spec, self._keyed, self._held = folder, spec, keyed, ExitStack()
        self._starts: list[int] = []
        self.num_entries = 0
        with ExitStack() as held:
            array = lambda name, dtype, width=None: held.enter_context(  # noqa: E731
                closing(GrowingArray(folder / name, dtype, width, rows=rows))
            )
            self._keys: GrowingArray | None = array(KEYS, "<f2", spec.dim) if keyed else None
            self._values: GrowingArray = array(VALUES, "<u4")
            self._pruned: GrowingArray | None = array(PRUNED, "|b1") if keyed and spec.prune is not None else None
            self._documents = held.enter_context(closing(DocumentTableWriter(folder / DOCUMENTS)))
            self._held = held.pop_all()

    @property
    def rows(self) -> int:
        """Entries in the files."""
        return self._values.rows

    def begin_document(self, document_id: str, title: str, metadata: Mapping[str, Any]) -> None:
        """Starts a document, which owns all entries until the next one. Raises AlreadyExists for a repeated id."""
        self._documents.add(document_id, title, metadata)
        self._starts.append(self.num_entries)

    def append(
        self,
        keys_ND: Float[np.ndarray, "N D"] | None,
        values_N: Int64[np.ndarray, " N"],
        pruned_N: Bool[np.ndarray, " N"] | None = None,
    ) -> None:
        """Appends entries to the current document. Searches never find the pruned ones. Keys are rounded to float16.
        None stands for the keys of a segment without keys. Raises InvalidInput for keys that float16 cannot hold.
        """
        self._check(keys_ND, values_N)
        if (pruned_N is None) != (self._pruned is None):
            raise InvalidInput("pruned_N goes with keys that are pruned (prune), and only with these", field="pruned_N")
        if self._keys and keys_ND is not None:
            self._keys.append(_rounded(keys_ND))
        self._values.append(values_N)
        if self._pruned and pruned_N is not None:
            self._pruned.append(pruned_N)
        self.num_entries += len(values_N)

    def repeat(self, first: int, count: int) -> None:
        """Appends `count` entries to the current document that equal those from number `first` on, which it has."""
        for begin in range(first, first + count, BLOCK_ENTRIES):
            some = begin, min(begin + BLOCK_ENTRIES, first + count)
            keys_ND = self._keys.read(*some) if self._keys else None
            pruned_N = self._pruned.read(*some) if self._pruned else None
            self.append(keys_ND, self._values.read(*some).astype(np.int64), pruned_N)

    def sync(self) -> None:
        """Syncs the appended entries."""
        if self._keys:
            self._keys.sync()
        self._values.sync()
        if self._pruned:
            self._pruned.sync()
        sync_folder(self._folder)

    def finish(
        self, number: int, spec: StoreSpec, *, is_first: bool = False, progress: Progress = silent
    ) -> tuple[SegmentRecord, float]:
        """Completes synced files as the segment of a number, as `finish_segment`. `spec` says how to index it."""
        starts = np.array([*self._starts, self.num_entries])
        self._documents.set_sizes(np.diff(starts).tolist())
        self._documents.commit()
        return finish_segment(
            self._folder, number, spec, starts, keyed=self._keyed, is_first=is_first, progress=progress
        )

    def close(self) -> None:
        """Closes the files."""
        self._held.close()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, keys_ND: np.ndarray | None, values_N: np.ndarray) -> None:
        if not self._starts:
            raise InvalidInput("an entry before the first document; call begin_document first", field="values")
        if self.num_entries != self._values.rows:
            raise InvalidInput("entries were left out of a resumed build; replay them first", field="values")
        if (keys_ND is None) == self._keyed:
            raise InvalidInput("keys_ND goes with a segment that has keys, and only with one", field="keys_ND")
        if keys_ND is not None and keys_ND.shape != (len(values_N), self._spec.dim):
            raise InvalidInput(
                f"keys of shape {keys_ND.shape}; expected ({len(values_N)}, {self._spec.dim}), one row a value",
                field="keys",
            )
        if len(values_N) and not 0 <= values_N.min() <= values_N.max() < 1 << VALUE_BITS:
            raise InvalidInput(f"a value is outside 0 to {(1 << VALUE_BITS) - 1}", field="values")


def _rounded(keys_ND: Float[np.ndarray, "N D"]) -> Float16[np.ndarray, "N D"]:
    with np.errstate(over="ignore"):
        stored_ND = np.ascontiguousarray(keys_ND, "<f2")
    if not np.isfinite(stored_ND).all():
        raise InvalidInput(
            "a key is not finite in float16; the model's states are too large to be stored", field="keys"
        )
    return stored_ND
