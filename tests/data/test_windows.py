import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlm.data.windows import blocks_of, windows_of
from memlm.errors import InvalidInput

SIZES = st.integers(1, 12).flatmap(lambda context: st.tuples(st.just(context), st.integers(1, context)))


@given(length=st.integers(0, 60), sizes=SIZES)
def test_every_token_is_predicted_once_with_all_the_context_a_window_gives(length, sizes):
    context, stride = sizes
    tokens, read = np.arange(1, length + 1), np.arange(length)  # read[t] is the input that predicts tokens[t]
    place = 0
    for window in windows_of(tokens, start_id=0, context=context, stride=stride):
        new = len(window.targets_N)
        assert len(window.inputs_T) <= context
        assert window.targets_N.tolist() == tokens[place : place + new].tolist()
        end = place + new
        assert window.inputs_T.tolist() == read[max(0, end - context) : end].tolist()
        assert len(window.inputs_T) - new == min(place, context - new)
        place = end
    assert place == length


def test_a_key_has_read_its_document_or_at_least_context_minus_stride():
    for window in windows_of(np.arange(100), start_id=-1, context=16, stride=4):
        left = len(window.inputs_T) - len(window.targets_N)
        assert left >= 16 - 4 or window.inputs_T[0] == -1


@pytest.mark.parametrize("stride", [0, 17])
def test_a_stride_beyond_the_context_is_refused(stride):
    with pytest.raises(InvalidInput, match="between 1 and the window of 16"):
        list(windows_of(np.arange(5), start_id=0, context=16, stride=stride))


def test_blocks_hold_everything_in_order():
    assert list(blocks_of(range(5), 2)) == [[0, 1], [2, 3], [4]]
