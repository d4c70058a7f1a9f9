"""A completion as HTML, for notebooks: each token's background tells its share of p_kNN."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlm.api.generation import Token

HUE = "0, 150, 136"
MOST_OPAQUE = 0.6  # dark text stays readable on it, and light text too
SHADED = 0.05  # shares below are not shown


def completion_html(tokens: Sequence[Token]) -> str:
    """The text with one shaded span for each token from memory, with its share and source as a tooltip."""
    pieces = "".join(map(_token_html, tokens))
    share = sum(token.knn_share for token in tokens) / max(1, len(tokens))
    return (
        f'<div style="white-space: pre-wrap; font-family: monospace">{pieces}</div>'
        f"<small>{len(tokens)} tokens, {share:.0%} from memory</small>"
    )


def _token_html(token: Token) -> str:
    text = escape(token.text)
    if token.knn_share < SHADED or not text:
        return text
    agreeing = [neighbor for neighbor in token.neighbors if neighbor.token_id == token.id]
    title = f"{token.knn_share:.0%} from memory"
    if agreeing:
        source = max(agreeing, key=lambda neighbor: neighbor.weight)
        title += f": {source.document_id}, line {source.line}"
    opacity = MOST_OPAQUE * token.knn_share
    return f'<span style="background: rgba({HUE}, {opacity:.2f})" title="{escape(title, quote=True)}">{text}</span>'
