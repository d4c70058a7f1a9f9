"""The report of a bench, which `memlm bench COMMAND --json` prints and benchmarks/results/*.json keep.

    {
      "command": "memlm bench generate --json",
      "commit": "0c5f...-dirty",              null outside of a git checkout
      "date": "2026-11-25T03:00:00+00:00",
      "versions": {"memlm": "0.1.0", "python": "3.12.1", "torch": "2.9.0", ...},
      "machine": {"processor": "Intel(R) Xeon(R) ...", "instruction_sets": ["avx2", "avx512f"], "cores": 2,
                  "gigabytes_per_s": 41.2, "gigaflops_float32": 485.1, "gigaflops_bfloat16": 997.2},
      "settings": {"entries": 1133664, "index": "IVF2048,SQfp16", "nprobe": 4, "k": 64},
      "results": [{"metric": "with_store_over_without", "value": 1.45, "low": 1.40, "high": 1.49, "n": 5}]
    }

`low` and `high` are the smallest and largest of `n` repeats, or, for a mean over texts or queries, one standard error
below and above it. They are null for a single value, and `n` is null if it was not counted. A figure `x` with `x_n` has
an `n` of its own. `target` may be added. The metrics of a bench with rows carry the words of the row:
`recall_k32[entries=100000,index=Flat]`. The machine's bandwidth is that of summing 400 MB on all cores, its GFLOP/s
those of a product of 2048 x 2048 matrices, both measured after the bench.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memlm.bench.machine import machine, versions

# Figures that describe the measurement; all others are its results.
SETTINGS = (
    "answers", "budget", "documents", "entries", "entries_1x", "entries_4x", "faiss_searches", "files", "gates", "dim",
    "dropped_from_memory", "holes", "index", "k", "keep_gain", "lists", "nprobe", "parameters", "pruned", "queries",
    "rerank", "real_keys", "repeats", "shards", "streams", "target", "temperature", "tokens",
)  # fmt: skip
ROW_WORDS = (
    "table", "text", "task", "entries", "store", "way", "index", "cut", "prompts", "streams", "keys", "windows",
    "tokens", "depth", "effect", "config", "delay_ms",
)  # fmt: skip


def report(figures: Mapping[str, Any], *, repeats: int | None, program: str = "memlm") -> dict[str, Any]:
    """The report of a bench that this process has just run. `figures` are as the bench returned them. `program` is the
    beginning of the command line.
    """
    return {
        "command": " ".join([program, *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "settings": {name: value for name, value in figures.items() if _is_setting(name, value)},
        "results": list(results(figures, repeats)),
    }


def results(figures: Mapping[str, Any], repeats: int | None) -> Iterator[dict[str, Any]]:
    """The results in some figures: `x` with `x_least` and `x_most`, or with `x_error`."""
    for name, value in figures.items():
        if name == "rows":
            for row in value:
                words = ",".join(f"{word}={row[word]}" for word in ROW_WORDS if word in row)
                figures_of_row = {key: row[key] for key in row if key not in ROW_WORDS}
                for result in (*_row_settings(figures_of_row), *results(figures_of_row, repeats)):
                    yield {**result, "metric": f"{result['metric']}[{words}]"}
        elif not (_is_setting(name, value) or _is_bound(name, figures)):
            low, high = figures.get(f"{name}_least"), figures.get(f"{name}_most")
            if (error := figures.get(f"{name}_error")) is not None:
                low, high = value - error, value + error
            yield {"metric": name, "value": value, "low": low, "high": high, "n": figures.get(f"{name}_n", repeats)}


def _row_settings(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The numeric settings of a row, such as `nprobe`, which differ from row to row."""
    for name, value in row.items():
        if name in SETTINGS and isinstance(value, int | float):
            yield {"metric": name, "value": value, "low": None, "high": None, "n": None}


def _is_setting(name: str, value: Any) -> bool:
    return name != "rows" and (name in SETTINGS or not isinstance(value, int | float) or isinstance(value, bool))


def _is_bound(name: str, figures: Mapping[str, Any]) -> bool:
    return re.sub(r"_(least|most|error|n)$", "", name) in figures.keys() - {name}


def commit() -> str | None:
    """The commit of the checkout that memlm is imported from."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
