"""Documents, and problems in place of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memlm.base.printable import one_line
from memlm.errors import InvalidInput, MemlmError

DETAILS = re.compile(r" \(|; |: ")  # where a reason goes on with what differs between files


@dataclass(frozen=True, slots=True)
class Document:
    """One text with a name. `num_bytes` is the size of the text in UTF-8."""

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the corpus that cannot be used: where (file, and line where there is one) and why."""

    where: str
    why: str

    @property
    def reason(self) -> str:
        """Why, without details and advice: equal for files that are left out for the same reason."""
        return DETAILS.split(self.why, maxsplit=1)[0]

    def __str__(self) -> str:
        """One line, place first. File names and metadata keys may hold control characters, which are shown escaped."""
        return one_line(f"{self.where}: {self.why}")


class UnusableText(MemlmError):
    """A document that cannot be read, under `--on-error fail`."""


class NoText(InvalidInput):
    """A corpus without a document."""
