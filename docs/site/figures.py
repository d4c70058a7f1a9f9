"""Draws the figures of the documentation: python docs/site/figures.py

Each is an SVG with a panel of its own, in colors that follow the reader's system, so that it can be read on light and
dark pages.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "images"
STYLE = """
.panel{fill:#fbfbfe;stroke:#d4d8e4} .box{fill:#eef0f8;stroke:#8a93b0} .memory{fill:#fdebd3;stroke:#c98a2b}
.new{fill:#dcecfb;stroke:#3d7ec0} .bar{fill:#c98a2b} .model{fill:#8a93b0} .line{stroke:#5c6580;fill:none}
.head{fill:#5c6580} text{fill:#20263a;font:13px system-ui,sans-serif} .small{font-size:11.5px;fill:#535b75}
.bold{font-weight:600} .middle{text-anchor:middle} .end{text-anchor:end}
@media (prefers-color-scheme:dark){.panel{fill:#1c2030;stroke:#3a4158} .box{fill:#2a3045;stroke:#7c86a6}
.memory{fill:#47351c;stroke:#d9a04a} .new{fill:#1d3a57;stroke:#6ea8e0} .bar{fill:#d9a04a} .model{fill:#7c86a6}
.line{stroke:#a4adc8} .head{fill:#a4adc8} text{fill:#e6e9f4} .small{fill:#b4bcd4}}
"""


class Figure:
    """An SVG under construction. Positions are in pixels from the upper left."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.parts = name, [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img"><title>{escape(title)}</title><style>{STYLE}</style>',
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            '<path class="head" d="M0,0 L9,4 L0,8 z"/></marker></defs>',
            f'<rect class="panel" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>',
        ]  # fmt: skip

    def box(self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "box") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4.5 + 16 * (number - (len(lines) - 1) / 2), line, "middle")

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<path class="line" d="M{path}" stroke-width="1.4" marker-end="url(#head)"/>')

    def bar(self, x: float, y: float, width: float, kind: str = "bar") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width:.1f}" height="12" rx="2"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def knn_lm() -> Figure:
    figure = Figure("knn-lm", "kNN-LM: neighbors of a key, and the mixture with the model", 720, 300)
    figure.box(20, 30, 190, 48, "The gateway of the\noffice listens on port")
    figure.box(250, 36, 90, 36, "the model")
    figure.arrow((210, 54), (248, 54))
    figure.arrow((340, 46), (408, 46))
    figure.text(352, 38, "p_LM", "small")
    figure.arrow((305, 72), (305, 132))
    figure.text(313, 106, "key", "small")
    figure.text(20, 124, "datastore", "bold")
    figure.text(20, 141, "key, next token, place", "small")
    for row, (place, token, distance, weight) in enumerate(
        [
            ("gateway.md:1", "7443", "1", "0.67"),
            ("gateway.md:3", "7443", "3", "0.24"),
            ("proxy.md:8", "8080", "5", "0.09"),
        ]
    ):
        y = 150 + 38 * row
        figure.box(20, y, 170, 30, f"{place}   {token}", "memory")
        figure.text(198, y + 20, f"distance² {distance}", "small")
        figure.arrow((345, y + 15), (408, y + 15))
        figure.text(352, y + 9, weight, "small")
    figure.box(276, 134, 60, 128, "search,\nk = 3")
    for x, y, name, values in (
        (418, 40, "p_LM", (("7443", 0.01), ("8080", 0.30))),
        (418, 166, "p_kNN", (("7443", 0.91), ("8080", 0.09))),
        (590, 106, "mixture, λ = 0.6", (("7443", 0.55), ("8080", 0.17))),
    ):
        figure.text(x, y, name, "bold")
        for number, (token, value) in enumerate(values):
            figure.text(x, y + 20 + 19 * number, token)
            figure.bar(x + 36, y + 10 + 19 * number, max(1.5, 50 * value), "bar" if name != "p_LM" else "model")
            figure.text(x + 42 + 50 * value, y + 20 + 19 * number, f"{value:.2f}", "small")
    figure.arrow((535, 62), (582, 118))
    figure.arrow((535, 182), (582, 140))
    figure.text(418, 280, "Each token keeps the places that gave it its weight.", "small")
    return figure


def context_cache() -> Figure:
    figure = Figure("kv-cache", "KV cache and Transformer-XL memory along a text", 720, 220)
    figure.text(20, 32, "KV cache of one segment: attention reads its earlier tokens", "bold")
    for number in range(8):
        figure.box(20 + 34 * number, 44, 30, 26, kind="box" if number < 7 else "new")
    figure.text(304, 61, "the new token reads the 7 keys and values before it", "small")
    figure.text(20, 116, "Transformer-XL memory: the segment before stays readable", "bold")
    for number in range(12):
        figure.box(20 + 34 * number, 128, 30, 26, kind="memory" if number < 4 else "box" if number < 11 else "new")
    figure.text(44, 174, "xl_length = 4", "small")
    figure.text(200, 174, "the segment", "small")
    figure.arrow((409, 156), (409, 184), (35, 184), (35, 156))
    figure.text(440, 146, "tokens before these are gone", "small")
    figure.text(20, 206, "Keys and values are written once and read by every later token.", "small")
    return figure


def compressive_memory() -> Figure:
    figure = Figure("compressive-memory", "Compressive memory: states that leave the memory become fewer", 720, 190)
    figure.text(20, 30, "compressive memory", "bold")
    figure.text(220, 30, "Transformer-XL memory", "bold")
    figure.text(470, 30, "segment", "bold")
    for number in range(3):
        figure.box(20 + 50 * number, 44, 42, 30, kind="memory")
    for number in range(6):
        figure.box(220 + 36 * number, 44, 30, 30, kind="memory")
    for number in range(5):
        figure.box(470 + 36 * number, 44, 30, 30, kind="box" if number < 4 else "new")
    figure.arrow((485, 76), (485, 92), (436, 92), (436, 78))
    figure.text(444, 108, "a segment has ended", "small")
    for number in range(3):
        figure.arrow((235 + 36 * number, 76), (200, 122))
    figure.box(110, 122, 90, 30, "rate = 3 → 1")
    figure.arrow((150, 120), (141, 78))
    figure.text(220, 142, "mean, max, convolution, dilated convolution or the most used", "small")
    figure.text(20, 176, "Attention reads all three. The oldest compressed state is dropped.", "small")
    return figure


def knn_attention() -> Figure:
    figure = Figure("knn-attention", "kNN attention: local attention and the nearest pairs of the past", 720, 220)
    figure.text(20, 30, "the document's past: pairs of attention key and value", "bold")
    for number in range(16):
        figure.box(20 + 26 * number, 42, 22, 24, kind="memory" if number in (3, 7, 12) else "box")
    figure.text(446, 58, "…", "small")
    figure.text(470, 30, "segment", "bold")
    for number in range(7):
        figure.box(470 + 32 * number, 42, 27, 24, kind="box" if number < 6 else "new")
    figure.arrow((676, 68), (676, 100))
    figure.box(632, 102, 78, 28, "query", "new")
    figure.arrow((632, 110), (350, 110), (335, 70))
    figure.arrow((632, 116), (215, 116), (215, 70))
    figure.arrow((632, 122), (112, 122), (112, 70))
    figure.text(226, 136, "top_k = 3 nearest keys", "small")
    figure.box(110, 152, 170, 30, "attention over them: m", "memory")
    figure.box(310, 152, 170, 30, "local attention: a")
    figure.arrow((671, 132), (671, 167), (482, 167))
    figure.arrow((195, 184), (195, 204), (312, 204))
    figure.arrow((395, 184), (395, 192))
    figure.text(320, 208, "a + g (m - a)", "bold")
    figure.text(420, 208, "g: sigmoid or tanh of a number for each head", "small")
    return figure


def provenance() -> Figure:
    figure = Figure("provenance", "Provenance of a token: share of memory, and the neighbors behind it", 720, 190)
    figure.text(20, 30, "the token 7443", "bold")
    figure.text(20, 58, "λ p_kNN = 0.6 · 0.91 = 0.55")
    figure.bar(250, 47, 330)
    figure.text(20, 84, "(1 - λ) p_LM = 0.4 · 0.01 = 0.004")
    figure.bar(250, 73, 3, "model")
    figure.text(20, 112, "share of memory = λ p_kNN / p = 0.99", "bold")
    figure.text(20, 146, "neighbors with this token", "small")
    for row, (place, weight) in enumerate((("gateway.md, line 1", 0.67), ("gateway.md, line 3", 0.24))):
        figure.box(190 + 240 * row, 130, 130, 26, place, "memory")
        figure.text(330 + 240 * row, 148, f"weight {weight}", "small")
    figure.text(20, 176, "The neighbor with 8080 had weight 0.09, and supported another token.", "small")
    return figure


def floors() -> Figure:
    figure = Figure("floors", "The rooms of memlm by floors, the lowest at the bottom", 720, 400)
    rooms = (  # from the roof down: the name of a floor, and its rooms with their kinds
        ("commands", "box", ("zoo", "bench", "cli")),
        ("server", "new", ("inference", "jobs", "frontend", "http")),
        ("border", "box", ("wire", "client", "integrations")),
        ("in process", "box", ("prompting", "language_model", "evaluation")),
        ("work", "box", ("training", "indexing", "generation", "inspect", "distributed")),
        ("mixture", "memory", ("retrieval",)),
        ("model", "box", ("api", "data", "model")),
        ("storage", "memory", ("index", "index.store")),
    )
    for number, (name, kind, boxes) in enumerate((*rooms, ("ground", "box", ("v1, the contract", "errors", "base")))):
        y = 20 + 38 * number
        figure.text(24, y + 20, name, "bold")
        width = (590 - 8 * (len(boxes) - 1)) / len(boxes)
        for place, room in enumerate(boxes):
            figure.box(round(106 + (width + 8) * place, 1), y, round(width, 1), 30, room, kind)
    figure.text(24, 374, "A room imports from lower floors, and on its own floor from rooms to its left.", "small")
    figure.text(24, 390, "Blue: the server's processes. Orange: where neighbors come from.", "small")
    return figure


FIGURES = (knn_lm, context_cache, compressive_memory, knn_attention, provenance, floors)

if __name__ == "__main__":
    for draw in FIGURES:
        (FOLDER / f"{draw().name}.svg").write_text(draw().svg(), encoding="utf-8")
