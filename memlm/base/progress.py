"""The callback through which long work reports its progress. It has no output of its own."""

from typing import Protocol, runtime_checkable

LOADING = "load"  # the phase in which a model is loaded, before the work touches anything
COMPARING = "compare documents"  # in which a synchronization changes nothing yet
DELETING = "delete documents"


# What a phase counts. Of the others, steps.
UNITS = {
    LOADING: "models",
    "add to index": "entries",
    "ask": "answers",
    "assign to lists": "entries",
    "check files": "files",
    "check keys": "documents",
    COMPARING: "bytes",
    "copy": "entries",
    "copy files": "bytes",
    DELETING: "documents",
    "embed chunks": "chunks",
    "evaluate": "bytes",
    "evaluate index": "indexes",
    "find passages": "pieces",
    "index words": "passages",
    "learn tokens": "bytes",
    "make keys": "tokens",
    "make vectors": "passages",
    "measure quality": "windows",
    "read": "bytes",
    "read texts": "tokens",
    "retrieve": "tokens",
    "score held-out text": "tokens",
    "sort passages": "pieces",
    "tokenize": "bytes",
    "train gate": "epochs",
    "train index": "entries",
    "try indexes": "indexes",
    "try lists": "settings",
    "tune": "tokens",
}


@runtime_checkable
class Progress(Protocol):
    """Told now and then how far a phase has come.

    `total` is None where it is not known. `note` is a few words for a person, such as a loss. May raise to stop the
    work.
    """

    def __call__(self, phase: str, done: int, total: int | None, note: str = "") -> None:
        """Takes a phase's name and how much of it is done, in the unit that `UNITS` has for it."""


def silent(phase: str, done: int, total: int | None, note: str = "") -> None:
    """Ignores progress."""
