"""Draws docs/reports/context-gain.svg from benchmarks/context-h100.json, and prints its tables. Needs matplotlib.

python benchmarks/plot_context.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import load, rows_of

PICTURE = Path(__file__).parents[1] / "docs" / "reports" / "context-gain.svg"
WAYS = {
    "datastore": "datastore",
    "context_cache": "context cache",
    "both": "both",
    "window_2048": "window of 2,048",
    "window_8192": "window of 8,192",
}


def main() -> None:
    """Gains over a window of 512 by kind of text, and of a datastore by its size."""
    rows = rows_of(load()["context-h100"])
    texts = [row for row in rows if "nats_per_token" in row]
    sizes = [row for row in rows if "nats_less_datastore" in row and "nats_per_token" not in row]
    sys.stdout.write("\n".join([*table(texts), "", *table_of_sizes(sizes)]) + "\n")
    draw(texts, sizes)


def table(texts: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a line for each kind of text."""
    yield f"| text | entries | tokens | alone | {' | '.join(WAYS.values())} |"
    yield "|" + "---|" * (4 + len(WAYS))
    for row in texts:
        cells = [f"{row[f'nats_less_{way}']:.3f} ± {row[f'nats_less_{way}_error']:.3f}" for way in WAYS]
        counts = f"{row['entries']:,.0f} | {row['tokens']:,.0f}"
        yield f"| {row['text']} | {counts} | {row['nats_per_token']:.3f} | {' | '.join(cells)} |"


def table_of_sizes(sizes: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a line for each number of entries."""
    yield "| entries | nats a token less |"
    yield "|---|---|"
    for row in sizes:
        yield f"| {int(row['entries']):,} | {row['nats_less_datastore']:.3f} ± {row['nats_less_datastore_error']:.3f} |"


def draw(texts: list[dict[str, Any]], sizes: list[dict[str, Any]]) -> None:
    """Bars by kind of text on the left, a line by number of entries on the right."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "memlm", "font.size": 9, "svg.fonttype": "none"})
    figure, (bars, line) = plt.subplots(1, 2, figsize=(8.4, 3.2), width_ratios=(1.7, 1))
    width = 0.8 / len(WAYS)
    for number, (way, name) in enumerate(WAYS.items()):
        places = [place + (number - (len(WAYS) - 1) / 2) * width for place in range(len(texts))]
        gains, errors = ([row[f"nats_less_{way}{end}"] for row in texts] for end in ("", "_error"))
        # Memories in blue and orange, longer windows in grey.
        color = ("C0", "C1", "C2", "0.75", "0.5")[number]
        bars.bar(places, gains, width, yerr=errors, label=name, color=color, error_kw={"linewidth": 0.8})
    bars.set_xticks(range(len(texts)), [row["text"] for row in texts])
    bars.set_ylabel("nats a token less than alone")
    bars.set_title("SmolLM2-135M, window of 512", fontsize=9)
    bars.legend(fontsize=8)
    entries = [int(row["entries"]) for row in sizes]
    gains, errors = ([row[f"nats_less_datastore{end}"] for row in sizes] for end in ("", "_error"))
    line.errorbar(entries, gains, yerr=errors, marker="o", markersize=3, linewidth=1)
    line.set(xscale="log", xlabel="entries of the datastore", ylim=(0, None))
    line.set_title("Isabelle, window of 1,024, exact search", fontsize=9)
    for panel in (bars, line):
        panel.grid(alpha=0.3, axis="y")
        panel.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
