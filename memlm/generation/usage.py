"""The cost of a generation, token by token."""

from __future__ import annotations

from dataclasses import replace

from memlm.api.generation import Token, Usage
from memlm.retrieval.result import RetrievalResult


def with_token(
    usage: Usage, token: Token | None, result: RetrievalResult | None, elapsed_ms: float, *, is_first: bool
) -> Usage:
    """Adds a token, None for the end of the text, and its neighbors. The first one of a step has the time of its
    search.
    """
    count, is_prefill = usage.generated_tokens + (token is not None), usage.generated_tokens == 0
    share = usage.searched_share
    if result is not None:
        share = min(1.0 if share is None else share, result.share)
    return replace(
        usage,
        generated_tokens=count,
        steps=usage.steps + is_first,
        retrieved_neighbors=usage.retrieved_neighbors
        + (0 if result is None else int((result.neighbors.ids_QK >= 0).sum())),
        searches=usage.searches + (result is not None),
        prefill_ms=usage.prefill_ms + elapsed_ms * is_prefill,
        decode_ms=usage.decode_ms + elapsed_ms * (not is_prefill),
        retrieval_ms=usage.retrieval_ms + (result.took_ms if result is not None and is_first else 0.0),
        lam=usage.lam if token is None else usage.lam + (token.lam - usage.lam) / count,
        searched_share=share,
    )
