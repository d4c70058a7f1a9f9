"""Prompt -> tokens, one step at a time.

A step reads what is new (the prompt at first, then the last token), asks the memory, mixes, draws one token, and
gives the tokens whose text has become certain. Whoever drives the steps decides what happens between them: the
library loops, the server's worker takes turns among its requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from memlm.api.generation import Accepted, Alternative, Finished, FinishReason, GenerationEvent, Neighbor, Token, Usage
from memlm.api.params import GenerateRequest
from memlm.base.steps import Steps, run_steps
from memlm.errors import InvalidInput
from memlm.generation.detokenizer import Detokenizer
from memlm.generation.early_exit import load_rule
from memlm.generation.sampling import sample
from memlm.generation.session_files import SessionState
from memlm.generation.sessions import Lease, copied_aside
from memlm.model import DecoderState, decoding_threads
from memlm.model.checkpoint import Checkpoint
from memlm.model.early_exit import ExitRule, forward_early_exit
from memlm.model.state_pool import copied
from memlm.retrieval.gate import gated
from memlm.retrieval.interpolation import knn_logprobs, mix
from memlm.retrieval.retriever import NO_POINTERS, RetrievalResult, Retriever


class Generation:
    """One text being continued. Raises InvalidInput at once for a prompt, or a length, that the model does not take."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        request: GenerateRequest,
        prompt: Sequence[int],
        retriever: Retriever | None,
        *,
        request_id: str = "",
        lease: Lease | None = None,
    ) -> None:
        """Checks the request, whose `prompt` is encoded already. With the `lease` of a session, it continues from what
        that has read.
        """
        self._decoder, self._tokenizer = checkpoint.decoder, checkpoint.tokenizer
        self._request, self.retriever, self._begun_s = request, retriever, time.perf_counter()
        self._sampling = request.sampling.or_else(checkpoint.sampling)
        self._lease, self._session = lease, lease.state if lease else SessionState()
        self.pending_ids = (
            [*self._session.pending_ids, *prompt] if self._session.context_ids else self._tokenizer.framed(prompt)
        )
        if not self.pending_ids:
            raise InvalidInput("the session's text has ended; give a prompt to go on with", field="prompt")
        self._context_ids = [*self._session.context_ids, *prompt]
        self.prompt_positions = self._session.num_read + len(self.pending_ids)
        self._max_tokens = self._room_for(self.prompt_positions)
        self.max_positions = self.prompt_positions + self._max_tokens - 1
        self._state: DecoderState | None = None
        self._rule = self._exit_rule(checkpoint) if request.early_exit else None
        seed = self._sampling.seed
        self._seed = secrets.randbits(63) if seed is None else seed
        self._generator = np.random.default_rng(self._seed)
        self._stream = Detokenizer(self._sampling.stop)
        self.pointers = NO_POINTERS
        self.accepted = self._accept(request_id)
        self.usage = Usage(prompt_tokens=len(prompt))
        self.finished: Finished | None = None

    @classmethod
    def steps(
        cls,
        checkpoint: Checkpoint,
        request: GenerateRequest,
        retriever: Retriever | None,
        *,
        request_id: str = "",
        lease: Lease | None = None,
    ) -> Steps[Generation]:
        """Encodes the prompt and makes the generation. A prompt that is far too long is refused before it is encoded;
        whatever fails gives the session back.
        """
        try:
            longest, session = checkpoint.decoder.config.max_length, lease.state if lease else SessionState()
            least = session.num_read + checkpoint.tokenizer.least_tokens(request.prompt)
            if longest is not None and least > longest:
                raise too_long(f"at least {least:,}", longest)
            prompt = yield from checkpoint.tokenizer.encode_steps(request.prompt)
            return cls(checkpoint, request, prompt, retriever, request_id=request_id, lease=lease)
        except BaseException:
            if lease is not None:
                lease.end(None)
            raise

    def step(self) -> tuple[Token, ...]:
        """Draws one token; returns those that may be shown now. After the last one `finished` is set."""
        begin = time.perf_counter()
        if self._state is None:
            self._state = self.initial_state(self.max_positions)
        with torch.inference_mode(), decoding_threads(self._decoder, len(self.pending_ids)):
            tokens_BT = torch.tensor([self.pending_ids])
            if self._rule is not None and len(self.pending_ids) == 1:
                hidden_BTD, _ = forward_early_exit(self._decoder, tokens_BT, self._state, self._rule)
                return self.sample_next(self._decoder.logprobs(hidden_BTD[0, -1]), None, begin)
            hidden_BTD, keys_BTD = self._decoder(tokens_BT, self._state)
            retrieved, logprobs_1V = None, self._decoder.logprobs(hidden_BTD[0, -1:])
            if self.retriever and self.needs_retrieval:
                max_logprobs_1 = logprobs_1V.amax(dim=1).numpy() if self.retriever.needs_max_logprob else None
                keys_1D = keys_BTD[0, -1:].float().numpy()
                retrieved = self.retriever.search(keys_1D, max_logprobs_1, [self.pointers])
                if self.retriever.gate:
                    gate = self.retriever.gate
                    hidden_1D = gated(self._decoder, gate, hidden_BTD[0, -1:], retrieved.neighbors)
                    logprobs_1V = self._decoder.logprobs(hidden_1D)
            return self.sample_next(logprobs_1V[0], retrieved, begin)

    def sample_next(
        self, lm_logprobs_V: Float[Tensor, " V"], retrieved: RetrievalResult | None, begin: float
    ) -> tuple[Token, ...]:
        """Samples the next token from logits computed by the caller and returns the tokens that may be shown.

        `begin` is the start of that forward pass (perf_counter); `retrieved` has this sequence's one row.
        """
        first = self.usage.generated_tokens == 0
        token = self._next_token(lm_logprobs_V, retrieved)
        if token is None:
            tokens = self._stream.finish()
            self._finish(FinishReason.END)
        else:
            tokens = self._take(token)
        self._count(token, retrieved, 1000 * (time.perf_counter() - begin), first=first)
        return tuple(tokens)

    @property
    def is_batchable(self) -> bool:
        """Whether it can share its steps. With early exit the number of layers differs from token to token."""
        return self._rule is None

    @property
    def needs_retrieval(self) -> bool:
        """Whether neighbors could change anything, or are asked for."""
        retriever = self.retriever
        return retriever is not None and bool(
            retriever.lam or retriever.adaptive or retriever.gate or self._request.neighbors
        )

    def events(self) -> Generator[GenerationEvent, None, None]:
        """Accepted, the tokens, Finished: what the library and the server's stream both tell."""
        try:
            yield self.accepted
            while self.finished is None:
                tokens = self.step()
                run_steps(self.commit_to_session())
                if tokens:
                    yield tokens
            yield self.finished
        finally:
            self.close()

    def initial_state(self, capacity: int) -> DecoderState:
        """The state that the first step starts from, with room for `capacity` tokens."""
        return run_steps(self.initial_state_steps(capacity))

    def initial_state_steps(self, capacity: int) -> Steps[DecoderState]:
        """Does the work of `initial_state`; the state of a session is copied outside the loop where it is large."""
        session = self._session
        if session.cache is None:
            return self._decoder.new_state(capacity=capacity)
        copy = partial(copied, session.cache, 0, self._decoder, capacity=capacity)
        return (yield from copied_aside(copy, session.num_bytes))

    @property
    def continues(self) -> bool:
        """Whether something was read before its prompt."""
        return self._session.cache is not None

    @property
    def has_session(self) -> bool:
        """Whether what was read stays with somebody."""
        return self._lease is not None

    def commit_to_session(self, state: DecoderState | None = None) -> Steps[None]:
        """After the last step, hands over what was read to the session, if there is one, and writes it where sessions
        are kept. `state` is that of a batch; nothing happens before the last step.
        """
        state = state or self._state
        if self._lease is not None and self.finished is not None and state is not None:
            state = yield from self._trimmed(state)
            ended = self.finished.reason is FinishReason.END
            seen = self._context_ids[:-1] if ended else self._context_ids
            yield from self._lease.keep(SessionState(state, () if ended else tuple(self.pending_ids), tuple(seen)))

    def _trimmed(self, state: DecoderState) -> Steps[DecoderState]:
        """The state without the places that were reserved for more output; the copy is made outside the loop."""
        used = max(state.places_B())
        if state.num_front + state.num_local == used:
            return state
        return (yield from copied_aside(partial(copied, state, 0, self._decoder), state.num_bytes))

    def close(self) -> None:
        """Gives the session back, if there is one: as it was, unless the generation came to its end."""
        if self._lease is not None:
            self._lease.end(None)

    def _next_token(self, lm_logprobs_V: Float[Tensor, " V"], retrieved: RetrievalResult | None) -> Token | None:
        """Mixes and draws; None where the model ends the text."""
        knn_logprobs_V = self._memory_of(retrieved)
        lam = 0.0 if knn_logprobs_V is None or retrieved is None else float(retrieved.lams_Q[0])
        logprobs_V = mix(lm_logprobs_V, knn_logprobs_V, lam)
        drawn = sample(logprobs_V, self._sampling, self._context_ids, self._generator)
        self.pending_ids = [drawn]
        self._context_ids.append(drawn)
        if self.retriever and retrieved:
            self.pointers = self.retriever.pointers_after(retrieved, drawn)
        if drawn in self._tokenizer.end_ids:
            return None
        return Token(
            id=drawn,
            text="",
            bytes=self._bytes_of(drawn),
            logprob=float(logprobs_V[drawn]),
            lm_logprob=float(lm_logprobs_V[drawn]),
            knn_logprob=None if knn_logprobs_V is None else float(knn_logprobs_V[drawn]),
            lam=lam,
            neighbors=self._neighbors_of(retrieved),
            top_logprobs=self._alternatives(logprobs_V),
        )

    def _bytes_of(self, drawn: int) -> bytes:
        """A token's bytes; of the first one after no prompt, without the space that encoding would have put there."""
        piece = self._tokenizer.token_bytes[drawn] if drawn < self._tokenizer.vocab_size else b""
        is_first = len(self._context_ids) == 1 and not self._request.prompt
        return piece.removeprefix(b" ") if is_first and self._tokenizer.prepends_space else piece

    def _memory_of(self, retrieved: RetrievalResult | None) -> Float[Tensor, " V"] | None:
        if retrieved is None:
            return None
        vocab_size = self._decoder.config.vocab_size
        return knn_logprobs(retrieved.logweights_QK[0], retrieved.neighbors.values_QK[0], vocab_size)

    def _neighbors_of(self, retrieved: RetrievalResult | None) -> tuple[Neighbor, ...]:
        if retrieved is None or self.retriever is None or not self._request.neighbors:
            return ()
        return self.retriever.describe(retrieved, self._request.neighbors)

    def _alternatives(self, logprobs_V: Float[Tensor, " V"]) -> tuple[Alternative, ...]:
        if not self._request.top_logprobs:
            return ()
        best = logprobs_V.topk(min(self._request.top_logprobs, len(logprobs_V)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return tuple(Alternative(token_id, self._tokenizer.decode([token_id]), logprob) for token_id, logprob in pairs)

    def _take(self, token: Token) -> list[Token]:
        """Adds a token to the text, and ends it where a stop string or the length is reached."""
        tokens = self._stream.push(token)
        if self._stream.stopped_by is not None:
            self._finish(FinishReason.STOP)
        elif self.usage.generated_tokens + 1 == self._max_tokens:
            tokens += self._stream.finish()
            self._finish(FinishReason.LENGTH)
        elif self._time_is_up:
            tokens += self._stream.finish()
            self._finish(FinishReason.TIME)
        return tokens

    @property
    def _time_is_up(self) -> bool:
        limit_s = self._sampling.time_limit_s
        return limit_s is not None and time.perf_counter() - self._begun_s >= limit_s

    def _finish(self, reason: FinishReason) -> None:
        self.finished = Finished(reason, self._stream.stopped_by, self.usage)

    def _count(self, token: Token | None, retrieved: RetrievalResult | None, elapsed_ms: float, *, first: bool) -> None:
        there = 0 if retrieved is None else int((retrieved.neighbors.ids_QK >= 0).sum())
        searched = retrieved is not None and bool(retrieved.searched_Q[0])
        before, count = self.usage, self.usage.generated_tokens + (token is not None)
        self.usage = replace(
            before,
            generated_tokens=count,
            retrieved_neighbors=before.retrieved_neighbors + there,
            searches=before.searches + searched,
            prefill_ms=before.prefill_ms + elapsed_ms * first,
            decode_ms=before.decode_ms + elapsed_ms * (not first),
            retrieval_ms=before.retrieval_ms + (0.0 if retrieved is None else retrieved.took_ms),
            lam=before.lam if token is None else before.lam + (token.lam - before.lam) / count,
        )
        if self.finished is not None:
            self.finished = replace(self.finished, usage=self.usage)

    def _exit_rule(self, checkpoint: Checkpoint) -> ExitRule:
        if self.needs_retrieval:
            raise InvalidInput(
                "early_exit leaves out the layer whose input the datastore is searched with; ask without a datastore,"
                " or without early_exit",
                field="early_exit",
            )
        return load_rule(checkpoint.path)

    def _room_for(self, prompt_size: int) -> int:
        """How many tokens may be drawn: what was asked for, or all that the context has room for."""
        context = self._decoder.config.max_length
        asked = self._sampling.max_tokens
        if context is None:  # memory makes room for any length; without a word it goes on for a segment
            return asked or self._decoder.config.context_length
        room = context - prompt_size + 1
        if room < 1:
            raise too_long(str(prompt_size - 1), context)
        if asked is not None and asked > room:
            raise InvalidInput(
                f"max_tokens is {asked}; after a prompt of {prompt_size - 1} tokens the context of {context} has"
                f" room for {room}: ask for at most that, or leave max_tokens out",
                field="max_tokens",
            )
        return asked or room

    def _accept(self, request_id: str) -> Accepted:
        retriever = self.retriever
        return Accepted(
            request_id=request_id or secrets.token_hex(8),
            seed=self._seed,
            store=retriever.name if retriever else None,
            k=retriever.k if retriever else 0,
            lam=retriever.lam if retriever else 0.0,
            knn_temperature=retriever.temperature if retriever else 0.0,
        )


def too_long(size: str, context: int) -> InvalidInput:
    """The error for a prompt of `size` tokens."""
    return InvalidInput(
        f"the prompt has {size} tokens; the model takes at most {context - 1}: shorten the prompt", field="prompt"
    )
