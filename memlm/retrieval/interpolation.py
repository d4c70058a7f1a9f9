"""Neighbors and the model's log-probabilities -> the mixture: kNN-LM (arXiv 1911.00172, equations 2 and 3).

p_kNN(v) is the softmax of -distance/temperature over the neighbors, summed over those with the value v. The mixture is
p = λ p_kNN + (1 - λ) p_LM. Everything stays in log space and in float32 or better. λ = 0, and a position without
neighbors, give the model's own log-probabilities bit for bit. λ = 1 gives p_kNN alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor


def neighbor_logweights(
    distances_QK: Float32[np.ndarray, "Q K"], temperature: float | Float64[np.ndarray, "Q 1"]
) -> Float32[np.ndarray, "Q K"]:
    """Log softmax of -distance/temperature over the neighbors, -inf at missing places (distance +inf)."""
    found_Q1 = np.isfinite(distances_QK[:, :1])
    excess_QK = distances_QK.astype(np.float64) - np.where(found_Q1, distances_QK[:, :1], 0.0)  # nearest stands first
    with np.errstate(over="ignore"):  # -inf: at this temperature the nearest have all of the mass
        excess_QK /= -np.asarray(temperature)
        total_Q1 = np.exp(excess_QK).sum(axis=1, keepdims=True)
        return (excess_QK - np.log(np.where(found_Q1, total_Q1, 1.0))).astype(np.float32)


def target_logprobs(
    logweights_QK: Float32[np.ndarray, "Q K"], values_QK: Int64[np.ndarray, "Q K"], targets_Q: Int64[np.ndarray, " Q"]
) -> Float32[np.ndarray, " Q"]:
    """Log p_kNN of one token for each query: log-sum-exp over the neighbors of this value, -inf if there is none."""
    agreeing_QK = np.where(values_QK == targets_Q[:, None], np.exp(logweights_QK.astype(np.float64)), 0.0)
    with np.errstate(divide="ignore"):
        return np.log(agreeing_QK.sum(axis=1)).astype(np.float32)


class KnnLogprobs(NamedTuple):
    """Log p_kNN of the U tokens that neighbors have, in ascending order. All others have a probability of 0."""

    ids_U: Int64[np.ndarray, " U"]
    logprobs_U: Float32[np.ndarray, " U"]

    def of(self, token_id: int) -> float:
        """Log p_kNN of a token, -inf if no neighbor has it."""
        place = int(self.ids_U.searchsorted(token_id))
        found = place < len(self.ids_U) and self.ids_U[place] == token_id
        return float(self.logprobs_U[place]) if found else -math.inf

    def to_dense(self, vocab_size: int) -> Float[Tensor, " V"]:
        """Log p_kNN of the whole vocabulary."""
        logprobs_V = np.full(vocab_size, -np.inf, np.float32)
        logprobs_V[self.ids_U] = self.logprobs_U
        return torch.from_numpy(logprobs_V)


def knn_logprobs(logweights_K: Float32[np.ndarray, " K"], values_K: Int64[np.ndarray, " K"]) -> KnnLogprobs | None:
    """Log p_kNN for one query, or None without a neighbor."""
    if not len(values_K) or values_K[0] < 0:
        return None
    num_found = len(values_K) if values_K[-1] >= 0 else int((values_K >= 0).sum())  # missing places stand last
    ids_U, places_K = np.unique(values_K[:num_found], return_inverse=True)
    weights_U = np.bincount(places_K, np.exp(logweights_K[:num_found].astype(np.float64)))
    with np.errstate(divide="ignore"):  # weights so small that they are none
        return KnnLogprobs(ids_U, np.log(weights_U).astype(np.float32))


def mix(lm_logprobs_V: Float[Tensor, " V"], knn: KnnLogprobs | None, lam: float) -> Float[Tensor, " V"]:
    """Returns log(λ p_kNN + (1 - λ) p_LM)."""
    if lam == 0.0 or knn is None:
        return lm_logprobs_V
    if lam == 1.0:
        return knn.to_dense(len(lm_logprobs_V))
    mixed_V = lm_logprobs_V + math.log1p(-lam)  # of the tokens that no neighbor has
    ids_U, knn_U = torch.from_numpy(knn.ids_U), torch.from_numpy(knn.logprobs_U)
    mixed_V[ids_U] = torch.logaddexp(knn_U + math.log(lam), mixed_V[ids_U])
    return mixed_V


def mix_targets(
    lm_logprobs_Q: Float32[np.ndarray, " Q"],
    knn_logprobs_Q: Float32[np.ndarray, " Q"],
    found_Q: Any,
    lam: Any,
) -> Float32[np.ndarray, " Q"]:
    """Computes `mix` for one token of each query, in float64. `found_Q` (bool) marks the queries with a neighbor. `lam`
    is one number, or one for each query.
    """
    # In float32, as the log-probabilities are, a lam just below 1 would be 1.
    lams_Q = np.broadcast_to(np.asarray(lam, np.float64), lm_logprobs_Q.shape)
    with np.errstate(divide="ignore"):
        mixed_Q = np.logaddexp(knn_logprobs_Q + np.log(lams_Q), lm_logprobs_Q + np.log1p(-lams_Q)).astype(np.float32)
    mixed_Q = np.where(lams_Q == 1.0, knn_logprobs_Q, mixed_Q)
    return np.where(found_Q & (lams_Q > 0), mixed_Q, lm_logprobs_Q)
