"""Changes of a session's text: tokens are appended, or a span of them is forgotten. The model reads what is new.

A state is never changed in place, but for its past behind `past_size`. So a change that is cancelled or fails leaves
the state of before whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from memlm.base.steps import Offload, Steps
from memlm.errors import InvalidInput
from memlm.generation.sessions.files import SessionState
from memlm.model import DecoderState, decoding_threads
from memlm.model.files.checkpoint import Checkpoint
from memlm.model.state.pool import UNBOUNDED
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.own_past import ContextSettings, OwnPast

PIECE_TOKENS = 512
LARGE_BYTES = 1 << 20  # a cache from here on is copied outside the loop

_Copied = TypeVar("_Copied")


@dataclass(slots=True)
class ReadProgress:
    """How many tokens a change reads, and how many of them were read."""

    num_tokens: int = 0
    num_done: int = 0


class SessionReader:
    """Reads the text of sessions. `settings` are those of a model that was tuned for a context cache."""

    def __init__(self, checkpoint: Checkpoint, settings: ContextSettings | None) -> None:
        self._decoder, self._tokenizer, self._settings = checkpoint.decoder, checkpoint.tokenizer, settings

    def append(
        self, state: SessionState, progress: ReadProgress, *, text: str, token_ids: tuple[int, ...]
    ) -> Steps[SessionState]:
        """Returns the state after a text, or after tokens. Raises InvalidInput for more than the context takes, and for
        tokens that are not in the vocabulary.
        """
        tokenizer = self._tokenizer
        self._check_fits(state, len(token_ids) or tokenizer.least_tokens(text))
        new = list(token_ids) or (yield from tokenizer.encode_steps(text))
        pending_ids = [*(state.pending_ids if state.context_ids else tokenizer.prompt("")), *new]
        self._check_fits(state, len(new), len(pending_ids))
        progress.num_tokens = len(new)
        yield from tokenizer.check_ids(token_ids, "token_ids")
        yield None  # from here on it needs the model
        cache = yield from self._extensible(state, self._capacity(state.num_read + len(pending_ids)))
        past = self._past_of(state.past_to_extend())
        yield from self._read(pending_ids[:-1], cache, past, progress)
        kept = _state_of(cache, (pending_ids[-1],), (*state.context_ids, *new), state.answer_ends, past)
        return replace(kept, adapter=state.adapter)

    def forget(self, state: SessionState, progress: ReadProgress, *, start: int, stop: int) -> Steps[SessionState]:
        """Returns the state as if the tokens from `start` up to `stop` had never been appended.

        Those behind are read again, and those before where the cache does not go back to them. Raises InvalidInput for
        a span that is not in the text.
        """
        if stop > state.num_tokens:
            raise InvalidInput(
                f"the span ends at {stop:,}, and the session has {state.num_tokens:,} tokens; expected a stop within"
                " these",
                field="stop",
            )
        context_ids = (*state.context_ids[:start], *state.context_ids[stop:])
        if not context_ids:
            return SessionState(adapter=state.adapter)
        ids = [*self._prefix_of(state), *context_ids]
        has_ended = not state.pending_ids and stop < state.num_tokens  # the last token was read too
        num_read = len(ids) - (not has_ended)
        yield None  # from here on it needs the model
        cache, past = yield from self._start_of(state, min(state.num_prefix + start, num_read), len(ids))
        progress.num_tokens = num_read - cache.length
        yield from self._read(ids[cache.length : num_read], cache, past, progress)
        ends = (end if end <= start else end - (stop - start) for end in state.answer_ends if not start < end <= stop)
        kept = _state_of(cache, tuple(ids[num_read:]), context_ids, tuple(ends), past)
        return replace(kept, adapter=state.adapter)

    def _check_fits(self, state: SessionState, num_new: int, num_pending: int = 0) -> None:
        """Raises InvalidInput for more than the context takes. `num_new` may be a lower bound before encoding."""
        longest = self._decoder.config.max_length
        if longest is not None and state.num_read + max(num_new, num_pending) > longest:
            at_least = "" if num_pending else "at least "
            raise InvalidInput(
                f"the session has {state.num_tokens:,} tokens and {at_least}{num_new:,} come; the model's context has"
                f" {longest - 1:,}: append less, or use a model with memory",
                field="text",
            )

    def _capacity(self, num_tokens: int) -> int:
        return UNBOUNDED if self._decoder.config.max_length is None else num_tokens

    def _extensible(self, state: SessionState, capacity: int) -> Steps[DecoderState]:
        """A cache of its own that continues from a state, with room for `capacity` tokens."""
        if state.cache is None:
            return self._decoder.new_state(capacity=capacity, adapters_B=[state.adapter])
        return (yield from copied_aside(partial(state.cache.extract_row, 0, capacity=capacity), state.num_bytes))

    def _start_of(
        self, state: SessionState, length: int, num_tokens: int
    ) -> Steps[tuple[DecoderState, OwnPast | None]]:
        """The cache after the first `length` tokens that were read, or an empty one, with room for `num_tokens`. The
        past ends where the cache does.
        """
        capacity, cache = self._capacity(num_tokens), None
        if length and state.cache is not None:
            extract = partial(state.cache.extract_start, 0, length, capacity=capacity)
            cache = yield from copied_aside(extract, state.num_bytes)
        if cache is None:
            cache = self._decoder.new_state(capacity=capacity, adapters_B=[state.adapter])
        # The past may lack the first tokens, which were read before the model was tuned for it.
        size = cache.length - (state.num_read - state.past_size)
        if self._settings is None or state.past is None or size <= 0:
            return cache, self._past_of(None)
        return cache, self._past_of((yield from copied_aside(partial(state.past.copy, size), state.num_bytes)))

    def _past_of(self, cache: ContextCache | None) -> OwnPast | None:
        """The past of a session that reads on, for a model that was tuned for it."""
        if self._settings is None:
            return None
        return OwnPast(self._settings, ContextCache(self._decoder.config.dim) if cache is None else cache)

    def _prefix_of(self, state: SessionState) -> tuple[int, ...]:
        """The tokens that were read before the text. A text without those of the tokenizer may begin as a document."""
        prefix, count = self._tokenizer.special.prefix, state.num_prefix
        return tuple(prefix) if len(prefix) == count else (self._tokenizer.start_id,) * count

    def _read(
        self, ids: Sequence[int], cache: DecoderState, past: OwnPast | None, progress: ReadProgress
    ) -> Steps[None]:
        """Reads tokens into a cache, one piece a step."""
        for begin in range(0, len(ids), PIECE_TOKENS):
            piece = ids[begin : begin + PIECE_TOKENS]
            with torch.inference_mode(), decoding_threads(self._decoder, len(piece)):
                keys_1TD = self._decoder.keys(torch.tensor([piece]), cache)
            if past is not None:
                past.read(piece, keys_1TD[0].float().cpu().numpy())
            progress.num_done = begin + len(piece)
            yield None


def _state_of(
    cache: DecoderState,
    pending_ids: tuple[int, ...],
    context_ids: tuple[int, ...],
    answer_ends: tuple[int, ...],
    past: OwnPast | None,
) -> SessionState:
    kept = None if past is None else past.cache
    return SessionState(cache, pending_ids, context_ids, answer_ends, kept, 0 if kept is None else len(kept))


def copied_aside(copy: Callable[[], _Copied], num_bytes: int) -> Steps[_Copied]:
    """Copies a cache of `num_bytes`: outside the loop where it is large."""
    if num_bytes < LARGE_BYTES:
        return copy()
    cache: _Copied = yield Offload(copy)
    return cache
