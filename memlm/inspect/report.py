"""An inspection as one HTML page, with nothing loaded from elsewhere and no script, on light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import memlm.inspect.svg as svg
from memlm.inspect.findings import LEAST_EIGENVALUES, THRESHOLDS, AttentionMap, Inspection, Role
from memlm.inspect.heads import HeadId

LISTED = 24
# Of several roles, the first one colors a head in the diagram.
CLASSES = {
    Role.INDUCTION: "induction", Role.PREVIOUS: "previous", Role.DUPLICATE: "duplicate", Role.RETRIEVAL: "retrieval",
}  # fmt: skip
LINK_OVER_RANDOM = 2.0  # links below so many times the composition of random weights are not drawn

STYLE = """
:root{color-scheme:light dark;--ground:#f6f6f3;--paper:#fff;--ink:#1b1e22;--muted:#5a6068;--line:#dcdcd5;--cell:#f0f0ec;
--heat:#00796b;--cold:#b3423a;--weak:#a9c9c4;--induction:#00796b;--previous:#c07a14;--duplicate:#6d55c4;
--retrieval:#2f6fb5;--mono:ui-monospace,"Cascadia Mono","DejaVu Sans Mono",Menlo,Consolas,monospace;
font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
@media (prefers-color-scheme:dark){:root{--ground:#121416;--paper:#1a1d20;--ink:#e8e9ea;--muted:#a0a7ae;--line:#33383d;
--cell:#24282c;--heat:#5fd0c0;--cold:#f08a80;--weak:#2f5f59;--induction:#5fd0c0;--previous:#e5ab4f;--duplicate:#a996f0;
--retrieval:#7db4ee}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1150px;padding:2rem 1.5rem 4rem;background:var(--ground);color:var(--ink)}
h1,h2,h3,p,dl,dd,figure{margin:0}
h1{font-size:1.5rem;overflow-wrap:anywhere} h2{font-size:1.1rem;margin-bottom:.3rem} h3{font-size:.92rem}
section{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:1.2rem 1.4rem;margin-top:1.2rem}
section>p{max-width:72ch;margin-bottom:.7rem} p.note,figcaption,header p,footer{color:var(--muted);font-size:.86rem}
.pair{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));gap:1.3rem 2rem}
.trio{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,280px),1fr));gap:1.3rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.8rem;margin-top:1.2rem}
.card{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:.7rem 1rem}
.card b{display:block;font-size:1.6rem;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums}
.card span{color:var(--muted);font-size:.85rem}
svg{display:block;width:100%;height:auto;overflow:visible} svg text{fill:var(--ink);font-size:12px}
svg .tick{fill:var(--muted);font-size:9.5px} svg .strong{fill:var(--ink);font-weight:700}
svg .middle{text-anchor:middle} svg .end{text-anchor:end} .cell{fill:var(--cell)} .heat{fill:var(--heat)}
.cold{fill:var(--cold)} .weak{fill:var(--weak)}
.ring{fill:none;stroke:var(--ink);stroke-width:1.6} .rule{fill:none;stroke:var(--line);stroke-width:1}
.arc{fill:none;stroke:var(--muted);stroke-width:1.8} .line{fill:none;stroke:var(--heat);stroke-width:2}
.hover{fill:transparent} .dot{fill:var(--line)} .induction{fill:var(--induction)} .previous{fill:var(--previous)}
.duplicate{fill:var(--duplicate)} .retrieval{fill:var(--retrieval)}
.scroll{overflow-x:auto} .scroll>svg{min-width:640px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{text-align:right;padding:.28rem .55rem;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--muted);font-weight:600} th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
td.shade{position:relative} td.shade i{position:absolute;inset:2px 2px;border-radius:3px;z-index:0}
td.shade i.heat{background:var(--heat)} td.shade i.cold{background:var(--cold)} td.shade span{position:relative}
.tag{display:inline-block;border:1px solid var(--line);border-radius:99px;padding:0 .5rem;font-size:.78rem}
.tag+.tag{margin-left:.25rem}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;color:var(--muted);font-size:.84rem;margin-bottom:.6rem}
.legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:99px;margin-right:.35rem;vertical-align:-1px}
i.induction{background:var(--induction)} i.previous{background:var(--previous)} i.duplicate{background:var(--duplicate)}
i.retrieval{background:var(--retrieval)} dt{font-weight:600;margin-top:.5rem} dd{color:var(--muted);font-size:.9rem}
footer{margin-top:1.5rem}
"""


def report_html(inspection: Inspection) -> str:
    """Returns the page."""
    name = escape(inspection.model)
    sections = [
        _advice(inspection), _grids(inspection), _circuit(inspection), _table(inspection), _causal(inspection),
        _losses(inspection), *_maps(inspection), _memories(inspection), _definitions(inspection),
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}: heads and circuits</title><style>{STYLE}</style></head><body>"
        f"{_head(inspection)}{''.join(filter(None, sections))}"
        f"<footer>memlm inspect, version {escape(inspection.version)}. Layers and heads count from 0."
        " Numbers appear under the pointer.</footer></body></html>\n"
    )


def _head(found: Inspection) -> str:
    cards = [
        (str(len(found.with_role(role))), f"{role.value} head{'s' * (len(found.with_role(role)) != 1)}")
        for role in (Role.INDUCTION, Role.PREVIOUS, Role.COPYING, Role.RETRIEVAL)
    ]
    cards.append((f"{found.in_context_gain:.1f}", "nats a token saved by a repetition"))
    shown = "".join(f'<div class="card"><b>{value}</b><span>{text}</span></div>' for value, text in cards)
    layers = ", ".join(map(str, found.layers_without_heads))
    without = f". No attention weights, and so no heads, in layers {layers}" if layers else ""
    return (
        f"<header><h1>{escape(found.model)}</h1><p>{found.num_layers} layers of {found.num_heads} heads"
        f" ({found.num_kv_heads} for keys and values), {found.num_parameters / 1e6:,.1f} million parameters,"
        f' positions: {escape(found.positions)}{without}</p></header><div class="cards">{shown}</div>'
    )


def _section(title: str, text: str, *content: str) -> str:
    return f"<section><h2>{title}</h2><p>{text}</p>{''.join(content)}</section>"


def _wide(drawing: str) -> str:
    """A drawing that scrolls where it would be too small to read."""
    return f'<div class="scroll">{drawing}</div>'


def _ids(heads: Iterable[HeadId]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


def _advice(found: Inspection) -> str:
    advice = found.advice
    if not advice.layers:
        return _section("Layers for kNN attention", f"None. {escape(advice.basis)}")
    layers = ", ".join(map(str, advice.layers))
    return _section(
        "Layers for kNN attention",
        f"Try <b>{layers}</b> first. {escape(advice.basis)} This is a heuristic: heads of these layers look for earlier"
        " text by its content already. It was not learned from trained memories, so compare it with other layers.",
        _wide(svg.columns("Evidence by layer", advice.evidence, advice.layers)),
    )


def _grids(found: Inspection) -> str:
    shape = found.num_layers, found.num_heads
    figures = []
    for title, name, roles in (
        ("Induction", "induction", (Role.INDUCTION,)), ("Retrieval", "retrieval", (Role.RETRIEVAL,)),
        ("Previous token", "previous", (Role.PREVIOUS,)), ("Duplicate token", "duplicate", (Role.DUPLICATE,)),
        ("Copying (OV eigenvalues)", "copying", (Role.COPYING, Role.ANTI_COPYING)),
        ("Copied tokens", "copied", (Role.COPYING, Role.ANTI_COPYING)),
        ("Matching (QK eigenvalues)", "matching", ()), ("First place", "first", (Role.FIRST,)),
    ):  # fmt: skip
        scores = {head.id: getattr(head, name) for head in found.heads}
        if all(score is None for score in scores.values()):
            continue
        marked = [head.id for head in found.heads if not set(roles).isdisjoint(head.roles)]
        count = f" · {len(marked)} framed" if roles else ""
        figures.append(f"<figure><h3>{title}{count}</h3>{svg.grid(title, scores, marked, shape)}</figure>")
    return _section(
        "Scores of all heads",
        "A column for each layer, a row for each head. Full color is 1, red is negative. Frames mark heads that reach"
        " the threshold of a role.",
        f'<div class="pair">{"".join(figures)}</div>',
    )


def _circuit(found: Inspection) -> str:
    least = LINK_OVER_RANDOM * found.random_composition[1]
    shown = [link for link in found.compositions if link.kind == "K" and link.score >= least]
    roles = {head.id: head.roles for head in found.heads}

    def kind_of(head: HeadId) -> str:
        return next((kind for role, kind in CLASSES.items() if role in roles[head]), "")

    def name_of(head: HeadId) -> str:
        return f"{_ids([head])} {', '.join(roles[head])}".strip()

    if not shown:
        return ""
    legend = "".join(f'<span><i class="{kind}"></i>{role.value}</span>' for role, kind in CLASSES.items())
    return _section(
        "Circuits",
        "An arc leads from a head to a later one whose keys it writes (K-composition). An induction head that finds"
        " repeated text reads a previous-token head in this way. Shown are the strongest links into the most telling"
        f" heads, from {least:.3f} on: twice the 95th percentile of random weights.",
        f'<div class="legend">{legend}</div>',
        _wide(svg.links((found.num_layers, found.num_heads), shown, kind_of, name_of)),
    )


def _table(found: Inspection) -> str:
    heads = [head for head in found.heads if set(head.roles) - {Role.FIRST}]
    heads.sort(key=lambda head: -head.telling)
    if not heads:
        return _section("Heads with a role", "No head reaches the threshold of a role.")
    names = ("induction", "control", "previous", "duplicate", "first", "copying", "copied", "matching", "retrieval")
    head_row = "".join(f"<th>{name}</th>" for name in ("head", "roles", *names))
    rows = "".join(
        f"<tr><td>{_ids([head.id])}</td><td>{_tags(head.roles)}</td>"
        f"{''.join(_shaded(getattr(head, name)) for name in names)}</tr>"
        for head in heads[:LISTED]
    )
    rest = len(heads) - LISTED
    return _section(
        "Heads with a role",
        f"The {min(LISTED, len(heads))} most telling heads{f', of {len(heads)}' if rest > 0 else ''}, as layer.head.",
        f'<div class="scroll"><table><thead><tr>{head_row}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def _tags(roles: Iterable[Role]) -> str:
    return "".join(f'<span class="tag">{role.value}</span>' for role in roles)


def _shaded(score: float | None) -> str:
    if score is None:
        return "<td>–</td>"
    kind, opacity = "heat" if score >= 0 else "cold", 0.45 * min(1.0, abs(score))
    shade = f'<i class="{kind}" style="opacity:{opacity:.2f}"></i>' if abs(score) >= 0.05 else ""
    return f'<td class="shade">{shade}<span>{round(score, 2) + 0.0:.2f}</span></td>'


def _causal(found: Inspection) -> str:
    ablation = found.ablation
    if ablation is None:
        return ""
    count = len(ablation.heads)
    others = [(f"without {count} other{'s' * (count > 1)}", loss, "weak") for loss in ablation.losses_without_others]
    rows = [
        ("the model", ablation.loss, "heat"),
        (f"without {count} induction", ablation.loss_without, "cold"),
        *others,
    ]
    return _section(
        "Do induction heads cause the copying?",
        f"The loss on repeated random tokens, in nats. Heads {_ids(ablation.heads)} were left out by replacing their"
        " outputs with their means, and as a comparison as many heads drawn from the same layers, where these have"
        " enough.",
        svg.bars(rows, "nats"),
    )


def _losses(found: Inspection) -> str:
    # The first loss is of the second token.
    begins = [max(0, found.prefix + n * found.period - 1) for n in range(found.repeats)]
    names = [f"repeat {n + 1}: {loss:.2f}" for n, loss in enumerate(found.repeat_losses)]
    return _section(
        "Loss by place",
        f"{found.period} random tokens, repeated {found.repeats} times. A model that copies has a low loss from the"
        " second repeat on. Below each part is its mean, in nats.",
        _wide(svg.curve(found.losses, begins, names)),
    )


def _maps(found: Inspection) -> list[str]:
    by_text: dict[str, list[AttentionMap]] = {}
    for shown in found.maps:
        by_text.setdefault(shown.text, []).append(shown)
    roles = {head.id: head.roles for head in found.heads}
    sections = []
    for number, (text, maps) in enumerate(by_text.items()):
        bounds = [found.prefix + n * found.period for n in range(1, found.repeats)] if number == 0 else []
        figures = "".join(
            f"<figure><h3>{shown.layer}.{shown.head}</h3>"
            f"{svg.attention_map(shown, [at for at in bounds if at < len(shown.tokens)])}"
            f"<figcaption>{', '.join(roles[shown.layer, shown.head]) or 'no role'}</figcaption></figure>"
            for shown in maps
        )
        sections.append(
            _section(
                f"Attention in {escape(text)}",
                f"Each row is a token, each column an earlier one, for the first {len(maps[0].tokens)} tokens.",
                f'<div class="trio">{figures}</div>',
            )
        )
    return sections


def _memories(found: Inspection) -> str:
    names = {"knn": "kNN attention", "xl": "Transformer-XL memory", "compressed": "compressed memory"}
    used = [name for name in names if any(getattr(head, name) for head in found.heads)]
    if not used:
        return ""
    shape = found.num_layers, found.num_heads
    figures = "".join(
        f"<figure><h3>{names[name]}</h3>"
        f"{svg.grid(names[name], {head.id: getattr(head, name) for head in found.heads}, (), shape)}</figure>"
        for name in used
    )
    return _section(
        "Attention to memories", "The share of each head's attention, a mean over all tokens of the repeated text.",
        f'<div class="pair">{figures}</div>',
    )  # fmt: skip


def _definitions(found: Inspection) -> str:
    def role(name: Role) -> str:
        return f"Role: {name.value} from {THRESHOLDS[name]:g} on."

    entries: Sequence[tuple[str, str]] = (
        ("induction", "Attention from a repeated random token to the tokens behind its earlier occurrences (arXiv"
         f" 2209.11895). Uniform attention has {found.uniform['induction']:.3f}. {role(Role.INDUCTION)} The control, in"
         " which each repeat has an order of its own, is subtracted first."),
        ("previous, duplicate, first", "Attention from a repeated token to the token before, to its own earlier"
         f" occurrences, and to the first place. {role(Role.PREVIOUS)} {role(Role.DUPLICATE)} {role(Role.FIRST)}"),
        ("copying, matching", "Sum of the eigenvalues over the sum of their sizes, of the circuits from token to logit"
         " (OV) and from token to attention score (QK), as in A Mathematical Framework for Transformer Circuits. Norms"
         " are folded in by their gains, without their division. Layers behind the first read tokens with the first"
         " feed-forward. Rotary heads are compared at distances 1, 8 and 64."),
        ("copied", "The share of 256 tokens whose own logit the OV circuit raises into the highest 2 %, less the share"
         f" that it lowers into the lowest. Roles: copying from {THRESHOLDS[Role.COPYING]:g} on, anti-copying from"
         f" -{THRESHOLDS[Role.ANTI_COPYING]:g} down, with eigenvalues of the same sign of {LEAST_EIGENVALUES:g}."),
        ("retrieval", "The share of the tokens of a sentence within a text that the model repeats in an answer while"
         f" the head looks most at the token to repeat (arXiv 2404.15574). {role(Role.RETRIEVAL)}"),
        ("composition", "|A B| / (|A| |B|) of a later head's circuit A and an earlier head's OV circuit B. Random"
         f" weights of this shape have {found.random_composition[0]:.3f}."),
    )  # fmt: skip
    shown = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in entries)
    return f"<section><h2>How the scores are made</h2><dl>{shown}</dl></section>"
