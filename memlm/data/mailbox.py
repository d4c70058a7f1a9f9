"""A mailbox (mbox, RFC 4155) -> its messages, one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

SEPARATOR = b"From "
ESCAPED = re.compile(rb"^>(>*From )", re.MULTILINE)  # how a message's own such lines are written (mboxrd)
MAX_LINE_BYTES = 1 << 20  # read at a time: a message may be one line


def messages_in(stream: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """The messages, without the lines that separate them. One of more than `most_bytes` is cut to one byte more."""
    message, size, is_begun, is_after_blank = list[bytes](), 0, False, True
    while line := stream.readline(MAX_LINE_BYTES):
        if is_after_blank and line.startswith(SEPARATOR):
            if is_begun:
                yield _whole(message)
            message, size, is_begun, is_after_blank = [], 0, True, False
            continue
        is_after_blank = not line.strip()
        if is_begun and size <= most_bytes:
            message.append(line[: most_bytes + 1 - size])
            size += len(line)
    if is_begun:
        yield _whole(message)


def _whole(lines: list[bytes]) -> bytes:
    return ESCAPED.sub(rb"\1", b"".join(lines))
