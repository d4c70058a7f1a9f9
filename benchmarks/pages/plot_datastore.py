"""Draws docs/reports/datastore-*.svg from benchmarks/results/datastore.json, and prints its table. Needs matplotlib.

python -m benchmarks.pages.plot_datastore
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.pages.report import load, rows_of

REPORTS = Path(__file__).parents[2] / "docs" / "reports"


def main() -> None:
    """Two pictures: what a query costs over the size of a store, and what is found for how many bytes."""
    rows = [{**row, "entries": int(row["entries"])} for row in rows_of(load()["datastore"])]
    plt.rcParams.update({"svg.hashsalt": "memlm", "font.size": 9, "figure.figsize": (6.4, 3.6), "svg.fonttype": "none"})
    draw_times(rows)
    draw_bytes(rows)
    sys.stdout.write("\n".join(table(rows)) + "\n")


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a line a row of figures."""
    yield (
        "| entries | index | bytes | lists probed | training, s | added a second | over Faiss | ms, k 32, one / of 64"
        " | ms, k 1024, one / of 64 | recall@32 | mass, k 32 | mass, k 1024 | nats more, k 1024 |"
    )
    yield "|" + "---|" * 13
    for row in rows:
        cells = [
            f"{row['entries']:,}",
            f"`{row['index']}`",
            f"{row['bytes_per_entry']:,}",
            f"{row.get('nprobe', '')}",
            f"{row['train_s']:.0f}" if "train_s" in row else "",
            f"{row['add_per_s']:,.0f}" if "add_per_s" in row else "",
            f"{row['add_over_bare_faiss']:.2f}" if "add_over_bare_faiss" in row else "",
            *(f"{row[f'ms_per_query_k{k}_batch1']:.2f} / {row[f'ms_per_query_k{k}_batch64']:.2f}" for k in (32, 1024)),
            f"{row['recall_k32']:.3f}",
            f"{row['softmax_mass_k32']:.4f}",
            f"{row['softmax_mass_k1024']:.4f}",
            f"{row['nats_change_k1024']:+.4f} ± {row['nats_change_k1024_error']:.4f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def draw_times(rows: list[dict[str, Any]]) -> None:
    """Milliseconds of one query, by entries."""
    figure, axes = plt.subplots()
    for kind in dict.fromkeys(row["index"] for row in rows):
        points = sorted((row["entries"], row["ms_per_query_k32_batch1"]) for row in rows if row["index"] == kind)
        if len(points) > 1:
            axes.plot(*zip(*points, strict=True), marker="o", label=kind)
    axes.set(xscale="log", yscale="log", xlabel="entries", ylabel="milliseconds a query (k = 32, one at a time)")
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(REPORTS / "datastore-time.svg", metadata={"Date": None})


def draw_bytes(rows: list[dict[str, Any]]) -> None:
    """Softmax mass by bytes an entry, at a million entries."""
    figure, axes = plt.subplots()
    for row in rows:
        if row["entries"] == 1_000_000:
            place = row["bytes_per_entry"], row["softmax_mass_k32"]
            axes.errorbar(*place, yerr=row["softmax_mass_k32_error"], marker="o", color="C0")
            axes.annotate(row["index"], place, xytext=(4, -10), textcoords="offset points", fontsize=7)
    axes.set(xscale="log", xlabel="bytes an entry in memory", ylabel="softmax mass found (k = 32)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(REPORTS / "datastore-mass.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
