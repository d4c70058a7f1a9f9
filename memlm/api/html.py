"""A completion as HTML, for notebooks: each token's background tells its share of memory, or of the passages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from memlm.api.passages import Passage
from memlm.base.figures import counted

if TYPE_CHECKING:
    from memlm.api.generation import Token

HUE = "0, 150, 136"
MOST_OPAQUE = 0.6  # dark text stays readable on it, and light text too
SHADED = 0.05  # shares below are not shown
NAMED = 0.01  # passages of a smaller share are not named


def completion_html(tokens: Sequence[Token], passages: Sequence[Passage] = ()) -> str:
    """The text with one shaded span for each token from memory, with its share and source as a tooltip. Of a mixture
    over `passages`, the tooltip has the share of each.
    """
    pieces = "".join(_token_html(token, passages) for token in tokens)
    return (
        f'<div style="white-space: pre-wrap; font-family: monospace">{pieces}</div>'
        f"<small>{len(tokens)} tokens, {_origin(tokens, passages)}</small>"
    )


def _origin(tokens: Sequence[Token], passages: Sequence[Passage]) -> str:
    share = sum(map(_share_of, tokens)) / max(1, len(tokens))
    if not passages or any(token.lam for token in tokens):
        return f"{share:.0%} from memory"
    number = counted(len(passages), "passage")
    return f"{share:.0%} from {number}" if any(token.passage_shares for token in tokens) else f"from {number}"


def _share_of(token: Token) -> float:
    return sum(token.passage_shares) if token.passage_shares else token.knn_share


def _token_html(token: Token, passages: Sequence[Passage]) -> str:
    text, share = escape(token.text), _share_of(token)
    if share < SHADED or not text:
        return text
    title = _passages_of(token, passages) if token.passage_shares else _neighbor_of(token)
    background = f"background: rgba({HUE}, {MOST_OPAQUE * share:.2f})"
    return f'<span style="{background}" title="{escape(title, quote=True)}">{text}</span>'


def _passages_of(token: Token, passages: Sequence[Passage]) -> str:
    """The places of the passages of a token, those of the largest shares first."""
    shares = sorted(zip(token.passage_shares, (passage.place for passage in passages), strict=False), reverse=True)
    return "\n".join(f"{share:.0%} {place}" for share, place in shares if share >= NAMED)


def _neighbor_of(token: Token) -> str:
    title = f"{token.knn_share:.0%} from memory"
    agreeing = [neighbor for neighbor in token.neighbors if neighbor.token_id == token.id]
    if agreeing:
        source = max(agreeing, key=lambda neighbor: neighbor.weight)
        title += f": {source.document_id}, line {source.line}"
    return title
