r"""Makes untrusted text (document ids, titles, metadata, file names, generated text) safe for a terminal or a log.

A control character can retitle a terminal's window, move its cursor or forge a line. A bidirectional override can
reorder the text on the screen. Both are shown as Python escapes, like `\x1b`.
"""

from __future__ import annotations

import re

# C0 but for tab and newline, delete and C1, half surrogate pairs, and the marks that reorder text (UAX #9).
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Also each character at which a line may end.
_CONTROLS_AND_LINE_ENDS = re.compile(f"{_CONTROLS.pattern[:-1]}\n\u2028\u2029]")


def printable(text: str) -> str:
    """Escapes control characters, and keeps tabs and newlines: for text that may have several lines."""
    return _CONTROLS.sub(_escaped, text)


def one_line(text: str) -> str:
    """Escapes control characters and line ends: for text that is part of a line."""
    return _CONTROLS_AND_LINE_ENDS.sub(_escaped, text)


def printable_json(text: str) -> str:
    """Escapes in JSON the characters that JSON itself allows unescaped, so that it stays JSON for the same value."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
