"""Metadata of a dataclass field: the command-line option that it becomes (help text, flags, panel, parser), and the
bounds of its numbers, which requests check and schemas show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from memlm.errors import InvalidInput, check_range

OPTION, BOUNDS = "option", "bounds"
RESEARCH = "Research"  # the panel of help that stands last
RAY = "ray://"  # before the name under which shards run on a Ray cluster


@dataclass(frozen=True, slots=True)
class Option:
    """One command-line option. Without flags it is `--` and the field's name, less `num_` and `_s`.

    `parse` turns the text of the command line into the field's value; `default` is the default that help shows, if
    it is not the field's own. One that `is_setting` has the parameter's name in a file and the environment, and is no
    option of the command line.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    panel: str | None = None
    parse: Callable[[Any], Any] | None = None
    default: str | None = None
    is_setting: bool = False


def option(
    help: str,  # noqa: A002 - the word of every command-line library
    *flags: str,
    metavar: str | None = None,
    panel: str | None = None,
    parse: Callable[[Any], Any] | None = None,
    default: str | None = None,
    **range_of: Any,
) -> dict[str, Any]:
    """Metadata for `dataclasses.field`. `range_of` are the `bounds` of a number."""
    return {OPTION: Option(help, flags, metavar, panel, parse, default), **(bounds(**range_of) if range_of else {})}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number, as `check_range` has it."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    whole: bool = False


def bounds(
    *, least: float | None = None, above: float | None = None, most: float | None = None, whole: bool = False
) -> dict[str, Bounds]:
    """Metadata for `dataclasses.field`, of a number that is no option."""
    return {BOUNDS: Bounds(least, above, most, whole)}


@cache
def bounds_of(record_type: type[Any]) -> dict[str, Bounds]:
    """The bounds of a dataclass's fields, by name."""
    return {each.name: each.metadata[BOUNDS] for each in fields(record_type) if BOUNDS in each.metadata}


def check_bounds(record: object) -> None:
    """Checks the numbers of a dataclass, and makes floats of those that need not be whole. Raises InvalidInput, naming
    the field.
    """
    record_type: Any = type(record)  # which mypy does not take for hashable
    for name, each in bounds_of(record_type).items():
        value = getattr(record, name)
        check_range(name, value, least=each.least, above=each.above, most=each.most, whole=each.whole)
        if not each.whole and isinstance(value, int):
            try:
                object.__setattr__(record, name, float(value))
            except OverflowError:  # whole numbers may be larger than any float
                raise InvalidInput(f"{name} is too large; expected a smaller number", field=name) from None


def setting(
    help: str,  # noqa: A002
    *flags: str,
    metavar: str | None = None,
    parse: Callable[[Any], Any] | None = None,
    default: str | None = None,
) -> dict[str, Option]:
    """Metadata of a field that a file and the environment set, and no option of the command line."""
    return {OPTION: Option(help, flags, metavar, parse=parse, default=default, is_setting=True)}


def parse_bytes(text: str | int) -> int:
    """Parses a number of bytes: 1500000, 500M, 2GB (powers of 1000), 2GiB (of 1024). Raises InvalidInput."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", str(text), re.IGNORECASE)
    if not found or not found[1].replace(".", "", 1).isdigit():
        raise InvalidInput(f"{text!r} is not a number of bytes; expected for example 500M or 2GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def check_address(field: str, text: str) -> str:
    """Returns the address of a process: HOST:PORT, or unix:PATH. Raises InvalidInput for other text."""
    if not re.fullmatch(r"unix:.+|[^\s/:]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", text):
        raise InvalidInput(f"{field} is {text!r}; expected HOST:PORT, or unix:PATH on one machine", field=field)
    return text


def check_shard(text: str) -> str:
    """Returns where shards are: the address of one, or ray://NAME. Raises InvalidInput for other text."""
    if text.startswith(RAY):
        if not re.fullmatch(r"[\w.-]+", text.removeprefix(RAY)):
            raise InvalidInput(
                f"shards is {text!r}; expected ray://NAME, of letters, digits, dots and dashes", field="shards"
            )
        return text
    return check_address("shards", text)


def format_bytes(number: int) -> str:
    """Formats a number of bytes in the largest binary unit that divides it: 4194304 is 4MiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number and number % (1 << power) == 0:
            return f"{number >> power}{unit}"
    return str(number)
