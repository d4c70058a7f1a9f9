"""The mixture of prompts by its definition (REALM, arXiv 2002.08909, equation 1): every text read from its start."""

from collections.abc import Sequence

import numpy as np

from memlm.language_model import LanguageModel


def alone(lm: LanguageModel, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """The log-probability of each token of a text after one prompt, from a pass without a state."""
    logits_TV = lm.logits([*prompt, *text]).double().numpy()[len(prompt) - 1 : -1]
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    return logprobs_TV[np.arange(len(text)), text]


def mixed_logprobs(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], weights: Sequence[float], text: Sequence[int]
) -> tuple[list[float], list[float]]:
    """The log-probability of each token of a text in the mixture, and the weights of the prompts after it."""
    rows_BT = np.stack([alone(lm, prompt, text) for prompt in prompts])
    joint_BT = np.cumsum(rows_BT, axis=1) + np.log(np.array(weights) / sum(weights))[:, None]
    totals_T = np.log(np.exp(joint_BT).sum(axis=0))
    return np.diff(totals_T, prepend=0.0).tolist(), np.exp(joint_BT[:, -1] - totals_T[-1]).tolist()
