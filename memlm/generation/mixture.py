"""Several prompts -> one text, from the mixture of the distributions after each (REALM, arXiv 2002.08909, equation 1).

p(y | x) = sum over z of p(z | x) p(y | x, z), where each z gives a prompt of its own. Token by token, the weight of z
is p(z | x, y so far): p(z | x) times the probability that the prompt gave to the text so far, normalized. With these
weights the product of the mixtures is the sum over whole texts. The prompts are the rows of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from memlm.api.generation import Accepted, Finished, Token
from memlm.errors import InvalidInput
from memlm.generation.generation import Generation
from memlm.generation.seams import UNBOUNDED
from memlm.model import DecoderState, decoding_threads
from memlm.model.files.checkpoint import Checkpoint


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
        self._last = [torch.empty(0)] * len(prompts)  # the hidden state after each row's last token
        self._state: DecoderState = self._decoder.new_state(batch_size=len(prompts), capacity=capacity)
        self._logweights_B = torch.tensor(weights, dtype=torch.float64).log().log_softmax(dim=0)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each prompt, given the tokens read so far. They sum to 1."""
        return tuple(self._logweights_B.exp().tolist())

    def read(self) -> Float[Tensor, " V"]:
        """Reads the pending tokens of all rows, and returns the log-probabilities of the next token in the mixture."""
        while (mixed_V := self.read_piece(UNBOUNDED)) is None:
            pass
        return mixed_V

    @torch.inference_mode()
    def read_piece(self, most_tokens: int) -> Float[Tensor, " V"] | None:
        """Reads about `most_tokens` of the pending tokens, each row as many. Returns the log-probabilities of the next
        token in the mixture once all are read, and None before.
        """
        size = max(1, most_tokens // sum(map(bool, self._pending)))
        pieces, self._pending = [ids[:size] for ids in self._pending], [ids[size:] for ids in self._pending]
        counts = [len(ids) for ids in pieces]
        padded_BT = torch.tensor([[*ids, *[0] * (max(counts) - len(ids))] for ids in pieces])
        with decoding_threads(self._decoder, sum(counts)):
            hidden_BTD, _ = self._decoder(padded_BT, self._state, new_B=counts)
            for row, count in enumerate(counts):
                if count and not self._pending[row]:
                    self._last[row] = hidden_BTD[row, count - 1]
            if any(self._pending):
                return None
            self._logprobs_BV = self._decoder.logprobs(torch.stack(self._last))
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


class MixedGeneration:
    """A `SteppedText` from the mixture of the prompts of several generations that search no datastore. Sampling, stop
    strings and limits are those of the longest prompt's request.

    `weights` are those of `PromptMixture`. `close` closes the generations.
    """

    def __init__(self, checkpoint: Checkpoint, generations: Sequence[Generation], weights: Sequence[float]) -> None:
        self._leader = max(generations, key=lambda generation: generation.prompt_positions)
        self._generations, self._checkpoint, self._weights = generations, checkpoint, weights
        self._mixture: PromptMixture | None = None
        self._since_s = 0.0

    @property
    def num_pending(self) -> int:
        """Tokens that the model reads next, of all prompts together."""
        return sum(generation.num_pending for generation in self._generations)

    @property
    def max_positions(self) -> int:
        """The most tokens of a row."""
        return self._leader.max_positions

    @property
    def num_rows(self) -> int:
        """The number of prompts."""
        return len(self._generations)

    @property
    def accepted(self) -> Accepted:
        """The first event."""
        return self._leader.accepted

    @property
    def finished(self) -> Finished | None:
        """The last event, with the weights after the text, once it has ended."""
        if self._leader.finished is None or self._mixture is None:
            return None
        return replace(self._leader.finished, passage_weights=self._mixture.weights)

    def step(self, most_tokens: int) -> tuple[Token, ...]:
        """Reads about `most_tokens` of the prompts, or the last token behind each, and then samples a token. Returns
        the tokens that may be shown.
        """
        if self._mixture is None:
            self._since_s, prompts = time.perf_counter(), [generation.pending_ids for generation in self._generations]
            capacity = self._leader.max_positions
            self._mixture = PromptMixture(self._checkpoint, prompts, self._weights, capacity=capacity)
        mixed_V = self._mixture.read_piece(most_tokens)
        if mixed_V is None:
            return ()
        with torch.inference_mode():
            tokens, _ = self._leader.sample_draft(mixed_V[None], [None], self._since_s)
        (token_id,) = self._leader.pending_ids
        self._mixture.append(token_id)
        self._since_s = time.perf_counter()
        return tokens

    def close(self) -> None:
        """Closes the generations."""
        for generation in self._generations:
            generation.close()
