"""How long work tells what it has done."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Told now and then how far a phase has come; may raise to stop the work."""

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Takes a phase's name, and how much of it is done."""


def silent(phase: str, done: int, total: int) -> None:
    """Tells nobody."""
