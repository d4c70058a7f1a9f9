"""Sequences decoded together: a step reads the weights once for all of them.

A step reads each sequence's last token and its draft, searches once for all of these positions, and samples.

Sequences are added and removed between any two steps. A prompt is read in pieces, one a step, so that a long one delays
others by one piece at most. The sequences of a retriever share a search.

Batch invariance: each text is what it would be alone, with its own seed and its own datastores, up to the last bits of
floating point, because the products of a batch add in another order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from memlm.base.cpu import threads
from memlm.base.steps import Steps
from memlm.generation.drafts.budget import DraftBudget, PassCost, allot
from memlm.generation.generation import Generation
from memlm.generation.mixture import Mixture
from memlm.generation.prefill import Prompt, Prompts, padded
from memlm.generation.prefix_cache import PrefixCache
from memlm.generation.step_search import Decoded, Found, RunningSequence, remember, search_memories
from memlm.model import DecoderState, decoding_threads
from memlm.model.files.checkpoint import Checkpoint
from memlm.model.state.pool import UNBOUNDED, StatePool
from memlm.model.state.size import row_bytes

PREFILL_TOKENS = 256
KEPT_BYTES = 64 << 20  # take about as long to copy as a step
# A session's state is read apart from the others' where reading it takes a quarter of the time of reading the weights.
# Copying a smaller one into a row, and out of it, takes about as long as a step.
APART_BYTES, APART_SHARE = 8 << 20, 4


class _Joining(NamedTuple):
    """A sequence that is through its prompt, and the row of a state that has read it."""

    sequence: RunningSequence
    state: DecoderState
    row: int


class Batch:
    """Up to `max_sequences` generations of one model, decoded together. A step reads at most `prefill_tokens` of
    prompts. Each generation has room for `capacity` tokens, by default for as many as the model reads. With `prefixes`,
    the states of texts are kept, and prompts that begin like one are read from where they part.

    Most sequences share the rows of a pool. A sequence is decoded apart, in a KV cache of its own, if it is the
    only one, if its session's cache is large, or if it has a decoder of its own.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_sequences: int,
        prefill_tokens: int = PREFILL_TOKENS,
        capacity: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._decoder, self._max_sequences, self._prefill_tokens = checkpoint.decoder, max_sequences, prefill_tokens
        self._capacity = capacity or checkpoint.decoder.config.max_length or UNBOUNDED
        self._pool = StatePool(checkpoint.decoder, most_rows=max_sequences, capacity=self._capacity)
        self._prefixes = PrefixCache(checkpoint.decoder, 0) if prefixes is None else prefixes
        self._prompts = Prompts(checkpoint.decoder, self._places_for, self._prefixes)
        self._rows: list[RunningSequence] = []
        self._apart: dict[RunningSequence, DecoderState] = {}
        self._joining = list[_Joining]()
        self._held = dict[Mixture | None, list[tuple[_Joining, Decoded]]]()  # rows that wait for others of their text
        self._budget = DraftBudget.of(checkpoint.decoder)
        self._kept_bytes = 0  # of states that this step has copied for later texts
        weights = checkpoint.decoder.num_bytes
        self._apart_bytes = max(APART_BYTES, weights // APART_SHARE)

    def __len__(self) -> int:
        return len(self._prompts) + len(self._rows) + len(self._apart)

    def add_mixture(self, mixture: Mixture) -> RunningSequence:
        """Adds the rows of a mixture from the next step on. The sequence that is returned stands for all of them, also
        in `remove`. They begin together, once the longest prompt is read.
        """
        begun_s = time.perf_counter()
        rows = [RunningSequence(each, since_s=begun_s, mixture=mixture) for each in mixture.generations]
        first = rows[mixture.generations.index(mixture.leader)]
        first.rows = tuple(rows)
        for each in rows:
            self._prompts.add(Prompt(each, None, apart=False))
        return first

    def add(self, generation: Generation) -> Steps[RunningSequence]:
        """Adds a generation from the next step on. A large KV cache of its session is copied outside the loop.

        A very large one stays apart: copying it into a row and out again would delay all other sequences.
        """
        sequence, state = RunningSequence(generation, since_s=time.perf_counter()), None
        cache_bytes = row_bytes(self._decoder.config, generation.prompt_positions, self._decoder.dtype)
        apart = (
            self._max_sequences == 1
            or generation.own_decoder is not None
            or (generation.has_session and cache_bytes > self._apart_bytes)
        )
        if generation.continues or apart:
            positions = generation.max_positions if apart else generation.prompt_positions
            state = yield from generation.initial_state(self._places_for(positions))
        self._prompts.add(Prompt(sequence, state, apart))
        return sequence

    def remove(self, sequence: RunningSequence) -> None:
        """Removes a sequence and frees its place at once. Does nothing for one that is not in the batch."""
        rows = sequence.rows or (sequence,)
        self._held.pop(sequence.mixture, None)
        self._joining = [joining for joining in self._joining if joining.sequence not in rows]  # of a step that failed
        self._prompts.remove(rows)
        for each in rows:
            self._remove_row(each)

    def _remove_row(self, sequence: RunningSequence) -> None:
        if sequence in self._rows:
            row = self._rows.index(sequence)
            self._pool.remove_row(row)
            self._rows[row] = self._rows[-1]
            self._rows.pop()
        else:
            self._apart.pop(sequence, None)

    def shrink(self) -> None:
        """Frees the memory of all rows but one, if the batch is empty."""
        if not len(self):
            self._pool.shrink()

    def step(self) -> list[RunningSequence]:
        """Generates a token or more for each sequence that is through its prompt, and returns these sequences. Those
        that are done have been removed.
        """
        with torch.inference_mode():
            begin_s, self._kept_bytes = time.perf_counter(), 0
            decoded = [*self._decode_rows(), *self._decode_apart()]
            for each in decoded:
                remember(each.sequence, each.sequence.generation.ids_to_read, each.keys_ND)
            num_passes, prefilled = bool(self._rows) + len(self._apart), self._prefill()
            stepped = [*decoded, *prefilled]
            if stepped:
                num_rows = sum(len(each.hidden_ND) for each in decoded)
                with decoding_threads(self._decoder, num_rows + len(prefilled)):
                    found = search_memories(self._decoder, stepped)
                if num_passes == 1 and not prefilled:
                    self._cost(each.sequence for each in decoded).add(num_rows, time.perf_counter() - begin_s)
                self._sample(stepped, found)
            self._join()
        drawn = [each.sequence for each in stepped if each.sequence.mixture is None or each.sequence.rows]
        for sequence in drawn:
            self._end(sequence)
        return drawn

    def _end(self, sequence: RunningSequence) -> None:
        """Removes a sequence that is done, and takes its KV cache for its session, or for later texts."""
        if sequence.generation.finished:
            try:
                if not sequence.generation.has_session:
                    self._keep(sequence.rows or (sequence,))
                elif sequence in self._apart:
                    sequence.state = self._apart[sequence]
                else:
                    sequence.state = self._pool.state.extract_row(self._rows.index(sequence))
            except Exception as error:
                sequence.failure = error
        if sequence.is_done:
            self.remove(sequence)

    def _keep(self, sequences: Sequence[RunningSequence]) -> None:
        """Keeps the states of texts that are done, as far as a step has time to copy them: of several that end
        together, the first alone where they are large.
        """
        for each in sequences:
            generation = each.generation
            if (scope := generation.scope) is None or self._kept_bytes > KEPT_BYTES:
                continue
            state, row = (self._apart[each], 0) if each in self._apart else (self._pool.state, self._rows.index(each))
            past, ids = generation.past, np.array(generation.ids_read(state.rows[row].length), np.int32)
            self._kept_bytes += self._prefixes.keep(scope, ids, state, row, None if past is None else past.cache)

    def _decode_rows(self) -> list[Decoded]:
        """Reads the last token and the draft of every row of the pool."""
        if not self._rows:
            return []
        ids_R, new_R = self._draft(self._rows, self._pool.state)
        with decoding_threads(self._decoder, sum(new_R)):
            hidden_RTD, keys_RTD = self._decoder(padded(ids_R), self._pool.state, new_B=new_R)
        self._pool.settle()
        parts = zip(self._rows, hidden_RTD, keys_RTD, new_R, strict=True)
        return [Decoded(sequence, hidden_TD[:new], keys_TD[:new]) for sequence, hidden_TD, keys_TD, new in parts]

    def _decode_apart(self) -> list[Decoded]:
        """Reads the last token and the draft of each sequence that is apart, with its own decoder where it has one."""
        decoded = list[Decoded]()
        for sequence, state in self._apart.items():
            ids_1, (num_new,) = self._draft([sequence], state)
            own_decoder = sequence.generation.own_decoder
            with decoding_threads(self._decoder, num_new):
                if own_decoder is None:
                    hidden_1TD, keys_1TD = self._decoder(torch.tensor(ids_1), state)
                else:
                    hidden_1TD = keys_1TD = own_decoder(torch.tensor(ids_1), state)  # it searches nothing
            decoded.append(Decoded(sequence, hidden_1TD[0], keys_1TD[0]))
        return decoded

    def _draft(self, sequences: Sequence[RunningSequence], state: DecoderState) -> tuple[list[list[int]], list[int]]:
        """Chooses the drafts of one pass. Returns the tokens that it reads of each sequence, and their numbers."""
        chances, num_forced = list[list[float]](), 0
        for sequence, room in zip(sequences, state.draft_room_B(), strict=True):
            drafts, expected = sequence.generation.drafts, list[float]()
            try:
                expected = drafts.propose(room - 1)
            except Exception as error:
                sequence.failure = error
            num_forced += len(expected) if drafts.is_forced else 0
            chances.append([] if drafts.is_forced else expected)
        if any(chances):
            seconds = self._cost(sequences).seconds
            lengths = allot(chances, lambda num_rows: seconds(num_rows + num_forced))
            for sequence, length in zip(sequences, lengths, strict=True):
                if not sequence.generation.drafts.is_forced:
                    sequence.generation.drafts.shorten(length)
        ids = [sequence.generation.ids_to_read for sequence in sequences]
        return ids, list(map(len, ids))

    def _cost(self, sequences: Iterable[RunningSequence]) -> PassCost:
        """The times of passes that search all datastores of these sequences."""
        stores = (store for sequence in sequences for store in sequence.generation.drafts.stores)
        return self._budget.experience(stores).cost

    def _prefill(self) -> list[Decoded]:
        """Reads a piece of the prompts. After its last piece a sequence gets its first token."""
        decoded = list[Decoded]()
        for prompt, state, row, after in self._prompts.read(self._prefill_tokens):
            if prompt.apart:
                self._apart[prompt.sequence] = state
                decoded.append(after)
            else:
                decoded += self._released(_Joining(prompt.sequence, state, row), after)
        return decoded

    def _released(self, joining: _Joining, after: Decoded) -> list[Decoded]:
        """Lets a sequence that is through its prompt join the others: at once, or with the last row of its mixture.
        Returns the sequences that join, with the last states of their prompts.
        """
        if (mixture := joining.sequence.mixture) is None:
            self._joining.append(joining)
            return [after]
        held = self._held.setdefault(mixture, [])
        held.append((joining, after))
        if len(held) < len(mixture.generations):
            return []
        del self._held[mixture]
        self._joining += [joining for joining, _ in held]
        return [after for _, after in held]

    def _join(self) -> None:
        """Gives rows of the pool to the sequences that are through their prompts.

        They wait until drafts have been taken back, because a pool that grows is another state.
        """
        most_positions = max((each.sequence.generation.max_positions for each in self._joining), default=0)
        self._pool.grow(len(self._joining), most_positions)
        for sequence, state, row in self._joining:
            self._pool.add_row(state, row)
            self._rows.append(sequence)
        self._joining.clear()

    def _places_for(self, num_tokens: int) -> int:
        """A window that moves must have as many places as the rows of the pool that it will be one of."""
        return self._capacity if self._decoder.config.is_windowed else num_tokens

    def _sample(self, decoded: Sequence[Decoded], found: Found) -> None:
        """Samples tokens for each sequence, and takes back the tokens of its draft that are not part of its text."""
        num_wrong, of_mixtures = dict[RunningSequence, int](), dict[RunningSequence, Tensor]()
        each_NV = found.logprobs_RV.split([len(each.hidden_ND) for each in decoded])
        with threads(1):  # a vocabulary is too little to wait for a second thread
            for each, logprobs_NV, results_N, past in zip(decoded, each_NV, found.results, found.pasts, strict=True):
                sequence = each.sequence
                if sequence.mixture is not None:
                    of_mixtures[sequence] = logprobs_NV[0]
                    continue
                if sequence.failure is None:
                    try:
                        tokens, num_read = sequence.generation.sample_draft(
                            logprobs_NV, results_N, sequence.since_s, past
                        )
                        sequence.tokens, num_wrong[sequence] = tokens, len(each.hidden_ND) - 1 - num_read
                    except Exception as error:
                        sequence.failure = error
                sequence.since_s = time.perf_counter()
            self._sample_mixtures(of_mixtures)
        for sequence, state in self._apart.items():
            if num_wrong.get(sequence):
                self._decoder.crop(state, [state.length - num_wrong[sequence]])
        if any(num_wrong.get(sequence) for sequence in self._rows):
            rows = zip(self._rows, self._pool.state.rows, strict=True)
            lengths = [row.length - num_wrong.get(sequence, 0) for sequence, row in rows]
            self._decoder.crop(self._pool.state, lengths)

    def _sample_mixtures(self, logprobs: Mapping[RunningSequence, Float[Tensor, " V"]]) -> None:
        """Samples a token for each mixture, given the log-probabilities after each of its rows."""
        for first in [sequence for sequence in logprobs if sequence.rows]:
            assert first.mixture is not None
            first.failure = next((row.failure for row in first.rows if row.failure), None)
            if first.failure is not None:
                continue
            try:
                first.tokens = first.mixture.draw(torch.stack([logprobs[row] for row in first.rows]), first.since_s)
            except Exception as error:
                first.failure = error
            first.since_s = time.perf_counter()
