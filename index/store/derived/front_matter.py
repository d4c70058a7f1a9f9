"""The fields at the beginning of a text in Markdown, as lines: what front matter is, and where it ends.

It stands between two lines `---`. A field is a line `name: value` at the very left, with the lines that go on with its
value. Another line at the left says that this is no such block but text between two rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

MOST_CHARACTERS = 1 << 14  # of a block
RULE, ENDS = "---", ("---", "...")

_NAME = re.compile(r"(\w(?:[^:#\[\]{}\"']|:(?=\S)){0,99}):(?:[ \t]+(.*))?")


class _Left(NamedTuple):
    """The brackets and the quote that a line leaves open."""

    depth: int
    quote: str


_CLOSED = _Left(0, "")


def front_matter_of(text: str) -> tuple[list[tuple[str, list[str]]], int]:
    """The fields at the beginning of a text, each with the lines of its value, and the characters up to the end of the
    block: none where there is no block, and no fields where other lines are between the rules.
    """
    lines, end = _block(text)
    return _fields(lines), end


def may_begin_front_matter(content: bytes) -> bool:
    """Whether the first eight bytes of a text may be of front matter."""
    return content.lstrip(b" ").removeprefix(b"\xef\xbb\xbf").startswith(RULE.encode())


def size_of_front_matter(content: bytes, known: Collection[str]) -> int:
    """The bytes at the beginning of a text that hold its fields and the empty lines behind them. 0 where a field with
    a value is not `known`, which would be found nowhere, or no text follows. A tokenizer may begin the text with a
    space.
    """
    begin = content.startswith(b" ")
    text = content[begin:].decode(errors="surrogateescape")
    found, end = front_matter_of(text)
    rest = text[end:]
    unknown = [name for name, lines in found if name not in known and any(lines)]
    if not rest.strip() or not found or unknown:
        return 0
    empty = rest[: len(rest) - len(rest.lstrip(" \t\r\n\f"))]
    end += max(empty.rfind("\n"), empty.rfind("\f")) + 1  # spaces before the text are of it
    return begin + len(text[:end].encode(errors="surrogateescape"))


def _block(text: str) -> tuple[list[str], int]:
    """The lines of the block, without the rules around it, and the characters up to its end: none where there is
    no block.
    """
    head = text[:MOST_CHARACTERS]
    lines = head.split("\n")
    if len(head) < len(text):
        lines.pop()  # may be half a line
    if lines and lines[0].lstrip("\ufeff").rstrip() == RULE:
        for number, line in enumerate(lines[1:], start=1):
            if line.rstrip() in ENDS:
                return lines[1:number], sum(len(each) + 1 for each in lines[: number + 1])
    return [], 0


def _fields(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The fields with their lines. None at all for lines that are no fields."""
    found, left = list[tuple[str, list[str]]](), _CLOSED
    for line in map(str.rstrip, lines):
        if left == _CLOSED and (not line or line.startswith("#")):
            continue
        if left != _CLOSED or line.startswith((" ", "\t", "- ")):
            if not found:
                return []
            found[-1][1].append(line.strip())
        elif match := _NAME.fullmatch(line):
            found.append((match[1].strip(), [(match[2] or "").strip()]))
        else:
            return []
        content = found[-1][1][-1].removeprefix("- ").lstrip()
        if left != _CLOSED or content.startswith(("[", "{", '"', "'")):
            left = _left_open(content, left)
    return found


def _left_open(line: str, left: _Left) -> _Left:
    """The brackets or quotes that are open behind a line of a value, given those that were open before."""
    depth, quote = left
    before, is_escaped = ",", False
    for sign in line:
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = quote == '"' and sign == "\\"
            quote = "" if sign == quote else quote
        elif sign in "\"'" and (before in ",[{:" or before == sign == "'"):
            quote = sign
        elif sign == "#" and before in " \t\"'":
            break
        else:
            depth += (sign in "[{") - (sign in "]}")
        before = sign if sign.strip() or before not in ",[{:" else before
    return _Left(depth, quote)
