"""Draws docs/reports/drafts-accepted.svg from benchmarks/results/drafts.json, and prints its table. Needs matplotlib.

python -m benchmarks.pages.plot_drafts
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.report import load, rows_of

PICTURE = Path(__file__).parents[2] / "docs" / "reports" / "drafts-accepted.svg"
LEAST_TRIED = 20  # a share of fewer tokens says little
SPANS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16))  # places in a draft, of one column


def main() -> None:
    """The share of drafted tokens that texts took, by kind of prompt, source and place in the draft, for one stream."""
    rows = [row for row in rows_of(load()["drafts"]) if row["streams"] == "1"]
    sys.stdout.write("\n".join(table(rows)) + "\n")
    draw(rows)


def places_of(row: Mapping[str, Any]) -> dict[str, dict[int, tuple[int, int]]]:
    """How many tokens were tried and taken, by source and place."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for metric, tried in row.items():
        if named := re.fullmatch(r"tried_from_(\w+)_at_(\d+)", metric):
            source, place = named[1], int(named[2])
            taken = row.get(f"taken_from_{source}_at_{place}", 0)
            found.setdefault(source, {})[place] = int(tried), int(taken)
    return found


def points_of(places: Mapping[int, tuple[int, int]]) -> list[tuple[int, float]]:
    """Places with the share of tokens that were taken, where enough were tried."""
    return [(place, taken / tried) for place, (tried, taken) in sorted(places.items()) if tried >= LEAST_TRIED]


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a line for each kind of prompt and source. An empty cell has fewer than LEAST_TRIED tokens."""
    names = [f"{first}" if first == last else f"{first} to {last}" for first, last in SPANS]
    yield f"| prompts | source | {' | '.join(names)} |"
    yield "|" + "---|" * (2 + len(SPANS))
    for row in rows:
        for source, places in places_of(row).items():
            cells = []
            for first, last in SPANS:
                pairs = [pair for place, pair in places.items() if first <= place <= last]
                tried, taken = (sum(each) for each in zip(*pairs, strict=True)) if pairs else (0, 0)
                cells.append(f"{taken / tried:.0%} of {tried:,}" if tried >= LEAST_TRIED else "")
            yield f"| {row['prompts']} | {source} | {' | '.join(cells)} |"


def draw(rows: list[dict[str, Any]]) -> None:
    """A panel for each kind of prompt, and in it a line for each source."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "memlm", "font.size": 9, "svg.fonttype": "none"})
    rows = [row for row in rows if any(map(points_of, places_of(row).values()))]
    figure, axes = plt.subplots(1, len(rows), figsize=(2.8 * len(rows), 2.8), sharex=True, sharey=True)
    colors = {source: f"C{number}" for number, source in enumerate(("text", "datastore", "neighbors", "request"))}
    for panel, row in zip(axes, rows, strict=True):
        for source, places in places_of(row).items():
            if points := points_of(places):
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colors[source], label=source)
        panel.set(title=row["prompts"], xlabel="place in the draft", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    axes[0].legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("accepted share of tried tokens")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
