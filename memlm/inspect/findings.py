"""The findings of an inspection: scores and roles of heads, a causal check, layers for kNN attention, maps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memlm.inspect.circuits import Composition
from memlm.inspect.heads import HeadId


class Role(StrEnum):
    """The job of a head, by the thresholds of `THRESHOLDS`. A head may have several roles."""

    INDUCTION = "induction"
    PREVIOUS = "previous token"
    DUPLICATE = "duplicate token"
    FIRST = "first place"
    COPYING = "copying"
    ANTI_COPYING = "anti-copying"
    RETRIEVAL = "retrieval"


# Heads of random weights reach 0.08 at most, and 0.28 for the previous token, to which ALiBi's slopes lead (the log,
# 2026-11-26-heads). Retrieval's threshold is that of arXiv 2404.15574.
THRESHOLDS = {
    Role.INDUCTION: 0.3,
    Role.PREVIOUS: 0.4,
    Role.DUPLICATE: 0.3,
    Role.FIRST: 0.5,
    Role.COPYING: 0.25,
    Role.ANTI_COPYING: 0.25,
    Role.RETRIEVAL: 0.1,
}
LEAST_EIGENVALUES = 0.5  # the copying score that a head of the roles copying and anti-copying needs as well


@dataclass(frozen=True, slots=True)
class Head:
    """The scores of a head. Layers and heads count from 0.

    Mean attention from a repeated random token: `induction` to the tokens behind its earlier occurrences, `duplicate`
    to these occurrences, `previous` to the token before, `first` to the text's first place. `control` is the attention
    to the places of `induction` where each repeat has an order of its own.

    `copying` and `matching` are shares of positive eigenvalues of the OV and the QK circuit, from -1 to 1, or None for
    a circuit of zeros, and for a mixer whose weights are no circuits of heads. `copied` is the share of tokens that the
    OV circuit raises, less that of tokens that it lowers. `retrieval` is the share of a sentence's tokens that the head
    copied from within a text, or None where none fits the model. `knn`, `xl` and `compressed` are the masses on
    memories.
    """

    layer: int
    head: int
    induction: float
    control: float
    previous: float
    duplicate: float
    first: float
    copying: float | None
    copied: float | None
    matching: float | None
    retrieval: float | None
    knn: float
    xl: float
    compressed: float
    roles: tuple[Role, ...]

    @property
    def id(self) -> HeadId:
        return self.layer, self.head

    @property
    def telling(self) -> float:
        """The greatest of the scores that a position cannot explain."""
        return max(self.induction, self.retrieval or 0.0, self.previous, self.duplicate)


@dataclass(frozen=True, slots=True)
class Ablation:
    """The loss on repeated tokens, in nats: of the model, without its induction heads, and without as many other heads
    of the same layers where there are enough, for some draws.

    A head is left out by replacing its output with its mean over the text.
    """

    heads: tuple[HeadId, ...]
    loss: float
    loss_without: float
    losses_without_others: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """The layers in which kNN attention may help most, and the `evidence` of each layer, in the order of layers.

    It is a heuristic: heads of these layers look for earlier text by its content already. `basis` has the reason in
    words. No layers where no head qualifies.
    """

    layers: tuple[int, ...]
    evidence: tuple[float, ...]
    basis: str


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The attention of a head in a text: row t has the weights of token t on the tokens up to itself."""

    layer: int
    head: int
    text: str
    tokens: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """The findings of `inspect_model`. `losses` has nats by place of the repeated text, from its second token on, and
    `repeat_losses` their means by repeat. `layers_without_heads` are those whose mixers have no attention weights, and
    `heads` has none of them. `random_composition` is the mean and the 95th percentile of random weights.
    """

    model: str
    version: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_parameters: int
    positions: str
    prefix: int
    period: int
    repeats: int
    heads: tuple[Head, ...]
    uniform: dict[str, float]
    compositions: tuple[Composition, ...]
    random_composition: tuple[float, float]
    losses: tuple[float, ...]
    repeat_losses: tuple[float, ...]
    ablation: Ablation | None
    advice: Advice
    maps: tuple[AttentionMap, ...]
    layers_without_heads: tuple[int, ...] = ()

    @property
    def in_context_gain(self) -> float:
        """How many nats a token the first repetition saves."""
        return self.repeat_losses[0] - self.repeat_losses[1]

    def with_role(self, role: Role) -> list[Head]:
        """The heads of a role, those of the highest score first."""
        found = [head for head in self.heads if role in head.roles]
        return sorted(found, key=lambda head: -abs(score_of(head, role)))


def score_of(head: Head, role: Role) -> float:
    """The score that decides on a role."""
    if role == Role.INDUCTION:
        return head.induction - head.control
    scores = {
        Role.PREVIOUS: head.previous, Role.DUPLICATE: head.duplicate, Role.FIRST: head.first,
        Role.COPYING: head.copied or 0.0, Role.ANTI_COPYING: -(head.copied or 0.0),
        Role.RETRIEVAL: head.retrieval or 0.0,
    }  # fmt: skip
    return scores[role]
