"""Generations that go on side by side: the weights are read once a step for all of them.

New ones join, and old ones leave, between any two steps. A prompt is read in pieces, one a step, so that a long one
holds up the others for no longer than a piece takes. Whatever wants its memory in a step is searched for at once.

Each text is what it would be alone, with its own seed and its own memory, up to the last bits of floating point: the
products of a batch add in another order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from memlm.api.generation import Completion, Token
from memlm.base.steps import Steps, run_steps
from memlm.generation.generation import Generation
from memlm.model import DecoderState, decoding_threads
from memlm.model.checkpoint import Checkpoint
from memlm.model.state import row_bytes
from memlm.model.state_pool import UNBOUNDED, StatePool, copied
from memlm.retrieval.gate import gated
from memlm.retrieval.retriever import RetrievalResult, Retriever

PREFILL_TOKENS = 256
# A session's state is read apart from the others' where reading it takes a quarter of the time of reading the weights.
# Copying a smaller one into a row, and out of it, takes about as long as a step.
APART_BYTES, APART_SHARE = 8 << 20, 4
READING_TOKENS = 16  # calculating so many takes as long as reading the weights (docs/log, 2026-11-21)


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A generation in the batch: its tokens of the last step, or what went wrong with it. After its last step, `state`
    is what its session is to keep, if it has one.
    """

    generation: Generation
    tokens: tuple[Token, ...] = ()
    failure: Exception | None = None
    since: float = 0.0
    state: DecoderState | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to come."""
        return self.failure is not None or self.generation.finished is not None


@dataclass(slots=True)
class _Prefill:
    """A sequence whose prompt is being read, how many of its tokens were, and what was made of them. One `apart` keeps
    that state as its own.
    """

    sequence: RunningSequence
    state: DecoderState | None = None
    done: int = 0
    apart: bool = False

    @property
    def num_pending(self) -> int:
        """Tokens that are left."""
        return len(self.sequence.generation.pending_ids) - self.done


_Last: TypeAlias = tuple[
    RunningSequence, Tensor, Tensor
]  # a sequence, and the final state and the key of its last token


class Batch:
    """Up to `max_sequences` generations of one model, decoded together. A step reads at most `prefill_tokens`
    of prompts.
    Each generation has room for `capacity` tokens, by default for as many as the model reads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_sequences: int,
        prefill_tokens: int = PREFILL_TOKENS,
        capacity: int | None = None,
    ) -> None:
        """Nobody is in it yet."""
        self._decoder, self._prefill_tokens = checkpoint.decoder, prefill_tokens
        config = checkpoint.decoder.config
        self._capacity = capacity or config.max_length or UNBOUNDED
        self._pool = StatePool(checkpoint.decoder, most_rows=max_sequences, capacity=self._capacity)
        self._reading: deque[_Prefill] = deque()
        self._rows: list[RunningSequence] = []
        self._apart: dict[RunningSequence, DecoderState] = {}
        weights = checkpoint.decoder.num_parameters * checkpoint.decoder.dtype.itemsize
        self._apart_bytes = max(APART_BYTES, weights // APART_SHARE)

    def __len__(self) -> int:
        """How many are in it."""
        return len(self._reading) + len(self._rows) + len(self._apart)

    def add(self, generation: Generation) -> RunningSequence:
        """Adds a generation, from the next step on."""
        return run_steps(self.add_steps(generation))

    def add_steps(self, generation: Generation) -> Steps[RunningSequence]:
        """Does the work of `add`; the state of a session is copied outside the loop where it is large. One that is
        very large stays a state of its own, read apart from the rows of the others: copying it into a row, and out of
        it at the end, would hold up all of them.
        """
        sequence, state = RunningSequence(generation, since=time.perf_counter()), None
        apart = generation.has_session and self._bytes_of(generation.prompt_positions) > self._apart_bytes
        if generation.continues or apart:
            places = generation.max_positions if apart else generation.prompt_positions
            state = yield from generation.initial_state_steps(self._places_for(places))
        self._reading.append(_Prefill(sequence, state, apart=apart))
        return sequence

    def _bytes_of(self, num_tokens: int) -> int:
        return row_bytes(self._decoder.config, num_tokens, self._decoder.dtype)

    def _places_for(self, num_tokens: int) -> int:
        """A window that moves must have as many places as the rows that it will be one of."""
        return self._capacity if self._decoder.config.is_windowed else num_tokens

    def remove(self, sequence: RunningSequence) -> None:
        """One less: its place is free at once. Nothing happens where it has left already."""
        if sequence in self._rows:
            row = self._rows.index(sequence)
            self._pool.remove_row(row)
            self._rows[row] = self._rows[-1]
            self._rows.pop()
        elif self._apart.pop(sequence, None) is None:
            self._reading = deque(each for each in self._reading if each.sequence is not sequence)

    def shrink(self) -> None:
        """Gives up the room for more than one, where nobody is in it."""
        if not len(self):
            self._pool.shrink()

    def step(self) -> list[RunningSequence]:
        """One token more for each whose prompt has been read. Gives those that it drew for; the ones that are done have
        left.
        """
        with torch.inference_mode():
            drawn = [*self._decode(), *self._decode_apart(), *self._prefill()]
            if drawn:
                with decoding_threads(self._decoder, len(drawn)):
                    self._draw(drawn)
        sequences = [sequence for sequence, _, _ in drawn]
        for sequence in sequences:
            if sequence.generation.has_session and sequence.generation.finished:
                self._keep(sequence)
            if sequence.is_done:
                self.remove(sequence)
        return sequences

    def _keep(self, sequence: RunningSequence) -> None:
        """Takes out what was read for the sequence's session."""
        if sequence in self._apart:
            sequence.state = self._apart[sequence]
            return
        try:
            sequence.state = copied(self._pool.state, self._rows.index(sequence), self._decoder)
        except Exception as error:
            sequence.failure = error

    def _decode(self) -> list[_Last]:
        """Reads the last token of every row."""
        if not self._rows:
            return []
        with decoding_threads(self._decoder, len(self._rows)):
            tokens_R1 = torch.tensor([sequence.generation.pending_ids for sequence in self._rows])
            hidden_R1D, keys_R1D = self._decoder(tokens_R1, self._pool.state)
        self._pool.settle()
        return list(zip(self._rows, hidden_R1D[:, 0], keys_R1D[:, 0], strict=True))

    def _decode_apart(self) -> list[_Last]:
        """Reads the last token of each sequence that has a state of its own."""
        read = list[_Last]()
        for sequence, state in self._apart.items():
            with decoding_threads(self._decoder, 1):
                hidden_11D, keys_11D = self._decoder(torch.tensor([sequence.generation.pending_ids]), state)
            read.append((sequence, hidden_11D[0, 0], keys_11D[0, 0]))
        return read

    def _prefill(self) -> list[_Last]:
        """Reads on in the prompts, the oldest first; those that end become rows."""
        room, ended = self._prefill_tokens, list[_Last]()
        while self._reading and room > 0:
            together = self._begin_together(room)
            size = min(room, max(reading.num_pending for reading in together))
            hidden_BTD, keys_BTD, state = self._read_pieces(together, size)
            room -= len(together) * size
            ending = [
                reading.sequence.generation.max_positions
                for reading in together
                if reading.num_pending <= size and not reading.apart
            ]
            self._pool.grow(len(ending), max(ending, default=0))
            for row, reading in enumerate(together):
                last = min(size, reading.num_pending) - 1
                reading.done += last + 1
                if not reading.num_pending:
                    self._reading.popleft()
                    if reading.apart:
                        self._apart[reading.sequence] = state
                    else:
                        self._pool.add_row(state, row)
                        self._rows.append(reading.sequence)
                    ended.append((reading.sequence, hidden_BTD[row, last], keys_BTD[row, last]))
        return ended

    def _begin_together(self, room: int) -> list[_Prefill]:
        """The oldest prompt; where all of it fits, with those behind it for which the weights need not be read again.
        Each saves a reading, and costs the padding that makes all of them as long as the longest.
        """
        first, *others = self._reading
        together, longest, total = [first], first.num_pending, first.num_pending
        if first.state is not None or longest > room:
            return together
        for reading in others:
            longest, total = max(longest, reading.num_pending), total + reading.num_pending
            padded = (len(together) + 1) * longest
            if reading.state is not None or padded > room or padded - total > READING_TOKENS * len(together):
                break
            together.append(reading)
        return together

    def _read_pieces(self, together: Sequence[_Prefill], size: int) -> tuple[Tensor, Tensor, DecoderState]:
        """Reads up to `size` tokens of each; gives the final states, the keys, and the state with a row for each."""
        pieces = [reading.sequence.generation.pending_ids[reading.done : reading.done + size] for reading in together]
        if (state := together[0].state) is None:
            capacity = self._places_for(max(reading.num_pending for reading in together))
            state = self._decoder.new_state(batch_size=len(together), capacity=capacity)
            if len(together) == 1:
                together[0].state = state
        padded = [[*piece, *[0] * (size - len(piece))] for piece in pieces]
        with decoding_threads(self._decoder, len(together) * size):
            hidden_BTD, keys_BTD = self._decoder(torch.tensor(padded), state, new_B=[len(piece) for piece in pieces])
        return hidden_BTD, keys_BTD, state

    def _draw(self, drawn: Sequence[_Last]) -> None:
        """Asks the memories, all of one kind at once, and draws a token for each."""
        hidden_RD = torch.stack([hidden_D for _, hidden_D, _ in drawn])
        logprobs_RV = self._decoder.logprobs(hidden_RD)
        found: dict[int, RetrievalResult] = {}
        for retriever, rows in _by_retriever(drawn).items():
            try:
                retrieved = self._retrieve(retriever, [drawn[row] for row in rows], logprobs_RV[rows])
                if retriever.gate:
                    gated_QD = gated(self._decoder, retriever.gate, hidden_RD[rows], retrieved.neighbors)
                    logprobs_RV[rows] = self._decoder.logprobs(gated_QD)
                found |= {row: retrieved.row(place) for place, row in enumerate(rows)}
            except Exception as error:
                for row in rows:
                    drawn[row][0].failure = error
        for row, (sequence, _, _) in enumerate(drawn):
            if sequence.failure is None:
                try:
                    sequence.tokens = sequence.generation.sample_next(logprobs_RV[row], found.get(row), sequence.since)
                except Exception as error:
                    sequence.failure = error
            sequence.since = time.perf_counter()

    def _retrieve(self, retriever: Retriever, asking: Sequence[_Last], logprobs_QV: Tensor) -> RetrievalResult:
        keys_QD = torch.stack([key_D for _, _, key_D in asking]).float().numpy()
        max_logprobs_Q = logprobs_QV.amax(dim=1).numpy() if retriever.needs_max_logprob else None
        return retriever.search(keys_QD, max_logprobs_Q, [sequence.generation.pointers for sequence, _, _ in asking])


def _by_retriever(drawn: Sequence[_Last]) -> dict[Retriever, list[int]]:
    """Which of them ask their memories, and alike."""
    rows: dict[Retriever, list[int]] = {}
    for row, (sequence, _, _) in enumerate(drawn):
        retriever = sequence.generation.retriever
        if retriever is not None and sequence.generation.needs_retrieval:
            rows.setdefault(retriever, []).append(row)
    return rows


def complete_all(checkpoint: Checkpoint, generations: Sequence[Generation]) -> tuple[Completion, ...]:
    """Drives all generations to their ends. Raises what goes wrong with any."""
    longest = max((len(each.pending_ids) for each in generations), default=0)
    batch = Batch(
        checkpoint,
        max_sequences=len(generations),
        prefill_tokens=len(generations) * longest,
        capacity=max((each.max_positions for each in generations), default=None),
    )
    sequences = [batch.add(generation) for generation in generations]
    told: dict[RunningSequence, list[Token]] = {sequence: [] for sequence in sequences}
    try:
        while len(batch):
            for sequence in batch.step():
                if sequence.failure is not None:
                    raise sequence.failure
                if sequence.state is not None:
                    run_steps(sequence.generation.commit_to_session(sequence.state))
                told[sequence] += sequence.tokens
    finally:
        for generation in generations:
            generation.close()
    return tuple(
        Completion("".join(token.text for token in tokens), tuple(tokens), generation.accepted, generation.finished)
        for tokens, generation in zip(told.values(), generations, strict=True)
        if generation.finished is not None
    )
