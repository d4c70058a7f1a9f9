"""Prompts -> the states behind them: read in pieces, several at once, each from where an earlier text parts from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memlm.generation.prefix_cache import Beginning, PrefixCache, Scope
from memlm.generation.step_search import Decoded, RunningSequence, remember
from memlm.model import Decoder, DecoderState, decoding_threads

PADDING_TOKENS = 16  # computing so many takes as long as reading the weights (benchmarks/log, 2026-11-21)


@dataclass(eq=False, slots=True)
class Prompt:
    """A sequence before its first token: its KV cache, and how much of the prompt is in it. One that is `apart` keeps
    this cache to its end.
    """

    sequence: RunningSequence
    state: DecoderState | None
    apart: bool
    done: int = 0
    beginning: Beginning | None = None  # that is copied into its state before the first piece

    @property
    def ids(self) -> list[int]:
        """All of its tokens."""
        return self.sequence.generation.pending_ids

    @property
    def scope(self) -> Scope | None:
        """As `Generation.scope`."""
        return self.sequence.generation.scope

    @property
    def num_pending(self) -> int:
        """Tokens left to read."""
        return len(self.ids) - self.done


class Through(NamedTuple):
    """A prompt that was read, the row of the state that read it, and the states behind its last token."""

    prompt: Prompt
    state: DecoderState
    row: int
    after: Decoded


class Prompts:
    """The prompts of a batch, the oldest first. Those of mixtures have a queue of their own, and half of each step
    where others wait. `places_for` is the number of places that a state of so many tokens needs. A prompt is read from
    where it parts from a text in `prefixes`.
    """

    def __init__(self, decoder: Decoder, places_for: Callable[[int], int], prefixes: PrefixCache) -> None:
        self._decoder, self._places_for, self._prefixes = decoder, places_for, prefixes
        self._alone, self._mixed = deque[Prompt](), deque[Prompt]()

    def __len__(self) -> int:
        return len(self._alone) + len(self._mixed)

    def add(self, prompt: Prompt) -> None:
        """Adds a prompt."""
        (self._alone if prompt.sequence.mixture is None else self._mixed).append(prompt)

    def remove(self, sequences: Sequence[RunningSequence]) -> None:
        """Removes the prompts of some sequences."""
        gone = set(sequences)
        for queue in (self._alone, self._mixed):
            left = [prompt for prompt in queue if prompt.sequence not in gone]
            queue.clear()
            queue.extend(left)

    def read(self, room: int) -> list[Through]:
        """Reads `room` tokens. Returns the prompts that are through."""
        through = list[Through]()
        shares = [(self._alone, room)] if not self._mixed else [(self._alone, room // 2), (self._mixed, room)]
        for queue, share in shares:
            left = min(share, room)
            while queue and left > 0:
                group = self._next_group(queue, left)
                size = min(left, max(prompt.num_pending for prompt in group))
                through += self._read(queue, group, size)
                left -= len(group) * size
                room -= len(group) * size
        return through

    def _read(self, queue: deque[Prompt], group: Sequence[Prompt], size: int) -> list[Through]:
        """Reads up to `size` tokens of each of the oldest prompts. Returns those that are through."""
        pieces = [prompt.ids[prompt.done : prompt.done + size] for prompt in group]
        if (state := group[0].state) is None:
            capacity = self._places_for(max(len(prompt.ids) for prompt in group))
            adapters_B = [prompt.sequence.generation.adapter for prompt in group]
            state = self._decoder.new_state(batch_size=len(group), capacity=capacity, adapters_B=adapters_B)
            if len(group) == 1:
                group[0].state = state
        for row, prompt in enumerate(group):
            if prompt.beginning is not None:
                prompt.beginning.copy_to(state, row)
                prompt.beginning = None
        with decoding_threads(self._decoder, len(group) * size):
            hidden_BTD, keys_BTD = self._decoder(padded(pieces), state, new_B=[len(piece) for piece in pieces])
        through = list[Through]()
        for row, (prompt, piece) in enumerate(zip(group, pieces, strict=True)):
            prompt.done += len(piece)
            remember(prompt.sequence, piece, keys_BTD[row, : len(piece)])
            if prompt.num_pending:
                continue
            queue.popleft()
            self._keep_for_others(prompt, state, row)
            last = slice(len(piece) - 1, len(piece))
            after = Decoded(prompt.sequence, hidden_BTD[row, last], keys_BTD[row, last])
            through.append(Through(prompt, state, row, after))
        return through

    def _next_group(self, queue: deque[Prompt], room: int) -> list[Prompt]:
        """Returns the oldest prompt, with those behind it that are cheaper to read along than by themselves.

        Each saves one reading of the weights, and costs the padding that makes all of them as long as the longest.
        """
        first, *others = queue
        self._find_beginning(first)
        group, longest, total = [first], first.num_pending, first.num_pending
        if first.state is not None or longest > room:
            return group
        for prompt in others:
            self._find_beginning(prompt)
            longest, total = max(longest, prompt.num_pending), total + prompt.num_pending
            cells, is_alike = (len(group) + 1) * longest, prompt.state is None and prompt.done == first.done
            if not is_alike or cells > room or cells - total > PADDING_TOKENS * len(group):
                break
            if any(self._num_shared(prompt, each) for each in group):
                break  # it is read once the state of what they share is there
            group.append(prompt)
        return group

    def _find_beginning(self, prompt: Prompt) -> None:
        """Looks for an earlier text that an unread prompt goes on from. Its last token is read in any case."""
        if (scope := prompt.scope) is None or prompt.done:
            return
        if found := self._prefixes.find(scope, prompt.ids, len(prompt.ids) - 1):
            prompt.beginning, prompt.done = found, found.length
            prompt.sequence.generation.begin_behind(found)

    def _num_shared(self, prompt: Prompt, other: Prompt) -> int:
        """How many tokens a prompt, of which nothing is known, need not read once another one is read."""
        if prompt.done or prompt.scope is None or prompt.scope != other.scope:
            return 0
        return self._prefixes.num_shared(prompt.ids[:-1], other.ids)

    def _keep_for_others(self, prompt: Prompt, state: DecoderState, row: int) -> None:
        """Keeps the beginning of a prompt that was read, as far as one that waits shares it."""
        shared = max((self._num_shared(other, prompt) for other in (*self._alone, *self._mixed)), default=0)
        if shared and prompt.scope is not None:
            past = prompt.sequence.generation.past
            self._prefixes.keep(prompt.scope, prompt.ids[:shared], state, row, None if past is None else past.cache)


def padded(ids: Sequence[Sequence[int]]) -> Tensor:
    """Token ids of several rows (B, T), with zeros behind the shorter ones."""
    longest = max(map(len, ids))
    return torch.tensor([[*each, *[0] * (longest - len(each))] for each in ids])
