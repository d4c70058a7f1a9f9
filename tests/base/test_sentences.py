"""Sentences of a text, and the items that stand for them in text without sentences."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlm.base.sentences import LONGEST, sentences_of


def cut(text: str) -> list[str]:
    return [span.of(text) for span in sentences_of(text)]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("Dr. Smith met J. R. Tolkien. They left.", ["Dr. Smith met J. R. Tolkien.", "They left."]),
        ("It has 3.5 parts, e.g. Wheels. It rolls.", ["It has 3.5 parts, e.g. Wheels.", "It rolls."]),
        ("The default is 25. Others are possible.", ["The default is 25.", "Others are possible."]),
        ("A line\nthat goes on. And\nanother.", ["A line\nthat goes on.", "And\nanother."]),
        ("A paragraph\n\nanother one", ["A paragraph", "another one"]),
        ("A page\fthe next one", ["A page", "the next one"]),
        ("# Title v. 2\ntext. more", ["# Title v. 2", "text. more"]),
        ("- one item\n- another\n1. a third", ["- one item", "- another", "1. a third"]),
        ("| a. b | c |\n| d | e |", ["| a. b | c |", "| d | e |"]),
        ("```\n# the port. of it\nserve --port 80\n```", ["# the port. of it\nserve --port 80"]),
        ("Run:\n```\nmake a.\nmake b\n```\nDone.", ["Run:", "make a.\nmake b", "Done."]),
        ("-p PORT\nThe port. The default is 80.", ["-p PORT\nThe port.", "The default is 80."]),
        ("日本語です。次の文。", ["日本語です。", "次の文。"]),
        ("पहला वाक्य। दूसरा।", ["पहला वाक्य।", "दूसरा।"]),
        ("  \n\t\n", []),
        ("", []),
    ],
)
def test_a_text_is_cut_where_a_reader_would(text: str, sentences: list[str]) -> None:
    assert cut(text) == sentences


def test_a_sentence_that_is_too_long_is_cut_at_its_lines() -> None:
    lines = ["word " * 20 + str(number) for number in range(8)]
    assert cut("\n".join(lines)) == lines
    assert cut("x" * (2 * LONGEST)) == ["x" * (2 * LONGEST)]


@given(st.text(st.sampled_from("ab .!?\n\f-#|`\t 。\"')")))
def test_sentences_are_in_order_and_lose_nothing_but_space_and_fences(text: str) -> None:
    spans = sentences_of(text)
    assert all(span.begin < span.end and span.of(text) == span.of(text).strip() for span in spans)
    assert all(one.end <= other.begin for one, other in pairwise(spans))
    between = [0, *(place for span in spans for place in span[:2]), len(text)]
    lost = [text[begin:end] for begin, end in zip(between[::2], between[1::2], strict=True)]
    for piece in lost:
        lines = [line.strip() for line in piece.replace("\f", "\n").split("\n")]
        assert all(not line or line.startswith("```") for line in lines)
