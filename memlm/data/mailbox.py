"""A mailbox (mbox, RFC 4155) -> its messages, one at a time."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import IO

SEPARATOR = b"From "
ESCAPED = re.compile(rb">+From ")  # how a message's own such lines are written (mboxrd)
MAX_LINE_BYTES = 1 << 20  # read at a time: a message may be one line


def messages_in(stream: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """The messages, without the lines that separate them. One of more than `most_bytes` is cut to one byte more.

    Takes the memory of one message, however short its lines are.
    """
    message, size, is_begun, is_after_blank, is_line = io.BytesIO(), 0, False, True, True
    while line := stream.readline(MAX_LINE_BYTES):
        if is_after_blank and line.startswith(SEPARATOR):
            if is_begun:
                yield message.getvalue()
            message, size, is_begun, is_after_blank = io.BytesIO(), 0, True, False
            continue
        is_after_blank = not line.strip()
        if is_begun and size <= most_bytes:
            size += message.write(line[is_line and ESCAPED.match(line) is not None :][: most_bytes + 1 - size])
        is_line = line.endswith(b"\n")
    if is_begun:
        yield message.getvalue()
