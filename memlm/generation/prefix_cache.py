"""The states of texts that were read: a prompt that begins like one of them is read from where it parts.

A chat sends its history with each turn, an answer puts a passage before another question, and the choices of a request
have one prompt: only the rest is read. A text is found for its caller alone, so that no time and no count shows the
content of others' requests.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memlm.model import Decoder, DecoderState
from memlm.model.state.fields import fields_of
from memlm.model.state.size import row_bytes
from memlm.retrieval.context_cache import ContextCache

DEFAULT_MAX_BYTES = 1 << 30
MAX_TEXTS = 1024  # which a search compares one by one
LEAST_TOKENS = 32  # fewer are read in about the time that it takes to copy them


log = logging.getLogger("memlm.prefixes")


class Scope(NamedTuple):
    """Two texts share this where one may go on from the other: their caller, the `PrefixCache.epoch` when their
    requests came, the adapter that reads them, and whether their past is remembered.
    """

    caller: str
    epoch: int
    adapter: str | None = None
    has_past: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    """A text: its tokens, the state behind them in a row of its own, and their past where the model searches it."""

    scope: Scope
    ids_T: Int32[np.ndarray, " T"]
    state: DecoderState
    past: ContextCache | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first `length` tokens of a text that is kept, and the bytes of their state."""

    length: int
    num_bytes: int
    _kept: _Kept = field(repr=False)

    def copy_to(self, state: DecoderState, row: int) -> None:
        """Overwrites a row of a state."""
        copied = state.copy_start(row, self._kept.state, 0, self.length)
        assert copied  # as `find` has seen

    def past(self) -> ContextCache | None:
        """A copy of the past of these tokens."""
        return None if self._kept.past is None else self._kept.past.copy(self.length)


class PrefixCache:
    """The states of the latest texts of each caller, of at most `max_bytes` together (0: none). For one thread.

    Where they are too many, the caller with the most bytes loses the text that was used the longest ago. `epoch` counts
    how often all were dropped. A request that came before the last time leaves no text.
    """

    def __init__(self, decoder: Decoder, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        config = decoder.config
        fields = fields_of(config).values()
        is_given = config.reads_source or any(each.is_given for each in fields)
        self.max_bytes = 0 if is_given else max_bytes  # there the tokens alone do not make the state
        self._has_all_beginnings = not (
            config.is_segmented or config.is_windowed or any(each.changes for each in fields)
        )
        self.epoch, self._config, self._dtype = 0, config, decoder.dtype
        self._texts = OrderedDict[_Kept, None]()  # the least recently used first
        self._bytes_of = Counter[str]()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        """RAM of all that is kept, or memory of the model's device."""
        return self._bytes_of.total()

    def known_after(self, scope: Scope, ids_T: Int32[np.ndarray, " T"], other_U: Int32[np.ndarray, " U"]) -> int:
        """How many tokens of a text need not be read once another one of its scope is, 0 where these are too few."""
        if not self._has_all_beginnings or scope.epoch != self.epoch:
            return 0
        shared = num_shared(ids_T, other_U)
        return shared if shared >= LEAST_TOKENS and self._size_of(shared) <= self.max_bytes else 0

    def find(self, scope: Scope, ids_T: Int32[np.ndarray, " T"]) -> Beginning | None:
        """Finds the longest beginning of a text that is kept. None if it is too short to save time."""
        found, length = None, LEAST_TOKENS - 1
        for kept in self._alike(scope, ids_T):
            shared = num_shared(kept.ids_T, ids_T)
            if shared > length and kept.state.start_of(0, shared) is not None:
                found, length = kept, shared
        if found is None:
            return None
        self._texts.move_to_end(found)
        return Beginning(length, found.num_bytes * length // len(found.ids_T), found)

    def keep(
        self,
        scope: Scope,
        ids_T: Int32[np.ndarray, " T"],
        state: DecoderState,
        row: int,
        past: ContextCache | None = None,
    ) -> int:
        """Copies these tokens, the first that a row of a state has read, with their past. Texts that they begin with
        go. Returns the bytes that were copied.
        """
        if scope.epoch != self.epoch or len(ids_T) < LEAST_TOKENS or state.start_of(row, len(ids_T)) is None:
            return 0
        contained = list[_Kept]()
        for kept in self._alike(scope, ids_T):
            shared = num_shared(kept.ids_T, ids_T)
            if shared == len(ids_T) and kept.state.start_of(0, shared) is not None:
                self._texts.move_to_end(kept)
                return 0
            if shared == len(kept.ids_T):
                contained.append(kept)
        num_bytes = self._size_of(len(ids_T)) + (0 if past is None else past.num_bytes(len(ids_T)))
        if not self._make_room(scope.caller, num_bytes, contained):
            return 0
        try:
            whole = len(ids_T) == state.rows[row].length
            copy = state.extract_row(row) if whole else state.extract_start(row, len(ids_T))
            assert copy is not None  # as `start_of` has said
            past = None if past is None else past.copy(len(ids_T))
        except (MemoryError, RuntimeError):  # torch's, where the device has no room
            log.warning("no room for the state of %d tokens, which is not kept", len(ids_T), exc_info=True)
            return 0
        self._texts[_Kept(scope, ids_T, copy, past, num_bytes)] = None
        self._bytes_of[scope.caller] += num_bytes
        return num_bytes

    def clear(self) -> None:
        """Drops everything, such as texts with passages of documents that are deleted."""
        self.epoch += 1
        self._texts.clear()
        self._bytes_of.clear()

    def _alike(self, scope: Scope, ids_T: Int32[np.ndarray, " T"]) -> list[_Kept]:
        """The texts that share a beginning with another one."""
        head = ids_T[:LEAST_TOKENS].tobytes()
        return [each for each in self._texts if each.scope == scope and each.ids_T[:LEAST_TOKENS].tobytes() == head]

    def _size_of(self, num_tokens: int) -> int:
        return row_bytes(self._config, num_tokens, self._dtype) + num_tokens * np.dtype(np.int32).itemsize

    def _make_room(self, caller: str, num_bytes: int, contained: Sequence[_Kept]) -> bool:
        """Drops texts that a new one contains, and others until there is room for it. Drops none where its caller would
        have the most bytes by it alone.
        """
        sizes, of_caller, dropped = Counter(self._bytes_of), defaultdict[str, list[_Kept]](list), list(contained)
        sizes[caller] += num_bytes - sum(each.num_bytes for each in contained)
        for each in self._texts:
            if each not in contained:
                of_caller[each.scope.caller].append(each)
        while sizes.total() > self.max_bytes or len(self) - len(dropped) >= MAX_TEXTS:
            largest = max(sizes, key=sizes.__getitem__)
            if not of_caller[largest]:
                return False
            dropped.append(of_caller[largest].pop(0))
            sizes[largest] -= dropped[-1].num_bytes
        for each in dropped:
            del self._texts[each]
        sizes[caller] -= num_bytes
        self._bytes_of = +sizes  # callers of nothing leave
        return True


def num_shared(first_T: Int32[np.ndarray, " T"], second_U: Int32[np.ndarray, " U"]) -> int:
    """How many of the first tokens of two texts are equal."""
    length = min(len(first_T), len(second_U))
    differ_T = first_T[:length] != second_U[:length]
    return int(differ_T.argmax()) if differ_T.any() else length
