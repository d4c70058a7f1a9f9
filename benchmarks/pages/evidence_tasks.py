"""Tables of docs/reports/evidence.md: how a datastore changes tasks, beside its gain on text."""

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.evidence_rows import TEXTS, Rows, error_of, header, line, with_error

WAYS = {"one_lam": "one λ", "adaptive_lam": "adaptive λ", "thresholded_lam": "adaptive λ with a threshold"}


def table_of_tasks(rows: Rows) -> Iterator[str]:
    """A line for each domain and task: the right answers of the model alone, and the points that each way adds."""
    ways = ways_of_tasks(rows)
    yield from header("text", "task", "questions", "alone, %", *ways.values(), "changed by the last")
    found = {(row["text"], row["task"], row["questions"], *way_of(row)): row for row in rows if "right" in row}
    for text, task, count in dict.fromkeys(place[:3] for place in found):
        alone = found[text, task, count, "alone", 0]
        others = [found.get((text, task, count, *way)) for way in ways]
        more = (points_of(row) for row in others)
        name = task.removeprefix("local_").replace("_", " ")
        last = others[-1]
        changed = "-" if last is None else f"{last['changed']:.1f} %"
        yield line(TEXTS[text], name, f"{count:.0f}", with_error(alone, "right", 1), *more, changed)


def points_of(row: dict[str, Any] | None) -> str:
    """By how many points more answers are right than those of the model alone."""
    return "-" if row is None else f"{row['points_more']:+.2f} ± {error_of(row, 'points_more', 2)}"


def table_of_text_beside_tasks(rows: Rows) -> Iterator[str]:
    """A line for each domain and way: its gain on text of the domain, and the share of positions without memory."""
    yield from header("text", "way", "nats a token less than alone", "share of the gain", "positions with λ = 0")
    gains = {(row["text"], *way_of(row)): row for row in rows if "nats_less" in row}
    for text in dict.fromkeys(place[0] for place in gains):
        whole = gains.get((text, "adaptive_lam", 0))
        for way, name in ways_of_tasks(rows).items():
            if (row := gains.get((text, *way))) is not None:
                share = "-" if whole is None else f"{100 * row['nats_less'] / whole['nats_less']:.0f} %"
                yield line(TEXTS[text], name, with_error(row, "nats_less"), share, f"{100 * row['left_alone']:.0f} %")


def way_of(row: dict[str, Any]) -> tuple[str, float]:
    """The way of a row of tasks, and the share of the gain that its threshold keeps, 0 without one."""
    return row["way"], row.get("keep_gain", 0.9) if row["way"] == "thresholded_lam" else 0


def ways_of_tasks(rows: Rows) -> dict[tuple[str, float], str]:
    """The names of the ways but the model alone. Thresholds are told apart by what they keep, if there are several."""
    found = {way_of(row) for row in rows if row["way"] != "alone"}
    several = sum(keep > 0 for _, keep in found) > 1
    in_order = sorted(found, key=lambda place: (list(WAYS).index(place[0]), place[1]))
    return {(way, keep): WAYS[way] + f" ({keep:g})" * (several and keep > 0) for way, keep in in_order}
