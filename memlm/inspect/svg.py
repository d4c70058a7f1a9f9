"""Charts of a report as SVG: grids of heads, attention maps, links between heads, bars and a line.

Colors are CSS variables and classes of the page (`memlm.inspect.report`), so that charts follow light and dark. Every
mark has its exact number as a title.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from memlm.inspect.circuits import Composition
from memlm.inspect.findings import AttentionMap
from memlm.inspect.heads import HeadId

LEFT, TOP = 26, 18  # room for the labels of axes
GRID_WIDTH, MAP_SIZE, WIDE = 500, 330, 1060
LABELLED = 9  # pixels that a token needs to have its text beside it
FAINTEST = 0.02  # attention below is not drawn


class Svg:
    """An SVG under construction, in pixels from the upper left."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
            f' style="max-width:{width:g}px"><title>{escape(title)}</title>'
        ]

    def rect(self, box: Sequence[float], kind: str, *, opacity: float = 1.0, title: str = "") -> None:
        """Draws a box, given as x, y, width and height."""
        x, y, width, height = box
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"'
            f"{_opacity(opacity)}{_closed('rect', title)}"
        )

    def circle(self, x: float, y: float, radius: float, kind: str, *, title: str = "") -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}"{_closed("circle", title)}')

    def path(self, commands: str, kind: str, *, opacity: float = 1.0, title: str = "") -> None:
        self._parts.append(f'<path d="{commands}" class="{kind}"{_opacity(opacity)}{_closed("path", title)}')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def done(self) -> str:
        """Returns the whole drawing."""
        return "".join([*self._parts, "</svg>"])


def _opacity(opacity: float) -> str:
    return "" if opacity >= 1 else f' opacity="{opacity:.3f}"'


def _closed(element: str, title: str) -> str:
    return f"><title>{escape(title)}</title></{element}>" if title else "/>"


def grid(title: str, scores: Mapping[HeadId, float | None], marked: Sequence[HeadId], shape: tuple[int, int]) -> str:
    """Draws a score of all heads, a column for each layer: stronger color for a score nearer to 1, another one for
    negative scores. Heads in `marked` have a frame.
    """
    layers, heads = shape
    cell = min(22.0, max(4.0, (GRID_WIDTH - LEFT) / layers))
    svg = Svg(LEFT + cell * layers + 4, TOP + cell * heads + 6, title)
    _axes(svg, cell, layers, heads)
    for (layer, head), score in scores.items():
        x, y = LEFT + cell * layer, TOP + cell * head
        box = x + 0.5, y + 0.5, cell - 1, cell - 1
        text = f"layer {layer}, head {head}: {'none' if score is None else f'{score:.3f}'}"
        svg.rect(box, "cell", title=text)
        if score is not None and abs(score) >= FAINTEST:
            svg.rect(box, "heat" if score > 0 else "cold", opacity=min(1.0, abs(score)), title=text)
        if (layer, head) in marked:
            svg.rect((x + 1, y + 1, cell - 2, cell - 2), "ring", title=text)
    return svg.done()


def _axes(svg: Svg, cell: float, layers: int, heads: int) -> None:
    """Numbers every layer and head for which there is room."""
    for n in range(0, layers, _step(layers, cell, 16)):
        svg.text(LEFT + cell * (n + 0.5), TOP - 6, str(n), "tick middle")
    for n in range(0, heads, _step(heads, cell, 11)):
        svg.text(LEFT - 6, TOP + cell * (n + 0.5) + 3.5, str(n), "tick end")


def _step(count: int, cell: float, room: float) -> int:
    """Every how many cells a label of some pixels has room: a power of two."""
    step = 1
    while step * cell < room and step < count:
        step *= 2
    return step


def attention_map(shown: AttentionMap, boundaries: Sequence[int] = ()) -> str:
    """Draws the weights of each token on earlier ones, a row for each token. Lines mark the `boundaries`."""
    size, tokens = len(shown.tokens), [_visible(token) for token in shown.tokens]
    cell = min(14.0, MAP_SIZE / max(1, size))
    labels = 62 if cell >= LABELLED else 0
    svg = Svg(labels + cell * size + 2, cell * size + 2, f"Attention of layer {shown.layer}, head {shown.head}")
    svg.rect((labels, 0, cell * size, cell * size), "cell")
    for at in boundaries:
        edge = cell * at
        svg.path(f"M{labels + edge:g} {edge:g}V{cell * size:g}M{labels:g} {edge:g}H{labels + edge:g}", "rule")
    for row, weights in enumerate(shown.weights):
        if labels:
            svg.text(labels - 4, cell * row + cell - 2, tokens[row][:9], "tick end")
        for column, weight in enumerate(weights):
            if weight >= FAINTEST:
                box = labels + cell * column, cell * row, cell, cell
                svg.rect(box, "heat", opacity=weight, title=f"{tokens[row]} → {tokens[column]}: {weight:.2f}")
    return svg.done()


def _visible(token: str) -> str:
    """The text of a token with its spaces and line ends as signs."""
    return token.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def links(
    shape: tuple[int, int],
    found: Sequence[Composition],
    kind_of: Callable[[HeadId], str],
    name_of: Callable[[HeadId], str],
) -> str:
    """Draws all heads as points, a column for each layer, and an arc for each link, stronger for a higher score.

    `kind_of` gives a head's class, or "" for a small point, and `name_of` its title.
    """
    layers, heads = shape
    across, down = (WIDE - LEFT - 12) / layers, min(26.0, 420 / heads)
    svg = Svg(WIDE, TOP + down * heads + 8, "Earlier heads that later ones read")
    strongest = max((link.score for link in found), default=1.0)

    def place(head: HeadId) -> tuple[float, float]:
        return LEFT + across * (head[0] + 0.5), TOP + down * (head[1] + 0.5)

    for layer in range(0, layers, _step(layers, across, 20)):
        svg.text(place((layer, 0))[0], TOP - 6, str(layer), "tick middle")
    for head in range(0, heads, _step(heads, down, 11)):
        svg.text(LEFT - 6, place((0, head))[1] + 3.5, str(head), "tick end")
    for link in sorted(found, key=lambda link: link.score):
        (x, y), (to_x, to_y) = place(link.source), place(link.target)
        bend = 0.25 * (to_x - x) * (-1 if to_y <= y else 1)
        title = f"{name_of(link.source)} → {name_of(link.target)}: {link.kind} {link.score:.3f}"
        middle = f"Q{(x + to_x) / 2:.1f} {(y + to_y) / 2 + bend:.1f}"
        svg.path(f"M{x:.1f} {y:.1f}{middle} {to_x:.1f} {to_y:.1f}", "arc", opacity=link.score / strongest, title=title)
    for layer in range(layers):
        for head in range(heads):
            at, kind = (layer, head), kind_of((layer, head))
            svg.circle(*place(at), 5.5 if kind else 1.6, kind or "dot", title=name_of(at))
    return svg.done()


def columns(title: str, values: Sequence[float], marked: Sequence[int]) -> str:
    """Draws a column for each value, those of `marked` in full color."""
    across, height, most = (WIDE - LEFT - 12) / max(1, len(values)), 96, max([*values, 1e-9])
    svg = Svg(WIDE, height + 24, title)
    svg.path(f"M{LEFT} {height}H{WIDE - 12}", "rule")
    step = _step(len(values), across, 20)
    for n, value in enumerate(values):
        x, tall = LEFT + across * n, (height - 6) * value / most
        box = x + 1.5, height - tall, max(1.0, across - 3), tall
        if value:
            svg.rect(box, "heat" if n in marked else "weak", title=f"layer {n}: {value:.2f}")
        if n in marked or n % step == 0:
            svg.text(x + across / 2, height + 15, str(n), "tick middle" + (" strong" if n in marked else ""))
    return svg.done()


def bars(rows: Sequence[tuple[str, float, str]], unit: str) -> str:
    """Draws a bar for each name, value and class, with its value behind it."""
    width, left, down, most = 660, 210, 28, max((value for _, value, _ in rows), default=1.0)
    svg = Svg(width, down * len(rows) + 4, unit)
    for n, (name, value, kind) in enumerate(rows):
        long = (width - left - 90) * value / max(most, 1e-9)
        svg.text(left - 10, down * n + 18, name, "label end")
        svg.rect((left, down * n + 5, max(1.0, long), down - 10), kind, title=f"{name}: {value:.3f} {unit}")
        svg.text(left + long + 8, down * n + 18, f"{value:.2f}", "label")
    return svg.done()


def curve(values: Sequence[float], boundaries: Sequence[int], names: Sequence[str]) -> str:
    """Draws a line through values, with a rule and a name where each part begins."""
    height, most = 170, max([*values, 1e-9])
    across = (WIDE - LEFT - 16) / max(1, len(values) - 1)
    svg = Svg(WIDE, height + 24, "Loss by place, in nats")
    for level in range(0, int(most) + 1, max(1, round(most / 4))):
        y = height - (height - TOP) * level / most
        svg.path(f"M{LEFT} {y:.1f}H{WIDE - 12}", "rule", opacity=0.6)
        svg.text(LEFT - 6, y + 3.5, str(level), "tick end")
    for at, name in zip(boundaries, names, strict=True):
        x = LEFT + across * at
        svg.path(f"M{x:.1f} {TOP - 8}V{height}", "rule")
        svg.text(x + 5, height + 16, name, "tick")
    points = [f"{LEFT + across * n:.1f} {height - (height - TOP) * value / most:.1f}" for n, value in enumerate(values)]
    svg.path("M" + "L".join(points), "line")
    for n, (value, point) in enumerate(zip(values, points, strict=True)):
        at_x, at_y = map(float, point.split())
        svg.circle(at_x, at_y, 5, "hover", title=f"token {n + 2}: {value:.2f} nats")
    return svg.done()
