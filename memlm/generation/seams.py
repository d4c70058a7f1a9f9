"""The seams of generation: parts that a request may bring, so that the batch and the worker need not know them."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from memlm.model import DecoderState


class OwnDecoder(Protocol):
    """Reads the tokens behind a prompt in place of the model's decoder, such as one that leaves out layers
    (`early_exit`), one at a time. It gives no keys, so that its text searches nothing, and it checks no drafts.
    """

    def __call__(self, token_11: Int[Tensor, "1 1"], state: DecoderState) -> Float[Tensor, "1 1 D"]:
        """Reads one token into `state` and returns its final hidden state."""
