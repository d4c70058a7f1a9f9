"""The mixture of prompts by its definition (REALM, arXiv 2002.08909, equation 1): every text read from its start."""

from collections.abc import Sequence

import numpy as np

from memlm.language_model import LanguageModel

POWER = 0.3  # of the probability of the question


def alone(lm: LanguageModel, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """The log-probability of each token of a text after one prompt, from a pass without a state."""
    logits_TV = lm.logits([*prompt, *text]).double().numpy()[len(prompt) - 1 : -1]
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    return logprobs_TV[np.arange(len(text)), text]


def question_size(prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all prompts end with, each behind another."""
    size = 0
    while all(len(ids) > size + 1 and ids[-1 - size] == prompts[0][-1 - size] for ids in prompts):
        size += 1
    return size


def mixed(lm: LanguageModel, prompts: Sequence[Sequence[int]], text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability (T) of each token of a text in the mixture, and the shares (T, B) of the prompts in it: each
    prompt's in the question, which is what all prompts end with, tempered, and in the text up to the token.
    """
    size = question_size(prompts)
    asked_B = np.array([alone(lm, ids[: len(ids) - size], ids[len(ids) - size :]).sum() for ids in prompts])
    rows_TB = np.stack([alone(lm, ids, text) for ids in prompts], axis=1)
    joint_TB = POWER * asked_B + np.concatenate([np.zeros((1, len(prompts))), np.cumsum(rows_TB, axis=0)])
    totals_T = np.log(np.exp(joint_TB).sum(axis=1))
    return np.diff(totals_T), np.exp(joint_TB - totals_T[:, None])[1:]
