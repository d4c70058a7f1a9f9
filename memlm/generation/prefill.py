"""Prompts -> the states behind them: read in pieces, several at once, each from where an earlier text parts from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from memlm.generation.prefix_cache import LEAST_TOKENS, Beginning, PrefixCache, Scope
from memlm.generation.step_search import Decoded, RunningSequence, remember
from memlm.model import Decoder, DecoderState, decoding_threads
from memlm.model.state.pool import UNBOUNDED

COPIED_BYTES = 1 << 20  # of a state are copied in about the time in which a token is read
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
    ids_T: Int32[np.ndarray, " T"] = field(init=False)

    def __post_init__(self) -> None:
        self.ids_T = np.array(self.sequence.generation.pending_ids, np.int32)

    @property
    def skippable_T(self) -> Int32[np.ndarray, " T"]:
        """The tokens that need not be read where their state is known: all but the last, and but those that score the
        next ones.
        """
        scored_from = self.sequence.generation.scored_from
        return self.ids_T[:-1] if scored_from is None else self.ids_T[:scored_from]

    @property
    def scope(self) -> Scope | None:
        """As `Generation.scope`."""
        return self.sequence.generation.scope

    @property
    def num_pending(self) -> int:
        """Tokens left to read."""
        return len(self.ids_T) - self.done


class Next(NamedTuple):
    """A prompt of which a piece is read, and the text that it goes on from, where that is copied before its first."""

    prompt: Prompt
    beginning: Beginning | None

    @property
    def start(self) -> int:
        """Its first token that is read."""
        return self.prompt.done if self.beginning is None else self.beginning.length

    @property
    def num_pending(self) -> int:
        """Tokens left to read."""
        return len(self.prompt.ids_T) - self.start

    @property
    def copy_cost(self) -> int:
        """As many tokens are read in the time that its beginning takes."""
        return 0 if self.beginning is None else self.beginning.num_bytes // COPIED_BYTES


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
                size = min(left, max(each.num_pending for each in group))
                cost = len(group) * size + sum(each.copy_cost for each in group)
                through += self._read(queue, group, size)
                left, room = left - cost, room - cost
        return through

    def _read(self, queue: deque[Prompt], group: Sequence[Next], size: int) -> list[Through]:
        """Reads up to `size` tokens of each of the oldest prompts. Returns those that are through."""
        prompts = [each.prompt for each in group]
        pieces = [each.prompt.ids_T[each.start : each.start + size].tolist() for each in group]
        if (state := prompts[0].state) is None:
            capacity = self._places_for(max(each.start for each in group) + max(each.num_pending for each in group))
            adapters_B = [prompt.sequence.generation.adapter for prompt in prompts]
            state = self._decoder.new_state(batch_size=len(group), capacity=capacity, adapters_B=adapters_B)
            if len(group) == 1:
                prompts[0].state = state
        for row, each in enumerate(group):
            self._begin(each, state, row)
        with decoding_threads(self._decoder, len(group) * size):
            hidden_BTD, keys_BTD = self._decoder(padded(pieces), state, new_B=[len(piece) for piece in pieces])
            for prompt, piece, hidden_TD in zip(prompts, pieces, hidden_BTD, strict=True):
                _score(self._decoder, prompt, hidden_TD[: len(piece)])
        through = list[Through]()
        for row, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True)):
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

    def _begin(self, each: Next, state: DecoderState, row: int) -> None:
        """Copies the beginning of a prompt. Where that fails, its sequence alone fails."""
        if each.beginning is None:
            return
        try:
            each.beginning.copy_to(state, row)
            each.prompt.sequence.generation.begin_behind(each.beginning)
        except Exception as error:
            each.prompt.sequence.failure = error
        each.prompt.done = each.beginning.length

    def _next_group(self, queue: deque[Prompt], room: int) -> list[Next]:
        """Returns the oldest prompt, with those behind it that are cheaper to read along than by themselves.

        Each saves one reading of the weights, and costs the padding that makes all of them as long as the longest. One
        that begins like another of them is read after that one.
        """
        candidates = map(self._next, queue)
        first = next(candidates)
        group, longest, total, copied = [first], first.num_pending, first.num_pending, first.copy_cost
        if first.prompt.state is not None or longest > room:
            return group
        for each in candidates:
            longest, total = max(longest, each.num_pending), total + each.num_pending
            cells, copied = (len(group) + 1) * longest, copied + each.copy_cost
            if each.prompt.state is not None or cells + copied > room or cells - total > PADDING_TOKENS * len(group):
                break
            if not self._fit_together([*group, each], longest) or any(self._waits(each, other) for other in group):
                break
            group.append(each)
        return group

    def _fit_together(self, group: Sequence[Next], longest: int) -> bool:
        """Whether one state can have rows that begin at these places."""
        starts, config = {each.start for each in group}, self._decoder.config
        if len(starts) == 1:
            return True
        is_plain = config.is_plain and not (config.is_windowed or config.is_segmented)
        return is_plain and max(starts) + longest <= (config.max_length or UNBOUNDED)

    def _next(self, prompt: Prompt) -> Next:
        """Looks for an earlier text that an unread prompt goes on from."""
        scope = prompt.scope
        return Next(prompt, None if prompt.done or scope is None else self._prefixes.find(scope, prompt.skippable_T))

    def _waits(self, each: Next, other: Next) -> bool:
        """Whether much less of a prompt has to be read once another one is."""
        return self._num_known(each.prompt, other.prompt) - each.start >= LEAST_TOKENS

    def _num_known(self, prompt: Prompt, other: Prompt) -> int:
        """How many tokens of an unread prompt are known once another one is read."""
        if prompt.done or prompt.scope is None or prompt.scope != other.scope:
            return 0
        return self._prefixes.known_after(prompt.scope, prompt.skippable_T, other.ids_T)

    def _keep_for_others(self, prompt: Prompt, state: DecoderState, row: int) -> None:
        """Keeps the beginning of a prompt that was read, as far as one that waits shares it."""
        shared = max((self._num_known(other, prompt) for other in (*self._alone, *self._mixed)), default=0)
        if shared and prompt.scope is not None and prompt.sequence.failure is None:
            past = prompt.sequence.generation.past
            self._prefixes.keep(prompt.scope, prompt.ids_T[:shared], state, row, None if past is None else past.cache)


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
