"""What stands in a signature is checked while tests run: types, shapes, and that one letter is one length."""

from dataclasses import FrozenInstanceError
from importlib import import_module

import numpy as np
import pytest
from signatures import PACKAGES, checked

from memlm.index.neighbours import Neighbours
from memlm.interpolation import neighbor_logweights, target_logprobs
from memlm.windows import check_stride, windows_of

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
    made = Neighbours(DISTANCES_QK, ids_QK, VALUES_QK)
    with pytest.raises(TypeError):
        Neighbours(DISTANCES_QK, ids_QK, VALUES_QK[:, :2])
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
