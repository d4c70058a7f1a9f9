"""Lists as callers give them. A text is a sequence of its characters, and passes for a list unless that is checked."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from pathlib import PurePath
from types import UnionType
from typing import Any, cast

from memlm.errors import InvalidInput


def items_of(
    name: str, given: object, kinds: type | UnionType = str, *, expected: str = "texts", one: bool = False
) -> tuple[Any, ...]:
    """The items of a list, a tuple or another iterable, each of one of the kinds. With `one`, an item alone stands for
    a list of it.

    Raises InvalidInput, naming the argument and the kind that is `expected`, for anything else.
    """
    if one and isinstance(given, kinds):
        return (given,)
    check_list(name, given, kinds, expected=expected)
    items = tuple(cast("Iterable[Any]", given))
    for each in items:
        if not isinstance(each, kinds):
            raise InvalidInput(f"{name} holds {reprlib.repr(each)}; expected {expected}", field=name)
    return items


def check_list(name: str, given: object, kinds: type | UnionType = str, *, expected: str = "texts") -> None:
    """Raises InvalidInput, naming the argument, for one item, a text or a path in place of a list."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | PurePath):
        return
    shown = reprlib.repr(str(given) if isinstance(given, PurePath) else given)
    example = f", as [{shown}]" if isinstance(given, kinds) else ""
    raise InvalidInput(f"{name} is {shown}; expected {expected} in a list{example}", field=name)
