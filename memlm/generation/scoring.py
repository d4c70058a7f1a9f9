"""A given text -> its log-probability, token by token, under the model and under the mixture with p_kNN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64

from memlm.api.scoring import Figures, Score, ScoreRequest, TokenScore
from memlm.base.steps import Steps
from memlm.data.windows import Window, blocks_of
from memlm.errors import InvalidInput
from memlm.generation.likeliest import Likeliest, check_alternatives, likeliest
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder, Prediction
from memlm.retrieval.encoder import document_windows as windows_for
from memlm.retrieval.gate import SpalmGate, gated
from memlm.retrieval.own_past import OwnPast, with_past
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever

COUNTED_CHARACTERS = 1 << 16
STEP_WINDOWS = 4  # a step is short, since other requests wait for it


class Scored(NamedTuple):
    """N consecutive tokens with their log-probabilities under p_LM, p_kNN and the mixture (without retrieval None), and
    on request the likeliest tokens. `searched_share` is as in `Usage`.
    """

    targets_N: Int64[np.ndarray, " N"]
    lm_logprobs_N: Float32[np.ndarray, " N"]
    knn_logprobs_N: Float32[np.ndarray, " N"] | None
    logprobs_N: Float32[np.ndarray, " N"] | None
    likeliest: Likeliest | None = None
    searched_share: float | None = None


def score_windows(
    checkpoint: Checkpoint,
    windows: Iterator[Window],
    retriever: Retriever | None,
    past: OwnPast | None = None,
    *,
    at_once: int = BLOCK_WINDOWS,
) -> Iterator[Scored]:
    """Scores the windows of one document as they come, `at_once` of them in a block."""
    for scored in score_parts(checkpoint, windows, retriever, past, at_once=at_once):
        if scored is not None:
            yield scored


def score_parts(
    checkpoint: Checkpoint,
    windows: Iterator[Window],
    retriever: Retriever | None,
    past: OwnPast | None = None,
    *,
    at_once: int,
    top_logprobs: int = 0,
    may_be_partial: bool = False,
) -> Iterator[Scored | None]:
    """Scores the windows of one document, with the datastores of a retriever and the document's own `past`, which is
    empty at first. Yields None after a piece of work without a result. `may_be_partial` is as in `Retriever.search`.
    """
    encoder, gate = Encoder(checkpoint.decoder), retriever.knn.gate if retriever else None
    for block in blocks_of(windows, at_once):
        for part in encoder.parts(block, hidden=gate is not None or top_logprobs > 0):
            if part is None:
                yield None
                continue
            targets_N, read = part
            found, share, lm_logprobs_N = None, None, read.logprobs_N
            if retriever is not None:
                found = retriever.search(read.keys_ND, read.max_logprobs_N, may_be_partial=may_be_partial)
                share = found.share
                if gate is not None:
                    lm_logprobs_N = _gated_logprobs(checkpoint, gate, read, found, targets_N)
            if past is not None:
                past.cache.append(read.keys_ND, targets_N)
                found = with_past(found, past.search(read.keys_ND, read.max_logprobs_N))
            if found is None:
                top = _likeliest(checkpoint, None, read, None, top_logprobs)
                yield Scored(targets_N, read.logprobs_N, None, None, top)
                continue
            knn_N, mixed_N = found.mix_targets(lm_logprobs_N, targets_N)
            top = _likeliest(checkpoint, gate, read, found, top_logprobs)
            yield Scored(targets_N, read.logprobs_N, knn_N, mixed_N, top, share)


def _likeliest(
    checkpoint: Checkpoint, gate: SpalmGate | None, read: Prediction, found: RetrievalResult | None, number: int
) -> Likeliest | None:
    """The likeliest tokens, where any are asked for."""
    if not number:
        return None
    hidden_ND = read.hidden_ND
    assert hidden_ND is not None  # asked for them, the encoder returns these
    if gate is not None and found is not None:
        with torch.inference_mode():
            hidden_ND = gated(checkpoint.decoder, gate, hidden_ND, found.neighbors)
    return likeliest(checkpoint.decoder, hidden_ND, found, number)


def _gated_logprobs(
    checkpoint: Checkpoint,
    gate: SpalmGate,
    read: Prediction,
    found: RetrievalResult,
    targets_N: Int64[np.ndarray, " N"],
) -> Float32[np.ndarray, " N"]:
    """Returns the log-probabilities of targets after the gate."""
    assert read.hidden_ND is not None  # given a gate, the encoder returns them
    with torch.inference_mode():
        hidden_ND = gated(checkpoint.decoder, gate, read.hidden_ND, found.neighbors).to(checkpoint.decoder.dtype)
        logprobs_NV = checkpoint.decoder.logprobs(hidden_ND)
        targets_N1 = torch.from_numpy(targets_N)[:, None].to(logprobs_NV.device)
        return logprobs_NV.gather(1, targets_N1)[:, 0].cpu().numpy()


def score_text(
    checkpoint: Checkpoint, request: ScoreRequest, retriever: Retriever | None, past: OwnPast | None = None
) -> Steps[Score]:
    """Scores one text, a few windows or a piece of a long one a step. Raises InvalidInput for an empty text."""
    tokenizer, text = checkpoint.tokenizer, request.text
    if request.token_ids:
        yield from tokenizer.check_ids(request.token_ids, "token_ids")
        start_id, *ids = request.token_ids
        text = yield from tokenizer.decode_steps(ids, whole=True)
    elif text:
        start_id, ids = tokenizer.start_id, (yield from tokenizer.encode_steps(text))
    else:
        raise InvalidInput("the text is empty; give at least one character", field="text")
    check_alternatives(len(ids), request.top_logprobs)
    accumulator, details = ScoreAccumulator(), list[TokenScore]()
    size = retriever.window_size if retriever else None
    windows = windows_for(checkpoint.decoder, np.asarray(ids, dtype=np.int64), start_id, size)
    yield None  # from here on it needs the model
    parts = score_parts(
        checkpoint, windows, retriever, past,
        at_once=STEP_WINDOWS, top_logprobs=request.top_logprobs, may_be_partial=True,
    )  # fmt: skip
    for scored in parts:
        if scored is not None:
            accumulator.add(scored)
            details.extend(_details(scored, checkpoint) if request.token_scores else ())
        yield None
    yield from accumulator.add_text(text)
    return accumulator.score(retriever, tuple(details))


@dataclass
class ScoreAccumulator:
    """Sums over texts, from which the figures follow. Log-probabilities are added in float64."""

    tokens: int = 0
    words: int = 0
    num_bytes: int = 0
    base_nll: float = 0.0
    knn_nll: float = 0.0
    has_memory: bool = False
    searched_share: float | None = None

    def add(self, scored: Scored) -> None:
        """Adds tokens."""
        self.tokens += len(scored.targets_N)
        self.base_nll -= float(scored.lm_logprobs_N.sum(dtype=np.float64))
        if scored.logprobs_N is not None:
            self.has_memory = True
            self.knn_nll -= float(scored.logprobs_N.sum(dtype=np.float64))
        if scored.searched_share is not None:
            before = 1.0 if self.searched_share is None else self.searched_share
            self.searched_share = min(before, scored.searched_share)

    def add_text(self, text: str) -> Steps[None]:
        """Adds a text's words and bytes, a bounded part a step. Words are runs of characters other than white space,
        plus one for each newline.
        """
        in_word = False
        for begin in range(0, len(text), COUNTED_CHARACTERS):
            part = text[begin : begin + COUNTED_CHARACTERS]
            self.words += len(part.split()) + part.count("\n") - (in_word and not part[0].isspace())
            self.num_bytes += len(part.encode())
            in_word = not part[-1].isspace()
            if begin + COUNTED_CHARACTERS < len(text):
                yield None

    def score(self, retriever: Retriever | None, token_scores: tuple[TokenScore, ...] = ()) -> Score:
        """Returns the figures of all that was added."""
        counts = {"tokens": self.tokens, "words": self.words, "num_bytes": self.num_bytes}
        base = Figures.of(self.base_nll, **counts)
        parts: dict[str, Any] = {"tokens": self.tokens, "words": self.words, "bytes": self.num_bytes, "base": base}
        if self.has_memory:
            parts["knn"] = Figures.of(self.knn_nll, **counts)
        if retriever is None:
            return Score(**parts, token_scores=token_scores)
        return Score(
            **parts,
            store=retriever.name,
            k=retriever.knn.k,
            lam=retriever.knn.lam,
            knn_temperature=retriever.knn.temperature,
            token_scores=token_scores,
            searched_share=self.searched_share,
        )


def _details(scored: Scored, checkpoint: Checkpoint) -> Iterator[TokenScore]:
    mixed_N = scored.lm_logprobs_N if scored.logprobs_N is None else scored.logprobs_N
    tokenizer, top = checkpoint.tokenizer, scored.likeliest
    for place, token_id in enumerate(scored.targets_N.tolist()):
        logprob = float(mixed_N[place])
        yield TokenScore(
            id=token_id,
            text=tokenizer.decode([token_id]),
            logprob=logprob,
            lm_logprob=float(scored.lm_logprobs_N[place]),
            knn_logprob=None if scored.knn_logprobs_N is None else float(scored.knn_logprobs_N[place]),
            top_logprobs=() if top is None else top.alternatives(place, token_id, logprob, tokenizer),
        )
