"""Arrays on disk that grow at their end: .npy files whose header always counts the rows that were last synced."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.lib import format as npy

from memlm.base.files import create, storage, sync, unshare

HEADER_BYTES = 128


class RowSubset:
    """Selected rows of an array on disk, in order. Rows are read when they are indexed, by a slice or a list."""

    def __init__(self, array: np.ndarray, rows: Int64[np.ndarray, " N"]) -> None:
        self._array, self.rows = array, rows
        self.shape = (len(rows), *array.shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: Any) -> np.ndarray:
        return self._array[self.rows[places]]


def rows_of(array: np.ndarray | RowSubset, places: Int64[np.ndarray, "*S"]) -> Int64[np.ndarray, "*S"]:
    """Maps places in an array to rows on disk. They differ only for a `RowSubset`."""
    return array.rows[places] if isinstance(array, RowSubset) else places


class GrowingArray:
    """An .npy file of rows, open for appending. `rows` counts the appended rows, and `sync` makes them durable."""

    def __init__(self, path: Path, dtype: str, width: int | None, *, rows: int = 0) -> None:
        """Starts a new file, or continues a file after its first `rows` rows and drops the rest."""
        self.path, self.rows = path, rows
        self._dtype, self._width = np.dtype(dtype), width
        with storage(path):
            if rows:
                unshare(path)
            self._file = path.open("r+b") if rows else create(path)
            self._file.truncate(self._end)
            self._write_header()

    def append(self, rows: np.ndarray) -> None:
        """Adds rows at the end."""
        with storage(self.path):
            self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self.rows += len(rows)

    def read(self, first: int, last: int) -> np.ndarray:
        """The appended rows from `first` up to `last`, as a copy."""
        with storage(self.path):
            self._file.flush()
        row_bytes = self._dtype.itemsize * (self._width or 1)
        found = os.pread(self._file.fileno(), (last - first) * row_bytes, HEADER_BYTES + first * row_bytes)
        rows = np.frombuffer(found, self._dtype)
        return rows if self._width is None else rows.reshape(-1, self._width)

    def sync(self) -> None:
        """Writes the number of rows to the header, and waits until the file is on the disk."""
        self.flush()
        with storage(self.path):
            sync(self._file.fileno())

    def flush(self) -> None:
        """Writes the number of rows to the header without waiting for the disk."""
        with storage(self.path):
            self._write_header()
            self._file.flush()

    def close(self) -> None:
        """Closes the file. Rows that were not synced may be lost, and are lost on a full disk."""
        with suppress(OSError):
            self._file.close()

    def _write_header(self) -> None:
        self._file.seek(0)
        self._file.write(_header((self.rows,) if self._width is None else (self.rows, self._width), self._dtype))
        self._file.seek(self._end)

    @property
    def _end(self) -> int:
        return HEADER_BYTES + self.rows * self._dtype.itemsize * (self._width or 1)


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """An .npy header, version 1.0, of fixed size."""
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    prefix = npy.magic(1, 0)
    room = HEADER_BYTES - len(prefix) - 2
    return prefix + room.to_bytes(2, "little") + repr(described).encode().ljust(room - 1) + b"\n"
