"""Sources of a corpus: files, plain or packed (`.gz`, `.zst`), tables (`.parquet`), and standard input (`-`)."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import stat
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

from memlm.base.files import storage
from memlm.base.texts import InUtf8
from memlm.errors import InvalidInput

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STANDARD_INPUT = "-"
PIPED_IN = Path(STANDARD_INPUT)  # this object alone: an equal path is that of a file in the working directory
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": zstd.open}
OPENED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # by a shell, for this process
UNREADABLE = (OSError, EOFError, zlib.error, zstd.ZstdError)  # what reading a file may raise

SAMPLE_BYTES = 1 << 20  # of a packed file, for the ratio of packing
PIECE_BYTES = 1 << 16
ROWS = 64  # of a table at a time: a row may be a book

_JSON_ROWS = json.JSONDecoder(parse_constant=lambda name: None if name == "NaN" else float(name))


@cache
def _standard_input() -> IO[bytes]:
    """Copies standard input to a file without a name: a corpus may be read several times, and the file goes with the
    process, however that ends. Raises InvalidInput on a terminal.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise InvalidInput("nothing is piped in; the corpus '-' is standard input", field="corpus")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
    with storage(Path(tempfile.gettempdir())):
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
    return file


@cache
def standard_input_name() -> str:
    """The name that documents of standard input go by: `stdin`, or `stdin.jsonl` where its first line is a JSON
    object.
    """
    with open_as_utf_8(PIPED_IN) as file:
        first = next((line for line in file if line.strip()), b"")
    return "stdin" + JSON_LINES[0] * _is_object(first)


class _Reading(io.RawIOBase):
    """Reads an open file from its beginning, with an offset of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._offset = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._file.fileno(), len(buffer), self._offset)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)


class _Unmarked(io.RawIOBase):
    """Reads an open file as UTF-8 without its byte order mark, and closes it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._text, self._ready, self._ended = file, InUtf8(), memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._ended:
            data = self._file.read(PIECE_BYTES)
            self._ended = not data
            try:
                self._ready = memoryview(self._text.feed(data, final=self._ended))
            except UnicodeDecodeError as error:
                raise OSError(f"its byte order mark says {error.encoding}, and it is not: {error.reason}") from error
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def layout_of(name: str) -> str:
    """Returns the suffix of a file's layout, without that of its packing."""
    return os.path.splitext(name_without_packing(name).lower())[1]


def name_without_packing(name: str) -> str:
    """A file's name without the suffix of its packing."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in PACKED else name


def open_unpacked(path: Path) -> IO[bytes]:
    """Opens a file, or standard input for PIPED_IN, and unpacks it as it is read. Raises one of UNREADABLE, here or
    while reading.
    """
    if path is PIPED_IN:
        return io.BufferedReader(_Reading(_standard_input()))
    _check_kind(path)
    return io.BufferedReader(PACKED.get(path.suffix.lower(), open)(path, "rb"))


def _check_kind(path: Path) -> None:
    """Raises OSError for a named pipe, a socket or a device: opening one may wait for ever, and reading not end."""
    if not stat.S_ISREG(path.stat().st_mode) and not str(path).startswith(OPENED):
        raise OSError("no regular file; pipe its text in, with '-' as the corpus")


def open_as_utf_8(path: Path) -> IO[bytes]:
    """As `open_unpacked`, and gives a text in UTF-8 without its byte order mark."""
    return io.BufferedReader(_Unmarked(open_unpacked(path)))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet file, with values that JSON can represent. NaN in a column is a missing value, as
    pandas writes it.

    Raises OSError if the file cannot be read, or pyarrow is missing.
    """
    with _open_table(path) as table:
        try:
            for batch in table.iter_batches(batch_size=ROWS):
                for row in _JSON_ROWS.decode(json.dumps(batch.to_pylist(), default=str)):
                    yield {name: value for name, value in row.items() if value is not None}
        except ValueError as error:  # pyarrow's of damaged pages is one
            raise OSError(error) from error


def _open_table(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise OSError("reading Parquet takes pyarrow: pip install 'memlm[parquet]'") from None
    _check_kind(path)
    try:
        return parquet.ParquetFile(path, page_checksum_verification=True)
    except ValueError as error:
        raise OSError(error) from error


def unpacked_size(path: Path) -> int:
    """Returns the size of a file once unpacked, from its metadata or extrapolated from its beginning."""
    if path is PIPED_IN:
        return os.fstat(_standard_input().fileno()).st_size
    size, suffix = path.stat().st_size, path.suffix.lower()
    try:
        _check_kind(path)
        if suffix == PARQUET:
            return _text_size(path)
        if suffix == ".zst":
            return _guessed_size(path, size)
    except UNREADABLE:
        return size
    if suffix == ".gz" and size >= 4:  # the last four bytes hold it, modulo 2^32 (RFC 1952)
        with path.open("rb") as file:
            file.seek(-4, io.SEEK_END)
            return int(struct.unpack("<I", file.read(4))[0])
    return size


def _guessed_size(path: Path, size: int) -> int:
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    unpacked = 0
    with zstd.open(io.BytesIO(sample)) as stream:
        try:
            while part := stream.read1():
                unpacked += len(part)
        except EOFError:  # the sample ends within a frame
            pass
    return unpacked * size // max(1, len(sample))


def _text_size(path: Path) -> int:
    with _open_table(path) as table:
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == "text")
