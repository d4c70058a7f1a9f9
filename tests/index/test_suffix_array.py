"""Passages are found where comparing every place with every place finds them, in the documents that are asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlm.index import suffix_array
from memlm.index.suffix_array import SuffixArray, sorted_piece

documents = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=6).filter(any)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@pytest.fixture(autouse=True, scope="module", params=[(16, 8, 3), (7, 4, 2), (1 << 22, 16, 8)])
def sizes(request: pytest.FixtureRequest):
    """Pieces that cut documents, and passages that are longer than what is sorted."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("PIECE_TOKENS", "DEPTH", "SHALLOW"), request.param, strict=True):
            patch.setattr(suffix_array, name, value)
        patch.setattr(suffix_array, "ROWS_AT_ONCE", 3)
        yield


def array_of(documents: list[list[int]]) -> SuffixArray:
    tokens_N = np.array([token for document in documents for token in document], np.int32)
    starts = np.cumsum([0, *map(len, documents)])
    pieces = -(-len(tokens_N) // suffix_array.PIECE_TOKENS)
    return SuffixArray(tokens_N, starts, [sorted_piece(tokens_N, starts, piece) for piece in range(pieces)])


def common(document: list[int], place: int, text: list[int], begin: int) -> int:
    length = 0
    while place + length < len(document) and begin + length < len(text):
        if document[place + length] != text[begin + length]:
            break
        length += 1
    return length


def longest_by_loops(documents: list[list[int]], text: list[int], begin: int) -> int:
    return max((common(each, place, text, begin) for each in documents for place in range(len(each))), default=0)


@settings(max_examples=150)
@given(documents, texts, st.data())
def test_the_longest_passages_are_those_of_a_comparison_of_all_places(documents, text, data):
    array = array_of(documents)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))))
    seen = [each for each, is_wanted in zip(documents, wanted, strict=True) if is_wanted]
    full = [longest_by_loops(seen, text, begin) for begin in range(len(text))]
    expected = [min(length, suffix_array.DEPTH) if length >= 2 else 0 for length in full]
    assert array.longest(np.array(text), wanted, 2).tolist() == expected

    for begin, length in enumerate(full):
        if length >= suffix_array.DEPTH:
            first, last = array.extended(np.array(text), begin, wanted)
            assert last == begin + length
            assert longest_by_loops(seen, text, first) >= last - first
            assert first <= begin


@settings(max_examples=150)
@given(documents, texts, st.data())
def test_the_rows_of_a_passage_are_all_where_it_stands(documents, text, data):
    array = array_of(documents)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))))
    spans = [
        (begin, length) for begin in range(0, len(text), 3) for length in (1, 4, 20) if begin + length <= len(text)
    ]
    if not spans:
        return
    begins_Q, lengths_Q = np.array(spans).T
    found = array.rows(np.array(text), begins_Q, lengths_Q, wanted)
    for (begin, length), chunks in zip(spans, found, strict=True):
        rows = np.concatenate([np.zeros(0, np.int64), *chunks])
        expected = [
            int(start) + place
            for document, start, is_wanted in zip(documents, array.starts, wanted, strict=False)
            for place in range(len(document))
            if is_wanted and common(document, place, text, begin) >= length
        ]
        assert sorted(rows.tolist()) == expected


def test_a_damaged_order_hides_passages_and_makes_none_up():
    array = array_of([[1, 2, 0, 1, 2, 1], [2, 2, 1]])
    damaged = [np.full_like(order, 2**32 - 1) for order in array.orders]
    text, wanted = np.array([1, 2, 1, 2, 2, 1]), np.array([True, True])
    whole = array.longest(text, wanted, 1)
    found = SuffixArray(array.tokens_N, array.starts, damaged).longest(text, wanted, 1)
    assert (found <= whole).all()
    assert (found < whole).any()
