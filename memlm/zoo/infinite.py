"""Infinity-former: the tokens that leave local attention become a signal over [0, 1] (arXiv 2109.00301).

The signal of a layer is X(t) = sum_j B_j psi_j(t), of bumps psi_j(t) = N(t; m_j, s_j^2), fitted by ridge regression to
the layer's inputs. A query reads the mean of the signal's values under a normal density, N(mu, sigma^2), whose mu and
sigma follow from its scores with the keys of B. At the end of a segment the old signal is sampled, squeezed to [0,
squeeze], and fitted again with the tokens that leave behind it. So the memory has one size for any length.

With `sticky` memories, the old signal is sampled where the queries of the segment looked. The paper draws these places.
Here they are quantiles of the same density, so that two readings are equal. Local and long-term attention share their
projections.

Shapes: B batch, T new tokens, N bumps, M samples, P places to fit, n bins, H heads, G key-value heads, d width of a
head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.attention import Attention
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part
from memlm.model.state.decoder_state import DecoderState
from memlm.model.state.fields import Field

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Infinite(Part):
    """A mixer with `bumps` for the past, which needs an `xl_length`.

    Bumps have `widths` in turn. `ridge` weights the squares of B. `penalty` is the weight of the loss KL(N(mu, sigma^2)
    || N(mu, spread^2)), which keeps densities narrow.
    """

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "infinite"
    keeps_inputs: ClassVar[bool] = True

    bumps: int = 64
    samples: int = 64
    squeeze: float = 0.5
    ridge: float = 0.5
    widths: tuple[float, ...] = (0.01, 0.05)
    sticky: bool = True
    bins: int = 32
    penalty: float = 1e-5
    spread: float = 0.05

    def __post_init__(self) -> None:
        for name in ("bumps", "samples", "bins"):
            check_range(name, getattr(self, name), least=1, whole=True)
        for name in ("ridge", "spread"):
            check_range(name, getattr(self, name), above=0)
        check_range("penalty", self.penalty, least=0)
        if not 0 < self.squeeze < 1:
            raise InvalidInput(f"squeeze is {self.squeeze}; expected a share between 0 and 1", field="squeeze")
        if not self.widths or min(self.widths) <= 0 or self.bumps % len(self.widths):
            raise InvalidInput(
                f"widths are {self.widths}; expected numbers above 0, as many as divide {self.bumps} bumps",
                field="widths",
            )

    def fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The signal, and for sticky memories how much the queries of a segment looked at each part of it."""
        signal = Field("signal", (self.bumps, config.dim), wide=True, of_segments=True)
        return (signal, Field("looks", (self.bins,), wide=True)) if self.sticky else (signal,)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> InfiniteAttention:
        """Returns attention with a signal beside it."""
        return InfiniteAttention(config, layer, self)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput for what else would take the tokens, and for keys and values that are not linear."""
        if not config.xl_length:
            raise InvalidInput("infinite takes what leaves a Transformer-XL memory; give xl_length", field="xl_length")
        for name in ("compression", "memorizing", "stack", "border", "qkv_bias", "out_bias", "qk_norm"):
            if getattr(config, name):
                raise InvalidInput(f"the mixer infinite does not go with {name}; leave one out", field=name)


class Bumps:
    """The functions psi_j, whose numbers are made on the processor: no file has them."""

    def __init__(self, part: Infinite) -> None:
        each = part.bumps // len(part.widths)
        self.ridge = part.ridge
        self.center_N = torch.linspace(0, 1, each, dtype=torch.float64, device="cpu").repeat(len(part.widths))
        widths = torch.tensor(part.widths, dtype=torch.float64, device="cpu")
        self.variance_N = widths.repeat_interleave(each) ** 2

    def overlaps(self, mean: Float[Tensor, "*Q"], variance: Float[Tensor, "*Q"]) -> Float[Tensor, "*Q N"]:
        """The integrals of N(mean, variance) times each bump: N(mean; m_j, variance + s_j^2). Variance 0: psi(mean)."""
        center_N, own_N = self.center_N.to(mean), self.variance_N.to(mean)
        both = variance[..., None] + own_N
        return torch.exp(-((mean[..., None] - center_N) ** 2) / (2 * both)) / torch.sqrt(2 * math.pi * both)

    def fit(self, place_P: Float[Tensor, " P"], value_PD: Float[Tensor, "P D"]) -> Float[Tensor, "N D"]:
        """Returns B = (F F^T + ridge I)^-1 F X. It is solved in float64 on the processor."""
        basis_PN = self.overlaps(place_P.to("cpu", torch.float64), torch.zeros(len(place_P), dtype=torch.float64))
        gram_NN = basis_PN.T @ basis_PN + self.ridge * torch.eye(len(self.center_N), dtype=torch.float64)
        return torch.linalg.solve(gram_NN, basis_PN.T).to(value_PD) @ value_PD


class InfiniteAttention(Attention):
    """Local attention, plus what each head reads of the signal."""

    def __init__(self, config: ModelConfig, layer: int, part: Infinite) -> None:
        super().__init__(config, layer)
        self.part, self.bumps = part, Bumps(part)
        self.mean, self.variance = nn.Linear(part.bumps, 1, bias=False), nn.Linear(part.bumps, 1, bias=False)

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """Returns local attention plus attention to the signal of the row's document."""
        local_BTD = super().forward(hidden_BTD, context)
        read_BHTd = self._read(hidden_BTD, context)
        return local_BTD if read_BHTd is None else local_BTD + self.out(read_BHTd.transpose(1, 2).flatten(2))

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes the tokens to the state, and where they look."""
        super().keep(hidden_BTD, context)
        self._read(hidden_BTD, context)

    def _read(self, hidden_BTD: Tensor, context: ForwardContext) -> Float[Tensor, "B H T d"] | None:
        """What the tokens read of the signal, None where no row has one. Counts where they look."""
        assert context.state is not None
        if not any(row.floor > row.start for row in context.state.rows):
            self._count(None, context)
            return None
        signal_BND = context.field(self.layer, "signal").clone()
        repeats = self.config.num_heads // self.config.num_kv_heads
        heads = self.project(signal_BND.to(hidden_BTD.dtype))
        key_BHNd, value_BHNd = (each.repeat_interleave(repeats, dim=1) for each in (heads.key_BGTd, heads.value_BGTd))
        query_BHTd = self.project(hidden_BTD).query_BHTd
        scores_BHTN = query_BHTd @ key_BHNd.mT / math.sqrt(self.config.head_dim)
        mean_BHT = torch.sigmoid(self.mean(scores_BHTN)[..., 0])
        variance_BHT = F.softplus(self.variance(scores_BHTN)[..., 0])
        sees_BT = self._sees(context)
        self._count((mean_BHT, variance_BHT), context)
        if context.losses is not None and self.part.penalty:
            ratio_BHT = variance_BHT / self.part.spread**2
            each_BT = ((ratio_BHT - 1 - torch.log(ratio_BHT)) / 2).mean(dim=1) * sees_BT
            context.tell("infinite", self.part.penalty * each_BT.sum() / context.is_real_BT.sum().clamp(min=1))
        overlap_BHTN = self.bumps.overlaps(mean_BHT, variance_BHT) * sees_BT[:, None, :, None]
        return overlap_BHTN.to(value_BHNd.dtype) @ value_BHNd

    def _sees(self, context: ForwardContext) -> Tensor:
        """Whether a new token is text of a document with a signal."""
        assert context.state is not None
        has_B1 = torch.tensor([[row.floor > row.start] for row in context.state.rows], device=context.state.device)
        continues = context.mask.continues_RT
        return context.is_real_BT & has_B1 if continues is None else context.is_real_BT & has_B1 & continues

    def _count(self, density: tuple[Tensor, Tensor] | None, context: ForwardContext) -> None:
        """Adds up the shares of the tokens' densities in each bin. A document that begins has looked nowhere."""
        if not self.part.sticky:
            return
        looks_Bn = context.field(self.layer, "looks")
        if density is not None:
            mean_BHT1, deviation_BHT1 = density[0].detach()[..., None], density[1].detach().sqrt()[..., None]
            edges = torch.linspace(0, 1, self.part.bins + 1, dtype=looks_Bn.dtype, device=looks_Bn.device)
            below = torch.erf((edges - mean_BHT1) / (deviation_BHT1 * math.sqrt(2))) / 2
            looks_Bn += (below.diff(dim=3) * self._sees(context)[:, None, :, None]).sum(dim=(1, 2))
        begins_B = (context.begins_BT & context.is_real_BT).any(dim=1)
        looks_Bn.masked_fill_(begins_B[:, None], 0)

    def end_segment(self, state: DecoderState, layer: int, row: int, begin: int, count: int) -> None:
        """Fits the signal of a row to its old one and to the `count` tokens that leave, the first at place `begin`."""
        assert state.inputs_LBSD is not None
        signal_ND, marks = state.field(f"{layer}.signal")[row], state.rows[row]
        new_PD = state.inputs_LBSD[layer, row, begin : begin + count].to(signal_ND.dtype)
        places, values, start = [], [], 0.0
        if marks.floor > marks.start:
            start = self.part.squeeze
            sample_M = self._samples(state, layer, row)
            values.append(self.bumps.overlaps(sample_M, torch.zeros_like(sample_M)).to(signal_ND) @ signal_ND)
            places.append(start * sample_M)
        places.append(start + (1 - start) * middles(count))
        values.append(new_PD)
        with torch.no_grad():
            signal_ND.copy_(self.bumps.fit(torch.cat(places), torch.cat(values)))

    def _samples(self, state: DecoderState, layer: int, row: int) -> Float[Tensor, " M"]:
        """The places at which the old signal is sampled: evenly, or at the quantiles of where the queries looked."""
        share_M = middles(self.part.samples)
        if not self.part.sticky:
            return share_M
        looks_n = state.field(f"{layer}.looks")[row]
        mass_n = looks_n.to("cpu", torch.float64) / looks_n.sum().item()
        looks_n.zero_()
        upto_n = mass_n.cumsum(0)
        bin_M = torch.searchsorted(upto_n, share_M).clamp(max=len(mass_n) - 1)
        within_M = 1 - (upto_n[bin_M] - share_M) / mass_n[bin_M]
        return (bin_M + within_M) / len(mass_n)


def middles(count: int) -> Float[Tensor, " P"]:
    """The middles of equal parts of [0, 1], in float64 on the processor."""
    return (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
