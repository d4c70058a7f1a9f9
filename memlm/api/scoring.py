"""The request for a text's score, and the score. Probabilities are natural logarithms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from memlm.api.params import RetrievalParams


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a given text under model, memory and mixture (natural logarithms)."""

    id: int
    text: str
    logprob: float
    lm_logprob: float
    knn_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """How well a text is predicted: `nll` in nats, summed; the rest follows from it and the counts."""

    nll: float
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float

    @classmethod
    def of(cls, nll: float, *, tokens: int, words: int, num_bytes: int) -> Figures:
        """The three rates of a summed negative log-likelihood; a rate over nothing is nan."""
        return cls(
            nll=nll,
            token_perplexity=_exp(nll / tokens) if tokens else math.nan,
            word_perplexity=_exp(nll / words) if words else math.nan,
            bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else math.nan,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """A text's log-probability. `base` is the model alone; `knn` the mixture, None where no store was asked.

    `words` are white-space words plus one for each newline, so that numbers compare across tokenizers.
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

    @property
    def figures(self) -> Figures:
        """The mixture's figures where there is one, else the model's."""
        return self.knn or self.base

    @property
    def nll(self) -> float:
        """Nats, summed over the text."""
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
class ScoreRequest:
    """How probable is this text?"""

    text: str
    retrieval: RetrievalParams = field(default_factory=RetrievalParams)
    token_scores: bool = False
