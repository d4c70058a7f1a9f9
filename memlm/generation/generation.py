"""One text being continued: the state that a sequence has of its own.

`Batch` decodes sequences together. After each forward pass it gives every sequence its log-probabilities and neighbors.
`Generation.sample_next` mixes them, samples one token, and returns the tokens that may be shown.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float
from torch import Tensor

from memlm.api.chat import ChatRequest
from memlm.api.generation import Accepted, Alternative, Finished, FinishReason, Neighbor, Token, Usage
from memlm.api.params import MAX_SEED, GenerateRequest, StreamRequest
from memlm.base.steps import Steps
from memlm.errors import InvalidInput
from memlm.generation.detokenizer import Detokenizer
from memlm.generation.early_exit import EarlyExitDecoder, load_rule
from memlm.generation.prompts import prompt_steps, too_long
from memlm.generation.sampling import sample
from memlm.generation.session_files import SessionState
from memlm.generation.sessions import Lease, copied_aside
from memlm.model import DecoderState
from memlm.model.checkpoint import Checkpoint
from memlm.retrieval.interpolation import knn_logprobs, mix
from memlm.retrieval.loop_guard import WINDOW
from memlm.retrieval.policy import RetrievalPolicy
from memlm.retrieval.retriever import RetrievalResult, Retriever


class Generation:
    """A sequence of a batch: its request, its session, and the text generated so far.

    `pending_ids` are the tokens that the model reads next: at first the prompt, then the last token. After the last
    token `finished` is set. Raises InvalidInput for a prompt or a length that the model does not take.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        request: StreamRequest,
        prompt_ids: Sequence[int],
        retriever: Retriever | None,
        *,
        request_id: str = "",
        lease: Lease | None = None,
    ) -> None:
        """`prompt_ids` is the request's prompt, encoded. With a `lease`, the session's text comes before it."""
        self._decoder, self._tokenizer = checkpoint.decoder, checkpoint.tokenizer
        self._request, self._begun_s = request, time.perf_counter()
        self.retriever, self.policy = retriever, retriever.new_policy() if retriever else RetrievalPolicy()
        self._sampling = request.sampling.or_else(checkpoint.sampling)
        self._lease, self._session = lease, lease.state if lease else SessionState()
        self._is_chat = isinstance(request, ChatRequest)
        self._end_ids = checkpoint.chat_end_ids if self._is_chat else self._tokenizer.end_ids
        is_text = isinstance(request, GenerateRequest) and not request.prompt_token_ids
        if not self._session.context_ids and not is_text:
            self.pending_ids = [*prompt_ids]
        elif not self._session.context_ids:
            as_document = retriever is not None and retriever.changes_output
            self.pending_ids = self._tokenizer.framed(prompt_ids, as_document=as_document)
        else:
            self.pending_ids = [*self._session.pending_ids, *prompt_ids]
        if not self.pending_ids:
            raise InvalidInput("the session's text has ended; give a prompt to go on with", field="prompt")
        self._context_ids = [*self._session.context_ids, *prompt_ids]
        self.prompt_positions = self._session.num_read + len(self.pending_ids)
        self._max_tokens = _room_for(checkpoint, self.prompt_positions, self._sampling.max_tokens)
        self.max_positions = self.prompt_positions + self._max_tokens - 1
        # A decoder that is not shared with the batch: the number of layers differs from token to token.
        self.own_decoder: EarlyExitDecoder | None = None
        if request.early_exit:
            if self.needs_retrieval:
                raise InvalidInput(
                    "early_exit leaves out the layer whose input the datastore is searched with; ask without a"
                    " datastore, or without early_exit",
                    field="early_exit",
                )
            self.own_decoder = EarlyExitDecoder(checkpoint.decoder, load_rule(checkpoint.path))
        seed = secrets.randbelow(MAX_SEED) if self._sampling.seed is None else self._sampling.seed
        self._rng, self._detokenizer = np.random.default_rng(seed), Detokenizer(self._sampling.stop)
        self.accepted = Accepted(
            request_id=request_id or secrets.token_hex(8),
            seed=seed,
            store=retriever.name if retriever else None,
            k=retriever.k if retriever else 0,
            lam=retriever.lam if retriever else 0.0,
            knn_temperature=retriever.temperature if retriever else 0.0,
        )
        self.usage = Usage(prompt_tokens=len(prompt_ids))
        self.finished: Finished | None = None

    @classmethod
    def start(
        cls,
        checkpoint: Checkpoint,
        request: StreamRequest,
        retriever: Retriever | None,
        *,
        request_id: str = "",
        lease: Lease | None = None,
    ) -> Steps[Generation]:
        """Encodes the prompt and makes the generation. An error ends the lease."""
        try:
            prompt_ids = yield from prompt_steps(checkpoint, request, lease.state if lease else SessionState())
            return cls(checkpoint, request, prompt_ids, retriever, request_id=request_id, lease=lease)
        except BaseException:
            if lease is not None:
                lease.end(None)
            raise

    @property
    def guarded_ids(self) -> list[int]:
        """The last tokens, of which memory may repeat no run. Empty without the guard against loops."""
        changes_output = self.retriever is not None and self.retriever.changes_output
        if not changes_output or self._request.retrieval.loop_guard is False:
            return []
        return self._context_ids[-WINDOW:]

    @property
    def needs_retrieval(self) -> bool:
        """Whether neighbors can change the distribution, or are part of the answer."""
        return self.retriever is not None and (self.retriever.changes_output or bool(self._request.neighbors))

    @property
    def continues(self) -> bool:
        """Whether its session has a context cache."""
        return self._session.cache is not None

    @property
    def has_session(self) -> bool:
        """Whether its context cache goes back to a session."""
        return self._lease is not None

    def initial_state(self, capacity: int) -> Steps[DecoderState]:
        """Returns the context cache to start from, with room for `capacity` tokens. A session's large one is copied
        outside the loop.
        """
        if self._session.cache is None:
            return self._decoder.new_state(capacity=capacity)
        copy = partial(self._session.cache.extract_row, 0, capacity=capacity)
        return (yield from copied_aside(copy, self._session.num_bytes))

    def sample_next(
        self, lm_logprobs_V: Float[Tensor, " V"], result: RetrievalResult | None, begin_s: float
    ) -> tuple[Token, ...]:
        """Mixes p_kNN into the model's distribution, samples one token, and returns the tokens that may be shown.

        `result` has this sequence's one row. `begin_s` (perf_counter) is the start of the forward pass.
        """
        knn, lam = None, 0.0
        if result is not None:
            knn = knn_logprobs(result.logweights_QK[0], result.neighbors.values_QK[0])
            lam = 0.0 if knn is None else float(result.lams_Q[0])
        logprobs_V = mix(lm_logprobs_V, knn, lam)
        token_id = sample(logprobs_V, self._sampling, self._context_ids, self._rng)
        self.pending_ids = [token_id]
        self._context_ids.append(token_id)
        if result is not None:
            self.policy.observe(result.neighbors, token_id)
        token, tokens, reason = None, list[Token](), None
        if token_id in self._end_ids:
            reason = FinishReason.END
        else:
            neighbors: tuple[Neighbor, ...] = ()
            if result is not None and self.retriever is not None and self._request.neighbors:
                neighbors = self.retriever.describe(result, self._request.neighbors)
            token = Token(
                id=token_id,
                text="",
                bytes=self._bytes_of(token_id),
                logprob=float(logprobs_V[token_id]),
                lm_logprob=float(lm_logprobs_V[token_id]),
                knn_logprob=None if knn is None else knn.of(token_id),
                lam=lam,
                neighbors=neighbors,
                top_logprobs=self._top_logprobs(logprobs_V),
            )
            tokens = self._detokenizer.push(token)
            if self._detokenizer.stopped_by is not None:
                reason = FinishReason.STOP
            elif self.usage.generated_tokens + 1 == self._max_tokens:
                reason = FinishReason.LENGTH
            elif time.perf_counter() - self._begun_s >= (self._sampling.time_limit_s or np.inf):
                reason = FinishReason.TIME
        if reason is not None and reason is not FinishReason.STOP:
            tokens += self._detokenizer.finish()
        self._count(token, result, 1000 * (time.perf_counter() - begin_s))
        if reason is not None:
            self.finished = Finished(reason, self._detokenizer.stopped_by, self.usage)
        return tuple(tokens)

    def commit_to_session(self, state: DecoderState) -> Steps[None]:
        """After the last token, gives the session its new context cache, and writes it where sessions are kept. A large
        cache is trimmed to the tokens read, outside the loop.
        """
        if self._lease is None or self.finished is None:
            return
        used = max(state.places_B())
        if state.num_front + state.num_local != used:
            state = yield from copied_aside(partial(state.extract_row, 0), state.num_bytes)
        ended = self.finished.reason is FinishReason.END  # the model's end of text is no part of the session's
        context_ids = self._context_ids[:-1] if ended else self._context_ids
        pending_ids = () if ended else tuple(self.pending_ids)
        yield from self._lease.keep(SessionState(state, pending_ids, tuple(context_ids), ends_in_answer=self._is_chat))

    def close(self) -> None:
        """Gives the session back, if there is one: unchanged, unless `commit_to_session` has ended."""
        if self._lease is not None:
            self._lease.end(None)

    def _bytes_of(self, token_id: int) -> bytes:
        """The token's bytes. The first token after an empty prompt lacks the space that encoding would have added."""
        piece = self._tokenizer.token_bytes[token_id] if token_id < self._tokenizer.vocab_size else b""
        is_alone = self._is_chat and not self.usage.generated_tokens  # an answer begins a text of its own
        is_first = is_alone or len(self._context_ids) == 1
        return piece.removeprefix(b" ") if is_first and self._tokenizer.prepends_space else piece

    def _top_logprobs(self, logprobs_V: Float[Tensor, " V"]) -> tuple[Alternative, ...]:
        if not self._request.top_logprobs:
            return ()
        best = logprobs_V.topk(min(self._request.top_logprobs, len(logprobs_V)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return tuple(Alternative(token_id, self._tokenizer.decode([token_id]), logprob) for token_id, logprob in pairs)

    def _count(self, token: Token | None, result: RetrievalResult | None, elapsed_ms: float) -> None:
        before, count = self.usage, self.usage.generated_tokens + (token is not None)
        is_prefill = before.generated_tokens == 0
        self.usage = replace(
            before,
            generated_tokens=count,
            retrieved_neighbors=before.retrieved_neighbors
            + (0 if result is None else int((result.neighbors.ids_QK >= 0).sum())),
            searches=before.searches + (result is not None and bool(result.searched_Q[0])),
            prefill_ms=before.prefill_ms + elapsed_ms * is_prefill,
            decode_ms=before.decode_ms + elapsed_ms * (not is_prefill),
            retrieval_ms=before.retrieval_ms + (0.0 if result is None else result.took_ms),
            lam=before.lam if token is None else before.lam + (token.lam - before.lam) / count,
        )


def _room_for(checkpoint: Checkpoint, num_positions: int, max_tokens: int | None) -> int:
    """Returns how many tokens may be generated after `num_positions`: `max_tokens`, or all that fit the context."""
    config = checkpoint.decoder.config
    if config.max_length is None:  # Transformer-XL memory takes any length; without a limit, one segment
        return max_tokens or config.context_length
    room = config.max_length - num_positions + 1
    if room < 1:
        raise too_long(str(num_positions - 1), config.max_length)
    if max_tokens is not None and max_tokens > room:
        raise InvalidInput(
            f"max_tokens is {max_tokens}; after a prompt of {num_positions - 1} tokens the context of"
            f" {config.max_length} has room for {room}: ask for at most that, or leave max_tokens out",
            field="max_tokens",
        )
    return max_tokens or room
