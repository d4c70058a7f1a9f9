"""The two checks of arguments that every room shares: which values pass, and how the refusal reads."""

import pytest

from memlm.errors import InvalidInput, check_choice, check_range

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (0, {"least": 1}, "at least 1"),
        (0.0, {"above": 0}, "above 0"),
        (2, {"above": 0, "most": 1}, "above 0 and at most 1"),
        (-1, {"least": 0, "most": 1}, "between 0 and 1"),
        (9, {"most": 8}, "at most 8"),
        (NAN, {"least": 0}, "at least 0"),
        (INF, {"above": 0}, "above 0"),
        (2**63, {"least": 0, "most": 2**63 - 1}, f"between 0 and {2**63 - 1}"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(value, bounds, expected):
    with pytest.raises(InvalidInput) as caught:
        check_range("steps", value, **bounds)
    assert str(caught.value) == f"steps is {value!r}; expected {expected}"
    assert caught.value.field == "steps"


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(None, {"least": 1}), (1, {"least": 1}), (1, {"most": 1}), (1e-9, {"above": 0}), (True, {"least": 0, "most": 1}),
     (10**400, {"least": 0})],
)  # fmt: skip
def test_bounds_that_belong_to_the_range_pass_and_so_does_none(value, bounds):
    check_range("steps", value, **bounds)


def test_a_choice_is_one_of_those_that_are_named():
    check_choice("norm", "rms", ("rms", "layer"))
    with pytest.raises(InvalidInput, match=r"^norm is 'batch'; expected one of rms, layer$") as caught:
        check_choice("norm", "batch", ("rms", "layer"))
    assert caught.value.field == "norm"
