"""How loudly the memory speaks at each position, from what is known there anyway; and where it need not be asked.

One number fits all positions badly: a memory whose nearest neighbor is far away knows nothing, and a model that is
sure needs no help. Here lam is a logistic function of five features that cost nothing: the distance of the nearest
neighbor, how far the others lie behind it, how many of them agree with it, how evenly the softmax spreads, and how
sure the model is (arXiv 2109.04212, section 4.1; 2210.15859, section 4). Its weights maximise the log-likelihood of
held-out text (`memlm index tune`), and are used only where they did better on the part of it that they were not fitted
to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64

from memlm.index.neighbors import Neighbors

FEATURES = ("log_distance", "spread", "agreement", "entropy", "confidence")
RIDGE = 1e-3
LEAST, MOST = 1e-4, 0.999


@dataclass(frozen=True, slots=True)
class AdaptiveLam:
    """Weights over standardised features: lam = sigmoid(bias + weights . (features - means) / scales)."""

    bias: float
    weights: tuple[float, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> AdaptiveLam:
        """What a store's manifest says."""
        return cls(said["bias"], *(tuple(said[name]) for name in ("weights", "means", "scales")))

    def lams(self, features_QF: Float[np.ndarray, "Q F"]) -> Float32[np.ndarray, " Q"]:
        """The weight of the memory at each position."""
        scaled_QF = (features_QF - np.array(self.means)) / np.array(self.scales)
        logits_Q = np.clip(self.bias + scaled_QF @ np.array(self.weights), -30, 30)
        return np.clip(1 / (1 + np.exp(-logits_Q)), LEAST, MOST).astype(np.float32)


def features_of(
    found: Neighbors,
    logweights_QK: Float32[np.ndarray, "Q K"],
    temperature: float,
    max_logprobs_Q: Float32[np.ndarray, " Q"],
) -> Float64[np.ndarray, "Q F"]:
    """The features of Q positions, all finite, also where nothing was found. `max_logprobs_Q` are the model's largest
    log-probabilities.
    """
    there_QK = found.ids_QK >= 0
    weights_QK = np.where(there_QK, np.exp(logweights_QK.astype(np.float64)), 0.0)
    nearest_Q = np.where(there_QK[:, 0], found.distances_QK[:, 0], 0.0) / temperature
    logs_QK = np.where(there_QK, logweights_QK, 0.0).astype(np.float64)
    agrees_QK = there_QK & (found.values_QK == found.values_QK[:, :1])
    features = (
        np.log1p(nearest_Q),
        -(weights_QK * np.where(there_QK, logs_QK - logs_QK[:, :1], 0.0)).sum(axis=1),
        (weights_QK * agrees_QK).sum(axis=1),
        -(weights_QK * logs_QK).sum(axis=1),
        max_logprobs_Q.astype(np.float64),
    )
    return np.stack(features, axis=1)


def fit(
    features_QF: Float64[np.ndarray, "Q F"],
    lm_Q: Float64[np.ndarray, " Q"],
    knn_Q: Float64[np.ndarray, " Q"],
    start: float,
) -> AdaptiveLam:
    """The weights that maximise the mean of log(lam knn + (1 - lam) lm), given probabilities of the true tokens and
    the best fixed lam to start from.
    """
    means_F, scales_F = features_QF.mean(axis=0), features_QF.std(axis=0) + 1e-6
    scaled_QF = torch.from_numpy((features_QF - means_F) / scales_F)
    lm, knn = torch.from_numpy(lm_Q), torch.from_numpy(knn_Q)
    begin = min(max(start, 0.01), 0.99)
    learnt = torch.zeros(1 + features_QF.shape[1], dtype=torch.float64)
    learnt[0] = np.log(begin / (1 - begin))
    learnt.requires_grad_()
    search = torch.optim.LBFGS([learnt], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        lam = torch.sigmoid(learnt[0] + scaled_QF @ learnt[1:]).clamp(LEAST, MOST)
        cost = -(lam * knn + (1 - lam) * lm).clamp(min=1e-300).log().mean() + RIDGE * learnt[1:].square().mean()
        cost.backward()
        return cost

    search.step(loss)
    bias, *weights = learnt.tolist()
    return AdaptiveLam(bias, tuple(weights), tuple(means_F.tolist()), tuple(scales_F.tolist()))
