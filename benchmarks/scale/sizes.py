"""How the cost of a datastore grows: stores of several sizes measured, laws fitted, and larger stores predicted.

The largest size is held out: its bytes and times are predicted from the smaller sizes alone, and compared with the
measured ones. Larger stores are then predicted from all sizes. Entries are ranked by their codes alone, as in a store
that is too large for its keys.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.datastore import held_out_questions
from benchmarks.scale.law import (
    BUILD_TERMS,
    BYTE_TERMS,
    SEARCH_TERMS,
    Division,
    Law,
    PowerLaw,
    Prediction,
    Shape,
    divided,
    fit_law,
)
from benchmarks.scale.store import BATCHES, Built, K, Times, build, factory_of, scaled_keys, time_searches
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput, check_range
from memlm.index.ivf import code_bytes, create_index, lists_for
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint

MIN_QUERIES = max(BATCHES)
ID_BYTES = 8  # of an entry, beside its code
ONCE = ("softmax_mass", "bytes", "bytes_per_entry", "build_s", "built_per_s")  # figures that no repeat measures again
CACHE_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # of Linux, "32768K"
CACHE_BYTES = 32 << 20  # where the system does not say


@dataclass(frozen=True)
class Machine:
    """A machine of a divided store: bytes of RAM for its shard, None for all of the store, and the milliseconds of a
    round trip to it.
    """

    ram_bytes: float | None = None
    hop_ms: float = 0.5


@dataclass(frozen=True)
class Plan:
    """The sizes to measure, ascending, and the stores to predict.

    `kinds` are factory strings with `*` for the number of lists. `target` is the share of the findable softmax mass
    that a search finds. A predicted store is spread over copies of `machine`.
    """

    sizes: Sequence[int]
    kinds: Sequence[str] = ()
    predict: Sequence[int] = ()
    target: float = 0.95
    machine: Machine = Machine()
    repeats: int = 5

    def check(self) -> None:
        """Raises InvalidInput for sizes that no law can be fitted to, and for numbers out of range."""
        is_ascending = all(before < after for before, after in itertools.pairwise(self.sizes))
        if len(self.sizes) < 2 or self.sizes[0] < 1 or not is_ascending:
            raise InvalidInput(
                f"entries is {','.join(map(str, self.sizes)) or 'empty'}; expected two ascending sizes at least: the"
                " last one is predicted from the others",
                field="entries",
            )
        for entries in self.predict:
            check_range("predict", entries, least=1, whole=True)
        check_range("target", self.target, above=0, most=1)
        check_range("repeats", self.repeats, least=1, whole=True)
        check_range("hop_ms", self.machine.hop_ms, least=0)
        check_range("shard_ram", self.machine.ram_bytes, above=0)


@dataclass(frozen=True)
class Laws:
    """The laws of one kind of index: bytes, seconds of a build, seconds of a query by batch, and lists to probe."""

    bytes: Law
    build_s: Law
    query_s: dict[int, Law]
    nprobe: PowerLaw
    cache: int

    @classmethod
    def fit(cls, built: Sequence[Built], times: Sequence[Times], target: float, cache: int) -> Laws:
        """Fits all laws to some sizes. The times of all numbers of lists count."""
        shapes = [each.shape for each in built]

        def search_law(batch: int) -> Law:
            points = [
                (shape.search_terms(nprobe, cache), statistics.median(spent))
                for shape, taken in zip(shapes, times, strict=True)
                for (size, nprobe), spent in taken.items()
                if size == batch
            ]
            return fit_law(SEARCH_TERMS, np.array([terms for terms, _ in points]), np.array([s for _, s in points]))

        return cls(
            fit_law(BYTE_TERMS, np.array([s.byte_terms() for s in shapes]), np.array([b.bytes for b in built], float)),
            fit_law(BUILD_TERMS, np.array([s.build_terms() for s in shapes]), np.array([b.build_s for b in built])),
            {batch: search_law(batch) for batch in BATCHES},
            PowerLaw.fit([each.entries for each in built], [each.enough_lists(target) for each in built]),
            cache,
        )

    def predict(self, shape: Shape, nprobe: float, drifts: dict[str, float]) -> dict[str, Prediction]:
        """Every cost of one store, under its name in a row. `drifts` are the laws' relative errors at this distance."""
        return {
            "bytes": self.bytes.predict(shape.byte_terms(), drift=drifts.get("bytes", 0.0)),
            "build_s": self.build_s.predict(shape.build_terms(), drift=drifts.get("build_s", 0.0)),
            **{
                (name := _query_name(batch)): law.predict(
                    shape.search_terms(nprobe, self.cache), drift=drifts.get(name, 0.0)
                ).times(1e3)
                for batch, law in self.query_s.items()
            },
        }


def bench_scale(
    model: Path | Checkpoint, texts: Corpus, held_out: Corpus, work: Path, plan: Plan, *, progress: Progress = silent
) -> dict[str, Any]:
    """Measures stores of each size, predicts the largest from the others, and larger stores from all.

    `work` keeps keys and indexes, so that a second run only measures times. Raises InvalidInput for a plan that cannot
    be carried out, and for held-out text of fewer tokens than the largest batch.
    """
    plan.check()
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    dim = checkpoint.decoder.config.dim
    kinds = plan.kinds or default_kinds(dim)
    for kind in kinds:  # refuses what cannot be built or divided, before computing keys
        factory = factory_of(kind, plan.sizes[0])
        create_index(factory, dim)
        if plan.predict and plan.machine.ram_bytes is not None:
            divided(plan.predict[-1], code_bytes(factory, dim) + ID_BYTES, plan.machine.ram_bytes, dim=dim, k=K)
    queries_QD = held_out_questions(checkpoint, held_out).keys_QD
    if len(queries_QD) < MIN_QUERIES:
        raise InvalidInput(
            f"held_out has {len(queries_QD)} tokens; expected {MIN_QUERIES} at least: give more text", field="held_out"
        )
    keys_ND, values_N, real = scaled_keys(checkpoint, texts, work, plan.sizes[-1], progress)
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        built = [build(kind, keys_ND[:size], values_N[:size], queries_QD, work, progress) for size in plan.sizes]
        times = time_searches(built, queries_QD, work, target=plan.target, repeats=plan.repeats, progress=progress)
        rows += _rows(built, times, plan)
    return {"dim": dim, "queries": len(queries_QD), "k": K, "real_keys": real, "target": plan.target, "rows": rows}


def default_kinds(dim: int) -> list[str]:
    """Float16 codes, and codes of one byte for four numbers, as a store beyond RAM would have them."""
    return ["IVF*,SQfp16", f"IVF*,PQ{dim // 4}" if dim % 4 == 0 else "IVF*,SQ8"]


def cache_bytes() -> int:
    """Bytes of the processor's last cache, or a usual number where the system does not say."""
    try:
        return int(CACHE_FILE.read_text(encoding="utf-8").strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return CACHE_BYTES


def _rows(built: Sequence[Built], times: Sequence[Times], plan: Plan) -> Iterator[dict[str, Any]]:
    """The rows of the measured sizes of one kind, the largest with its prediction, and of the predicted sizes."""
    cache = cache_bytes()
    rows = [_measured(facts, taken, plan.target) for facts, taken in zip(built, times, strict=True)]
    before, after = (Laws.fit(built[:last], times[:last], plan.target, cache) for last in (-1, None))
    held_out, off = rows[-1], {}
    for name, prediction in before.predict(built[-1].shape, held_out["nprobe"], {}).items():
        off[name] = prediction.value / held_out[name] - 1
        held_out |= {f"{name}_predicted": prediction.value, f"{name}_off": off[name]}
    nprobe = before.nprobe.at(built[-1].entries)
    held_out |= {f"{name}_{of}_n": None for name in (*off, "nprobe") for of in ("predicted", "off")}
    held_out |= {"nprobe_predicted": nprobe, "nprobe_off": nprobe / held_out["nprobe"] - 1}
    yield from rows
    step = math.log(built[-1].entries / built[-2].entries)
    for entries in plan.predict:
        yield _predicted(entries, after, built[-1], off, step, plan.machine)


def _measured(facts: Built, times: Times, target: float) -> dict[str, Any]:
    """The row of a measured size, with times at the number of lists that finds the target and at all others."""
    nprobe = facts.enough_lists(target)
    row: dict[str, Any] = {
        "entries": facts.entries, "index": facts.index, "lists": facts.lists, "nprobe": nprobe,
        "softmax_mass": facts.mass(nprobe), "bytes": facts.bytes, "bytes_per_entry": facts.bytes / facts.entries,
        "build_s": facts.build_s, "built_per_s": facts.entries / facts.build_s,
    }  # fmt: skip
    row |= {f"{name}_n": 1 for name in ONCE}
    for (batch, probed), spent in times.items():
        name = _query_name(batch) if probed == nprobe else f"{_query_name(batch)}_nprobe{probed}"
        row |= {name: 1e3 * statistics.median(spent)}
        row |= {f"{name}_least": 1e3 * min(spent), f"{name}_most": 1e3 * max(spent)}
    return row


def _predicted(
    entries: int, laws: Laws, largest: Built, off: dict[str, float], step: float, machine: Machine
) -> dict[str, Any]:
    """The row of a predicted size. Bytes and build seconds are those of all shards, times those of one and the hop. The
    errors `off` of the held-out size count for each factor of exp(`step`) from the largest size to a shard.
    """
    share = Division(1, entries, 0)
    if machine.ram_bytes is not None:
        per_entry = laws.bytes.predict(largest.shape.byte_terms()).value / largest.entries
        share = divided(entries, per_entry, machine.ram_bytes, dim=largest.dim, k=K)
    shard = Shape(share.shard_entries, lists_for(round(share.shard_entries)), largest.code_bytes, largest.dim)
    nprobe = min(laws.nprobe.at(share.shard_entries), shard.lists)
    steps = max(0.0, math.log(share.shard_entries / largest.entries) / step)
    drifts = {name: abs(error) * steps for name, error in off.items()}
    row: dict[str, Any] = {
        "entries": entries, "index": largest.index, "lists": shard.lists, "nprobe": round(nprobe),
        "shards": share.shards, "network_bytes_per_query": share.network_bytes, "network_bytes_per_query_n": None,
    }  # fmt: skip
    hop_ms = machine.hop_ms if share.shards > 1 else 0.0
    for name, one in laws.predict(shard, nprobe, drifts).items():
        whole = one.plus(hop_ms) if name.startswith("ms_") else one.times(share.shards)
        row |= {f"{name}_predicted": whole.value, f"{name}_predicted_n": None}
        row |= {f"{name}_predicted_least": whole.low, f"{name}_predicted_most": whole.high}
    return row


def _query_name(batch: int) -> str:
    return f"ms_per_query_batch{batch}"
