"""Prints tokens, colored by the share of p_kNN, and their sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from memlm.api.generation import Neighbor, Token
from memlm.api.handles import TokenStream
from memlm.base.printable import one_line, printable
from memlm.cli.console import emit_json, out

# From tokens of p_LM to tokens almost entirely of p_kNN.
SHADES = ((0.2, "default"), (0.4, "cyan"), (0.6, "green"), (0.8, "yellow"), (1.01, "bold magenta"))


def stream(tokens: Iterable[Token], *, colored: bool, to: Console = out) -> list[Token]:
    """Prints tokens as they arrive, and returns them all."""
    seen = []
    for token in tokens:
        to.print(Text(printable(token.text), style=shade_of(token.knn_share) if colored else ""), end="")
        seen.append(token)
    to.print()
    return seen


def shade_of(knn_share: float) -> str:
    """The color of a token by its share of p_kNN."""
    return next(style for limit, style in SHADES if knn_share < limit)


def legend() -> Text:
    """The legend of the colors."""
    text, low = Text("share of p_kNN: "), 0.0
    for limit, style in SHADES:
        text.append(f"{low:.0%}-{min(limit, 1.0):.0%} ", style=style)
        low = limit
    return text


def sources(tokens: Iterable[Token], *, at_most: int = 8) -> list[tuple[Token, Neighbor]]:
    """The tokens with the largest shares of p_kNN and their top neighbors, in the order of the text."""
    pairs = [(token, source) for token in tokens if (source := top_source(token))]
    top = sorted(pairs, key=lambda pair: -pair[0].knn_share)[:at_most]
    return [pair for pair in pairs if pair in top]


def top_source(token: Token) -> Neighbor | None:
    """The neighbor with the most weight on this token."""
    agreeing = [neighbor for neighbor in token.neighbors if neighbor.token_id == token.id]
    return max(agreeing, key=lambda neighbor: neighbor.weight, default=None)


def probability_by_document(tokens: Iterable[Token]) -> Counter[str]:
    """Probability that each document contributed to the generated tokens, summed over tokens."""
    probability: Counter[str] = Counter()
    for token in tokens:
        agreeing = [neighbor for neighbor in token.neighbors if neighbor.token_id == token.id]
        total = sum(neighbor.weight for neighbor in agreeing)
        for neighbor in agreeing:
            probability[neighbor.document_id] += token.knn_share * neighbor.weight / total  # type: ignore[assignment]
    return probability


def print_sources(tokens: Iterable[Token], *, to: Console = out) -> None:
    """Lists the top sources under a text."""
    for token, source in sources(tokens):
        line = Text(f"  {token.knn_share:4.0%} ")
        line.append(f"{token.text!r:16}", style=shade_of(token.knn_share))
        line.append(one_line(f" {source.document_id}:{source.line}"), style="blue")
        line.append(f"  {_one_line(source.snippet)}", style="dim")
        to.print(line)


def _one_line(snippet: str, width: int = 60) -> str:
    flat = one_line(" ".join(snippet.split()))
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def print_generation(tokens: TokenStream, *, json: bool, show_sources: bool) -> None:
    """Prints a generation as it arrives, or whole as one JSON object."""
    if json:
        drawn = list(tokens)
        text = "".join(token.text for token in drawn)
        emit_json({"text": text, "accepted": tokens.accepted, "finished": tokens.finished, "tokens": drawn})
        return
    seen = stream(tokens, colored=show_sources)
    if show_sources:
        out.print(legend())
        print_sources(seen)
