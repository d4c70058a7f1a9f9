"""Log-probabilities -> the next token: pure functions, in the order they apply.

Repetition penalty (CTRL, arXiv 1909.05858, on log-probabilities), temperature, top-k, top-p (1904.09751), min-p
(2407.01082), then one draw. They apply to the mixture of p_LM and p_kNN, because a temperature before mixing would be
another model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from memlm.api.generation import Alternative
from memlm.api.params import SamplingParams
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Corrupt

# Divisors that float32 holds, at which the limits of temperature 0 and infinity are reached.
LEAST_TEMPERATURE, MOST_TEMPERATURE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# Beyond these factors log-probabilities would overflow to -inf, or -inf times 0 would be NaN.
LEAST_PENALTY, MOST_PENALTY = 1e-30, 1e30

LIKELY = 1024  # tokens that nearly always hold the mass of `top_p`


def sample(
    logprobs_V: Float[Tensor, " V"], params: SamplingParams, seen: Sequence[int], generator: np.random.Generator
) -> int:
    """Samples one token. `seen` are the tokens of prompt and output, for the repetition penalty.

    Raises Corrupt if the log-probabilities are not numbers.
    """
    logprobs_V = penalize_repetition(logprobs_V, seen, params.repetition_penalty or 1.0)
    if params.temperature == 0:
        return _checked(logprobs_V.numpy().argmax(), logprobs_V)  # torch's takes twenty times as long
    logprobs_V = heat(logprobs_V, float(params.temperature or 1.0))
    logprobs_V = keep_top_k(logprobs_V, params.top_k)
    logprobs_V = keep_top_p(logprobs_V, params.top_p)
    logprobs_V = keep_min_p(logprobs_V, params.min_p)
    return _checked(_first_to_arrive(logprobs_V.exp().double().numpy(), generator), logprobs_V)


def _first_to_arrive(weights_V: Float64[np.ndarray, " V"], generator: np.random.Generator) -> np.intp:
    """Samples an index with probability proportional to its weight: each arrives after an exponential time, at the rate
    of its weight, and the first one is taken.

    Other roundings in a batch change the first one only in near ties, where a cumulative sum would shift all later
    ones. `torch.multinomial` takes four times as long for an equal result.
    """
    return (weights_V / generator.standard_exponential(len(weights_V))).argmax()


def _checked(token: np.intp, logprobs_V: Float[Tensor, " V"]) -> int:
    if not logprobs_V[int(token)] > -torch.inf:
        raise Corrupt("the model's log-probabilities are not numbers; its weights may be damaged: restore them")
    return int(token)


def alternatives(logprobs_V: Float[Tensor, " V"], count: int, tokenizer: Tokenizer) -> tuple[Alternative, ...]:
    """The likeliest tokens, at most `count`."""
    if not count:
        return ()
    best = logprobs_V.topk(min(count, len(logprobs_V)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Alternative(token_id, tokenizer.decode([token_id]), logprob) for token_id, logprob in pairs)


def heat(logprobs_V: Float[Tensor, " V"], temperature: float) -> Float[Tensor, " V"]:
    """Divides log-probabilities by the temperature and normalizes them. Any temperature above 0 keeps the likeliest
    token's finite, so that the limit of 0 is greedy and the limit of infinity is even.
    """
    if temperature == 1.0:
        return torch.log_softmax(logprobs_V, dim=-1)
    below_V = logprobs_V - logprobs_V.max()
    return torch.log_softmax(below_V / min(max(temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE), dim=-1)


def penalize_repetition(logprobs_V: Float[Tensor, " V"], seen: Sequence[int], penalty: float) -> Float[Tensor, " V"]:
    """Multiplies the log-probability of tokens that were seen by the penalty, so that more than 1 makes them rarer."""
    if penalty == 1.0 or not seen:
        return logprobs_V
    penalty = min(max(penalty, LEAST_PENALTY), MOST_PENALTY)
    places = torch.tensor(sorted(set(seen)))
    return logprobs_V.index_put((places,), logprobs_V[places] * penalty)


def keep_top_k(logprobs_V: Float[Tensor, " V"], top_k: int | None) -> Float[Tensor, " V"]:
    """Keeps the `top_k` likeliest tokens, and all that tie with the last of them."""
    if top_k is None or top_k >= len(logprobs_V):
        return logprobs_V
    least = logprobs_V.topk(top_k).values[-1]
    return logprobs_V.masked_fill(logprobs_V < least, -torch.inf)


def keep_top_p(logprobs_V: Float[Tensor, " V"], top_p: float | None) -> Float[Tensor, " V"]:
    """Keeps the smallest set of likeliest tokens, at least one, that holds `top_p` of the mass, and all that tie with
    the last of them.
    """
    if top_p is None or top_p >= 1.0:
        return logprobs_V
    total = logprobs_V.logsumexp(dim=0).double()
    for size in (min(LIKELY, len(logprobs_V)), len(logprobs_V)):  # sorting all takes ten times as long
        likeliest_N = logprobs_V.topk(size).values
        mass_N = (likeliest_N - total).exp()
        count = int((mass_N.cumsum(dim=0) - mass_N < top_p).sum())
        if count < size:
            break
    return logprobs_V.masked_fill(logprobs_V < likeliest_N[max(count, 1) - 1], -torch.inf)


def keep_min_p(logprobs_V: Float[Tensor, " V"], min_p: float | None) -> Float[Tensor, " V"]:
    """Keeps the tokens at least `min_p` times as likely as the likeliest."""
    if not min_p:
        return logprobs_V
    return logprobs_V.masked_fill(logprobs_V < logprobs_V.max() + torch.tensor(min_p).log(), -torch.inf)
