"""Position encodings.

Rotary (RoFormer, arXiv 2104.09864) turns queries and keys. Learned and sinusoidal positions (1706.03762) are added to
the embeddings. All others change attention scores by the distance of query and key, and so are valid at every place of
a long text and across segment boundaries.

Shapes: R rows (1 if all have equal positions), B batch, H heads, T queries, S places, d width of a head.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.model.attention.mask import AttentionMask
from memlm.model.config import ModelConfig
from memlm.model.mechanisms import RopeScaling

NARROW_DEVICE = "mps"  # has no float64
TABLE_LENGTH = 16_384  # positions whose angles are kept; those beyond are computed when they are needed


class Rotary:
    """The angles of each layer's positions: of all layers alike, or of local and global ones, or none."""

    def __init__(self, config: ModelConfig) -> None:
        everywhere = Angles(config.rotary_dim, *rotary_frequencies(config))
        local = everywhere
        if config.local_rope_theta:
            unscaled = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
            local = Angles(config.rotary_dim, *rotary_frequencies(unscaled))
        of_layers = [local if config.window_of(layer) else everywhere for layer in range(config.num_layers)]
        self._of_layers = [None if n in config.no_rope_layers else angles for n, angles in enumerate(of_layers)]

    def of_layer(self, layer: int) -> Angles | None:
        """A layer's angles, the same object for layers that turn alike, or None if its heads do not turn."""
        return self._of_layers[layer]


class Angles:
    """Cosines and signed sines of the angles of positions, in float64 because positions may be large.

    A table for the first positions is computed when first used.
    """

    def __init__(self, rotary_dim: int, frequencies: Float[Tensor, " f"], scale: float) -> None:
        self.rotary_dim, self.frequencies, self.scale = rotary_dim, frequencies, scale
        self._table_2Sd = torch.empty(2, 0, self.rotary_dim, device="cpu", dtype=torch.float64)

    def at(self, positions: Int[Tensor, "*P"], span: tuple[int, int]) -> Float[Tensor, "2 *P d"]:
        """Returns cosines and signed sines of positions, which lie in `span`, in float64 where the device has it.

        Positions in a row as long as the span are all of it, in order.
        """
        begin, end = span
        if begin < 0 or end > TABLE_LENGTH:
            return self._turns(positions)
        if end > self._table_2Sd.shape[1] or self._table_2Sd.device != positions.device:
            size = min(TABLE_LENGTH, max(256, 2 * end))
            with torch.inference_mode(False):  # it outlives the call, and training may read it next
                self._table_2Sd = self._turns(torch.arange(size, device=positions.device))
        if positions.dim() == 1 and len(positions) == end - begin:
            return self._table_2Sd[:, begin:end]
        return self._table_2Sd[:, positions]

    def _turns(self, positions: Int[Tensor, "*P"]) -> Float[Tensor, "2 *P d"]:
        device = positions.device
        if device.type == NARROW_DEVICE:
            positions = positions.cpu()
        angles = positions[..., None].double() * self.frequencies.to(positions.device)
        cosine, sine = angles.cos() * self.scale, angles.sin() * self.scale
        turns = torch.stack([torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)])
        return turns.float().to(device) if device.type == NARROW_DEVICE else turns


def apply_rope(heads: Float[Tensor, "*P T d"], cos_sin: Float[Tensor, "2 *Q T r"], *, inverse: bool = False) -> Tensor:
    """Rotates each half-pair of the first r numbers of a head by its position's angle, or back by `inverse`."""
    cosine, sine = cos_sin.to(heads.dtype)
    size = cosine.shape[-1]
    turned = heads if size == heads.shape[-1] else heads[..., :size]
    mirrored = turned.roll(size // 2, dims=-1) * sine
    turned = turned * cosine - mirrored if inverse else turned * cosine + mirrored
    return turned if size == heads.shape[-1] else torch.cat([turned, heads[..., size:]], dim=-1)


def rotary_frequencies(config: ModelConfig) -> tuple[Float[Tensor, " f"], float]:
    """Returns radians per token for each pair, with the config's scaling, and the factor on cosines and sines."""
    exponents = torch.arange(0, config.rotary_dim, 2, device="cpu").double() / config.rotary_dim
    plain = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "longrope":
        return plain / torch.tensor(scaling.factors, device="cpu", dtype=torch.float64), scaling.attention_factor
    return _yarn(plain, scaling, config), scaling.attention_factor


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretches waves longer than the original length, keeps much shorter ones, and blends in between."""
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Blends from `beta_fast` to `beta_slow` rotations within the original length (arXiv 2309.00071, equations 17 to
    23).
    """

    def pair_that_turns(turns: float) -> float:
        return (
            config.rotary_dim
            * math.log(scaling.original_length / (turns * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), config.rotary_dim - 1)
    ramp = ((torch.arange(len(plain), device="cpu").double() - first) / max(last - first, 1e-3)).clamp(0, 1)
    return (1 - ramp) * plain + ramp * plain / scaling.factor


def sinusoids(positions: Int[Tensor, "*P"], dim: int) -> Float[Tensor, "*P D"]:
    """Returns sines, then cosines, of positions, in float64.

    Wavelengths range from 2 pi to 10,000 x 2 pi (arXiv 1706.03762, section 3.5).
    """
    device, is_narrow = positions.device, positions.device.type == NARROW_DEVICE
    positions = positions.cpu() if is_narrow else positions
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2, device=positions.device).double() / dim)
    angles = positions[..., None].double() * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim]
    return waves.float().to(device) if is_narrow else waves


class RelativeBias(nn.Module):
    """Additive score terms that depend on distance alone."""

    def forward(self, mask: AttentionMask) -> Float[Tensor, "R H T S"]:
        """Returns the terms to add to the scores."""
        raise NotImplementedError


class Alibi(RelativeBias):
    """A penalty proportional to distance, with a slope for each head (arXiv 2108.12409)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.slopes = alibi_slopes(config.num_heads)

    def forward(self, mask: AttentionMask) -> Float[Tensor, "R H T S"]:
        """Returns -slope x distance."""
        slopes_H11 = torch.tensor(self.slopes, device=mask.query_RT.device)[:, None, None]
        return -slopes_H11 * mask.distances()[:, None]


class T5Bias(RelativeBias):
    """A learned term for each head and bucket of distances, shared by all layers (arXiv 1910.10683). Far buckets are
    wider. Where a query sees later tokens too, they have the second half of the buckets.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_buckets, self.max_distance = config.num_buckets, config.max_distance
        self.table = nn.Embedding(config.num_buckets, config.num_heads)

    def forward(self, mask: AttentionMask) -> Float[Tensor, "R H T S"]:
        """Returns the table's entry for each distance."""
        if mask.ends_R is None:
            buckets_RTS = t5_buckets(mask.distances(), self.num_buckets, self.max_distance)
        else:
            half, ahead_RTS = self.num_buckets // 2, mask.query_RT[:, :, None] - mask.key_RS[:, None]
            buckets_RTS = t5_buckets(ahead_RTS.abs(), half, self.max_distance) + half * (ahead_RTS < 0)
        return self.table(buckets_RTS).permute(0, 3, 1, 2)


def alibi_slopes(num_heads: int) -> list[float]:
    """Slopes 2^(-8 i/n) for n heads, if n is a power of two (arXiv 2108.12409).

    Otherwise the slopes of the next lower power, and every second one of the next higher.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]


def t5_buckets(distances: Int[Tensor, "*P"], num_buckets: int, max_distance: int) -> Int[Tensor, "*P"]:
    """Half of the buckets hold one distance each. The others grow logarithmically up to `max_distance`."""
    exact = num_buckets // 2
    scaled = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (scaled * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return torch.where(distances < exact, distances, far)


class ScorePositions(nn.Module):
    """Positions that compute the scores from query, key and distance. `values` may add to the mixture."""

    def forward(
        self, query_BHTd: Float[Tensor, "B H T d"], key_BHSd: Float[Tensor, "B H S d"], mask: AttentionMask
    ) -> Float[Tensor, "B H T S"]:
        """Returns scaled scores, before any mask."""
        raise NotImplementedError

    def values(self, weights_BHTS: Float[Tensor, "B H T S"], mask: AttentionMask) -> Float[Tensor, "B H T d"] | None:
        """Returns the contribution of the distances to the mixture, or None."""
        return None


class TransformerXLPositions(ScorePositions):
    """(q + u) k + (q + v) W r, r the sinusoid of the distance (Transformer-XL, arXiv 1901.02860, section 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dim = config.dim
        self.u_Hd = nn.Parameter(torch.zeros(config.num_heads, config.head_dim))
        self.v_Hd = nn.Parameter(torch.zeros(config.num_heads, config.head_dim))
        self.project = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)

    def forward(
        self, query_BHTd: Float[Tensor, "B H T d"], key_BHSd: Float[Tensor, "B H S d"], mask: AttentionMask
    ) -> Float[Tensor, "B H T S"]:
        """Returns the content and the position terms, each with its own bias."""
        B, H, _, d = query_BHTd.shape
        content_BHTS = (query_BHTd + self.u_Hd[:, None]) @ key_BHSd.mT
        distance_RTS = mask.distances()
        longest = int(distance_RTS.max()) if mask.sink_cap else mask.max_distance
        waves_ED = sinusoids(torch.arange(longest + 1, device=query_BHTd.device), self.dim)
        relative_HEd = self.project(waves_ED.to(query_BHTd.dtype)).view(-1, H, d).transpose(0, 1)
        position_BHTE = (query_BHTd + self.v_Hd[:, None]) @ relative_HEd.mT
        places = distance_RTS[:, None].expand(B, H, -1, -1)
        return (content_BHTS + position_BHTE.gather(3, places)) / math.sqrt(d)


class ShawPositions(ScorePositions):
    """Learned vectors for clipped distances, added to keys and to values (arXiv 1803.02155, equations 3 and 4)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.max_distance = config.max_distance
        self.keys = nn.Embedding(config.max_distance + 1, config.head_dim)
        self.vectors = nn.Embedding(config.max_distance + 1, config.head_dim)

    def forward(
        self, query_BHTd: Float[Tensor, "B H T d"], key_BHSd: Float[Tensor, "B H S d"], mask: AttentionMask
    ) -> Float[Tensor, "B H T S"]:
        """Returns q (k + a)."""
        by_distance_BHTE = query_BHTd @ self.keys.weight.T
        scores_BHTS = query_BHTd @ key_BHSd.mT + by_distance_BHTE.gather(3, self._places(query_BHTd, mask))
        return scores_BHTS / math.sqrt(query_BHTd.shape[-1])

    def values(self, weights_BHTS: Float[Tensor, "B H T S"], mask: AttentionMask) -> Float[Tensor, "B H T d"]:
        """Returns the attention weight on each distance times its vector."""
        shape = (*weights_BHTS.shape[:3], self.max_distance + 1)
        by_distance_BHTE = weights_BHTS.new_zeros(shape).scatter_add(3, self._places(weights_BHTS, mask), weights_BHTS)
        return by_distance_BHTE @ self.vectors.weight

    def _places(self, like: Tensor, mask: AttentionMask) -> Int[Tensor, "B H T S"]:
        distance_RTS = mask.distances().clamp(max=self.max_distance)
        return distance_RTS[:, None].expand(like.shape[0], like.shape[1], -1, -1)


class DistanceFactor(ScorePositions):
    """Scores cut off at 0, times a learned sigmoid of distance (DA-Transformer, arXiv 2010.06925, equations 3 to 5)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        steepness = torch.linspace(-1.0, 1.0, config.num_heads) if config.num_heads > 1 else torch.zeros(1)
        self.slope_H = nn.Parameter(steepness / 16)
        self.bound_H = nn.Parameter(torch.ones(config.num_heads))

    def forward(
        self, query_BHTd: Float[Tensor, "B H T d"], key_BHSd: Float[Tensor, "B H S d"], mask: AttentionMask
    ) -> Float[Tensor, "B H T S"]:
        """Returns relu(q k) (1 + e^v) / (1 + e^(v - w x distance))."""
        scores_BHTS = (query_BHTd @ key_BHSd.mT).relu() / math.sqrt(query_BHTd.shape[-1])
        slope_H11, bound_H11 = self.slope_H[:, None, None], self.bound_H[:, None, None]
        distance_RHTS = mask.distances()[:, None].to(slope_H11.dtype)
        factor_RHTS = (1 + bound_H11.exp()) * torch.sigmoid(slope_H11 * distance_RHTS - bound_H11)
        return scores_BHTS * factor_RHTS.to(scores_BHTS.dtype)


BIASES: dict[str, type[RelativeBias]] = {"alibi": Alibi, "t5": T5Bias}
SCORES: dict[str, type[ScorePositions]] = {
    "transformer_xl": TransformerXLPositions,
    "shaw": ShawPositions,
    "distance": DistanceFactor,
}
