"""One text being continued: the state that a sequence has of its own.

`Batch` decodes sequences together. After each forward pass it gives every sequence its log-probabilities and neighbors,
for its last token and for each token of its draft. `Generation.sample_draft` mixes them, samples token after token
while the samples are those of the draft, and returns the tokens that may be shown.
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
from memlm.api.generation import Accepted, Finished, FinishReason, Token, Usage
from memlm.api.params import MAX_SEED, StreamRequest
from memlm.base.steps import Steps
from memlm.generation.detokenizer import Detokenizer
from memlm.generation.drafts.budget import DraftBudget
from memlm.generation.drafts.drafts import Drafts
from memlm.generation.drafts.sources import Drafter
from memlm.generation.prefix_cache import Beginning, Scope
from memlm.generation.prompts import EncodedPrompt, prompt_steps, room_for
from memlm.generation.sampling import sample
from memlm.generation.seams import OwnDecoder
from memlm.generation.sessions.files import SessionState
from memlm.generation.sessions.reading import copied_aside
from memlm.generation.sessions.sessions import Lease
from memlm.generation.token_records import TokenRecords
from memlm.generation.usage import with_token
from memlm.model import DecoderState
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.loop_guard import WINDOW
from memlm.retrieval.own_past import OwnPast, with_past
from memlm.retrieval.result import RetrievalResult, mix_memory
from memlm.retrieval.retriever import Retriever


class Generation:
    """A sequence of a batch: its request, its session, and the text generated so far.

    `pending_ids` are the tokens that the model reads next: at first the prompt, then the last token. The tokens of
    `drafts` are read behind them. After the last token `finished` is set. With `scored_from`, a place in the prompt's
    `pending_ids`, `prompt_logprob` is the log-probability of those behind it, once they and it are read. Raises
    InvalidInput for a prompt or a length that the model does not take.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        request: StreamRequest,
        prompt: EncodedPrompt,
        retriever: Retriever | None,
        past: OwnPast | None = None,
        *,
        request_id: str = "",
        lease: Lease | None = None,
        own_decoder: OwnDecoder | None = None,
    ) -> None:
        """With a `lease`, the session's text comes before the prompt. The request names the session's adapter then.
        With an `own_decoder`, there is no `past`, and no neighbors are needed.
        """
        self._decoder, self._tokenizer, self.own_decoder = checkpoint.decoder, checkpoint.tokenizer, own_decoder
        self._request, self.adapter, self._begun_s = request, request.adapter, time.perf_counter()
        self.retriever, self.past = retriever, past
        self._lease, self._session = lease, lease.state if lease else SessionState()
        self._is_chat = isinstance(request, ChatRequest)
        self._end_ids = checkpoint.chat_end_ids if self._is_chat else self._tokenizer.end_ids
        as_document = retriever is not None and retriever.knn.changes_output
        self.pending_ids = prompt.behind(self._session, request, self._tokenizer, as_document=as_document)
        self._context_ids = [*self._session.context_ids, *prompt.ids]
        self._front_ids = self.pending_ids[: len(self.pending_ids) - len(prompt.ids)]  # the frame before the prompt
        self.caller, self.epoch = "", 0  # of its `scope`
        self.prompt_positions = self._session.num_read + len(self.pending_ids)
        self.scored_from: int | None = None
        self.prompt_logprob = 0.0
        self._sampling = request.sampling.or_else(checkpoint.sampling)
        self._max_tokens = room_for(checkpoint, self.prompt_positions, self._sampling.max_tokens)
        self.max_positions = self.prompt_positions + self._max_tokens - 1
        seed = secrets.randbelow(MAX_SEED) if self._sampling.seed is None else self._sampling.seed
        self._rng, self._detokenizer = np.random.default_rng(seed), Detokenizer(self._sampling.stop)
        self.accepted = _accepted(retriever, request_id or secrets.token_hex(8), seed)
        self.usage = Usage(prompt_tokens=len(prompt.ids))
        self.finished: Finished | None = None
        self.drafts = self._new_drafts(prompt.expected_ids)
        begin = 0 if past is None else self._session.num_read - len(past.cache)  # the first position of the past
        self._records = TokenRecords(
            self._tokenizer, retriever,
            num_neighbors=request.neighbors, num_alternatives=request.top_logprobs,
            first_place=begin + len(self._context_ids) - self.prompt_positions + 1,
        )  # fmt: skip

    @classmethod
    def start(
        cls,
        checkpoint: Checkpoint,
        request: StreamRequest,
        retriever: Retriever | None,
        past: OwnPast | None = None,
        *,
        request_id: str = "",
        lease: Lease | None = None,
        own_decoder: OwnDecoder | None = None,
    ) -> Steps[Generation]:
        """Encodes the prompt and makes the generation. An error ends the lease."""
        try:
            prompt = yield from prompt_steps(checkpoint, request, lease.state if lease else SessionState())
            return cls(
                checkpoint, request, prompt, retriever, past,
                request_id=request_id, lease=lease, own_decoder=own_decoder,
            )  # fmt: skip
        except BaseException:
            if lease is not None:
                lease.end(None)
            raise

    def _new_drafts(self, expected_ids: Sequence[int]) -> Drafts:
        """By default, drafts come only where they change not even the last bits of a probability. Rows with an adapter
        are read in torch.
        """
        asked, retriever, drafter = self._request.drafts, self.retriever, None
        wants_drafts = (self._decoder.reads_alike and self.adapter is None) if asked is None else asked > 0
        if wants_drafts and self.own_decoder is None:
            gives_drafts = self.needs_retrieval or (retriever is not None and retriever.draft_stores)
            drafter = Drafter(self._context_ids, expected_ids, retriever if gives_drafts else None)
        stores = () if retriever is None else retriever.all_stores
        return Drafts(DraftBudget.of(self._decoder), stores, drafter, asked=asked, max_tokens=self._max_tokens)

    @property
    def num_pending(self) -> int:
        """The number of `pending_ids`."""
        return len(self.pending_ids)

    @property
    def ids_to_read(self) -> list[int]:
        """The tokens of the next pass: those that are pending, and the draft."""
        return [*self.pending_ids, *self.drafts.token_ids]

    def guarded_ids(self, place: int = 0) -> list[int]:
        """The last tokens, up to a place of the draft, of which memory may repeat no run. Empty without the guard
        against loops.
        """
        changes_output = self.retriever is not None and self.retriever.knn.changes_output
        if self.past is not None:
            changes_output |= self.past.is_searched
        if not changes_output or self._request.retrieval.loop_guard is False:
            return []
        return [*self._context_ids[-WINDOW:], *self.drafts.token_ids[:place]][-WINDOW:]

    @property
    def needs_retrieval(self) -> bool:
        """Whether neighbors can change the distribution, or are part of the answer."""
        return self.retriever is not None and self.retriever.is_needed(self._request.neighbors)

    @property
    def continues(self) -> bool:
        """Whether its session has a KV cache."""
        return self._session.cache is not None

    @property
    def scope(self) -> Scope | None:
        """Texts that this one may go on from, or be kept for, share this with it. None where it is neither: a session
        has its own state, and a decoder of one's own leaves another one behind.
        """
        if self.has_session or self.own_decoder is not None:
            return None
        return Scope(self.caller, self.epoch, self.adapter, self.past is not None)

    def begin_behind(self, beginning: Beginning) -> None:
        """Counts the tokens of the prompt that need not be read, since their state is known."""
        self.usage = replace(self.usage, cached_tokens=max(0, beginning.length - len(self._front_ids)))
        if self.past is not None and (past := beginning.past()) is not None:
            self.past.cache = past

    def ids_read(self, count: int) -> list[int]:
        """The first tokens that the model has read of a text without a session."""
        return [*self._front_ids, *self._context_ids][:count]

    @property
    def has_session(self) -> bool:
        """Whether its KV cache goes back to a session."""
        return self._lease is not None

    def initial_state(self, capacity: int) -> Steps[DecoderState]:
        """Returns the KV cache to start from, with room for `capacity` tokens. A session's large one is copied
        outside the loop.
        """
        if self._session.cache is None:
            return self._decoder.new_state(capacity=capacity, adapters_B=[self.adapter])
        copy = partial(self._session.cache.extract_row, 0, capacity=capacity)
        return (yield from copied_aside(copy, self._session.num_bytes))

    def sample_draft(
        self,
        lm_logprobs_NV: Float[Tensor, "N V"],
        results: Sequence[RetrievalResult | None],
        begin_s: float,
        past: RetrievalResult | None = None,
    ) -> tuple[tuple[Token, ...], int]:
        """Samples a token for each of N positions, while it is the draft's, so that the next position was read rightly.

        Returns the tokens that may be shown, and how many tokens of the draft are part of the text. `results` have one
        row each. `begin_s` (perf_counter) is the start of the forward pass. `past` has the neighbors of the
        positions in the text's own past.
        """
        drafted, tokens, reason, num_accepted = self.drafts.token_ids, list[Token](), None, 0
        for place, lm_logprobs_V in enumerate(lm_logprobs_NV):
            own = None if past is None else past.row(place)
            shown, reason = self._sample_next(lm_logprobs_V, results[place], own, begin_s, is_first=place == 0)
            tokens += shown
            is_accepted = self.pending_ids == [*drafted[place : place + 1]]
            num_accepted += is_accepted
            if reason is not None or not is_accepted:
                break
            begin_s = time.perf_counter()
        self.drafts.settle(num_accepted)
        num_read = min(place, num_accepted)
        if self.past is not None:
            self.past.cache.crop(len(self.past.cache) - len(lm_logprobs_NV) + 1 + num_read)
        if reason is not None:
            self.usage = replace(self.usage, drafts=self.drafts.usages)
            self.finished = Finished(reason, self._detokenizer.stopped_by, self.usage)
        return tuple(tokens), num_read

    def _sample_next(
        self,
        lm_logprobs_V: Float[Tensor, " V"],
        result: RetrievalResult | None,
        past: RetrievalResult | None,
        begin_s: float,
        *,
        is_first: bool,
    ) -> tuple[list[Token], FinishReason | None]:
        """Mixes p_kNN of datastores and past into the model's distribution, and samples one token.

        Returns the tokens that may be shown, and the reason if it is the last.
        """
        mixed = mix_memory(lm_logprobs_V, result if past is None else with_past(result, past))
        token_id = sample(mixed.logprobs_V, self._sampling, self._context_ids, self._rng)
        self.pending_ids = [token_id]
        self._context_ids.append(token_id)
        self.drafts.append(token_id, result)
        token, tokens = None, list[Token]()
        if token_id not in self._end_ids:
            # An answer to messages begins a text of its own, as does one to an empty prompt.
            is_alone = self._is_chat and not self.usage.generated_tokens
            begins_text = is_alone or len(self._context_ids) == 1
            token = self._records.of(self._context_ids, lm_logprobs_V, mixed, is_first=begins_text)
            tokens = self._detokenizer.push(token)
        reason = self._reason(token)
        if reason is not None and reason is not FinishReason.STOP:
            tokens += self._detokenizer.finish()
        elapsed_ms = 1000 * (time.perf_counter() - begin_s)
        self.usage = with_token(self.usage, token, result, elapsed_ms, is_first=is_first)
        return tokens, reason

    def _reason(self, token: Token | None) -> FinishReason | None:
        """The reason why a token, None for the end of the text, is the last one. None if it is not."""
        if token is None:
            return FinishReason.END
        if self._detokenizer.stopped_by is not None:
            return FinishReason.STOP
        if self.usage.generated_tokens + 1 == self._max_tokens:
            return FinishReason.LENGTH
        is_late = time.perf_counter() - self._begun_s >= (self._sampling.time_limit_s or np.inf)
        return FinishReason.TIME if is_late else None

    def commit_to_session(self, state: DecoderState) -> Steps[None]:
        """After the last token, gives the session its new KV cache, and writes it where sessions are kept. A large
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
        past = None if self.past is None else self.past.cache
        answer_ends = (*self._session.answer_ends, *((len(context_ids),) if self._is_chat else ()))
        past_size = 0 if past is None else len(past)
        kept = SessionState(state, pending_ids, tuple(context_ids), answer_ends, past, past_size, self._session.adapter)
        yield from self._lease.keep(kept)

    def close(self) -> None:
        """Gives the session back, if there is one: unchanged, unless `commit_to_session` has ended."""
        if self._lease is not None:
            self._lease.end(None)


def _accepted(retriever: Retriever | None, request_id: str, seed: int) -> Accepted:
    """The first event of a generation."""
    if retriever is None:
        return Accepted(request_id, seed, store=None, k=0, lam=0.0, knn_temperature=0.0)
    store = retriever.name or None  # without one that is searched, there is no name
    knn = retriever.knn.k, retriever.knn.lam, retriever.knn.temperature
    return Accepted(request_id, seed, store, *knn, keyed_share=retriever.keyed_share)
