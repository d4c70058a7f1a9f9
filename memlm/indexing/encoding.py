"""Blocks of windows -> keys: the interface of a build, and its implementation by a model of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from memlm.data.windows import Window
from memlm.indexing.pruning import EncodedWindow, encode_and_prune
from memlm.model import Decoder
from memlm.retrieval.encoder import Encoder


class BlockEncoder(Protocol):
    """Encodes blocks of windows of documents in their order, in this process or in others."""

    @property
    def note(self) -> str:
        """Where it works, in a few words for a person. Empty: in this process."""

    def skip(self, windows: Sequence[Window]) -> None:
        """Skips windows with known keys."""

    def encode(
        self, blocks: Iterable[Sequence[Window]], prune: float | None, on_window: Callable[[int], None]
    ) -> Iterator[list[EncodedWindow]]:
        """Encodes block by block, and goes on while the caller uses one. With `prune`, marks entries that the model
        gives that probability or more. `on_window` is told the place in its block of each window that is done.
        """


class LocalEncoder:
    """Encodes with a model of this process, on all of its threads."""

    note = ""

    def __init__(self, decoder: Decoder) -> None:
        self._encoder = Encoder(decoder)

    def skip(self, windows: Sequence[Window]) -> None:
        """Skips windows with known keys. A later window of their document encodes them, if it needs them."""
        self._encoder.skip(windows)

    def encode(
        self, blocks: Iterable[Sequence[Window]], prune: float | None, on_window: Callable[[int], None]
    ) -> Iterator[list[EncodedWindow]]:
        """Encodes as `BlockEncoder`."""
        if prune is not None:
            yield from encode_and_prune(self._encoder, blocks, prune, on_window)
            return
        for keys in self._encoder.keys_of_blocks(blocks, on_window):
            yield [EncodedWindow(keys_ND) for keys_ND in keys]
