"""The table at the top of docs/reports/evidence.md: a few lines of the others."""

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.evidence_rows import TEXTS, Rows, by_text, error_of, header, line, of

NATS, RIGHT, NONE = "nats a token", "right answers", "-"


def table_of_the_summary(rows: Rows) -> Iterator[str]:
    """A line for each domain and task: the model alone, with a datastore, and another way for comparison. Nats have
    their change against the model alone in brackets.
    """
    yield from header("text or task", "measure", "model alone", "datastore", "for comparison")
    yield from lines_of_text(rows)
    yield from lines_of_answers(rows)
    if deleted := of(rows, "deletion"):
        kinds = sum(row["index"] != "remembered" for row in deleted)
        task = link(f"documents that were deleted and purged, {kinds} kinds of index, tiny model", "deletion")
        off = max(row["off_purged"] for row in deleted)
        yield line(task, "largest difference of a probability from a datastore without them", NONE, f"{off:.1g}", NONE)


def lines_of_text(rows: Rows) -> Iterator[str]:
    """Nats a token of unseen text."""
    for row in (row for row in of(rows, "gain-by-domain") if row["way"] == "adaptive_lam"):
        task = link(f"new text, {TEXTS[row['text']]}, {int(row['entries']):,} tokens stored", "gain-by-domain")
        before = row["nats_per_token"]
        yield line(task, NATS, f"{before:.2f}", changed(before, row), NONE)
    for name, ways in by_text(of(rows, "passages")):
        task = link(f"the same, {TEXTS[name]}, equal contexts", "text-against-passages-in-the-prompt")
        yield compared(task, ways["datastore"], "passages in the prompt", ways["passages"])
    for name, ways in by_text(of(rows, "equal-time")):
        task = link(f"the same, {TEXTS[name]}, equal time", "text-in-equal-time")
        other = ways["passages in the time of at_once"]
        yield compared(task, ways["datastore at_once"], "passages in the prompt", other)
    for name, ways in by_text(of(rows, "training")):
        task = f"a small model of a quarter of a text, {TEXTS[name]}, the rest stored"
        stored, other = ways["quarter adaptive_lam"], ways["equal_time alone"]
        task = link(task, "a-datastore-against-training")
        yield compared(task, stored, "training on all, equal processor time", other)


def lines_of_answers(rows: Rows) -> Iterator[str]:
    """Shares of right answers."""
    for name, ways in by_text([row for row in of(rows, "questions") if row.get("cut", "all") == "all"]):
        task = link(f"questions about stored documents, {TEXTS[name]}", "questions-against-passages-in-the-prompt")
        before, stored, other = (percent(ways[way], "right") for way in ("alone", "datastore", "passages by_words"))
        yield line(task, RIGHT, before, stored, f"passages in the prompt: {other}")
    for name, ways in by_text(of(rows, "facts")):
        taught, behind = (
            ways["as_taught tuned"],
            f"behind another sentence: {percent(ways['behind_other_text tuned'], 'right_taught')}",
        )
        task = link(f"{taught['facts']:.0f} invented facts, taught beside {TEXTS[name]}", "invented-facts")
        yield line(task, RIGHT, percent(taught, "right_before"), percent(taught, "right_taught"), behind)
        yield line("the same, deleted", RIGHT, NONE, percent(taught, "right_deleted"), NONE)


def link(text: str, section: str) -> str:
    """A link to a section of the report."""
    return f"[{text}](#{section})"


def compared(task: str, stored: dict[str, Any], name: str, other: dict[str, Any]) -> str:
    """A line for a datastore and its alternative, whose rows have their own nats."""
    before = stored["nats_per_token"] + stored["nats_less"]
    return line(task, NATS, f"{before:.2f}", changed(before, stored), f"{name}: {changed(before, other)}")


def changed(before: float, row: dict[str, Any]) -> str:
    """The nats, and in brackets their change against the model alone. Less is better."""
    return f"{before - row['nats_less']:.2f} ({-row['nats_less']:+.3f} ± {error_of(row, 'nats_less', 3)})"


def percent(row: dict[str, Any], name: str) -> str:
    """A share in percent with its standard error. Of none or all, no error is known."""
    if row[name] in (0, 1):
        return f"{100 * row[name]:.0f} %"
    return f"{100 * row[name]:.0f} ± {error_of(row, name, 0, 100)} %"
