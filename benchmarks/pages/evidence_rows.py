"""Rows of the reports evidence-*.json, and lines of the tables that they become."""

from collections.abc import Iterator
from typing import Any

COUNTS = ("documents", "questions", "facts")  # of a row: the first one that it has is what its errors are over
Rows = list[dict[str, Any]]
TEXTS = {"isabelle": "Isabelle", "library": "standard library", "wikitext": "WikiText-2", "books": "books"}


def of(rows: Rows, table: str) -> Rows:
    """The rows of one table, in the order of the domains."""
    order = list(TEXTS)
    return sorted((row for row in rows if row["table"] == table), key=lambda row: order.index(row["text"]))


def header(*columns: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)


def line(*cells: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"


def with_error(row: dict[str, Any], name: str, digits: int = 3) -> str:
    """A figure and its standard error, which a dash stands for where there is one document or question."""
    return f"{row[name]:z.{digits}f} ± {error_of(row, name, digits)}"


def error_of(row: dict[str, Any], name: str, digits: int, scale: float = 1) -> str:
    """The standard error of a figure, or a dash where the row has one document or question. Some older results do not
    tell how many there are.
    """
    counts = [row[word] for word in COUNTS if word in row]
    return "–" if counts[:1] == [1] else f"{scale * row[f'{name}_error']:.{digits}f}"


def by_text(rows: Rows) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """The rows of each domain by their ways."""
    for name in dict.fromkeys(row["text"] for row in rows):
        yield name, {row["way"]: row for row in rows if row["text"] == name}
