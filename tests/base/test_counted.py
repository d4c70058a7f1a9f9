"""A number goes with its noun."""

import pytest

from memlm.base.figures import counted


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [(0, "document", "0 documents"), (1, "entry", "1 entry"), (2, "entry", "2 entries"), (2000, "file", "2,000 files")],
)
def test_one_thing_is_said_in_the_singular(number, noun, said):
    assert counted(number, noun) == said
