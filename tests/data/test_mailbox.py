"""A mailbox becomes messages in the memory of one of them, whatever its lines are."""

import io
import tracemalloc

import pytest

from memlm.data.mailbox import MAX_LINE_BYTES, messages_in

LONG = b"x" * (MAX_LINE_BYTES - 1)


def test_a_message_of_short_lines_takes_a_few_times_its_bytes():
    num_bytes = 1 << 20
    box = io.BytesIO(b"From a\n" + b"ab\n" * (num_bytes // 3))
    tracemalloc.start()
    try:
        (message,) = messages_in(box, 2 * num_bytes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(message) == num_bytes // 3 * 3
    assert peak < 4 * num_bytes


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b">From a\n>>From b\n> From c\n>Fromage\n", b"From a\n>From b\n> From c\n>Fromage\n"),
        (b"a >From b\nFrom c\n", b"a >From b\nFrom c\n"),
        (LONG + b"x>From within a line\n", LONG + b"x>From within a line\n"),
        (LONG + b"\n>From a line\n", LONG + b"\nFrom a line\n"),
    ],
    ids=["escaped", "within", "long", "after"],
)
def test_only_lines_that_were_escaped_are_changed(body, read):
    assert [*messages_in(io.BytesIO(b"From a\n" + body + b"\nFrom b\nlast"), 1 << 24)] == [read + b"\n", b"last"]


def test_a_message_is_cut_after_one_byte_too_many():
    box = b"From a\n" + b"abcd\n" * 10 + b"\nFrom b\nabcd\n"
    assert [*messages_in(io.BytesIO(box), 7)] == [b"abcd\nabc", b"abcd\n"]
