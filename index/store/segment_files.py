"""Completes the files of a new segment: builds its index, syncs every file, records sizes and checksums, and sorts its
passages.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from memlm.base.cpu import num_cores
from memlm.base.files import checksum, remove, sync_file, sync_folder
from memlm.base.progress import Progress
from memlm.errors import InvalidInput
from memlm.index.arrays import GrowingArray, RowSubset
from memlm.index.factory import FLAT, NO_INDEX, least_to_train, with_lists_for
from memlm.index.ivf import Ivf, open_index, resolve_index, train_ivf
from memlm.index.ivf_writer import write_ivf
from memlm.index.selection import IndexTrial, TrialQueries, select_index
from memlm.index.store.derived.suffixes import write_suffixes
from memlm.index.store.manifest import SUFFIXES, FileRecord, SegmentRecord, StoreSpec
from memlm.index.store.segment import DOCUMENTS, INDEX, KEYS, PRUNED, STARTS, VALUES


def finish_segment(
    folder: Path,
    number: int,
    spec: StoreSpec,
    starts: Int64[np.ndarray, " docs+1"],
    *,
    keyed: bool,
    is_first: bool,
    progress: Progress,
) -> tuple[SegmentRecord, float]:
    """Completes a folder with synced keys, values, pruned marks and a written document table. `starts` has the first
    row of each document, and the number of all rows. Returns the segment's record, and a temperature of the keys' scale
    if the segment `is_first` with keys in its store.

    Unless `keyed`, there are no keys and no index. There the order of passages is one of the recorded files.
    """
    sync_file(folder / DOCUMENTS)
    with closing(GrowingArray(folder / STARTS, "<i8", None)) as array:
        array.append(starts)
        array.sync()
    index_fields: dict[str, Any] = {"index": NO_INDEX, "nprobe": 0}
    scale, names = 1.0, [VALUES, STARTS, DOCUMENTS]
    if keyed:
        index_fields, scale = _build_index(folder, spec, starts, is_first=is_first, progress=progress)
        names += [KEYS] + [INDEX] * (index_fields["index"] != FLAT) + [PRUNED] * (spec.prune is not None)
    for file in list(folder.iterdir()):
        if file.name not in names:
            remove(file)
    sync_folder(folder)
    files = {}
    with ThreadPoolExecutor(num_cores()) as pool:
        checksums = pool.map(lambda name: checksum(folder / name), names)
        for done, (name, found) in enumerate(zip(names, checksums, strict=True), start=1):
            files[name] = FileRecord((folder / name).stat().st_size, found)
            progress("check files", done, len(names))
    write_suffixes(folder, files[VALUES], starts, progress)
    if not keyed:  # nothing but this order gives drafts, so a copy has it, and a damaged one is found
        files[SUFFIXES] = FileRecord((folder / SUFFIXES).stat().st_size, checksum(folder / SUFFIXES))
    return SegmentRecord(number, int(starts[-1]), len(starts) - 1, files=files, **index_fields), scale


def _build_index(
    folder: Path, spec: StoreSpec, starts: Int64[np.ndarray, " docs+1"], *, is_first: bool, progress: Progress
) -> tuple[dict[str, Any], float]:
    """Selects, trains, fills and evaluates the index. Returns the fields of its record, and the scale of the keys."""
    stored_ND, values_N = (np.load(folder / name, mmap_mode="r") for name in (KEYS, VALUES))
    keys_ND: np.ndarray | RowSubset = stored_ND
    if spec.prune is not None:
        kept = np.flatnonzero(~np.load(folder / PRUNED, mmap_mode="r"))
        keys_ND, values_N = RowSubset(stored_ND, kept), values_N[kept]
        if not len(kept) and (is_first or spec.index != FLAT):
            raise InvalidInput(
                f"prune is {spec.prune}, and the model gives every token that much; give more", field="prune"
            )
    trials: list[IndexTrial] = []
    factory = with_lists_for(resolve_index(spec.index, len(keys_ND), spec.dim), len(keys_ND))
    if spec.index == "auto" and spec.max_ram_bytes is not None:
        factory, trials = select_index(
            keys_ND, values_N, starts, target=spec.target, max_ram_bytes=spec.max_ram_bytes, keep_keys=spec.keep_keys,
            seed=spec.seed, progress=progress,
        )  # fmt: skip
    if len(keys_ND) < least_to_train(factory):  # of a small addition, or the last piece of a long run
        factory = FLAT
    if factory == FLAT:
        scale = TrialQueries.of(keys_ND, values_N, starts, seed=spec.seed).temperature if is_first else 1.0
        return {"index": factory, "nprobe": 0}, scale
    trained = train_ivf(factory, keys_ND, seed=spec.seed, progress=progress)
    write_ivf(folder / INDEX, trained, keys_ND, values_N, progress=progress)
    index = Ivf(open_index(folder / INDEX, len(keys_ND), spec.dim), factory, stored_ND if spec.keep_keys else None)
    progress("evaluate index", 0, 1)
    queries = TrialQueries.of(keys_ND, values_N, starts, seed=spec.seed)
    best = queries.tune_nprobe(index, spec.target)
    progress("evaluate index", 1, 1)
    tried = tuple(asdict(trial) for trial in (*trials, best))
    return {"index": factory, "nprobe": best.nprobe, "rerank": best.rerank, "tried": tried}, queries.temperature
