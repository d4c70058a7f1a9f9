"""Scoring a given text. Probabilities are natural logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlm.api.generation import Alternative
from memlm.api.params import MAX_TOP_LOGPROBS, RetrievalParams
from memlm.api.prompts import check_num_ids, split_prompt
from memlm.api.request import Request
from memlm.errors import InvalidInput, check_range

MAX_SCORE_ALTERNATIVES = 1 << 20  # likely tokens in one answer


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probabilities of one token of a given text: mixture, p_LM and p_kNN.

    `top_logprobs` are the likeliest tokens at its place. Where the token is one of them, both log-probabilities are
    equal.
    """

    id: int
    text: str
    logprob: float
    lm_logprob: float
    knn_logprob: float | None = None
    top_logprobs: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """Negative log-likelihood of a text in nats, and the rates derived from it."""

    nll: float
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float

    @classmethod
    def of(cls, nll: float, *, tokens: int, words: int, num_bytes: int) -> Figures:
        """Derives the rates from a summed negative log-likelihood. A rate over a count of 0 is nan."""
        return cls(
            nll=nll,
            token_perplexity=_exp(nll / tokens) if tokens else math.nan,
            word_perplexity=_exp(nll / words) if words else math.nan,
            bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else math.nan,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of a text under the model alone (`base`) and the mixture (`knn`, None without a memory).

    `words` counts whitespace-separated words plus one for each newline, which compares across tokenizers.
    `searched_share` is as in `Usage`.
    """

    tokens: int
    words: int
    bytes: int
    base: Figures
    knn: Figures | None = None
    store: str | None = None
    k: int | None = None
    lam: float | None = None
    knn_temperature: float | None = None
    token_scores: tuple[TokenScore, ...] = ()
    searched_share: float | None = None

    @property
    def figures(self) -> Figures:
        """`knn` if present, else `base`."""
        return self.knn or self.base

    @property
    def nll(self) -> float:
        """Negative log-likelihood in nats, summed over the text."""
        return self.figures.nll

    @property
    def token_perplexity(self) -> float:
        """exp(nats per token)."""
        return self.figures.token_perplexity

    @property
    def word_perplexity(self) -> float:
        """exp(nats per word)."""
        return self.figures.word_perplexity

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the text."""
        return self.figures.bits_per_byte


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


@dataclass(frozen=True, slots=True)
class ScoreRequest(Request[Score]):
    """Scores a text, or at least two `token_ids` in place of it, of which the first is only read.

    A text is scored after the start token, so `token_ids` that begin with it have the same score. `top_logprobs` is how
    many likely tokens each of the `token_scores` reports.
    """

    text: str
    retrieval: RetrievalParams = field(default_factory=RetrievalParams)
    token_scores: bool = False
    token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_num_ids("token_ids", self.token_ids)
        check_range("top_logprobs", self.top_logprobs, least=0, most=MAX_TOP_LOGPROBS, whole=True)
        if self.top_logprobs and not self.token_scores:
            raise InvalidInput("top_logprobs goes with token_scores; set token_scores to true", field="top_logprobs")
        if self.text and self.token_ids:
            raise InvalidInput("give either a text or token_ids, not both", field="token_ids")
        if self.retrieval.loop_guard:
            raise InvalidInput(
                "loop_guard is of generation; a text is scored as it is: leave it out", field="loop_guard"
            )
        if len(self.token_ids) == 1:
            raise InvalidInput("token_ids has one id; give at least two, the first is only read", field="token_ids")

    @classmethod
    def of(
        cls, text: str | Sequence[int], options: Mapping[str, Any], *, token_scores: bool = False, top_logprobs: int = 0
    ) -> ScoreRequest:
        """Makes one of a text or token ids and the fields of RetrievalParams."""
        text, ids = split_prompt(text, name="text")
        return cls(text, RetrievalParams.of(**options), token_scores, ids, top_logprobs)
