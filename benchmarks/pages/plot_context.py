"""Draws the plots of docs/reports/context.md and prints its tables, from context-h100.json and passkeys*.json in
benchmarks/results. Needs matplotlib.

python -m benchmarks.pages.plot_context
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages.report import load, rows_of

REPORTS = Path(__file__).parents[2] / "docs" / "reports"
WAYS = {
    "datastore": "datastore",
    "context_cache": "context cache",
    "both": "both",
    "window_2048": "window of 2,048",
    "window_8192": "window of 8,192",
}


PASS_KEYS = {"attention_window": "window", "context_cache": "context cache", "extended_attention": "extended attention"}
GUESS = 11.5  # nats of five digits


def main() -> None:
    """Gains over a window of 512 by kind of text, and of a datastore by its size, and pass keys by depth."""
    reports = load()
    rows = rows_of(reports["context-h100"])
    texts = [row for row in rows if "nats_per_token" in row]
    sizes = [row for row in rows if "nats_less_datastore" in row and "nats_per_token" not in row]
    sys.stdout.write("\n".join([*table(texts), "", *table_of_sizes(sizes)]) + "\n")
    draw(texts, sizes)
    draw_passkeys([row for name in sorted(reports) if name.startswith("passkeys") for row in rows_of(reports[name])])


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
    figure.savefig(REPORTS / "context-gain.svg", metadata={"Date": None})


def draw_passkeys(rows: list[dict[str, Any]]) -> None:
    """A heat map for each way: nats of the answer by length of the text and depth of the key, with a dot where it was
    right.
    """
    import matplotlib.pyplot as plt

    lengths = sorted({int(row["tokens"]) for row in rows})
    depths = sorted({float(row["depth"]) for row in rows})
    figure, panels = plt.subplots(1, len(PASS_KEYS), figsize=(8.4, 3.4), sharey=True, layout="constrained")
    for panel, (way, name) in zip(panels, PASS_KEYS.items(), strict=True):
        nats = [[math.nan] * len(lengths) for _ in depths]
        for row in rows:
            if row["way"] == way:
                line, column = depths.index(float(row["depth"])), lengths.index(int(row["tokens"]))
                nats[line][column] = row["nats_of_answer"]
                if row["right"] == 1:
                    panel.plot(column, line, "o", color="white", markersize=4)
        picture = panel.imshow(nats, aspect="auto", cmap="viridis_r", vmin=0, vmax=1.5 * GUESS)
        panel.set_xticks(range(len(lengths)), [f"{length // 1000:,}k" for length in lengths])
        panel.set_xlabel("tokens of the text")
        panel.set_title(name, fontsize=9)
    panels[0].set_yticks(range(0, len(depths), 2), [f"{depth:.0%}" for depth in depths[::2]])
    panels[0].set_ylabel("depth of the key")
    figure.colorbar(picture, ax=panels, label="nats of five digits")
    figure.savefig(REPORTS / "context-passkeys.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
