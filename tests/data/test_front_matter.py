"""The fields at the beginning of a file in Markdown: what is read of them is what YAML says."""

import json
import time

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memlm.data.corpus import Corpus
from memlm.data.extract.front_matter import fields_of_markdown
from memlm.index.store.derived.front_matter import MOST_CHARACTERS
from memlm.index.store.filters import begin_of, problems_of

BLOCK = """---
title: "Paid leave: the rules"   # of the handbook
valid_from: 2024-07-01
supersedes: [leave-2023.md, 'leave, 2022.md']
tags:
  - people
  - "time off"
aliases:
- Urlaub

draft: false
weight: 10
# a comment
menu:
  main:
    name: x
summary: >
  folded
  text
empty:
author: O'Neil #1
link: "[[Other note]]"
anchor: &a 5
format: pdf
---
# The rules
"""


def test_fields_are_texts_and_lists_of_texts_and_others_are_left_out():
    title, fields = fields_of_markdown(BLOCK)
    assert title == "Paid leave: the rules"
    assert fields == {
        "valid_from": "2024-07-01",
        "supersedes": ["leave-2023.md", "leave, 2022.md"],
        "tags": ["people", "time off"],
        "aliases": ["Urlaub"],
        "draft": "false",
        "weight": "10",
        "author": "O'Neil",
        "link": "[[Other note]]",
    }


@pytest.mark.parametrize(
    ("text", "title", "fields"),
    [
        ("# A\n---\ntitle: b\n---\n", "A", {}),
        ("---\nNote\n---\n# A\n", "A", {}),
        ("---\ntitle: b\n# A\n", "A", {}),
        ("----\ntitle: b\n----\n# A\n", "A", {}),
        ("---\n---\n# A\n", "A", {}),
        ("---\n# a comment\nx: y\n---\n# A\n", "A", {"x": "y"}),
        ("---\n  x: y\n---\n# A\n", "A", {}),
        ("\ufeff---\r\ntitle: b\r\nx: y\r\n---\r\n# A\r\n", "b", {"x": "y"}),
        ("--- \ntitle: b\n...\n# A\n", "b", {}),
        ("---\ntitle: [a, b]\n---\n# A\n", "A", {"title": ["a", "b"]}),
        ("---\nx: [\n  a,  # b\n  'c d',\n]\ny: 1\n---\n# A\n", "A", {"x": ["a", "c d"], "y": "1"}),
        ("---\n[x: y]\n---\n# A\n", "A", {}),
        ("---\ntitle: ''\n---\n# A\n", "A", {}),
        ('---\nx: "\\ud800"\ny: "\\u00e4\\n"\nz: \'it\'\'s\'\n---\n', "", {"y": "ä\n", "z": "it's"}),
        ("---\nx: *a\ny: !!python/object/apply:os.system [ls]\nog:z: 1\n---\n", "", {"og:z": "1"}),
        ("---\n" + "x: y\n" * MOST_CHARACTERS + "---\n# A\n", "", {}),
        ("---\nx: " + "y" * MOST_CHARACTERS, "", {}),
        ("---", "", {}),
        ("", "", {}),
    ],
)  # fmt: skip
def test_a_block_that_is_none_is_text(text, title, fields):
    assert fields_of_markdown(text) == (title, fields)


LINES = st.lists(
    st.one_of(
        st.text("ab:#-[]{}'\", \t\\&*|>~?!%@", max_size=12),
        st.builds("{}: {}".format, st.sampled_from("abc"), st.text("ab:#-[]'\", \\", max_size=10)),
        st.builds("  - {}".format, st.text("ab:#-[]'\", ", max_size=6)),
    ),
    max_size=6,
)


@settings(max_examples=400, deadline=None)
@given(LINES)
@example(["a: b # c", "b: [a, 'b, c', \"d\"]", "c:", "  - a", "  - b"])
@example(["a: [a, b] # c"])
@example(["a: 'b' c"])
@example(["a: [a b, , c]"])
@example(["a: - b"])
@example(["a: b", "a:"])
@example([":: [", "a: -]"])
@example(["a: [", "a: -]"])
@example(["a: 'x", "b: y'"])
@example(["a:", "- -"])
@example(["a:", " '", "a: :'"])
@example(["a:", "- 'x", "b: y'"])
@example(["b: '", "'#[", "a:"])
@example(["a: b", "", "b: c"])
def test_what_is_read_is_what_yaml_says(lines):
    title, fields = fields_of_markdown("\n".join(["---", *lines, "---", ""]))
    read = {**fields, **({"title": title} if title else {})}
    try:
        expected = yaml.load("\n".join(lines), Loader=yaml.BaseLoader)  # makes texts alone
    except yaml.YAMLError:
        return  # a part of it may be read
    assert isinstance(expected, dict) or not read
    for name, value in read.items():
        assert value == expected[name], (lines, name)


@pytest.mark.parametrize(
    "line",
    [
        "a: " + "[" * 16000, "a: " + '"\\' * 8000, "a: [" + "'" * 16000, "a" * 16000, "a: " + "# " * 8000, ":" * 16000,
        "a: [" + " ," * 8000 + "]", "a: '" + "'" * 15000 + "x", "a:" + " " * 16000 + "x", "a: \"" + " " * 16000,
    ],
)  # fmt: skip
def test_a_hostile_block_takes_a_moment(line):
    begin_s = time.process_time()
    fields_of_markdown(f"---\n{line}\n---\n")
    assert time.process_time() - begin_s < 1


def test_a_file_has_its_fields_and_the_lines_that_it_has(tmp_path):
    (tmp_path / "a.md").write_text(BLOCK)
    (tmp_path / "b.txt").write_text(BLOCK)
    (tmp_path / "c.md").write_text("---\nvalid_from: soon\n---\ntext")
    (tmp_path / "d.md").write_text("---\nsupersedes: [a.md, ]\n---\ntext")
    problems = []
    a, b, d = Corpus([tmp_path], on_problem=problems.append)
    assert (a.title, a.text, begin_of(a.metadata["valid_from"]) is not None) == ("Paid leave: the rules", BLOCK, True)
    assert (b.title, b.metadata, b.text) == ("b.txt", {}, BLOCK)
    assert (d.title, d.metadata) == ("d.md", {"supersedes": ["a.md"]})
    assert [str(problem) for problem in problems] == [
        "c.md: valid_from is 'soon'; expected a date, as 2024-05-01, or a date and a time, as 2024-05-01T09:30+02:00"
    ]
    assert problems_of(a.metadata) == {}
    assert json.loads(json.dumps(a.metadata)) == a.metadata
