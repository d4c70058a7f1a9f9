"""The seams of generation: parts that a request may bring, so that the batch and the worker need not know them.

A sequence of a batch may be read by a decoder of its own, such as one that leaves out layers (`early_exit`). A text may
draw beside the batch by steps of its own, such as one from a mixture of prompts (`mixture`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from memlm.api.generation import Accepted, Finished, GenerationEvent, Token
from memlm.model import DecoderState

UNBOUNDED = 1 << 40  # tokens in one step


class OwnDecoder(Protocol):
    """Reads the tokens behind a prompt in place of the model's decoder, one at a time. It gives no keys, so that its
    text searches nothing, and it checks no drafts.
    """

    def __call__(self, token_11: Int[Tensor, "1 1"], state: DecoderState) -> Float[Tensor, "1 1 D"]:
        """Reads one token into `state` and returns its final hidden state."""


class SteppedText(Protocol):
    """A text that draws beside the batch, by steps of its own. It has `num_rows` rows of keys and values, each of at
    most `max_positions` tokens, and reads `num_pending` tokens next.
    """

    @property
    def num_pending(self) -> int:
        """Tokens that the model reads next, in all rows."""

    @property
    def num_rows(self) -> int:
        """Rows of keys and values."""

    @property
    def max_positions(self) -> int:
        """The most tokens of a row."""

    @property
    def accepted(self) -> Accepted:
        """The first event."""

    @property
    def finished(self) -> Finished | None:
        """The last event, once the text has ended."""

    def step(self, most_tokens: int) -> tuple[Token, ...]:
        """Reads about `most_tokens`, and samples a token once all are read. Returns the tokens that may be shown."""

    def close(self) -> None:
        """Frees the memory of the text."""


def stream_steps(text: SteppedText) -> Generator[GenerationEvent, None, None]:
    """Drives a text to its end: yields Accepted, its tokens, and Finished. Closes it."""
    try:
        yield text.accepted
        while (finished := text.finished) is None:
            if tokens := text.step(UNBOUNDED):
                yield tokens
        yield finished
    finally:
        text.close()
