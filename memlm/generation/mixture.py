"""Several prompts -> one text, from the mixture of the distributions after each (REALM, arXiv 2002.08909, equation 1).

p(y | x) = sum over z of p(z | x) p(y | x, z), where each z gives a prompt of its own. Token by token, the share of z is
p(z | x, y so far): p(z | x) times the probability that the prompt gave to the text so far, normalized. With these
shares the product of the mixtures is the sum over whole texts. The prompts are rows of the ordinary batch.

All prompts end with the question x, which each row reads. So p(z | x) follows from Bayes' rule over prompts of equal
p(z), tempered: p(x | z) ** 0.3, normalized. Scores of a search need no scale then, and the order of the passages does
not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from memlm.api.generation import Token
from memlm.generation.generation import Generation

# The tokens of a question are no independent evidence: the power of 1 gains 0.05 to 0.1 nats where the right passage is
# nearly always found, and loses 0.5 where it is often missing (benchmarks/log/2026-11-28-prior-of-rows.md).
QUESTION_POWER = 0.3


class Mixture:
    """B generations that draw one text, the last of them that of the prompt without a passage, and p(z | x, y) of each.
    The `leader`, that of the longest prompt, samples: its request has the limits, the stop strings and the seed.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.generations = tuple(generations)
        self.leader = max(self.generations, key=lambda generation: generation.prompt_positions)
        self._logshares_B: Float64[Tensor, " B"] | None = None  # before the first token, prompts are not yet read
        self._shares = deque[tuple[float, ...]]()  # of the tokens that are not yet shown
        if len(self.generations) > 1:
            num_common = _common_end([generation.pending_ids for generation in self.generations])
            for generation in self.generations:
                generation.scored_from = generation.num_pending - num_common - 1

    @property
    def logshares_B(self) -> Float64[Tensor, " B"]:
        """log p(z | x, y so far) of each prompt, once all are read."""
        if self._logshares_B is None:
            read = [generation.prompt_logprob for generation in self.generations]
            self._logshares_B = (QUESTION_POWER * torch.tensor(read, dtype=torch.float64)).log_softmax(dim=0)
        return self._logshares_B

    def draw(self, logprobs_BV: Float[Tensor, "B V"], begin_s: float) -> tuple[Token, ...]:
        """Samples the next token, given its log-probabilities after each prompt, and gives it to all rows. Those that
        gave it more probability gain a share. Returns the tokens that may be shown.
        """
        rows_BV = logprobs_BV.double()
        mixed_V = (self.logshares_B[:, None] + rows_BV).logsumexp(dim=0).float()
        tokens, _ = self.leader.sample_draft(mixed_V[None], [None], begin_s)
        (token_id,) = self.leader.pending_ids
        self._logshares_B = (self.logshares_B + rows_BV[:, token_id]).log_softmax(dim=0)
        for generation in self.generations:
            generation.pending_ids = [token_id]
        self._shares.append(tuple(self._logshares_B.exp().tolist()[:-1]))
        return tuple(replace(token, passage_shares=self._shares.popleft()) for token in tokens)


def _common_end(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts end with, less one where that is a whole prompt: its first token follows nothing."""
    columns = zip(*map(reversed, prompts), strict=False)
    num_common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return min(num_common, min(map(len, prompts)) - 1)
