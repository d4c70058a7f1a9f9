"""Prompts -> the states behind them: read in pieces, and several at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from memlm.generation.step_search import Decoded, RunningSequence, remember
from memlm.model import Decoder, DecoderState, decoding_threads

SCORED_ROWS = 128  # positions with their log-probabilities over the vocabulary in RAM at once
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

    @property
    def num_pending(self) -> int:
        """Tokens left to read."""
        return len(self.sequence.generation.pending_ids) - self.done


class Through(NamedTuple):
    """A prompt that was read, the row of the state that read it, and the states behind its last token."""

    prompt: Prompt
    state: DecoderState
    row: int
    after: Decoded


class Prompts:
    """The prompts of a batch, the oldest first. Those of mixtures have a queue of their own, and half of each step
    where others wait. `places_for` is the number of places that a state of so many tokens needs.
    """

    def __init__(self, decoder: Decoder, places_for: Callable[[int], int]) -> None:
        self._decoder, self._places_for = decoder, places_for
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
        pieces = [prompt.sequence.generation.pending_ids[prompt.done : prompt.done + size] for prompt in group]
        if (state := group[0].state) is None:
            capacity = self._places_for(max(prompt.num_pending for prompt in group))
            adapters_B = [prompt.sequence.generation.adapter for prompt in group]
            state = self._decoder.new_state(batch_size=len(group), capacity=capacity, adapters_B=adapters_B)
            if len(group) == 1:
                group[0].state = state
        with decoding_threads(self._decoder, len(group) * size):
            hidden_BTD, keys_BTD = self._decoder(padded(pieces), state, new_B=[len(piece) for piece in pieces])
            for prompt, piece, hidden_TD in zip(group, pieces, hidden_BTD, strict=True):
                _score(self._decoder, prompt, hidden_TD[: len(piece)])
        through = list[Through]()
        for row, (prompt, piece) in enumerate(zip(group, pieces, strict=True)):
            prompt.done += len(piece)
            remember(prompt.sequence, piece, keys_BTD[row, : len(piece)])
            if prompt.num_pending:
                continue
            queue.popleft()
            last = slice(len(piece) - 1, len(piece))
            after = Decoded(prompt.sequence, hidden_BTD[row, last], keys_BTD[row, last])
            through.append(Through(prompt, state, row, after))
        return through

    def _next_group(self, queue: deque[Prompt], room: int) -> list[Prompt]:
        """Returns the oldest prompt, with those behind it that are cheaper to read along than by themselves.

        Each saves one reading of the weights, and costs the padding that makes all of them as long as the longest.
        """
        first, *others = queue
        group, longest, total = [first], first.num_pending, first.num_pending
        if first.state is not None or longest > room:
            return group
        for prompt in others:
            longest, total = max(longest, prompt.num_pending), total + prompt.num_pending
            cells = (len(group) + 1) * longest
            if prompt.state is not None or cells > room or cells - total > PADDING_TOKENS * len(group):
                break
            group.append(prompt)
        return group


def _score(decoder: Decoder, prompt: Prompt, hidden_TD: Float[Tensor, "T D"]) -> None:
    """Adds the log-probabilities of the tokens to be scored behind the T ones of a prompt that were read, a few rows of
    the large vocabulary at a time.
    """
    generation, done = prompt.sequence.generation, prompt.done
    if generation.scored_from is None:
        return
    ids, end = generation.pending_ids, done + len(hidden_TD)
    for begin in range(max(done, generation.scored_from), min(end, len(ids) - 1), SCORED_ROWS):
        next_N = ids[begin + 1 : min(begin + SCORED_ROWS, end) + 1]
        logprobs_NV = decoder.logprobs(hidden_TD[begin - done :][: len(next_N)])
        scored_N = logprobs_NV[torch.arange(len(next_N)), next_N]
        generation.prompt_logprob += float(scored_N.sum(dtype=torch.float64))


def padded(ids: Sequence[Sequence[int]]) -> Tensor:
    """Token ids of several rows (B, T), with zeros behind the shorter ones."""
    longest = max(map(len, ids))
    return torch.tensor([[*each, *[0] * (longest - len(each))] for each in ids])
