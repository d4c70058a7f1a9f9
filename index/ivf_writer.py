"""Writes an inverted file to disk in bounded RAM.

Faiss fills its lists in RAM and writes them at the end, so an index of 10^7 keys of 1 KiB would need 10 GB of it.
`faiss.contrib.ondisk.merge_ondisk` needs as much disk again for its shards. This module assigns the keys to lists in
one pass, sorts the row numbers by list on disk, and then writes list by list, a few lists for each core at a time.

It is the one place that knows a layout of Faiss: the "ilar" record of `faiss/impl/index_write.cpp`, which is a trained
index without entries, the sizes of the lists, then codes and ids of each list. A test compares the file with Faiss' own
byte for byte. With another layout nothing is written, and Faiss opens and checks the file before it is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import faiss
import numpy as np
from jaxtyping import Float16, Float32, Int64, UInt8

from memlm.base.files import create, remove, storage, sync
from memlm.base.progress import Progress
from memlm.errors import Incompatible
from memlm.index.arrays import GrowingArray, RowSubset, rows_of
from memlm.index.ivf import VALUE_BITS, create_index, inner, keys_are_codes, nearest_lists, transformed
from memlm.index.threads import Rows, blocks, even_blocks, rows_per_core, run_in_threads

BLOCK_ROWS, GROUP_ROWS = 32_768, 131_072  # in work at a time, shared out among the cores
LIST_BYTES, ROW_BYTES = 4, 8
EMPTY_LISTS_BYTES = 32  # "ilar", number of lists, code size, "sprs", no sizes: how an index without entries ends


def write_ivf(
    path: Path,
    index: Any,
    keys_ND: Float16[np.ndarray, "N D"] | RowSubset,
    values_N: np.ndarray,
    *,
    progress: Progress,
) -> None:
    """Writes and syncs an index of all keys. Its ids hold rows on disk and values. `index` is trained and empty. Three
    temporary files beside `path` hold the list and the code of each key, and the rows by list.
    """
    lists_path, codes_path, rows_path = (path.with_suffix(suffix) for suffix in (".lists", ".codes", ".rows"))
    _assign(index, keys_ND, lists_path, codes_path, progress)
    lists_N = np.load(lists_path, mmap_mode="r")
    codes_NC = keys_ND if keys_are_codes(index) else np.load(codes_path, mmap_mode="r")
    sizes = _sizes_of(lists_N, inner(index).nlist)
    with storage(path), create(path) as file:
        rows_N = _rows_by_list(lists_N, sizes, rows_path)
        _write_head(file, index, sizes)
        _write_lists(file, codes_NC, keys_ND, values_N, rows_N, sizes, progress)
        file.flush()
        sync(file.fileno())
    for temporary in (lists_path, codes_path, rows_path):
        remove(temporary)


def beside_bytes(factory: str, dim: int) -> int:
    """Bytes per key of the temporary files beside the index while it is written."""
    index = create_index(factory, dim)
    return LIST_BYTES + ROW_BYTES + (0 if keys_are_codes(index) else int(inner(index).code_size))


def _assign(
    index: Any,
    keys_ND: Float16[np.ndarray, "N D"] | RowSubset,
    lists_path: Path,
    codes_path: Path,
    progress: Progress,
) -> None:
    """Writes the list of each key, and its code unless the key itself is the code."""
    ivf = inner(index)
    is_code = keys_are_codes(index)

    def assign(rows: Rows) -> tuple[Int64[np.ndarray, " N"], UInt8[np.ndarray, "N C"] | None]:
        exact_ND = transformed(index, keys_ND[slice(*rows)])
        lists_N = nearest_lists(index, exact_ND)
        return lists_N, None if is_code else _encoded(ivf, exact_ND, lists_N)

    with (
        closing(GrowingArray(lists_path, "<i4", None)) as lists,
        closing(GrowingArray(codes_path, "u1", ivf.code_size)) as codes,
    ):
        for (_, end), (lists_N, codes_NC) in run_in_threads(assign, even_blocks(len(keys_ND), BLOCK_ROWS)):
            lists.append(lists_N)
            if codes_NC is not None:
                codes.append(codes_NC)
            progress("assign to lists", end, len(keys_ND))
        lists.flush()
        codes.flush()


def _encoded(
    ivf: Any, exact_ND: Float32[np.ndarray, "N D"], lists_N: Int64[np.ndarray, " N"]
) -> UInt8[np.ndarray, "N C"]:
    """The codes of some keys in their lists."""
    codes_NC = np.zeros((len(exact_ND), ivf.code_size), np.uint8)
    numbers_N = np.ascontiguousarray(lists_N)
    ivf.encode_vectors(len(exact_ND), *map(faiss.swig_ptr, (exact_ND, numbers_N, codes_NC)))
    return codes_NC


def _sizes_of(lists_N: np.ndarray, num_lists: int) -> Int64[np.ndarray, " L"]:
    """How many rows each list has."""
    return sum(
        (np.bincount(lists_N[b:e], minlength=num_lists) for b, e in blocks(len(lists_N), BLOCK_ROWS)),
        np.zeros(num_lists, int),
    )


def _rows_by_list(lists_N: np.ndarray, sizes: Int64[np.ndarray, " L"], path: Path) -> Int64[np.ndarray, " N"]:
    """All rows in the order of their lists, ascending in each: a counting sort, whose result is a file that is mapped
    into memory.
    """
    with create(path) as file:  # not a sparse file, whose map a full disk would break without an error
        for begin, end in blocks(len(lists_N), BLOCK_ROWS):
            file.write(bytes(ROW_BYTES * (end - begin)))
    rows_N = np.memmap(path, "<i8", "r+", shape=len(lists_N))
    next_L = np.cumsum(sizes) - sizes  # the place of each list's next row
    for begin, end in blocks(len(lists_N), BLOCK_ROWS):
        order_B = np.argsort(lists_N[begin:end], kind="stable")
        sorted_B = lists_N[begin:end][order_B]
        counts_L = np.bincount(sorted_B, minlength=len(sizes))
        firsts_L = np.cumsum(counts_L) - counts_L
        rows_N[(next_L - firsts_L)[sorted_B] + np.arange(end - begin)] = begin + order_B
        next_L += counts_L
    return rows_N


def _write_head(file: IO[bytes], index: Any, sizes: Int64[np.ndarray, " L"]) -> None:
    """Writes the trained index as Faiss writes it without entries, up to the lists, and then the sizes of the lists."""
    index.ntotal = inner(index).ntotal = int(sizes.sum())
    empty = faiss.serialize_index(index).tobytes()
    index.ntotal = inner(index).ntotal = 0
    head, tail = empty[:-EMPTY_LISTS_BYTES], empty[-EMPTY_LISTS_BYTES:]
    count = np.array([len(sizes), inner(index).code_size], "<u8").tobytes()
    if tail != b"ilar" + count + b"sprs" + bytes(8):
        raise Incompatible(
            f"Faiss {faiss.__version__} lays out inverted lists in a way that memlm does not know; install the version"
            " in constraints.txt"
        )
    file.write(head + b"ilar" + count + b"full" + np.array([len(sizes), *sizes], "<u8").tobytes())


def _write_lists(
    file: IO[bytes],
    codes_NC: np.ndarray | RowSubset,
    keys_ND: Float16[np.ndarray, "N D"] | RowSubset,
    values_N: np.ndarray,
    rows_N: Int64[np.ndarray, " N"],
    sizes: Int64[np.ndarray, " L"],
    progress: Progress,
) -> None:
    begins = np.concatenate([[0], np.cumsum(sizes)])

    def gather(group: Rows) -> tuple[np.ndarray, np.ndarray]:
        rows = rows_N[begins[group[0]] : begins[group[1]]]
        order = np.argsort(rows)  # read in the order of the file
        codes_GC = np.ascontiguousarray(codes_NC[rows[order]]).view(np.uint8)
        packed_G = rows_of(keys_ND, rows[order]) << VALUE_BITS | values_N[rows[order]]
        back = np.argsort(order)
        return codes_GC.take(back, axis=0), packed_G[back].astype("<i8", copy=False)

    done = 0
    for (first, last), (codes, packed) in run_in_threads(gather, _groups(sizes, rows_per_core(GROUP_ROWS))):
        begin = 0
        for end in np.cumsum(sizes[first:last]):
            file.write(codes[begin:end].data)
            file.write(packed[begin:end].data)
            begin = end
        done += len(packed)
        progress("add to index", done, len(rows_N))


def _groups(sizes: Int64[np.ndarray, " L"], rows: int) -> Iterator[Rows]:
    """Ranges of lists with about `rows` rows each. A list is never split."""
    first, held = 0, 0
    for number, size in enumerate(sizes):
        if held and held + size > rows:
            yield first, number
            first, held = number, 0
        held += int(size)
    yield first, len(sizes)
