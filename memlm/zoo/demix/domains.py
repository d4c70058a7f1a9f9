"""DEMix: one feed-forward a domain, chosen by the label of the text (arXiv 2108.05036).

A row of a state has a domain, which `set_domains` gives it. While learning it is the label of its documents. In
prediction one domain may be fixed, or the model reads a text once under each domain, and their predictions are mixed by
p(domain | text so far) (`memlm.zoo.demix.model_mixture`). Domains are added as copies of others, and removed.

Shapes: B rows, T new tokens, D width, E domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from memlm.errors import InvalidInput, NotFound, check_range
from memlm.model.experts import ExpertFeedForwards
from memlm.model.parts import Part
from memlm.model.state.fields import Field

if TYPE_CHECKING:
    from memlm.language_model import LanguageModel
    from memlm.model.config import ModelConfig
    from memlm.model.decoder import Decoder
    from memlm.model.forward import ForwardContext
    from memlm.model.state.decoder_state import DecoderState

DOMAIN = "model.domain"  # of each row: 1 more than its number among the names, 0 for the decoder's default


@dataclass(frozen=True, slots=True)
class Domains(Part):
    """One expert for each of some `names` of domains. `expert_dim` is the inner width of one expert, 0 for the model's
    `ff_dim`.
    """

    seam: ClassVar[str] = "channel"
    kind: ClassVar[str] = "domain"
    is_exact: ClassVar[bool] = False  # a product over other rows rounds otherwise
    recipe: ClassVar[str] = "memlm.zoo.demix.training:DomainRecipe"
    unserved: ClassVar[str] = (
        "has experts of domains, and a server chooses none; use it in process"
        " (`memlm.zoo.demix.domains.fix_domain`), or serve a model without"
    )

    names: tuple[str, ...] = ("first", "second")
    expert_dim: int = 0

    def __post_init__(self) -> None:
        check_range("expert_dim", self.expert_dim, least=0, whole=True)
        are_names = all(name and str(name) == name for name in self.names)  # a config may have numbers in their place
        if not self.names or not are_names or len(set(self.names)) < len(self.names):
            raise InvalidInput(
                f"the names of the domains are {list(self.names)}; give each domain one, and no two the same",
                field="names",
            )

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> DomainExperts:
        """Returns the feed-forwards."""
        return DomainExperts(config, self)

    def model_fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The domain of the row."""
        return (Field("domain", (), torch.int64, is_given=True),)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput where two layers have other domains."""
        if any(part.names != self.names for part in config.parts if isinstance(part, Domains)):
            raise InvalidInput("layers have experts of other domains; give all layers the same names", field="names")


class DomainExperts(ExpertFeedForwards):
    """The feed-forwards. `default` is the domain of rows that have none."""

    def __init__(self, config: ModelConfig, part: Domains) -> None:
        super().__init__(config, len(part.names), part.expert_dim, top=1)
        self.default = 0

    def forward(self, key_BTD: Float[Tensor, "B T D"], context: ForwardContext | None) -> Float[Tensor, "B T D"]:
        """Returns the outputs of each row's expert."""
        if context is None or context.state is None:
            return self.experts[self.default](key_BTD)
        domain_B = context.state.field(DOMAIN) - 1
        domain_B = torch.where(domain_B < 0, self.default, domain_B)
        domains = domain_B.unique().tolist()
        if len(domains) == 1:
            return self.experts[domains[0]](key_BTD)
        made_BTD = torch.zeros_like(key_BTD)
        for domain in domains:
            (row_b,) = (domain_B == domain).nonzero(as_tuple=True)
            made_BTD = made_BTD.index_copy(0, row_b, self.experts[domain](key_BTD[row_b]).to(made_BTD.dtype))
        return made_BTD


def domains_of(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of a model's domains, none for a model without experts of domains."""
    return next((part.names for part in config.parts if isinstance(part, Domains)), ())


def number_of(config: ModelConfig, name: str) -> int:
    """Returns the number of a domain. Raises NotFound, with the names there are."""
    names = domains_of(config)
    if name not in names:
        there = f"its domains are {', '.join(names)}" if names else "it has none"
        raise NotFound(f"the model has no domain {name!r}; {there}", kind="domain", name=name)
    return names.index(name)


def set_domains(state: DecoderState, domains_B: Sequence[int]) -> None:
    """Gives each row of a state its domain, until the row is reset. Set it before the row reads.

    Raises ValueError for another number of domains than rows. Numbers that the model does not have fail in its pass.
    """
    if len(domains_B) != len(held_B := state.field(DOMAIN)) or min(domains_B, default=0) < 0:
        raise ValueError(f"domains are {[*domains_B]}; expected a number from 0 on for each of {len(held_B)} rows")
    held_B.copy_(torch.tensor(domains_B) + 1)


def use_domain(decoder: Decoder, name: str) -> None:
    """Lets rows without a domain read by this one. Raises NotFound."""
    number = number_of(decoder.config, name)
    for module in decoder.modules():
        if isinstance(module, DomainExperts):
            module.default = number


def fix_domain(lm: LanguageModel, name: str) -> None:
    """Lets a model that is loaded read by the experts of one domain.

    Raises NotFound for a domain that the model does not have. Raises InvalidInput for another domain than the first
    where a datastore has keys, since the first one made them.
    """
    names, keyed = domains_of(lm.checkpoint.decoder.config), [each.name for each in lm.stores if each.dim]
    if keyed and name in names[1:]:
        raise InvalidInput(
            f"the keys of the datastore {keyed[0]!r} were made in the domain {names[0]!r}, and would not be found"
            f" in {name!r}; leave out either",
            field="domain",
        )
    use_domain(lm.checkpoint.decoder, name)


def with_domain(decoder: Decoder, name: str, *, like: str) -> Decoder:
    """Returns a decoder with one more domain, whose experts start as copies of those of another. The paper copies the
    nearest, which is the one with the greatest posterior on texts of the new domain, and trains the copy alone
    (section 5.2). Raises InvalidInput for a name that is there, NotFound for one to copy that is not.
    """
    names, copied = domains_of(decoder.config), number_of(decoder.config, like)
    if name in names:
        raise InvalidInput(f"the model has a domain {name!r} already; choose another name", field="name")
    return _with_experts(decoder, (*names, name), [*range(len(names)), copied])


def without_domain(decoder: Decoder, name: str) -> Decoder:
    """Returns a decoder without the experts of a domain. The others keep their weights. Raises NotFound for a domain
    that is not there, InvalidInput for the last one.
    """
    names, removed = domains_of(decoder.config), number_of(decoder.config, name)
    if len(names) == 1:
        raise InvalidInput(f"{name!r} is the only domain of the model, which needs one", field="name")
    kept = [number for number in range(len(names)) if number != removed]
    return _with_experts(decoder, tuple(names[number] for number in kept), kept)


def _with_experts(decoder: Decoder, names: tuple[str, ...], taken: Sequence[int]) -> Decoder:
    """A decoder of other domains, with copies of some experts in their place. The two share no numbers."""
    from memlm.model.decoder import Decoder as Changed

    layers = tuple(
        replace(each, channel=replace(each.channel, names=names)) if isinstance(each.channel, Domains) else each
        for each in decoder.config.layers
    )
    changed = Changed(replace(decoder.config, layers=layers)).to(decoder.device, decoder.dtype)
    learned, weights = decoder.weights(), dict[str, Tensor]()
    for full in changed.weights():
        before, mark, after = full.partition(".ff.experts.")
        number, _, rest = after.partition(".")
        layer = decoder.config.layer_at(int(before.rpartition(".")[2])) if mark else None
        is_of_domain = layer is not None and isinstance(layer.channel, Domains)
        weights[full] = learned[f"{before}{mark}{taken[int(number)]}.{rest}" if is_of_domain else full]
    changed.load_state_dict(weights, strict=False)
    return changed.train(decoder.training)
