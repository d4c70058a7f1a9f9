"""Several prompts -> one text, from the mixture of the distributions after each (REALM, arXiv 2002.08909, equation 1).

p(y | x) = sum over z of p(z | x) p(y | x, z), where each z gives a prompt of its own. Token by token, the weight of z
is p(z | x, y so far): p(z | x) times the probability that the prompt gave to the text so far, normalized. With these
weights the product of the mixtures is the sum over whole texts. The prompts are rows of the ordinary batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from memlm.api.generation import Token
from memlm.errors import InvalidInput
from memlm.generation.generation import Generation


class Mixture:
    """B generations that draw one text, and the weight of each after the tokens so far. The `leader`, that of the
    longest prompt, samples: its request has the limits, the stop strings and the seed.

    `weights` are p(z | x). They need not sum to 1. Raises InvalidInput for weights that are not above 0, and for
    another number of weights than of generations.
    """

    def __init__(self, generations: Sequence[Generation], weights: Sequence[float]) -> None:
        if len(generations) != len(weights) or not weights or not all(0 < weight < float("inf") for weight in weights):
            raise InvalidInput(
                f"there are {len(generations)} prompts and the weights {list(weights)}; give each prompt a weight"
                " above 0",
                field="weights",
            )
        self.generations = tuple(generations)
        self.leader = max(self.generations, key=lambda generation: generation.prompt_positions)
        self._logweights_B = torch.tensor(weights, dtype=torch.float64).log().log_softmax(dim=0)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each prompt, given the tokens so far. They sum to 1."""
        return tuple(self._logweights_B.exp().tolist())

    def draw(self, logprobs_BV: Float[Tensor, "B V"], begin_s: float) -> tuple[Token, ...]:
        """Samples the next token, given its log-probabilities after each prompt, and gives it to all rows. Those that
        gave it more probability gain weight. Returns the tokens that may be shown.
        """
        rows_BV = logprobs_BV.double()
        mixed_V = (self._logweights_B[:, None] + rows_BV).logsumexp(dim=0).float()
        tokens, _ = self.leader.sample_draft(mixed_V[None], [None], begin_s)
        (token_id,) = self.leader.pending_ids
        self._logweights_B = (self._logweights_B + rows_BV[:, token_id]).log_softmax(dim=0)
        for generation in self.generations:
            generation.pending_ids = [token_id]
        if self.leader.finished is not None:
            self.leader.finished = replace(self.leader.finished, passage_weights=self.weights)
        return tokens
