"""Rows of the reports evidence-*.json, and lines of the tables that they become."""

from collections.abc import Iterator
from typing import Any

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
    """A figure and its standard error."""
    return f"{row[name]:.{digits}f} ± {row[f'{name}_error']:.{digits}f}"


def by_text(rows: Rows) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """The rows of each domain by their ways."""
    for name in dict.fromkeys(row["text"] for row in rows):
        yield name, {row["way"]: row for row in rows if row["text"] == name}
