"""Inspecting a model: the roles of its heads, and the layers that kNN attention may help."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from memlm.base.progress import Progress, silent
from memlm.base.version import __version__
from memlm.errors import InvalidInput
from memlm.inspect.circuits import (
    Composition,
    TokenTables,
    compositions,
    copied_scores,
    copying_scores,
    matching_scores,
    random_composition,
)
from memlm.inspect.findings import (
    LEAST_EIGENVALUES,
    THRESHOLDS,
    Ablation,
    Advice,
    AttentionMap,
    Head,
    Inspection,
    Role,
    score_of,
)
from memlm.inspect.heads import (
    PlaceScores,
    losses,
    place_scores,
    repeat_losses,
    retrieval_scores,
    uniform_scores,
)
from memlm.inspect.texts import Needle, RepeatedText, needles, repeated_text
from memlm.model.attention.attention import Attention
from memlm.model.decoder import Decoder
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint

MAPPED = 64  # tokens of an attention map
MOST_MAPS, MOST_TARGETS, MOST_SOURCES = 6, 16, 4
ABLATION_ROWS, ABLATION_DRAWS = 4, 3
EVIDENCE_SHARE = 0.5  # of all evidence, in the layers that are advised
STEPS = 6
REPEATED, GIVEN = "random tokens, repeated", "the given text"


class Vocabulary(NamedTuple):
    """The tokens that texts are drawn from, those before every text, and the text of a token."""

    ids: Sequence[int]
    prefix: Sequence[int] = ()
    name: Callable[[int], str] = str


def inspect_model(
    model: str | Path | Checkpoint,
    text: str | None = None,
    *,
    device: str = "auto",
    seed: int = 0,
    progress: Progress = silent,
) -> Inspection:
    """Inspects the heads of a model, given as to `memlm.load`, or of a loaded checkpoint.

    A model is loaded in float32, to which a GGUF file is converted. The most telling heads are also mapped on the first
    64 tokens of `text`. Random tokens follow from `seed`. Takes 7 passes of 400 or 800 tokens and 8 of 256. Raises
    InvalidInput for a model whose texts are too short to repeat anything.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model, dtype="float32", device=device)
    tokenizer, decoder = checkpoint.tokenizer, checkpoint.decoder
    special, longest = set(tokenizer.special_tokens.values()), decoder.config.max_length
    vocabulary = Vocabulary(
        [token for token in range(tokenizer.vocab_size) if token not in special],
        tokenizer.special.prefix,
        lambda token: tokenizer.decode([token]),
    )
    found = inspect_decoder(
        decoder, vocabulary, sentences=list(needles(tokenizer, longest)),
        text_ids=tokenizer.prompt(text)[:longest] if text else (), seed=seed, progress=progress,
    )  # fmt: skip
    path = checkpoint.path
    return replace(found, model=path.stem if path.is_file() else path.name)


def _check(decoder: Decoder) -> None:
    if decoder.config.num_blocks != decoder.config.num_layers:
        raise InvalidInput("the layers of this stack share blocks, which have no heads of their own", field="stack")
    if decoder.config.border is not None:
        raise InvalidInput(
            "the model's border reads vectors that are no tokens between those of the text", field="border"
        )
    for block in decoder.blocks:
        if isinstance(block.attention, Attention) and type(block.attention).combine is not Attention.combine:
            kind = type(block.attention).__name__
            raise InvalidInput(f"{kind} joins the heads of a pair, which do not write by themselves", field="layers")


def inspect_decoder(
    decoder: Decoder,
    vocabulary: Vocabulary,
    *,
    sentences: Iterable[Needle] = (),
    text_ids: Sequence[int] = (),
    seed: int = 0,
    progress: Progress = silent,
) -> Inspection:
    """Inspects a decoder as `inspect_model`. Without `sentences`, heads have no retrieval score.

    Raises InvalidInput for a decoder whose heads do not write by themselves, one a layer.
    """
    config = decoder.config
    _check(decoder)
    text = repeated_text(vocabulary.ids, vocabulary.prefix, longest=config.max_length, seed=seed)
    progress("attention", 0, STEPS)
    scores = place_scores(decoder, text, mapped=min(MAPPED, text.length))
    progress("control", 1, STEPS)
    control = place_scores(decoder, text.shuffled())
    progress("circuits", 2, STEPS)
    tables = TokenTables(decoder, vocabulary.ids, seed=seed)
    circuits = copying_scores(decoder, tables), copied_scores(decoder, tables), matching_scores(decoder, tables)
    progress("retrieval", 3, STEPS)
    heads = _heads(scores, control, *circuits, retrieval_scores(decoder, sentences))
    telling = sorted(heads, key=lambda head: -head.telling)
    progress("composition", 4, STEPS)
    targets = [head.id for head in sorted(telling, key=lambda head: Role.INDUCTION not in head.roles) if head.roles]
    links = _strongest(compositions(decoder, targets[:MOST_TARGETS]))
    progress("ablation", 5, STEPS)
    losses_T = losses(decoder, text)
    maps = _maps(telling[:MOST_MAPS], text.tokens_BT[0].tolist(), scores.maps_LHPP, REPEATED, vocabulary.name)
    if text_ids:
        maps += _maps_of_text(decoder, telling[:MOST_MAPS], text_ids[:MAPPED], vocabulary.name)
    return Inspection(
        model="", version=__version__,
        num_layers=config.num_layers, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        num_parameters=decoder.num_parameters, positions=config.positions,
        prefix=text.prefix, period=text.period, repeats=text.repeats,
        heads=heads, uniform=uniform_scores(text),
        compositions=links, random_composition=random_composition(config.dim, config.head_dim),
        losses=tuple(losses_T.tolist()), repeat_losses=tuple(repeat_losses(losses_T, text)),
        ablation=_ablation(decoder, text, heads, seed), advice=advise(heads, config.num_layers), maps=tuple(maps),
        layers_without_heads=tuple(layer for layer in range(config.num_layers) if layer not in scores.layers),
    )  # fmt: skip


def _heads(
    scores: PlaceScores,
    control: PlaceScores,
    copying_LH: Tensor,
    copied_LH: Tensor,
    matching_LH: Tensor,
    retrieval_LH: Tensor | None,
) -> tuple[Head, ...]:
    """Puts the scores of each head together, and gives it roles."""
    sums, heads = scores.sums, list[Head]()
    for layer, head in product(sorted(scores.layers), range(copying_LH.shape[1])):
        at = layer, head
        without_roles = Head(
            layer, head, float(sums["induction"][at]), float(control.sums["induction"][at]),
            float(sums["previous"][at]), float(sums["duplicate"][at]), float(sums["first"][at]),
            _number(copying_LH[at]), _number(copied_LH[at]), _number(matching_LH[at]),
            None if retrieval_LH is None else float(retrieval_LH[at]),
            float(sums["knn"][at]), float(sums["xl"][at]) if "xl" in sums else 0.0, float(sums["compressed"][at]), (),
        )  # fmt: skip
        heads.append(replace(without_roles, roles=roles_of(without_roles)))
    return tuple(heads)


def _number(score: Tensor) -> float | None:
    """A score, or None in the place of NaN: of a circuit of zeros, or of a layer without head weights."""
    return None if score.isnan() else float(score)


def roles_of(head: Head) -> tuple[Role, ...]:
    """The roles whose threshold a head reaches. Copying needs eigenvalues of the same sign as well."""
    roles = [role for role, least in THRESHOLDS.items() if score_of(head, role) >= least]
    signs = {Role.COPYING: 1, Role.ANTI_COPYING: -1}
    return tuple(
        role for role in roles if role not in signs or signs[role] * (head.copying or 0.0) >= LEAST_EIGENVALUES
    )


def advise(heads: Sequence[Head], num_layers: int) -> Advice:
    """The fewest layers that hold half of the retrieval of all retrieval heads, or else half of the induction."""
    for role, basis in (
        (Role.RETRIEVAL, "They hold half of the retrieval scores of all retrieval heads."),
        (Role.INDUCTION, "They hold half of the induction scores of all induction heads. No retrieval head was found."),
    ):
        evidence = [0.0] * num_layers
        for head in heads:
            if role in head.roles:
                evidence[head.layer] += score_of(head, role)
        if any(evidence):
            return Advice(_fewest(evidence), tuple(evidence), basis)
    return Advice((), (0.0,) * num_layers, "No head looks for earlier text by its content.")


def _fewest(evidence: Sequence[float]) -> tuple[int, ...]:
    chosen = list[int]()
    for layer in sorted(range(len(evidence)), key=lambda layer: -evidence[layer]):
        chosen.append(layer)
        if sum(evidence[at] for at in chosen) >= EVIDENCE_SHARE * sum(evidence):
            break
    return tuple(sorted(chosen))


def _strongest(found: Sequence[Composition]) -> tuple[Composition, ...]:
    """The few strongest links into each head, of each kind, the strongest first."""
    kept, counts = list[Composition](), dict[tuple[object, str], int]()
    for link in sorted(found, key=lambda link: -link.score):
        counts[link.target, link.kind] = counts.get((link.target, link.kind), 0) + 1
        if counts[link.target, link.kind] <= MOST_SOURCES:
            kept.append(link)
    return tuple(kept)


def _ablation(decoder: Decoder, text: RepeatedText, heads: Sequence[Head], seed: int) -> Ablation | None:
    """Leaves the induction heads out, then as many others, and compares the losses on repeated tokens."""
    induction = [head.id for head in heads if Role.INDUCTION in head.roles]
    if not induction:
        return None
    some, generator = replace(text, tokens_BT=text.tokens_BT[:ABLATION_ROWS]), random.Random(seed)

    def repeated(silenced: Sequence[tuple[int, int]]) -> float:
        return float(losses(decoder, some, silenced)[text.first_repeated - 1 :].mean())

    others = [
        repeated(matched_heads(induction, sorted({head.layer for head in heads}), decoder.config.num_heads, generator))
        for _ in range(ABLATION_DRAWS)
    ]
    return Ablation(tuple(induction), repeated(()), repeated(induction), tuple(others))


def matched_heads(
    heads: Sequence[tuple[int, int]], layers: Sequence[int], num_heads: int, generator: random.Random
) -> list[tuple[int, int]]:
    """Draws as many other heads: of the same layers as far as these have others, then of any of `layers`, then none."""
    free = [(layer, head) for layer in layers for head in range(num_heads) if (layer, head) not in heads]
    generator.shuffle(free)
    drawn = list[tuple[int, int]]()
    for layer, _ in heads:
        left = [other for other in free if other not in drawn]
        near = [other for other in left if other[0] == layer]
        drawn += (near or left)[:1]
    return drawn


def _maps_of_text(
    decoder: Decoder, heads: Sequence[Head], ids: Sequence[int], name: Callable[[int], str]
) -> list[AttentionMap]:
    watch = PlaceScores(decoder.config, {}, mapped=len(ids))
    with torch.inference_mode():
        decoder(torch.tensor([list(ids)]), watch=watch)
    return _maps(heads, ids, watch.maps_LHPP, GIVEN, name)


def _maps(
    heads: Sequence[Head], ids: Sequence[int], maps_LHPP: Tensor, text: str, name: Callable[[int], str]
) -> list[AttentionMap]:
    names = tuple(name(token) for token in ids[: maps_LHPP.shape[2]])
    return [
        AttentionMap(
            head.layer, head.head, text, names,
            tuple(tuple(round(w, 3) for w in row[: at + 1]) for at, row in enumerate(maps_LHPP[head.id].tolist())),
        )
        for head in heads
    ]  # fmt: skip
