"""Tokens as a person reads them: colored by how much of each came from memory, with the places that spoke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from memlm.api.generation import Neighbor, Token
from memlm.api.handles import TokenStream
from memlm.base.printable import one_line, printable
from memlm.cli.console import emit_json, out

# From the model's own words to words that are nearly all memory.
SHADES = ((0.2, "default"), (0.4, "cyan"), (0.6, "green"), (0.8, "yellow"), (1.01, "bold magenta"))


def stream(tokens: Iterable[Token], *, colored: bool, to: Console = out) -> list[Token]:
    """Prints tokens as they come; gives them all."""
    seen = []
    for token in tokens:
        to.print(Text(printable(token.text), style=shade_of(token.knn_share) if colored else ""), end="")
        seen.append(token)
    to.print()
    return seen


def shade_of(knn_share: float) -> str:
    """The color of a token by the share of its probability that came from memory."""
    return next(style for limit, style in SHADES if knn_share < limit)


def legend() -> Text:
    """What the colors mean."""
    text, low = Text("from memory: "), 0.0
    for limit, style in SHADES:
        text.append(f"{low:.0%}-{min(limit, 1.0):.0%} ", style=style)
        low = limit
    return text


def sources(tokens: Iterable[Token], *, at_most: int = 8) -> list[tuple[Token, Neighbor]]:
    """The tokens that memory gave most to, each with the neighbor that spoke loudest for it; in order of text."""
    spoken = [(token, speaker) for token in tokens if (speaker := top_source(token))]
    loudest = sorted(spoken, key=lambda pair: -pair[0].knn_share)[:at_most]
    return [pair for pair in spoken if pair in loudest]


def top_source(token: Token) -> Neighbor | None:
    """The neighbor that gave this very token most of its weight."""
    speakers = [neighbor for neighbor in token.neighbors if neighbor.token_id == token.id]
    return max(speakers, key=lambda neighbor: neighbor.weight, default=None)


def probability_by_document(tokens: Iterable[Token]) -> Counter[str]:
    """How much probability each document gave to the tokens that were drawn, summed."""
    spoken: Counter[str] = Counter()
    for token in tokens:
        agreeing = [neighbor for neighbor in token.neighbors if neighbor.token_id == token.id]
        total = sum(neighbor.weight for neighbor in agreeing)
        for neighbor in agreeing:
            spoken[neighbor.document_id] += token.knn_share * neighbor.weight / total  # type: ignore[assignment]
    return spoken


def print_sources(tokens: Iterable[Token], *, to: Console = out) -> None:
    """Lists the loudest sources under a text."""
    for token, speaker in sources(tokens):
        line = Text(f"  {token.knn_share:4.0%} ")
        line.append(f"{token.text!r:16}", style=shade_of(token.knn_share))
        line.append(one_line(f" {speaker.document_id}:{speaker.line}"), style="blue")
        line.append(f"  {_one_line(speaker.snippet)}", style="dim")
        to.print(line)


def _one_line(snippet: str, width: int = 60) -> str:
    flat = one_line(" ".join(snippet.split()))
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def print_generation(tokens: TokenStream, *, json: bool, show_sources: bool) -> None:
    """Prints a generation as it comes, or all of it as one JSON object."""
    if json:
        drawn = list(tokens)
        text = "".join(token.text for token in drawn)
        emit_json({"text": text, "accepted": tokens.accepted, "finished": tokens.finished, "tokens": drawn})
        return
    seen = stream(tokens, colored=show_sources)
    if show_sources:
        out.print(legend())
        print_sources(seen)
