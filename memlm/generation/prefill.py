"""Prompts -> the states behind them: read in pieces, several at once, and what they begin with in common only once."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from memlm.generation.step_search import Decoded, RunningSequence, remember
from memlm.model import Decoder, DecoderState, decoding_threads

PADDING_TOKENS = 16  # computing so many takes as long as reading the weights (benchmarks/log, 2026-11-21)
SHARED_TOKENS = 32  # a shorter beginning is not worth a copy of its keys and values


@dataclass(eq=False, slots=True)
class Prompt:
    """A sequence before its first token: its KV cache, and how much of the prompt is in it. One that is `apart` keeps
    this cache to its end. `followers` begin with as many of its tokens as stand beside them, and wait for these.
    """

    sequence: RunningSequence
    state: DecoderState | None
    apart: bool
    done: int = 0
    followers: list[tuple[int, Prompt]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        return self.sequence.generation.pending_ids

    @property
    def num_pending(self) -> int:
        """Tokens left to read."""
        return len(self.ids) - self.done

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is read before its tokens."""
        return not self.sequence.generation.continues

    def piece(self, size: int) -> list[int]:
        """The next tokens, at most `size`, up to the place where a follower leaves."""
        stop = min([self.done + size, *(shared for shared, _ in self.followers)])
        return self.ids[self.done : stop]


class Through(NamedTuple):
    """A prompt that was read, the row of the state that read it, and what stands behind its last token."""

    prompt: Prompt
    state: DecoderState
    row: int
    after: Decoded


class Prompts:
    """The prompts of a batch, the oldest first. `places_for` says how many places a state of so many tokens needs."""

    def __init__(self, decoder: Decoder, places_for: Callable[[int], int]) -> None:
        self._decoder, self._places_for = decoder, places_for
        self._queue = deque[Prompt]()

    def __len__(self) -> int:
        return sum(1 + len(prompt.followers) for prompt in self._queue)

    def add(self, prompt: Prompt) -> None:
        """Adds a prompt. One that begins as another one does waits for it, and takes over what that has read."""
        shared, leader = max(self._beginnings(prompt), key=lambda each: each[0], default=(0, None))
        if leader is None or shared < SHARED_TOKENS:
            self._queue.append(prompt)
        else:
            leader.followers.append((shared, prompt))

    def _beginnings(self, prompt: Prompt) -> Iterator[tuple[int, Prompt]]:
        """How many tokens are those of other prompts, of which the last one and what was read before are not shared."""
        if prompt.state is not None:
            return
        for other in self._queue:
            if other.is_fresh and other.sequence.generation.adapter == prompt.sequence.generation.adapter:
                shared = min(num_common(prompt.ids, other.ids), len(prompt.ids) - 1, len(other.ids) - 1)
                if shared > other.done:
                    yield shared, other

    def remove(self, sequence: RunningSequence) -> None:
        """Removes the prompt of a sequence. Those that wait for it go on from where it is."""
        for prompt in self._queue:
            prompt.followers = [each for each in prompt.followers if each[1].sequence is not sequence]
        gone = next((prompt for prompt in self._queue if prompt.sequence is sequence), None)
        if gone is not None:
            place = self._queue.index(gone)
            del self._queue[place]
            for _, follower in reversed(gone.followers):
                self._fork(gone, follower)
                self._queue.insert(place, follower)

    def read(self, room: int) -> list[Through]:
        """Reads `room` tokens. Returns the prompts that are through."""
        through = list[Through]()
        while self._queue and room > 0:
            group = self._next_group(room)
            size = min(room, max(prompt.num_pending for prompt in group))
            pieces = [prompt.piece(size) for prompt in group]
            through += self._read(group, pieces)
            room -= len(group) * max(map(len, pieces))
        return through

    def _read(self, group: Sequence[Prompt], pieces: Sequence[Sequence[int]]) -> list[Through]:
        """Reads a piece of each of the oldest prompts. Returns those that are through."""
        if (state := group[0].state) is None:
            capacity = self._places_for(max(prompt.num_pending for prompt in group))
            adapters_B = [prompt.sequence.generation.adapter for prompt in group]
            state = self._decoder.new_state(batch_size=len(group), capacity=capacity, adapters_B=adapters_B)
            if len(group) == 1:
                group[0].state = state
        with decoding_threads(self._decoder, len(group) * max(map(len, pieces))):
            hidden_BTD, keys_BTD = self._decoder(padded(pieces), state, new_B=list(map(len, pieces)))
        through = list[Through]()
        for row, (prompt, piece) in enumerate(zip(group, pieces, strict=True)):
            prompt.done += len(piece)
            for each in (prompt, *(follower for _, follower in prompt.followers)):
                remember(each.sequence, piece, keys_BTD[row, : len(piece)])
            if not prompt.num_pending:
                self._queue.popleft()
                last = slice(len(piece) - 1, len(piece))
                through.append(
                    Through(prompt, state, row, Decoded(prompt.sequence, hidden_BTD[row, last], keys_BTD[row, last]))
                )
        self._let_go(group[0])
        return through

    def _let_go(self, prompt: Prompt) -> None:
        """Lets the followers go on by themselves that the prompt has come as far as."""
        for shared, follower in reversed(prompt.followers):
            if shared == prompt.done:
                self._fork(prompt, follower)
                self._queue.insert(1, follower)  # it has waited as long
        prompt.followers = [each for each in prompt.followers if each[0] > prompt.done]

    def _fork(self, prompt: Prompt, follower: Prompt) -> None:
        """Gives a follower what its prompt has read."""
        if prompt.done:
            assert prompt.state is not None  # one with followers is read alone
            follower.state = prompt.state.extract_row(0, capacity=self._places_for(len(follower.ids)))
            follower.done = prompt.done

    def _next_group(self, room: int) -> list[Prompt]:
        """Returns the oldest prompt, with those behind it that are cheaper to read along than by themselves.

        Each saves one reading of the weights, and costs the padding that makes all of them as long as the longest.
        """
        first, *others = self._queue
        group, longest, total = [first], first.num_pending, first.num_pending
        if first.state is not None or first.followers or longest > room:
            return group
        for prompt in others:
            longest, total = max(longest, prompt.num_pending), total + prompt.num_pending
            cells = (len(group) + 1) * longest
            is_own = prompt.state is not None or bool(prompt.followers)
            if is_own or cells > room or cells - total > PADDING_TOKENS * len(group):
                break
            group.append(prompt)
        return group


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    most = min(len(first), len(second))
    return bisect_left(range(1, most + 1), True, key=lambda size: first[:size] != second[:size])


def padded(ids: Sequence[Sequence[int]]) -> Tensor:
    """Token ids of several rows (B, T), with zeros behind the shorter ones."""
    longest = max(map(len, ids))
    return torch.tensor([[*each, *[0] * (longest - len(each))] for each in ids])
