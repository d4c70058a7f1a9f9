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
from memlm.base.steps import Steps, outcome_of
from memlm.generation.generation import Generation
from memlm.model import DecoderState, decoding_threads
from memlm.model.checkpoint import Checkpoint
from memlm.model.state import row_bytes
from memlm.model.state_pool import UNBOUNDED, StatePool, copied
from memlm.retrieval.gate import gated
from memlm.retrieval.retriever import Retrieval, Retrieved

PIECE_TOKENS = 256
# A session's state is read apart from the others' where reading it takes a quarter of the time of reading the weights.
# Copying a smaller one into a row, and out of it, takes about as long as a step.
APART_BYTES, APART_SHARE = 8 << 20, 4
READING_TOKENS = 16  # calculating so many takes as long as reading the weights (docs/log.md, 2026-11-21)


@dataclass(eq=False, slots=True)
class Member:
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
class _Reading:
    """A member whose prompt is being read, how many of its tokens were, and what was made of them. One `apart` keeps
    that state as its own.
    """

    member: Member
    state: DecoderState | None = None
    done: int = 0
    apart: bool = False

    @property
    def num_unread(self) -> int:
        """Tokens that are left."""
        return len(self.member.generation.unread) - self.done


_Last: TypeAlias = tuple[Member, Tensor, Tensor]  # a member, and the final state and the key of its last token


class Batch:
    """Generations of one model, up to `most` of them at a time; `piece_tokens` of prompts are read in a step, and each
    generation has room for `capacity` tokens: for as many as the model reads, if not given.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, most: int, piece_tokens: int = PIECE_TOKENS, capacity: int | None = None
    ) -> None:
        """Nobody is in it yet."""
        self._decoder, self._piece_tokens = checkpoint.decoder, piece_tokens
        config = checkpoint.decoder.config
        self._capacity = capacity or config.max_length or UNBOUNDED
        self._pool = StatePool(checkpoint.decoder, most_rows=most, capacity=self._capacity)
        self._reading: deque[_Reading] = deque()
        self._rows: list[Member] = []
        self._apart: dict[Member, DecoderState] = {}
        weights = checkpoint.decoder.num_parameters * checkpoint.decoder.dtype.itemsize
        self._apart_bytes = max(APART_BYTES, weights // APART_SHARE)

    def __len__(self) -> int:
        """How many are in it."""
        return len(self._reading) + len(self._rows) + len(self._apart)

    def join(self, generation: Generation) -> Member:
        """Adds a generation, from the next step on."""
        return outcome_of(self.join_steps(generation))

    def join_steps(self, generation: Generation) -> Steps[Member]:
        """Does the work of `join`; the state of a session is copied outside the loop where it is large. One that is
        very large stays a state of its own, read apart from the rows of the others: copying it into a row, and out of
        it at the end, would hold up all of them.
        """
        member, state = Member(generation, since=time.perf_counter()), None
        apart = generation.has_session and self._bytes_of(generation.prompt_places) > self._apart_bytes
        if generation.continues or apart:
            places = generation.num_places if apart else generation.prompt_places
            state = yield from generation.beginning_steps(self._places_for(places))
        self._reading.append(_Reading(member, state, apart=apart))
        return member

    def _bytes_of(self, num_tokens: int) -> int:
        return row_bytes(self._decoder.config, num_tokens, self._decoder.dtype)

    def _places_for(self, num_tokens: int) -> int:
        """A window that moves must have as many places as the rows that it will be one of."""
        return self._capacity if self._decoder.config.is_windowed else num_tokens

    def leave(self, member: Member) -> None:
        """One less: its place is free at once. Nothing happens where it has left already."""
        if member in self._rows:
            row = self._rows.index(member)
            self._pool.remove_row(row)
            self._rows[row] = self._rows[-1]
            self._rows.pop()
        elif self._apart.pop(member, None) is None:
            self._reading = deque(each for each in self._reading if each.member is not member)

    def rest(self) -> None:
        """Gives up the room for more than one, where nobody is in it."""
        if not len(self):
            self._pool.shrink()

    def step(self) -> list[Member]:
        """One token more for each whose prompt has been read. Gives those that it drew for; the ones that are done have
        left.
        """
        with torch.inference_mode():
            drawn = [*self._read_rows(), *self._read_apart(), *self._read_prompts()]
            if drawn:
                with decoding_threads(self._decoder, len(drawn)):
                    self._draw(drawn)
        members = [member for member, _, _ in drawn]
        for member in members:
            if member.generation.has_session and member.generation.finished:
                self._keep(member)
            if member.is_done:
                self.leave(member)
        return members

    def _keep(self, member: Member) -> None:
        """Takes out what was read for the member's session."""
        if member in self._apart:
            member.state = self._apart[member]
            return
        try:
            member.state = copied(self._pool.state, self._rows.index(member), self._decoder)
        except Exception as error:
            member.failure = error

    def _read_rows(self) -> list[_Last]:
        """Reads the last token of every row."""
        if not self._rows:
            return []
        with decoding_threads(self._decoder, len(self._rows)):
            tokens_R1 = torch.tensor([member.generation.unread for member in self._rows])
            hidden_R1D, keys_R1D = self._decoder(tokens_R1, self._pool.state)
        self._pool.settle()
        return list(zip(self._rows, hidden_R1D[:, 0], keys_R1D[:, 0], strict=True))

    def _read_apart(self) -> list[_Last]:
        """Reads the last token of each member that has a state of its own."""
        read = list[_Last]()
        for member, state in self._apart.items():
            with decoding_threads(self._decoder, 1):
                hidden_11D, keys_11D = self._decoder(torch.tensor([member.generation.unread]), state)
            read.append((member, hidden_11D[0, 0], keys_11D[0, 0]))
        return read

    def _read_prompts(self) -> list[_Last]:
        """Reads on in the prompts, the oldest first; those that end become rows."""
        room, ended = self._piece_tokens, list[_Last]()
        while self._reading and room > 0:
            together = self._begin_together(room)
            size = min(room, max(reading.num_unread for reading in together))
            hidden_BTD, keys_BTD, state = self._read_pieces(together, size)
            room -= len(together) * size
            ending = [
                reading.member.generation.num_places
                for reading in together
                if reading.num_unread <= size and not reading.apart
            ]
            self._pool.grow(len(ending), max(ending, default=0))
            for row, reading in enumerate(together):
                last = min(size, reading.num_unread) - 1
                reading.done += last + 1
                if not reading.num_unread:
                    self._reading.popleft()
                    if reading.apart:
                        self._apart[reading.member] = state
                    else:
                        self._pool.add_row(state, row)
                        self._rows.append(reading.member)
                    ended.append((reading.member, hidden_BTD[row, last], keys_BTD[row, last]))
        return ended

    def _begin_together(self, room: int) -> list[_Reading]:
        """The oldest prompt; where all of it fits, with those behind it for which the weights need not be read again.
        Each saves a reading, and costs the padding that makes all of them as long as the longest.
        """
        first, *others = self._reading
        together, longest, total = [first], first.num_unread, first.num_unread
        if first.state is not None or longest > room:
            return together
        for reading in others:
            longest, total = max(longest, reading.num_unread), total + reading.num_unread
            padded = (len(together) + 1) * longest
            if reading.state is not None or padded > room or padded - total > READING_TOKENS * len(together):
                break
            together.append(reading)
        return together

    def _read_pieces(self, together: Sequence[_Reading], size: int) -> tuple[Tensor, Tensor, DecoderState]:
        """Reads up to `size` tokens of each; gives the final states, the keys, and the state with a row for each."""
        pieces = [reading.member.generation.unread[reading.done : reading.done + size] for reading in together]
        if (state := together[0].state) is None:
            capacity = self._places_for(max(reading.num_unread for reading in together))
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
        found: dict[int, Retrieved] = {}
        for retrieval, rows in _by_retrieval(drawn).items():
            try:
                retrieved = self._retrieve(retrieval, [drawn[row] for row in rows], logprobs_RV[rows])
                if retrieval.gate:
                    gated_QD = gated(self._decoder, retrieval.gate, hidden_RD[rows], retrieved.neighbours)
                    logprobs_RV[rows] = self._decoder.logprobs(gated_QD)
                found |= {row: retrieved.row(place) for place, row in enumerate(rows)}
            except Exception as error:
                for row in rows:
                    drawn[row][0].failure = error
        for row, (member, _, _) in enumerate(drawn):
            if member.failure is None:
                try:
                    member.tokens = member.generation.draw(logprobs_RV[row], found.get(row), member.since)
                except Exception as error:
                    member.failure = error
            member.since = time.perf_counter()

    def _retrieve(self, retrieval: Retrieval, asking: Sequence[_Last], logprobs_QV: Tensor) -> Retrieved:
        keys_QD = torch.stack([key_D for _, _, key_D in asking]).float().numpy()
        peaks_Q = logprobs_QV.amax(dim=1).numpy() if retrieval.wants_peaks else None
        return retrieval.search(keys_QD, peaks_Q, [member.generation.pointers for member, _, _ in asking])


def _by_retrieval(drawn: Sequence[_Last]) -> dict[Retrieval, list[int]]:
    """Which of them ask their memories, and alike."""
    rows: dict[Retrieval, list[int]] = {}
    for row, (member, _, _) in enumerate(drawn):
        retrieval = member.generation.retrieval
        if retrieval is not None and member.generation.wants_memory:
            rows.setdefault(retrieval, []).append(row)
    return rows


def complete_all(checkpoint: Checkpoint, generations: Sequence[Generation]) -> tuple[Completion, ...]:
    """Drives all generations to their ends. Raises what goes wrong with any."""
    longest = max((len(each.unread) for each in generations), default=0)
    batch = Batch(
        checkpoint,
        most=len(generations),
        piece_tokens=len(generations) * longest,
        capacity=max((each.num_places for each in generations), default=None),
    )
    members = [batch.join(generation) for generation in generations]
    told: dict[Member, list[Token]] = {member: [] for member in members}
    try:
        while len(batch):
            for member in batch.step():
                if member.failure is not None:
                    raise member.failure
                if member.state is not None:
                    outcome_of(member.generation.keep_steps(member.state))
                told[member] += member.tokens
    finally:
        for generation in generations:
            generation.close()
    return tuple(
        Completion("".join(token.text for token in tokens), tuple(tokens), generation.accepted, generation.finished)
        for tokens, generation in zip(told.values(), generations, strict=True)
        if generation.finished is not None
    )
