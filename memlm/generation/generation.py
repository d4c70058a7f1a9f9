"""One text being continued: the state that a sequence has of its own.

`Batch` decodes sequences together. After each forward pass it gives every sequence its log-probabilities and neighbors,
for its last token and for each token of its draft. `Generation.sample_run` mixes them, samples token after token while
the samples are those of the draft, and returns the tokens that may be shown.
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
from memlm.api.generation import (
    Accepted,
    DraftSource,
    DraftUsage,
    Finished,
    FinishReason,
    Neighbor,
    Token,
    Usage,
)
from memlm.api.params import MAX_SEED, StreamRequest
from memlm.base.steps import Steps
from memlm.generation.detokenizer import Detokenizer
from memlm.generation.draft_budget import DraftBudget, Survival
from memlm.generation.drafting import LONGEST_DRAFT, Draft, Drafter
from memlm.generation.prompts import EncodedPrompt, prompt_steps, room_for
from memlm.generation.sampling import alternatives, sample
from memlm.generation.seams import OwnDecoder
from memlm.generation.session_files import SessionState
from memlm.generation.session_reading import copied_aside
from memlm.generation.sessions import Lease
from memlm.generation.usage import with_token
from memlm.model import DecoderState
from memlm.model.checkpoint import Checkpoint
from memlm.retrieval.loop_guard import WINDOW
from memlm.retrieval.own_past import OwnPast, describe_past, mix_memories
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore


class Generation:
    """A sequence of a batch: its request, its session, and the text generated so far.

    `pending_ids` are the tokens that the model reads next: at first the prompt, then the last token. `draft` is read
    behind them. After the last token `finished` is set. Raises InvalidInput for a prompt or a length that the model
    does not take.
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
        self.own_decoder = own_decoder
        self._decoder, self._tokenizer = checkpoint.decoder, checkpoint.tokenizer
        self._request, self.adapter, self._begun_s = request, request.adapter, time.perf_counter()
        self.retriever = retriever
        self._sampling = request.sampling.or_else(checkpoint.sampling)
        self._lease, self._session, self.past = lease, lease.state if lease else SessionState(), past
        self._is_chat = isinstance(request, ChatRequest)
        self._end_ids = checkpoint.chat_end_ids if self._is_chat else self._tokenizer.end_ids
        as_document = retriever is not None and retriever.changes_output
        self.pending_ids = prompt.behind(self._session, request, self._tokenizer, as_document=as_document)
        self._context_ids = [*self._session.context_ids, *prompt.ids]
        self.prompt_positions = self._session.num_read + len(self.pending_ids)
        # Where the token that follows the first position of the past stands in the text.
        self._first_place = len(self._context_ids) - self.prompt_positions + 1
        if past is not None:
            self._first_place += self._session.num_read - len(past.cache)
        self._max_tokens = room_for(checkpoint, self.prompt_positions, self._sampling.max_tokens)
        self.max_positions = self.prompt_positions + self._max_tokens - 1
        seed = secrets.randbelow(MAX_SEED) if self._sampling.seed is None else self._sampling.seed
        self._rng, self._detokenizer = np.random.default_rng(seed), Detokenizer(self._sampling.stop)
        self.accepted = Accepted(
            request_id=request_id or secrets.token_hex(8),
            seed=seed,
            store=retriever.name or None if retriever else None,
            k=retriever.k if retriever else 0,
            lam=retriever.lam if retriever else 0.0,
            knn_temperature=retriever.temperature if retriever else 0.0,
        )
        self.usage = Usage(prompt_tokens=len(prompt.ids))
        self.finished: Finished | None = None
        self.draft: Draft | None = None
        self._drafter = self._new_drafter(prompt.expected_ids)
        self._survival = Survival(DraftBudget.of(checkpoint.decoder).experience(self.stores).survival)
        self._draft_counts: dict[DraftSource, tuple[int, int, int]] = {}

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

    def _new_drafter(self, expected_ids: Sequence[int]) -> Drafter | None:
        """By default, drafts come only where they change not even the last bits of a probability. Rows with an adapter
        are read in torch.
        """
        asked = self._request.drafts
        wants_drafts = (self._decoder.reads_alike and self.adapter is None) if asked is None else asked > 0
        if not wants_drafts or self.own_decoder is not None:
            return None
        retriever = self.retriever
        gives_drafts = self.needs_retrieval or (retriever is not None and retriever.draft_stores)
        return Drafter(self._context_ids, expected_ids, retriever if gives_drafts else None)

    @property
    def num_pending(self) -> int:
        """The number of `pending_ids`."""
        return len(self.pending_ids)

    @property
    def ids_to_read(self) -> list[int]:
        """The tokens of the next pass: those that are pending, and the draft."""
        return self.pending_ids if self.draft is None else [*self.pending_ids, *self.draft.token_ids]

    def guarded_ids(self, place: int = 0) -> list[int]:
        """The last tokens, up to a place of the draft, of which memory may repeat no run. Empty without the guard
        against loops.
        """
        changes_output = self.retriever is not None and self.retriever.changes_output
        if self.past is not None:
            changes_output |= self.past.is_searched
        if not changes_output or self._request.retrieval.loop_guard is False:
            return []
        drafted = [] if self.draft is None else self.draft.token_ids[:place]
        return [*self._context_ids[-WINDOW:], *drafted][-WINDOW:]

    @property
    def needs_retrieval(self) -> bool:
        """Whether neighbors can change the distribution, or are part of the answer."""
        return self.retriever is not None and self.retriever.is_needed(self._request.neighbors)

    @property
    def stores(self) -> tuple[ModelStore, ...]:
        """The datastores that the text and its drafts depend on."""
        return () if self.retriever is None else self.retriever.all_stores

    @property
    def continues(self) -> bool:
        """Whether its session has a KV cache."""
        return self._session.cache is not None

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

    def propose(self, room: int) -> tuple[list[float], bool]:
        """Sets the best draft of at most `room` tokens. Returns how likely each token is to be accepted along with all
        before it, and whether all of them are to be read at any cost.
        """
        self.draft, chances = None, list[float]()
        count = min(room, self._request.drafts or LONGEST_DRAFT, self._most_drafted)
        if self._drafter is not None and count > 0:
            for draft in self._drafter.drafts(count):
                expected = self._survival.chances(draft)
                if sum(expected) > sum(chances):
                    self.draft, chances = draft, expected
        return chances, self._request.drafts is not None

    @property
    def _most_drafted(self) -> int:
        return self._max_tokens - self.usage.generated_tokens - 1

    def shorten_draft(self, length: int) -> None:
        """Keeps the first tokens of the draft."""
        if self.draft is not None:
            self.draft = self.draft._replace(token_ids=self.draft.token_ids[:length]) if length else None

    def sample_run(
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
        draft, tokens, reason, num_accepted = self.draft, list[Token](), None, 0
        self.draft = None
        for place, lm_logprobs_V in enumerate(lm_logprobs_NV):
            own = None if past is None else past.row(place)
            shown, reason = self._sample_next(lm_logprobs_V, results[place], own, begin_s, is_first=place == 0)
            tokens += shown
            is_accepted = draft is not None and self.pending_ids == [*draft.token_ids[place : place + 1]]
            num_accepted += is_accepted
            if reason is not None or not is_accepted:
                break
            begin_s = time.perf_counter()
        if draft is not None and draft.token_ids:
            self._survival.add(draft, num_accepted)
            drafted, accepted, drafts = self._draft_counts.get(draft.source, (0, 0, 0))
            counts = drafted + len(draft.token_ids), accepted + num_accepted, drafts + 1
            self._draft_counts[draft.source] = counts
        num_read = min(place, num_accepted)
        if self.past is not None:
            self.past.cache.crop(len(self.past.cache) - len(lm_logprobs_NV) + 1 + num_read)
        if reason is not None:
            usages = (DraftUsage(source.value, *counts) for source, counts in sorted(self._draft_counts.items()))
            self.usage = replace(self.usage, drafts=tuple(usages))
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
        logprobs_V, knn, lam, memory = mix_memories(lm_logprobs_V, result, past)
        token_id = sample(logprobs_V, self._sampling, self._context_ids, self._rng)
        self.pending_ids = [token_id]
        self._context_ids.append(token_id)
        if self._drafter is not None:
            self._drafter.append(token_id, result)
        token, tokens, reason = None, list[Token](), None
        if token_id in self._end_ids:
            reason = FinishReason.END
        else:
            neighbors = () if memory is None else self._described(memory)
            token = Token(
                id=token_id,
                text="",
                bytes=self._bytes_of(token_id),
                logprob=float(logprobs_V[token_id]),
                lm_logprob=float(lm_logprobs_V[token_id]),
                knn_logprob=None if knn is None else knn.of(token_id),
                lam=lam,
                neighbors=neighbors,
                top_logprobs=alternatives(logprobs_V, self._request.top_logprobs, self._tokenizer),
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
        elapsed_ms = 1000 * (time.perf_counter() - begin_s)
        self.usage = with_token(self.usage, token, result, elapsed_ms, is_first=is_first)
        return tokens, reason

    def _described(self, memory: RetrievalResult) -> tuple[Neighbor, ...]:
        """The neighbors that are part of the answer."""
        if not (count := self._request.neighbors):
            return ()
        found = describe_past(memory, count, self._context_ids, self._first_place, self._tokenizer)
        if self.retriever is not None:
            found |= self.retriever.describe_columns(memory, count)
        return tuple(found[column] for column in sorted(found))

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

    def _bytes_of(self, token_id: int) -> bytes:
        """The token's bytes. The first token after an empty prompt lacks the space that encoding would have added."""
        piece = self._tokenizer.token_bytes[token_id] if token_id < self._tokenizer.vocab_size else b""
        is_alone = self._is_chat and not self.usage.generated_tokens  # an answer begins a text of its own
        is_first = is_alone or len(self._context_ids) == 1
        return piece.removeprefix(b" ") if is_first and self._tokenizer.prepends_space else piece
