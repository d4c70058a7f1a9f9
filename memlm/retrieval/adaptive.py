"""A λ for each position, from features that cost nothing.

One number fits all positions badly: a datastore with a distant nearest neighbor knows nothing, and a confident model
needs no help. Here λ is a logistic function of five features: the distance of the nearest neighbor, the spread of the
others behind it, the mass that agrees with it, the entropy of the softmax, and the confidence of the model (arXiv
2109.04212, section 4.1, and 2210.15859, section 4). `memlm tune` fits its weights to held-out text, and keeps
them if they did better on the half that they were not fitted to.
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
SHARPER = 0.1  # of the temperature, where the datastore has the same context


@dataclass(frozen=True, slots=True)
class AdaptiveLam:
    """Weights over standardized features: λ = sigmoid(bias + weights . (features - means) / scales). It is least where
    the nearest neighbor has a log_distance above `reach`, and 0 where it would be below `threshold`: the model alone.

    A nearest neighbor at a distance below `near` is taken to follow the same context. There the temperature is a tenth,
    so that neighbors behind other contexts do not outvote it.
    """

    bias: float
    weights: tuple[float, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    reach: float | None = None
    threshold: float = 0.0
    near: float = 0.0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AdaptiveLam:
        """Takes the fields as a store's manifest holds them."""
        weights, means, scales = (tuple(fields[name]) for name in ("weights", "means", "scales"))
        later = {name: fields[name] for name in ("reach", "threshold", "near") if name in fields}
        return cls(fields["bias"], weights, means, scales, **later)

    def temperatures(
        self, distances_QK: Float32[np.ndarray, "Q K"], temperature: float
    ) -> float | Float64[np.ndarray, "Q 1"]:
        """The temperature of the weights at each position."""
        if not self.near:
            return temperature
        return np.where(distances_QK[:, :1] < self.near, SHARPER * temperature, temperature)

    def lams(self, features_QF: Float[np.ndarray, "Q F"]) -> Float32[np.ndarray, " Q"]:
        """Returns λ at each position."""
        scaled_QF = (features_QF - np.array(self.means)) / np.array(self.scales)
        logits_Q = np.clip(self.bias + scaled_QF @ np.array(self.weights), -30, 30)
        lams_Q = np.clip(1 / (1 + np.exp(-logits_Q)), LEAST, MOST)
        if self.reach is not None:
            lams_Q = np.where(features_QF[:, 0] > self.reach, LEAST, lams_Q)
        lams_Q = lams_Q.astype(np.float32)
        return np.where(lams_Q < np.float32(self.threshold), np.float32(0), lams_Q)


def features_of(
    found: Neighbors,
    logweights_QK: Float32[np.ndarray, "Q K"],
    temperature: float,
    max_logprobs_Q: Float32[np.ndarray, " Q"],
) -> Float64[np.ndarray, "Q F"]:
    """Computes the features of Q positions, all finite, also where nothing was found. `max_logprobs_Q` are the model's
    largest log-probabilities.
    """
    found_QK = found.ids_QK >= 0
    weights_QK = np.where(found_QK, np.exp(logweights_QK.astype(np.float64)), 0.0)
    nearest_Q = np.where(found_QK[:, 0], found.distances_QK[:, 0], 0.0) / temperature
    logs_QK = np.where(found_QK, logweights_QK, 0.0).astype(np.float64)
    agrees_QK = found_QK & (found.values_QK == found.values_QK[:, :1])
    features = (
        np.log1p(nearest_Q),
        -(weights_QK * np.where(found_QK, logs_QK - logs_QK[:, :1], 0.0)).sum(axis=1),
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
    shares_Q: Float64[np.ndarray, " Q"] | None = None,
) -> AdaptiveLam:
    """Finds the weights that maximize the mean of log(λ knn + (1 - λ) lm). `lm_Q` and `knn_Q` are probabilities of the
    true tokens, `start` is the best fixed λ. `shares_Q` weigh the positions, and sum to 1.
    """
    means_F, scales_F = features_QF.mean(axis=0), features_QF.std(axis=0) + 1e-6
    shares = torch.from_numpy(np.full(len(lm_Q), 1 / len(lm_Q)) if shares_Q is None else shares_Q)
    scaled_QF = torch.from_numpy((features_QF - means_F) / scales_F)
    lm, knn = torch.from_numpy(lm_Q), torch.from_numpy(knn_Q)
    begin = min(max(start, 0.01), 0.99)
    parameters = torch.zeros(1 + features_QF.shape[1], dtype=torch.float64)
    parameters[0] = np.log(begin / (1 - begin))
    parameters.requires_grad_()
    search = torch.optim.LBFGS([parameters], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        lam = torch.sigmoid(parameters[0] + scaled_QF @ parameters[1:]).clamp(LEAST, MOST)
        cost = -(shares * (lam * knn + (1 - lam) * lm).clamp(min=1e-300).log()).sum()
        cost = cost + RIDGE * parameters[1:].square().mean()
        cost.backward()
        return cost

    search.step(loss)
    bias, *weights = parameters.tolist()
    return AdaptiveLam(bias, tuple(weights), tuple(means_F.tolist()), tuple(scales_F.tolist()))
