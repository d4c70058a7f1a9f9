"""Passages of stored documents, encoded again as the build encoded them: what checks and tuning measure a store on.

A passage is the beginning of a document or one of its later windows. Beginnings come first, each of another document,
drawn at random. Encoding stops at a number of tokens or when its time is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import cycle, islice

import numpy as np
from jaxtyping import Float32, Int64

from memlm.base.progress import Progress, silent
from memlm.data.windows import Window, WindowSize, blocks_of
from memlm.index.neighbors import Neighbors
from memlm.index.store.snapshot import Snapshot, Span
from memlm.indexing.fitting import Evidence
from memlm.indexing.quality import Queries
from memlm.model import Decoder
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import Encoder, Prediction, document_windows

BEGINNING_TOKENS = 512  # of a longer document: a piece of work that is short beside the time allowed
MAX_DOCUMENTS = 512
MAX_TOKENS = 8192
MAX_PROMPTS, LONGEST_PROMPT, PROMPT_TOKENS = 32, 64, 8
PROMPTS_AT_ONCE = 8


@dataclass(slots=True)
class TimeLimit:
    """The seconds that some work may take, from the moment this is made. `was_reached` once work was refused."""

    seconds: float = math.inf
    begin_s: float = 0.0
    was_reached: bool = False

    @classmethod
    def starting_now(cls, seconds: float) -> TimeLimit:
        """Starts the clock."""
        return cls(seconds, time.perf_counter())

    @property
    def passed_s(self) -> float:
        """The seconds since the start."""
        return time.perf_counter() - self.begin_s

    def allows(self, more_s: float) -> bool:
        """Whether work of so many seconds would still end in time."""
        if math.isinf(self.seconds) or self.passed_s + more_s <= self.seconds:
            return True
        self.was_reached = True
        return False


NO_LIMIT = TimeLimit()


@dataclass(frozen=True, slots=True)
class Passages:
    """Q positions of stored documents: ids, keys, the tokens that follow, the log-probabilities that the model gives
    these and the likeliest tokens, and the number of each one's passage.
    """

    ids_Q: Int64[np.ndarray, " Q"]
    keys_QD: Float32[np.ndarray, "Q D"]
    targets_Q: Int64[np.ndarray, " Q"]
    lm_logprobs_Q: Float32[np.ndarray, " Q"]
    max_logprobs_Q: Float32[np.ndarray, " Q"]
    passages_Q: Int64[np.ndarray, " Q"]

    def queries(self, snapshot: Snapshot, most: int | None = None, seed: int = 0) -> Queries:
        """Returns the positions as queries without their own documents, or `most` of them at random."""
        count = len(self.ids_Q)
        rows_Q = np.arange(count)
        if most is not None and most < count:
            rows_Q = np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
        return Queries(
            ids_Q=self.ids_Q[rows_Q],
            keys_QD=self.keys_QD[rows_Q],
            targets_Q=self.targets_Q[rows_Q],
            lm_logprobs_Q=self.lm_logprobs_Q[rows_Q],
            documents_Q=snapshot.document_of(self.ids_Q[rows_Q]),
        )

    def evidence(self, found: Neighbors, windows_Q: Int64[np.ndarray, " Q"] | None = None) -> Evidence:
        """Returns the positions with the neighbors that were found for them, as evidence of tuning."""
        return Evidence(
            lm_logprobs_Q=self.lm_logprobs_Q,
            max_logprobs_Q=self.max_logprobs_Q,
            windows_Q=self.passages_Q if windows_Q is None else windows_Q,
            found=found,
            agrees_QK=found.values_QK == self.targets_Q[:, None],
        )


def sample_passages(
    snapshot: Snapshot,
    checkpoint: Checkpoint,
    *,
    newest: bool = False,
    max_tokens: int = MAX_TOKENS,
    limit: TimeLimit = NO_LIMIT,
    seed: int = 0,
    progress: Progress = silent,
) -> Passages:
    """Encodes passages of a store, or of its `newest` segment, until `max_tokens` positions are there or another
    passage might exceed the limit. The first passage is always encoded.
    """
    spans = snapshot.sample_documents(MAX_DOCUMENTS, seed, newest=newest)
    total = min(max_tokens, sum(span.num_entries for span in spans))
    encoding = _Encoding(checkpoint.decoder, limit, progress, "check", total)
    for first_id, windows in _passages(snapshot, checkpoint, spans, seed):
        if encoding.count >= total or not encoding.add([(first_id, windows)]):
            break
    return encoding.passages()


def sample_prompts(
    snapshot: Snapshot,
    checkpoint: Checkpoint,
    *,
    most: int = MAX_PROMPTS,
    limit: TimeLimit = NO_LIMIT,
    seed: int = 0,
    progress: Progress = silent,
) -> Passages:
    """Encodes `most` pieces of a store's documents without what stands before them, as a prompt with this text is read.
    The first positions of each are left out, because a prompt is longer. Few documents give several pieces each, and
    those that are too short give none.
    """
    rng, decoder, start_id = np.random.default_rng(seed), checkpoint.decoder, checkpoint.tokenizer.start_id
    size = WindowSize(snapshot.manifest.spec.context, snapshot.manifest.spec.stride)
    spans = [span for span in snapshot.sample_documents(MAX_DOCUMENTS, seed) if span.num_entries > 2 * PROMPT_TOKENS]
    spans = [spans[place] for place in rng.permutation(len(spans))]
    pieces = list[tuple[int, list[Window]]]()
    for span in islice(cycle(spans), most):
        begin = int(rng.integers(1, max(2, span.num_entries - LONGEST_PROMPT + 1)))
        end = min(begin + LONGEST_PROMPT, span.num_entries)
        tokens_n = snapshot.tokens(span.document_id, begin, end)
        pieces.append((span.first_id + begin, list(document_windows(decoder, tokens_n, start_id, size))))
    encoding = _Encoding(decoder, limit, progress, "tune", len(pieces) * (LONGEST_PROMPT - PROMPT_TOKENS))
    for together in blocks_of(pieces, PROMPTS_AT_ONCE):
        if not encoding.add(together, skip=PROMPT_TOKENS):
            break
    return encoding.passages()


class _Encoding:
    """Passages as they are encoded, one after another, within a time limit."""

    def __init__(self, decoder: Decoder, limit: TimeLimit, progress: Progress, phase: str, total: int) -> None:
        self.count, self._longest_s, self._number, self._decoder = 0, 0.0, 0, decoder
        self._limit, self._progress, self._phase, self._total = limit, progress, phase, total
        ids, logprobs = np.empty(0, np.int64), np.empty(0, np.float32)
        self._parts = [Passages(ids, np.empty((0, decoder.config.dim), np.float32), ids, logprobs, logprobs, ids)]
        progress(phase, 0, total)

    def add(self, passages: list[tuple[int, list[Window]]], *, skip: int = 0) -> bool:
        """Encodes passages together, each given by the id of its first entry and its windows, and drops the first
        `skip` positions of each. Returns False, without doing so, if it might exceed the limit, except for the first.
        """
        if self._number and not self._limit.allows(self._longest_s):
            return False
        begin_s = time.perf_counter()
        read = iter(Encoder(self._decoder).predictions([window for _, windows in passages for window in windows]))
        for first_id, windows in passages:
            self._put(first_id, windows, list(islice(read, len(windows))), skip)
        self._longest_s = max(self._longest_s, time.perf_counter() - begin_s)
        self._progress(self._phase, min(self.count, self._total), self._total)
        return True

    def _put(self, first_id: int, windows: list[Window], read: list[Prediction], skip: int) -> None:
        targets_N = np.concatenate([window.targets_N for window in windows])
        self._parts.append(
            Passages(
                ids_Q=np.arange(first_id, first_id + len(targets_N))[skip:],
                keys_QD=np.concatenate([each.keys_ND for each in read])[skip:],
                targets_Q=targets_N[skip:],
                lm_logprobs_Q=np.concatenate([each.logprobs_N for each in read])[skip:],
                max_logprobs_Q=np.concatenate([each.max_logprobs_N for each in read])[skip:],
                passages_Q=np.full(len(targets_N), self._number)[skip:],
            )
        )
        self._number, self.count = self._number + 1, self.count + len(targets_N) - skip

    def passages(self) -> Passages:
        """Returns the encoded passages."""
        self._progress(self._phase, self._total, self._total)
        return Passages(
            *(np.concatenate([getattr(part, each.name) for part in self._parts]) for each in fields(Passages))
        )


def _passages(
    snapshot: Snapshot, checkpoint: Checkpoint, spans: list[Span], seed: int
) -> Iterator[tuple[int, list[Window]]]:
    """Yields the first entry's id and the windows of each passage."""
    spec, decoder = snapshot.manifest.spec, checkpoint.decoder
    rng = np.random.default_rng(seed)
    spans = [spans[place] for place in rng.permutation(len(spans))]
    for span in spans:
        tokens_n = snapshot.tokens(span.document_id, 0, min(BEGINNING_TOKENS, spec.context))
        windows = document_windows(
            decoder, tokens_n, checkpoint.tokenizer.start_id, WindowSize(spec.context, spec.stride)
        )
        yield span.first_id, list(windows)
    if decoder.config.is_segmented:  # a later segment needs all before it
        return
    later = [(span, begin) for span in spans for begin in range(spec.context, span.num_entries, spec.stride)]
    for place in rng.permutation(len(later)):
        span, begin = later[place]
        yield span.first_id + begin, [_window_at(snapshot, span, begin)]


def _window_at(snapshot: Snapshot, span: Span, begin: int) -> Window:
    """Returns the window of a document that predicts the tokens from `begin` on, as building cut it."""
    spec = snapshot.manifest.spec
    end = min(begin + spec.stride, span.num_entries)
    first = end - spec.context  # above 0, because the first window predicts a whole context
    tokens_n = snapshot.tokens(span.document_id, first - 1, end)
    return Window(tokens_n[:-1], tokens_n[begin - end :])
