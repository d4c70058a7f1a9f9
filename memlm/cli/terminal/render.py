"""Prints tokens as they arrive, shaded by the share of p_kNN, then a summary and their sources.

Shares are backgrounds of one hue that grow lighter with the share (darker on a light terminal), so that they survive
eyes and screens of few colors. A terminal without color gets underlines and the share of each line. A pipe gets the
text alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from memlm.api.generation import Accepted, Neighbor, Token, Usage
from memlm.api.handles import TokenStream
from memlm.api.passages import AnswerPrompt, Passage, Sentence
from memlm.base.figures import counted
from memlm.base.printable import one_line, printable
from memlm.cli.terminal.console import emit_json, err, out

# Upper ends of shares of p_kNN with their styles: colors of the xterm cube, all of the hue of cyan.
LIMITS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.01)
ON_DARK = ("default", "bright_white on color(23)", "bright_white on color(30)", "black on color(37)",
           "black on color(44)", "black on color(51)")  # fmt: skip
ON_LIGHT = ("default", "black on color(195)", "black on color(159)", "black on color(44)", "bright_white on color(30)",
            "bright_white on color(23)")  # fmt: skip
UNDERLINED = 0.5  # share of p_kNN from which a token is underlined where there is no color
BAR_WIDTH = 20
DOCUMENTS_SHOWN, TOKENS_SHOWN = 5, 3
OTHERS, ALONE = "other neighbors", "the model alone"


def stream(
    tokens: Iterable[Token], *, colored: bool, to: Console = out, into: list[Token] | None = None
) -> list[Token]:
    """Prints tokens as they arrive, and returns them all. `into` has those that were printed before an interrupt."""
    seen = [] if into is None else into
    marked = colored and to.is_terminal and (to.no_color or to.color_system is None)
    shaded = colored and to.is_terminal and not marked
    line: list[Token] = []
    text = ""
    for token in tokens:
        seen.append(token)
        line.append(token)
        text = printable(token.text)
        if marked and "\n" in text:
            first, rest = text.split("\n", 1)
            text = first + _share_of_line(line) + "\n" + rest
            line = []
        if shaded and token.knn_share >= LIMITS[0]:
            text = text.replace("\n", "↵\n")  # a shade needs a character
        to.print(Text(text, style=_style(token.knn_share, shaded, marked)), end="")
    if marked and line and not text.endswith("\n"):
        to.print(_share_of_line(line), end="", markup=False)
    to.print()
    return seen


def _style(knn_share: float, shaded: bool, marked: bool) -> str:
    if shaded:
        return shade_of(knn_share)
    return "underline" if marked and knn_share >= UNDERLINED else ""


def _share_of_line(tokens: Sequence[Token]) -> str:
    share = mean_share(tokens)
    return f"  [{share:.0%}]" if share >= LIMITS[0] else ""


def shade_of(knn_share: float) -> str:
    """The style of a token by its share of p_kNN."""
    # Terminals that say so give foreground;background, 7 and 15 for light ones.
    is_light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    styles = ON_LIGHT if is_light else ON_DARK
    return next(style for limit, style in zip(LIMITS, styles, strict=True) if knn_share < limit)


def legend(to: Console = out) -> Text:
    """The legend of the shades, in less than 50 columns."""
    if to.is_terminal and (to.no_color or to.color_system is None):
        return Text("underlined: half or more from memory; [n%]: a line")
    text, low = Text("share of memory: "), 0.0
    for limit in LIMITS:
        text.append(f" {low:.0%} ", style=shade_of(low))
        low = limit
    return text


def mean_share(tokens: Sequence[Token]) -> float:
    """The mean share of p_kNN."""
    return sum(token.knn_share for token in tokens) / max(1, len(tokens))


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
        for neighbor in agreeing if total else ():  # weights of distant neighbors underflow to 0
            probability[neighbor.document_id] += token.knn_share * neighbor.weight / total  # type: ignore[assignment]
    return probability


def summary(tokens: Sequence[Token], usage: Usage | None, accepted: Accepted | None = None) -> str:
    """One line: number of tokens, speed, what came of drafts, and the share of p_kNN where it was retrieved, with the
    share of the entries that it could come from, where that is not all.
    """
    parts = [counted(len(tokens), "token")]
    if usage is not None and usage.decode_ms > 0 and usage.generated_tokens > 1:
        parts.append(f"{1000 * (usage.generated_tokens - 1) / usage.decode_ms:,.1f} tokens/s")
    if usage is not None and usage.drafts and usage.steps:
        taken, drafted = (sum(getattr(each, name) for each in usage.drafts) for name in ("accepted", "drafted"))
        parts.append(f"{usage.generated_tokens / usage.steps:.1f} tokens a step ({taken:,} of {drafted:,} drafted)")
    if any(token.knn_logprob is not None for token in tokens):
        partly = f", with keys of {accepted.keyed_share:.0%}" if accepted and accepted.keyed_share < 1 else ""
        parts.append(f"{mean_share(tokens):.0%} from memory{partly}")
    return " · ".join(parts)


def warn_if_partial(share: float | None) -> None:
    """Says so if a search could reach only a share of the entries."""
    if share is not None and share < 1:
        line = f"warning: a shard does not answer; only {share:.1%} of the entries could be searched"
        err.print(line, style="yellow", markup=False, soft_wrap=True)


def print_sentence(prompt: AnswerPrompt | None, shares: Sequence[float] = ()) -> None:
    """Prints the sentence of a prompt's best passage and its place, before the model has written anything. Of a
    mixture, it is the passage with the largest of the `shares`, unless the model alone has a larger one.
    """
    best = shares.index(max(shares)) if shares else 0
    passage = next(iter(prompt.passages[best:]), None) if prompt is not None else None
    if passage is None or passage.sentence is None or (shares and shares[best] < 1 - sum(shares)):
        return
    out.print(quoted(passage.sentence))
    out.print(Text(one_line(f"  {passage.sentence_place}"), style="dim"))
    out.print()


def quoted(sentence: Sentence) -> Text:
    """A sentence on one line, between marks, with the words of the question bold."""
    left, right = ('"', '"') if out.options.ascii_only else ("“", "”")
    text = Text(one_line(" ".join(sentence.text.split())))
    text.highlight_words(sentence.words, "bold", case_sensitive=True)
    return Text.assemble(left, text, right)


def print_places(prompt: AnswerPrompt, *, cited: Sequence[Passage] = (), shares: Sequence[float] = ()) -> None:
    """Lists the documents and lines of the passages of a prompt, each under its number, the `cited` ones marked. Of a
    mixture, each has its share in the answer, the largest first, and the rest is that of the model alone.
    """
    rows = [*zip_longest(prompt.numbers, prompt.passages, shares)]
    for number, passage, share in sorted(rows, key=lambda row: -(row[2] or 0)):
        figure = "" if share is None else f"{share:4.0%}  "
        line = Text(one_line(f"[{number}] {figure}{passage.place}"), style="dim")
        if passage in cited:
            line.append("  named", style="not dim bold")
        out.print(line)
    if shares:
        out.print(f"    {max(0.0, 1 - sum(shares)):4.0%}  {ALONE}", style="dim", markup=False)
    if prompt.left_out:
        out.print(f"no room in the prompt: {len(prompt.left_out):,} more", style="dim")


def print_sources(tokens: Sequence[Token], *, to: Console = out, details: bool = True) -> None:
    """Lists the documents behind a text with bars, and with `details` the tokens that each gave most to."""
    width = to.width
    for line in source_lines(tokens, width=width, details=details):
        if to.is_terminal:
            line.truncate(width, overflow="ellipsis")
        to.print(line)


def source_lines(tokens: Sequence[Token], *, width: int, details: bool) -> Iterator[Text]:
    """The lines of `print_sources`, for a terminal of a width."""
    contributions, count = probability_by_document(tokens), max(1, len(tokens))
    rows = [(name, share / count) for name, share in contributions.most_common(DOCUMENTS_SHOWN)]
    others = mean_share(tokens) - sum(share for _, share in rows)
    if others >= 0.005:
        rows.append((OTHERS, others))
    rows.append(("the model", 1 - mean_share(tokens)))
    bar_width = min(BAR_WIDTH, max(4, width // 5))
    name_width = min(max(cell_len(one_line(name)) for name, _ in rows), max(12, width - bar_width - 10))
    for name, share in rows:
        is_document = name in contributions
        line = Text(f"  {_fitted(name, name_width)}  ", style="" if is_document else "dim")
        line.append(f"{_bar(share, bar_width)} {share:4.0%}")
        yield line
        if details and is_document:
            yield from _token_lines(tokens, name, width)


def _token_lines(tokens: Sequence[Token], document_id: str, width: int) -> Iterator[Text]:
    """The tokens of a text with the largest shares of p_kNN and their top neighbor in a document, in order."""
    pairs = [(token, source) for token in tokens if (source := top_source(token)) and source.document_id == document_id]
    top = sorted(pairs, key=lambda pair: -pair[0].knn_share)[:TOKENS_SHOWN]
    for token, source in pairs:
        if (token, source) in top:
            top.remove((token, source))
            line = Text(f"    {token.knn_share:4.0%} ")
            line.append(f"{one_line(repr(token.text)):12}")
            line.append(f" line {source.line:<6}", style="dim")
            line.append(" " + one_line(" ".join(source.snippet.split())), style="dim")
            line.truncate(max(width, 40), overflow="ellipsis")
            yield line


def _bar(share: float, width: int) -> str:
    """A bar in eighths of a character, or in whole ones where standard output has no blocks."""
    if out.options.ascii_only:
        return ("#" * round(width * share)).ljust(width)
    eighths = round(8 * width * min(max(share, 0.0), 1.0))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def _fitted(name: str, width: int) -> str:
    """A name on one line, its beginning left out where it is too long, and filled up with spaces."""
    flat = one_line(name)
    while cell_len(flat) > width:
        flat = "…" + flat[2:]
    return flat + " " * (width - cell_len(flat))


def print_generation(
    tokens: TokenStream, *, prompt: str, json: bool, show_sources: bool, begun: Sequence[Token] = ()
) -> None:
    """Prints a generation as it arrives, or whole as one JSON object. On a terminal the prompt comes first and a
    summary last.
    """
    if json:
        drawn = list(tokens)
        text = "".join(token.text for token in drawn)
        emit_json({"text": text, "accepted": tokens.accepted, "finished": tokens.finished, "tokens": drawn})
        return
    seen: list[Token] = []
    if out.is_terminal:
        out.print(Text(printable(prompt), style="dim"), end="")
    try:
        stream(chain(begun, tokens), colored=show_sources, into=seen)
    except KeyboardInterrupt:
        out.print()  # what follows gets its own line
        if out.is_terminal:
            out.print(summary(seen, None, tokens.accepted), style="dim")
        raise
    usage = tokens.finished.usage if tokens.finished is not None else None
    if out.is_terminal:
        out.print(summary(seen, usage, tokens.accepted), style="dim")
    warn_if_partial(usage.searched_share if usage else None)
    if show_sources:
        out.print(legend())
    if show_sources or (out.is_terminal and any(token.neighbors for token in seen)):
        print_sources(seen, details=show_sources)
