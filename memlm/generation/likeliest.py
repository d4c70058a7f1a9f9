"""Final hidden states of a given text -> the likeliest tokens at each place, in the mixture."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from memlm.api.generation import Alternative
from memlm.api.scoring import MAX_SCORE_ALTERNATIVES
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.retrieval.result import RetrievalResult, mix_memory

ROWS = 64  # positions with their log-probabilities over the vocabulary in RAM at once


class Likeliest(NamedTuple):
    """A likely tokens at N places, the likeliest first."""

    ids_NA: Int64[np.ndarray, "N A"]
    logprobs_NA: Float32[np.ndarray, "N A"]

    def alternatives(
        self, place: int, target_id: int, target_logprob: float, tokenizer: Tokenizer
    ) -> tuple[Alternative, ...]:
        """The tokens at a place. The text's own token has the log-probability that its score has: the one here may
        differ in the last bit.
        """
        pairs = zip(self.ids_NA[place].tolist(), self.logprobs_NA[place].tolist(), strict=True)
        return tuple(
            Alternative(each, tokenizer.decode([each]), target_logprob if each == target_id else logprob)
            for each, logprob in pairs
        )


def likeliest(
    decoder: Decoder, hidden_ND: Float[Tensor, "N D"], found: RetrievalResult | None, number: int
) -> Likeliest:
    """The `number` likeliest tokens after each hidden state, mixed with the neighbors `found` for it."""
    ids, logprobs = list[np.ndarray](), list[np.ndarray]()
    for begin in range(0, len(hidden_ND), ROWS):
        rows = range(begin, min(begin + ROWS, len(hidden_ND)))
        with torch.inference_mode():
            states_RD = hidden_ND[begin : rows.stop].to(decoder.device, decoder.dtype)
            logprobs_RV = decoder.logprobs(states_RD).float().cpu()
            if found is not None:
                logprobs_RV = torch.stack([mix_memory(logprobs_RV[row - begin], found, row).logprobs_V for row in rows])
            best = logprobs_RV.topk(min(number, logprobs_RV.shape[1]))
        ids.append(best.indices.numpy())
        logprobs.append(best.values.numpy())
    return Likeliest(np.concatenate(ids), np.concatenate(logprobs))


def check_alternatives(num_tokens: int, top_logprobs: int) -> None:
    """Raises InvalidInput for more likely tokens than one answer may have."""
    if num_tokens * top_logprobs > MAX_SCORE_ALTERNATIVES:
        raise InvalidInput(
            f"top_logprobs is {top_logprobs} for a text of {num_tokens:,} tokens; one answer reports at most"
            f" {MAX_SCORE_ALTERNATIVES:,} likely tokens: ask for fewer, or score the text in parts",
            field="top_logprobs",
        )
