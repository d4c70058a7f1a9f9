"""What stands in a signature is checked while tests run: types, shapes, and that one letter is one length."""

import itertools
from dataclasses import FrozenInstanceError
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, Float32, Int64, jaxtyped
from jaxtyping._storage import get_shape_memo
from signatures import JUDGED, PACKAGES, checked

from memlm.data.windows import check_stride, windows_of
from memlm.index.neighbors import Neighbors
from memlm.retrieval.interpolation import neighbor_logweights, target_logprobs

DISTANCES_QK, VALUES_QK = np.ones((2, 3), np.float32), np.ones((2, 3), np.int64)


def test_arguments_of_the_wrong_type_are_refused() -> None:
    check_stride(8, 4)
    with pytest.raises(TypeError):
        check_stride(8, "4")  # type: ignore[arg-type]


def test_arrays_of_the_wrong_type_or_shape_are_refused() -> None:
    neighbor_logweights(DISTANCES_QK, 1.0)
    for wrong in (DISTANCES_QK.astype(np.float64), DISTANCES_QK[0]):
        with pytest.raises(TypeError):
            neighbor_logweights(wrong, 1.0)


def test_one_letter_is_one_length() -> None:
    logweights_QK = neighbor_logweights(DISTANCES_QK, 1.0)
    target_logprobs(logweights_QK, VALUES_QK, VALUES_QK[:, 0])
    with pytest.raises(TypeError):
        target_logprobs(logweights_QK, VALUES_QK[:, :2], VALUES_QK[:, 0])


def test_fields_are_checked_as_a_dataclass_is_made() -> None:
    ids_QK = VALUES_QK
    made = Neighbors(DISTANCES_QK, ids_QK, VALUES_QK)
    with pytest.raises(TypeError):
        Neighbors(DISTANCES_QK, ids_QK, VALUES_QK[:, :2])
    with pytest.raises(FrozenInstanceError):
        made.ids_QK = ids_QK  # type: ignore[misc]


def test_results_are_checked_too() -> None:
    @checked
    def half(number: int) -> int:
        return number / 2  # type: ignore[return-value]

    with pytest.raises(TypeError):
        half(3)


def test_lengths_of_one_call_are_none_of_the_next_ones() -> None:
    for length in (2, 3):
        assert len(list(windows_of(np.arange(length), start_id=0, context=8, stride=4))) == 1


def test_all_packages_are_there() -> None:
    """A name that is none would be checked nowhere."""
    for package in PACKAGES:
        assert import_module(package).__dict__["checked_signature"] is checked


HINTS = (
    *(Float[np.ndarray, lengths] for lengths in ("Q K", "Q Q", "Q 3", "*S K", "Q *S", "Q *S 3", "... K", "Q Q+1")),
    *(Float32[torch.Tensor, lengths] for lengths in ("Q K", "*S K")),
    Int64[np.ndarray, "Q K"],
    Bool[np.ndarray, " Q"],
)
ARRAYS = (
    *(np.ones(shape, np.float32) for shape in ((2,), (2, 3), (3, 3), (3, 4), (4, 2, 3), (4, 5, 3))),
    *(np.ones((2, 3), kind) for kind in (np.float16, np.int64, bool)),
    *(torch.ones(2, 3, dtype=kind) for kind in (torch.float32, torch.bfloat16)),
    np.ones(2, bool),
    3,
    None,
)


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_a_glance_sees_what_jaxtyping_sees(hint: Any) -> None:
    """One array after another in the same call, and what is known of lengths then."""
    for pair in itertools.product(ARRAYS, ARRAYS):
        seen = []
        for allows in (lambda array: isinstance(array, hint), lambda array: JUDGED(hint, array)):
            with jaxtyped("context"):
                seen.append(([allows(array) for array in pair], [dict(each) for each in get_shape_memo()[:2]]))
        assert seen[0] == seen[1], pair
