"""Several prompts -> one text, from the mixture of the distributions after each (REALM, arXiv 2002.08909, equation 1).

p(y | x) = sum over z of p(z | x) p(y | x, z), where each z gives a prompt of its own. Token by token, the weight of z
is p(z | x, y so far): p(z | x) times the probability that the prompt gave to the text so far, normalized. With these
weights the product of the mixtures is the sum over whole texts. The prompts are the rows of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from memlm.api.generation import GenerationEvent
from memlm.errors import InvalidInput
from memlm.generation.generation import Generation
from memlm.model import DecoderState, decoding_threads
from memlm.model.checkpoint import Checkpoint


class PromptMixture:
    """B prompts, the tokens that were read behind all of them, and the weight of each after these.

    `weights` are p(z | x). They need not sum to 1. Raises InvalidInput for weights that are not above 0, and for
    another number of weights than of prompts.
    """

    def __init__(
        self, checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], weights: Sequence[float], *, capacity: int
    ) -> None:
        """`prompts` are token ids, framed as the model reads them. A row has room for `capacity` tokens."""
        if len(prompts) != len(weights) or not prompts or not all(0 < weight < float("inf") for weight in weights):
            raise InvalidInput(
                f"there are {len(prompts)} prompts and the weights {list(weights)}; give each prompt a weight above 0",
                field="weights",
            )
        self._decoder, self._pending = checkpoint.decoder, [list(prompt) for prompt in prompts]
        self._logprobs_BV: Float[Tensor, "B V"] | None = None
        self._state: DecoderState = self._decoder.new_state(batch_size=len(prompts), capacity=capacity)
        self._logweights_B = torch.tensor(weights, dtype=torch.float64).log().log_softmax(dim=0)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each prompt, given the tokens read so far. They sum to 1."""
        return tuple(self._logweights_B.exp().tolist())

    @torch.inference_mode()
    def read(self) -> Float[Tensor, " V"]:
        """Reads the pending tokens of all rows, and returns the log-probabilities of the next token in the mixture."""
        counts = [len(ids) for ids in self._pending]
        padded_BT = torch.tensor([[*ids, *[0] * (max(counts) - len(ids))] for ids in self._pending])
        with decoding_threads(self._decoder, sum(counts)):
            hidden_BTD, _ = self._decoder(padded_BT, self._state, new_B=counts)
            last_BD = hidden_BTD[torch.arange(len(counts)), torch.tensor(counts) - 1]
            self._logprobs_BV = self._decoder.logprobs(last_BD)
        mixed_V: Tensor = (self._logweights_B[:, None] + self._logprobs_BV.double().cpu()).logsumexp(dim=0)
        return mixed_V.float()

    def append(self, token_id: int) -> None:
        """Appends the next token to all rows. Those that gave it more probability gain weight."""
        assert self._logprobs_BV is not None
        self._logweights_B += self._logprobs_BV[:, token_id].double().cpu()
        self._logweights_B -= self._logweights_B.logsumexp(dim=0)
        self._pending = [[token_id] for _ in self._pending]


def mixed_logprobs(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], weights: Sequence[float], token_ids: Sequence[int]
) -> list[float]:
    """The log-probability of each token of a text after the mixture of prompts, as a `PromptMixture` has them."""
    longest = max(map(len, prompts), default=0)
    mixture, logprobs = PromptMixture(checkpoint, prompts, weights, capacity=longest + len(token_ids)), list[float]()
    for token_id in token_ids:
        logprobs.append(float(mixture.read()[token_id]))
        mixture.append(token_id)
    return logprobs


def mixed_stream(
    checkpoint: Checkpoint, generations: Sequence[Generation], weights: Sequence[float], posterior: list[float]
) -> Generator[GenerationEvent, None, None]:
    """Generates one text from the mixture of the prompts of several generations that search no datastore: yields
    Accepted, its tokens, and Finished. Sampling, stop strings and limits are those of the longest prompt's request.

    `posterior` gets the weights after the text.
    """
    try:
        leader = max(generations, key=lambda generation: generation.prompt_positions)
        prompts = [generation.pending_ids for generation in generations]
        mixture = PromptMixture(checkpoint, prompts, weights, capacity=leader.max_positions)
        yield leader.accepted
        while leader.finished is None:
            begin_s = time.perf_counter()
            with torch.inference_mode():
                tokens, _ = leader.sample_run(mixture.read()[None], [None], begin_s)
            (token_id,) = leader.pending_ids
            mixture.append(token_id)
            posterior[:] = mixture.weights
            if tokens:
                yield tokens
        yield leader.finished
    finally:
        for generation in generations:
            generation.close()
