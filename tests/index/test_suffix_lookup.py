"""The end of a text is found where a comparison with every place of every document finds it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlm.index import suffix_array, suffix_lookup
from memlm.index.suffix_array import SuffixArray, sorted_piece
from memlm.index.suffix_lookup import LONGEST, SuffixLookup

LEAST = 2
documents = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=6).filter(any)
texts = st.lists(st.integers(0, 3), max_size=20)


@pytest.fixture(autouse=True, scope="module", params=[(1 << 22, 64, 16), (1 << 22, 64, 3), (16, 8, 3), (7, 64, 1)])
def sizes(request: pytest.FixtureRequest):
    """Pieces that cut documents, ends that are longer than what is sorted, and more places than are compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_array, "PIECE_TOKENS", request.param[0])
        patch.setattr(suffix_array, "DEPTH", request.param[1])
        patch.setattr(suffix_lookup, "MOST_ROWS", request.param[2])
        yield


def array_of(documents: list[list[int]]) -> SuffixArray:
    tokens_N = np.array([token for document in documents for token in document], np.uint32)
    starts = np.cumsum([0, *map(len, documents)])
    pieces = -(-len(tokens_N) // suffix_array.PIECE_TOKENS)
    return SuffixArray(tokens_N, starts, [sorted_piece(tokens_N, starts, piece) for piece in range(pieces)])


def by_loops(
    documents: list[list[int]], text: list[int], deleted: list[bool], *, in_a_piece: bool = False
) -> tuple[int, dict[int, list[int]]]:
    """The length of the longest end, and what follows each row behind it. Ends may lie `in_a_piece` each."""
    piece_of = lambda row: row // suffix_array.PIECE_TOKENS if in_a_piece else 0  # noqa: E731
    for length in range(min(len(text), LONGEST, suffix_array.DEPTH - 1), LEAST - 1, -1):
        rows, start = dict[int, list[int]](), 0
        for document, is_deleted in zip(documents, deleted, strict=True):
            for place in range(len(document) - length):
                is_there = document[place : place + length] == text[-length:] and not is_deleted
                if is_there and piece_of(start + place) == piece_of(start + place + length - 1):
                    rows[start + place + length] = document[place + length :]
            start += len(document)
        if rows:
            return length, rows
    return 0, {}


def is_agreed(chosen: list[int], others: list[list[int]]) -> bool:
    """Whether each token of a continuation is what most continuations go on with that are equal so far."""
    for ahead in range(min(len(chosen), suffix_lookup.AGREED)):
        nexts = [other[ahead] for other in others if len(other) > ahead and other[:ahead] == chosen[:ahead]]
        if nexts.count(chosen[ahead]) < max(map(nexts.count, nexts)):
            return False
    return True


@settings(max_examples=300)
@given(documents, texts, st.data())
def test_the_longest_end_is_that_of_a_comparison_of_all_places(documents, text, data):
    if data.draw(st.booleans()):  # an end that stands in a document
        document = data.draw(st.sampled_from(documents))
        text = text + document[: data.draw(st.integers(0, len(document)))]
    deleted = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    found = SuffixLookup(array_of(documents)).longest(text, LEAST, np.array(deleted) if any(deleted) else None)
    most, rows = by_loops(documents, text, deleted)
    least, _ = by_loops(documents, text, deleted, in_a_piece=True)
    assert least <= (found.length if found else 0) <= most
    if found and found.length == most:
        assert found.row in rows
    if found and suffix_array.PIECE_TOKENS > 1000 and len(rows) <= suffix_lookup.MOST_ROWS:
        assert is_agreed(rows[found.row], list(rows.values()))
    if found:
        tokens = [token for document in documents for token in document]
        number = int(np.searchsorted(np.cumsum([0, *map(len, documents)]), found.row, side="right")) - 1
        start = sum(map(len, documents[:number]))
        assert tokens[max(start, found.row - found.length) : found.row] == text[-found.length :]
        assert not deleted[number]


@pytest.mark.parametrize(
    ("document", "text", "expected"),
    [
        ([5, 6, 7, 8], [6, 7, 8], None),  # at the end of the document
        ([5, 6, 7, 8], [5, 6, 7], (3, 3)),
        ([5, 6, 7, 8], [7], None),  # shorter than the least
        ([5, 6, 7, 8], [], None),
        ([9] * 6, [9] * 20, (5, 5)),
        ([9] * 6 + [4], [9] * 20, (6, 6)),
    ],
)
def test_ends_of_one_document(document, text, expected):
    found = SuffixLookup(array_of([document])).longest(text, LEAST)
    assert (found and (found.row, found.length)) == expected


def test_a_passage_does_not_cross_into_the_next_document():
    array = array_of([[1, 2, 3], [4, 5, 6]])
    assert SuffixLookup(array).longest([2, 3, 4], LEAST) is None
    assert SuffixLookup(array).longest([1, 2, 3], LEAST) is None
    found = SuffixLookup(array).longest([3, 4, 5], LEAST)
    assert found is not None
    assert (found.row, found.length) == (5, 2)


def test_the_continuation_of_most_places_counts():
    array = array_of([[1, 2, 3, 4], [1, 2, 9, 6], [1, 2, 9, 5], [1, 2, 9, 6]])
    found = SuffixLookup(array).longest([1, 2], LEAST)
    assert found is not None
    if suffix_array.PIECE_TOKENS > 1000 and suffix_lookup.MOST_ROWS > 4:
        assert found.row == 6


@settings(max_examples=50)
@given(st.data())
def test_a_damaged_order_hides_passages_and_makes_none_up(data):
    documents = [[1, 2, 0, 1, 2, 1, 2, 2], [2, 2, 1, 2]]
    array, text = array_of(documents), [1, 2, 1, 2]
    damaged = [
        np.array(
            data.draw(
                st.lists(
                    st.sampled_from([0, 1, 5, 6, len(order) - 1, 2**32 - 1]), min_size=len(order), max_size=len(order)
                )
            ),
            np.uint32,
        )
        for order in array.orders
    ]
    for deleted in (None, np.array([False, True])):
        found = SuffixLookup(SuffixArray(array.tokens_N, array.starts, damaged)).longest(text, LEAST, deleted)
        if found is not None:
            document, place = (0, found.row) if found.row < 8 else (1, found.row - 8)
            assert found.length >= LEAST
            assert place < len(documents[document])
            assert documents[document][place - found.length : place] == text[-found.length :]
            assert deleted is None or not deleted[document]
