"""Pages of a list: together they are the list, also beside changes."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlm.api import paging
from memlm.api.datastores import ListDatastoresRequest
from memlm.api.operations import ListOperationsRequest
from memlm.api.paging import Place, page_of
from memlm.api.sessions import ListSessionsRequest
from memlm.errors import InvalidInput

places = st.tuples(st.sampled_from((-1.5, -0.1, 0.0, 1e9 / 3)), st.text(max_size=3))
lists = st.lists(places, unique=True, max_size=12)


def itself(place: Place) -> Place:
    return place


def pages_of(items: list[Place], page_size: int) -> list[tuple[Place, ...]]:
    pages, token = [], ""
    while not pages or token:
        page, token = page_of(items, itself, page_size, token)
        pages.append(page)
    return pages


@given(lists, st.integers(1, 14))
def test_the_pages_of_any_size_are_the_whole_list(items: list[Place], page_size: int) -> None:
    whole, token = page_of(items, itself, 0, "")
    assert (whole, token) == (tuple(sorted(items)), "")
    pages = pages_of(items, page_size)
    assert sum(pages, ()) == whole
    assert all(len(page) == page_size for page in pages[:-1])
    assert len(pages) == 1 or pages[-1]


@given(lists, lists, st.sets(st.integers(0, 11)), st.integers(1, 5), st.integers(0, 4))
def test_what_is_in_the_list_all_the_while_comes_once_beside_changes(
    items: list[Place], added: list[Place], removed: set[int], page_size: int, change_after: int
) -> None:
    kept = [item for number, item in enumerate(items) if number not in removed]
    now, found, token, number = items, list[Place](), "", 0
    while not number or token:
        page, token = page_of(now, itself, page_size, token)
        found += page
        number += 1
        if number == change_after:
            now = list({*kept, *added})
    assert set(kept) <= set(found) <= {*items, *added}
    assert found == sorted(set(found))


@given(st.text(max_size=40) | st.binary(max_size=30).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_another_token_is_refused_by_name(token: str) -> None:
    if token:
        with pytest.raises(InvalidInput, match="page_token") as raised:
            page_of([(1.0, "a")], itself, 1, token)
        assert raised.value.field == "page_token"


OTHERS = ([1], ["a", "b"], [1, 2], [None, "a"], {"a": 1}, 3, [1, "a", 2], "ab", [1e999, "a"], [True])


@pytest.mark.parametrize("place", OTHERS)
def test_a_token_of_another_place_is_refused(place: object) -> None:
    with pytest.raises(InvalidInput, match="page_token"):
        page_of([(1.0, "a")], itself, 1, base64.urlsafe_b64encode(json.dumps(place).encode()).decode())


def test_a_large_size_means_the_largest_page_and_a_negative_one_is_refused() -> None:
    items = [(0.0, f"{number:04}") for number in range(2500)]
    assert [len(page) for page in pages_of(items, 2**31 - 1)] == [1000, 1000, 500]
    assert len(page_of(items, itself, 0, "")[0]) == 2500
    assert len(page_of(items, itself, 0, "", default=paging.MAX_PAGE)[0]) == 1000
    for request in (ListDatastoresRequest, ListOperationsRequest, ListSessionsRequest):
        with pytest.raises(InvalidInput, match="page_size is -1"):
            request(-1)
