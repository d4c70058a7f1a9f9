"""Pages of a list, as AIP-158 has them: a token holds the place in the order behind which the next page begins.

So an item that stays in the list comes exactly once, beside additions and removals between two pages.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

from memlm.errors import InvalidInput, check_range

MAX_PAGE = 1000
MAX_PAGE_SIZE = (1 << 31) - 1  # of a request; above MAX_PAGE it means MAX_PAGE
Place: TypeAlias = tuple[float, str]  # of an item in the order of its list, which no other item has

T = TypeVar("T")


def check_page_size(page_size: int) -> None:
    """Raises InvalidInput for a size that is no number of items."""
    check_range("page_size", page_size, least=0, most=MAX_PAGE_SIZE)


def page_of(
    items: Iterable[T], place_of: Callable[[T], Place], page_size: int, page_token: str, *, default: int | None = None
) -> tuple[tuple[T, ...], str]:
    """The items behind the token's place, at most `page_size` and MAX_PAGE of them, and the token of the next page,
    which is empty on the last one. Without a size there are `default`, or all.

    Raises InvalidInput for a token that is not of this form.
    """
    ordered = sorted(items, key=place_of)
    if page_token:
        begin = _decode(page_token)
        ordered = [item for item in ordered if place_of(item) > begin]
    size = min(page_size, MAX_PAGE) if page_size else default
    page = tuple(ordered[:size])
    return page, "" if len(page) == len(ordered) else _encode(place_of(page[-1]))


def _encode(place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _decode(token: str) -> Place:
    try:
        number, name = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
        if not isinstance(number, int | float) or not math.isfinite(number) or not isinstance(name, str):
            raise TypeError
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise InvalidInput(
            "page_token is none that this server gave; take next_page_token of a page, or begin without one",
            field="page_token",
        ) from None
    return float(number), name
