"""Arrays on disk that grow at their end: .npy files whose header always tells what was last synced."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.lib import format as npy

from memlm.base.files import create, storage, sync, unshare

HEADER_BYTES = 128


class RowSubset:
    """Some rows of an array on disk, in order: read when they are asked for, a slice or a list of them at a time."""

    def __init__(self, array: np.ndarray, rows: Int64[np.ndarray, " N"]) -> None:
        """Takes the array, and which rows of it are meant."""
        self._array, self.rows = array, rows
        self.shape = (len(rows), *array.shape[1:])

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def __getitem__(self, places: Any) -> np.ndarray:
        """Reads the rows at some places."""
        return self._array[self.rows[places]]


def rows_of(array: np.ndarray | RowSubset, places: Int64[np.ndarray, "*S"]) -> Int64[np.ndarray, "*S"]:
    """The rows on disk of some places of an array, which are the same unless only some are meant."""
    return array.rows[places] if isinstance(array, RowSubset) else places


class GrowingArray:
    """An .npy file of rows, open for appending. `rows` counts those appended; `sync` makes them count."""

    def __init__(self, path: Path, dtype: str, width: int | None, *, rows: int = 0) -> None:
        """Starts a new file, or continues one after its first `rows` rows and drops the rest."""
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

    def sync(self) -> None:
        """Tells the number of rows in the header, and waits until all of it is on the disk."""
        self.flush()
        with storage(self.path):
            sync(self._file.fileno())

    def flush(self) -> None:
        """Tells the number of rows in the header; enough for what no crash need leave."""
        with storage(self.path):
            self._write_header()
            self._file.flush()

    def close(self) -> None:
        """Closes the file; what was not synced may be lost, on a full disk it is."""
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
