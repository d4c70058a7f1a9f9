"""HyperAttention (arXiv 2310.05869), in a causal form: near tokens are read exactly, and of the far past the likely
keys and a sample of the rest.

A document is cut into blocks. A query reads its own block exactly. The blocks before it make runs of 1, 2, 4, ...
blocks, as the paper's halves of halves do, and a run is used only when it is complete. Of a run, a query reads as many
keys as a block has, those whose hash is next to its own where the run's keys are sorted by hash. Of the other keys it
reads `samples`, one of each equal stretch of the sorted keys, and counts each as often as its stretch has keys. The
hash is the sign of each of some random projections, in an order in which neighbors differ in one of them. Vectors are
hashed before positions turn them.

This approximates attention. Ours are the blocks around the query's own hash, where the paper pairs equal blocks of
sorted queries and keys, the stretches, where it samples with replacement, and draws that follow from the seed and the
place. The scores of all places are computed and masked, so it shows the error and saves no time.

Shapes: B batch, T new tokens, S places, H query heads, G key-value heads, X either, d width of a head, P projections,
Q queries of one document, U those of them that read a run, N keys of the document, K read keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.attention import Attention, Heads
from memlm.model.attention.knn_attention import exact
from memlm.model.draws import drawn, normals
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part
from memlm.model.state.fields import PLACES, Field

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

DRAWS = 1  # sets the draws of samples apart from those of projections


@dataclass(frozen=True, slots=True)
class Hyper(Part):
    """A mixer that reads its own block, and of each run before it `block` likely keys and `samples` others."""

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "hyper"

    block: int = 64
    samples: int = 64
    projections: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("block", self.block, least=1, whole=True)
        check_range("samples", self.samples, least=1, whole=True)
        check_range("projections", self.projections, least=1, most=15, whole=True)
        check_range("seed", self.seed, least=0, whole=True)

    def fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The hash of each key."""
        return (Field("hash", (config.num_kv_heads, PLACES), torch.int16),)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput where tokens leave the state, since runs are sorted whole."""
        self.refuse(config, "windows", "memorizing", "extended_attention", "border")
        if config.is_segmented:
            raise InvalidInput("hyper sorts the whole past, which a model with segments forgets", field="layers")

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> HyperAttention:
        """Returns attention with random projections for each head."""
        return HyperAttention(config, layer, self)


class HyperAttention(Attention):
    """Attention with the logarithm of how often each key counts added to its score."""

    is_explicit = True

    def __init__(self, config: ModelConfig, layer: int, part: Hyper) -> None:
        super().__init__(config, layer)
        self.part = part
        sizes = config.num_kv_heads, config.head_dim, part.projections
        axes = torch.meshgrid(*(torch.arange(size, device="cpu") for size in sizes), indexing="ij")
        # Not a buffer: the loader builds decoders without memory, and no file has these numbers.
        self.projection_GdP = normals(part.seed, layer, *axes)

    def scores(
        self,
        query_BHTd: Float[Tensor, "B H T d"],
        heads: Heads,
        key_BHSd: Float[Tensor, "B H S d"],
        context: ForwardContext,
    ) -> Float[Tensor, "B H T S"]:
        """Returns the scores of the keys that each query reads, and -inf for the others."""
        scores_BHTS = exact(super().scores(query_BHTd, heads, key_BHSd, context))
        with torch.no_grad():
            queries_BHT, keys_BGS = self.hashes(heads.query_BHTd), self.write_hashes(heads, context)
            keys_BHS = keys_BGS.long().repeat_interleave(queries_BHT.shape[1] // keys_BGS.shape[1], dim=1)
            mask, count_BHTS = context.mask, torch.zeros_like(scores_BHTS)
            for row in range(len(scores_BHTS)):
                at = row if len(mask.query_RT) > 1 else 0
                position_T, begin_T, first = mask.query_RT[at], mask.document_RT[at], int(mask.key_RS[at, 0])
                for begin in begin_T.unique().tolist():
                    query_Q, place = (begin_T == begin).nonzero()[:, 0], max(0, begin - first)
                    count_HQN = self.counts(
                        queries_BHT[row][:, query_Q], keys_BHS[row, :, place:], position_T[query_Q] - begin
                    ).to(count_BHTS.dtype)
                    count_BHTS[row][:, query_Q, place:] = count_HQN
        return scores_BHTS + count_BHTS.log()

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes keys, values and hashes of new tokens to the state without attending to anything."""
        super().keep(hidden_BTD, context)
        with torch.no_grad():
            self.write_hashes(self.project(hidden_BTD), context)

    def write_hashes(self, heads: Heads, context: ForwardContext) -> Int[Tensor, "B G S"]:
        """Writes the hashes of the new tokens' keys, and returns those of all places."""
        return context.write_field(self.layer, "hash", self.hashes(heads.key_BGTd).to(torch.int16))

    def hashes(self, vector_BXTd: Float[Tensor, "B X T d"]) -> Int[Tensor, "B X T"]:
        """Returns where each vector's signs stand in Gray's order, in which neighbors differ in one sign."""
        exact_BXTd = exact(vector_BXTd)
        self.projection_GdP = self.projection_GdP.to(exact_BXTd.device)
        repeats = vector_BXTd.shape[1] // len(self.projection_GdP)
        projection_XdP = self.projection_GdP.to(exact_BXTd.dtype).repeat_interleave(repeats, dim=0)
        # A number in Gray's code has the parity of the digits so far in each place, from the highest.
        parity_BXTP = (exact_BXTd @ projection_XdP > 0).long().cumsum(dim=3) % 2
        powers_P = 1 << torch.arange(self.part.projections, device=exact_BXTd.device).flip(0)
        return (parity_BXTP * powers_P).sum(dim=3)

    def counts(
        self, query_HQ: Int[Tensor, "H Q"], key_HN: Int[Tensor, "H N"], position_Q: Int[Tensor, " Q"]
    ) -> Int[Tensor, "H Q N"]:
        """Returns how often each key counts, given hashes and the queries' positions in their document.

        Keys of the own block count once, also later ones, which the mask hides.
        """
        (H, N), block = key_HN.shape, self.part.block
        block_Q = position_Q // block
        key_block_N = torch.arange(N, device=key_HN.device) // block
        count_HQN = (key_block_N == block_Q[:, None]).long().expand(H, -1, -1).clone()
        for level in range(max(0, N // block).bit_length()):
            size = block << level
            uses_Q = (block_Q >> level & 1).nonzero()[:, 0]
            if not len(uses_Q):
                continue
            run_U = (block_Q[uses_Q] >> level) - 1
            sorted_HRn, order_HRn = key_HN[:, : N // size * size].unflatten(1, (-1, size)).sort(dim=2, stable=True)
            middle_HU = self._place_among(query_HQ[:, uses_Q], sorted_HRn[:, run_U])
            rank_HUK, times_K = self._ranks(middle_HU, position_Q[uses_Q], level)
            place_HUK = order_HRn[:, run_U].gather(2, rank_HUK) + (run_U * size)[:, None]
            level_HUN = torch.zeros(H, len(uses_Q), N, dtype=torch.int64, device=key_HN.device)
            count_HQN[:, uses_Q] += level_HUN.scatter_(2, place_HUK, times_K.expand_as(place_HUK))
        return count_HQN

    def _place_among(self, query_HU: Tensor, sorted_HUn: Tensor) -> Int[Tensor, "H U"]:
        """Returns the rank of each query's hash among sorted ones, the middle of the equal ones."""
        before_HU = (sorted_HUn < query_HU[..., None]).sum(dim=2)
        return (before_HU + (sorted_HUn <= query_HU[..., None]).sum(dim=2)) // 2

    def _ranks(
        self, middle_HU: Int[Tensor, "H U"], position_U: Int[Tensor, " U"], level: int
    ) -> tuple[Int[Tensor, "H U K"], Int[Tensor, " K"]]:
        """Returns the ranks that queries read of a run of 2^level blocks, and how often each counts."""
        block, device = self.part.block, middle_HU.device
        rest = (block << level) - block
        begin_HU1 = (middle_HU - block // 2).clamp(0, rest)[..., None]
        likely_HUK = begin_HU1 + torch.arange(block, device=device)
        num_samples = min(self.part.samples, rest)
        if not num_samples:
            return likely_HUK, torch.ones(block, dtype=torch.int64, device=device)
        bounds = torch.arange(num_samples + 1, device=device) * rest // num_samples
        times_K = bounds.diff()
        head_H11 = torch.arange(len(middle_HU), device=device)[:, None, None]
        draw_HUK = drawn(
            self.part.seed,
            DRAWS,
            self.layer,
            head_H11,
            position_U[:, None],
            level,
            torch.arange(num_samples, device=device),
        )
        other_HUK = bounds[:-1] + draw_HUK % times_K
        other_HUK = other_HUK + block * (other_HUK >= begin_HU1)  # past the likely ones
        ones_K = torch.ones(block, dtype=torch.int64, device=device)
        return torch.cat([likely_HUK, other_HUK], dim=2), torch.cat([ones_K, times_K])
