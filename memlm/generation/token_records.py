"""The record of a token in an answer: its bytes and probabilities, likelier ones, and the neighbors that spoke."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from memlm.api.generation import Neighbor, Token
from memlm.data.tokenizer import Tokenizer
from memlm.generation.sampling import alternatives
from memlm.retrieval.own_past import describe_past
from memlm.retrieval.result import Mixed, RetrievalResult
from memlm.retrieval.retriever import Retriever


class TokenRecords:
    """Makes the records of one text's tokens, with so many neighbors and alternatives each.

    The token that follows position n of the text's own past stands at `first_place` + n in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        *,
        num_neighbors: int,
        num_alternatives: int,
        first_place: int,
    ) -> None:
        self._tokenizer, self._retriever, self._first_place = tokenizer, retriever, first_place
        self._num_neighbors, self._num_alternatives = num_neighbors, num_alternatives

    def of(
        self,
        context_ids: Sequence[int],
        lm_logprobs_V: Float[Tensor, " V"],
        mixed: Mixed,
        *,
        is_first: bool,
    ) -> Token:
        """The record of the last token of a text, without its text, sampled from a mixture. Before the `is_first`
        token of a text, nothing was read that a space would part it from.
        """
        token_id = context_ids[-1]
        return Token(
            id=token_id,
            text="",
            bytes=self._bytes_of(token_id, is_first=is_first),
            logprob=float(mixed.logprobs_V[token_id]),
            lm_logprob=float(lm_logprobs_V[token_id]),
            knn_logprob=None if mixed.knn is None else mixed.knn.of(token_id),
            lam=mixed.lam,
            neighbors=self._described(mixed.memory, context_ids),
            top_logprobs=alternatives(mixed.logprobs_V, self._num_alternatives, self._tokenizer),
        )

    def _described(self, memory: RetrievalResult | None, context_ids: Sequence[int]) -> tuple[Neighbor, ...]:
        if memory is None or not self._num_neighbors:
            return ()
        found = describe_past(memory, self._num_neighbors, context_ids, self._first_place, self._tokenizer)
        if self._retriever is not None:
            found |= self._retriever.describe_columns(memory, self._num_neighbors)
        return tuple(found[column] for column in sorted(found))

    def _bytes_of(self, token_id: int, *, is_first: bool) -> bytes:
        """The token's bytes, for the first one without the space that encoding would have added."""
        piece = self._tokenizer.token_bytes[token_id] if token_id < self._tokenizer.vocab_size else b""
        return piece.removeprefix(b" ") if is_first and self._tokenizer.prepends_space else piece
