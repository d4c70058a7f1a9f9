"""The states of texts that were read: a prompt that begins like one of them is read from where it parts.

A chat sends its history with each turn, an answer puts a passage before another question, and the choices of a request
have one prompt: only the rest is read. A text is found for its caller alone, so that no time shows anything of the
requests of others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memlm.model import DecoderState, ModelConfig
from memlm.model.state.fields import fields_of
from memlm.model.state.size import row_bytes
from memlm.retrieval.context_cache import ContextCache

DEFAULT_MAX_BYTES = 1 << 30
MAX_TEXTS = 1024  # which a search compares one by one
LEAST_TOKENS = 32  # fewer are read in about the time that it takes to copy them
SPARE_SHARE = 4  # a text that goes on alone for less than a fourth of it is dropped for the one that it begins like


class Scope(NamedTuple):
    """Two texts share this where one may go on from the other: their caller, the adapter that reads them, whether
    their past is remembered, and the `PrefixCache.epoch` when their requests came.
    """

    caller: str
    adapter: str | None
    has_past: bool = False
    epoch: int = 0


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
    """The first `length` tokens of a text that is kept."""

    length: int
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

    def __init__(self, config: ModelConfig, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        fields = fields_of(config).values()
        is_given = config.reads_source or any(each.is_given for each in fields)
        self.max_bytes = 0 if is_given else max_bytes  # there the tokens alone do not make the state
        self._has_all_beginnings = self.max_bytes > 0 and not (
            config.is_segmented or config.is_windowed or any(each.changes for each in fields)
        )
        self.epoch, self._config = 0, config
        self._texts = OrderedDict[_Kept, None]()  # the least recently used first
        self._bytes_of = Counter[str]()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        """RAM of all that is kept."""
        return self._bytes_of.total()

    def num_shared(self, ids: Sequence[int], other_ids: Sequence[int]) -> int:
        """How many tokens of a text are known once another one is kept, 0 where these are too few."""
        if not self._has_all_beginnings or ids[:LEAST_TOKENS] != other_ids[:LEAST_TOKENS]:
            return 0
        shared = num_shared(np.array(ids, np.int32), np.array(other_ids, np.int32))
        return shared if shared >= LEAST_TOKENS else 0

    def find(self, scope: Scope, ids: Sequence[int], most: int) -> Beginning | None:
        """Finds the longest beginning of a text that is kept, of at most `most` tokens. None if it is too short to
        save time.
        """
        if not self._texts or most < LEAST_TOKENS:
            return None
        ids_T, found, length = np.array(ids[:most], np.int32), None, LEAST_TOKENS - 1
        for kept in self._alike(scope, ids_T):
            shared = num_shared(kept.ids_T, ids_T)
            if shared > length and kept.state.start_of(0, shared) is not None:
                found, length = kept, shared
        if found is None:
            return None
        self._texts.move_to_end(found)
        return Beginning(length, found)

    def keep(
        self, scope: Scope, ids: Sequence[int], state: DecoderState, row: int, past: ContextCache | None = None
    ) -> None:
        """Copies these tokens, the first that a row of a state has read, with their past. Texts that add little to them
        go.
        """
        num_bytes = row_bytes(self._config, len(ids), state.dtype)
        if scope.epoch != self.epoch or len(ids) < LEAST_TOKENS or num_bytes > self.max_bytes:
            return
        ids_T = np.array(ids, np.int32)
        for kept in self._alike(scope, ids_T):
            shared = num_shared(kept.ids_T, ids_T)
            if shared == len(ids_T) and kept.state.start_of(0, shared) is not None:
                self._texts.move_to_end(kept)
                return
            if SPARE_SHARE * (len(kept.ids_T) - shared) < len(kept.ids_T):
                self._drop(kept)
        self._make_room(num_bytes, 1)
        whole = len(ids) == state.rows[row].length
        copy = state.extract_row(row) if whole else state.extract_start(row, len(ids))
        if copy is None:
            return
        past = None if past is None else past.copy(len(ids))
        num_bytes = copy.num_bytes + ids_T.nbytes + (0 if past is None else past.num_bytes(len(ids)))
        self._texts[_Kept(scope, ids_T, copy, past, num_bytes)] = None
        self._bytes_of[scope.caller] += num_bytes
        self._make_room()

    def clear(self) -> None:
        """Drops everything, such as texts with passages of documents that are deleted."""
        self.epoch += 1
        self._texts.clear()
        self._bytes_of.clear()

    def _alike(self, scope: Scope, ids_T: Int32[np.ndarray, " T"]) -> list[_Kept]:
        """The texts that share a beginning with another one."""
        head = ids_T[:LEAST_TOKENS].tobytes()
        return [each for each in self._texts if each.scope == scope and each.ids_T[:LEAST_TOKENS].tobytes() == head]

    def _make_room(self, num_bytes: int = 0, count: int = 0) -> None:
        while self._texts and (self.num_bytes + num_bytes > self.max_bytes or len(self) + count > MAX_TEXTS):
            largest, _ = self._bytes_of.most_common(1)[0]
            self._drop(next(each for each in self._texts if each.scope.caller == largest))

    def _drop(self, kept: _Kept) -> None:
        del self._texts[kept]
        self._bytes_of[kept.scope.caller] -= kept.num_bytes
        self._bytes_of += Counter()  # callers of nothing leave


def num_shared(first_T: Int32[np.ndarray, " T"], second_U: Int32[np.ndarray, " U"]) -> int:
    """How many of the first tokens of two texts are equal."""
    length = min(len(first_T), len(second_U))
    differ_T = first_T[:length] != second_U[:length]
    return int(differ_T.argmax()) if differ_T.any() else length
