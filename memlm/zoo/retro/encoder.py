"""The encoder of RETRO's neighbors: bidirectional layers over each text (arXiv 2112.04426, section 2.4).

Shapes: N chunks, m tokens of a chunk, k neighbors, r tokens of a neighbor, M neighbors that are there, H heads, d width
of a head, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.model.attention.mask import AttentionMask
from memlm.model.forward import ForwardContext
from memlm.model.kernels.linear import Linear
from memlm.model.layers import Block
from memlm.model.norms import make_norm
from memlm.model.positions import Angles, Rotary, apply_rope

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

NOTHING = -1  # in the place of a token, behind short neighbors and for missing ones
THETA = 10_000.0


def angles_of(head_dim: int) -> Angles:
    """The angles of rotary positions of whole heads."""
    exponents = torch.arange(0, head_dim, 2, device="cpu").double() / head_dim
    return Angles(head_dim, THETA**-exponents, 1.0)


class NeighborEncoder(nn.Module):
    """Layers of the decoder's shape, under a bidirectional mask, with rotary positions.

    The first layer of a conditioned one attends to the states of the chunk that asked.
    """

    def __init__(self, config: ModelConfig, num_layers: int, length: int, is_conditioned: bool) -> None:
        super().__init__()
        own = replace(
            config, num_layers=num_layers, context_length=length, positions="rotary", rope_theta=THETA, rotary_dim=0,
            rope_scaling=None, local_rope_theta=0.0, no_rope_layers=(), windows=(), num_sinks=0, extended_attention=0,
            xl_length=0, compression=None, memorizing=None, layers=(), join=None, stack=None, border=None, cross=None,
        )  # fmt: skip
        self.blocks: Sequence[Block] = nn.ModuleList(Block(own, n) for n in range(num_layers))  # type: ignore[assignment]
        self.norm, self.rotary = make_norm(own), Rotary(own)
        if is_conditioned:
            self.blocks[0].cross = ChunkAttention(own)

    def forward(
        self,
        found_Nkr: Int[Tensor, "N k r"],
        vector_NkrD: Float[Tensor, "N k r D"],
        asked_NmD: Float[Tensor, "N m D"] | None,
    ) -> Float[Tensor, "N S D"]:
        """Returns the encoded neighbors of each chunk one behind the other, 0 where one is missing.

        States behind a short neighbor mean nothing.
        """
        is_there_Nk = found_Nkr[:, :, 0] != NOTHING
        chunk_M, _ = is_there_Nk.nonzero(as_tuple=True)
        encoded_NkrD = torch.zeros_like(vector_NkrD)
        if len(chunk_M):
            hidden_MrD = vector_NkrD[is_there_Nk]
            lengths = (found_Nkr[is_there_Nk] != NOTHING).sum(dim=1).tolist()
            mask = AttentionMask.bidirectional(lengths, found_Nkr.shape[2], found_Nkr.device)
            asked: Any = None if asked_NmD is None else asked_NmD[chunk_M]
            context = ForwardContext(mask, lengths, hidden_MrD.dtype, rotary=self.rotary, cross=asked)
            for block in self.blocks:
                hidden_MrD = block.finish(*block.attend(hidden_MrD, context), context)
            encoded_NkrD = encoded_NkrD.index_put((is_there_Nk,), self.norm(hidden_MrD).to(encoded_NkrD.dtype))
        return encoded_NkrD.flatten(1, 2)


class ChunkAttention(nn.Module):
    """Attention of a neighbor's tokens to the states of the chunk that asked, which is the context's `cross`.

    Heads turn by their places, of which the chunk and the neighbor both begin at 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, config.num_heads * config.head_dim
        self.norm, self.asked_norm = make_norm(config), make_norm(config)
        self.query = Linear(config.dim, width, bias=False)
        self.key_value = Linear(config.dim, 2 * width, bias=False)
        self.out = Linear(width, config.dim, bias=False)
        self.angles = angles_of(config.head_dim)

    def forward(self, stream_MrD: Float[Tensor, "M r D"], context: ForwardContext) -> Float[Tensor, "M r D"]:
        """Returns the change of each token of a neighbor by the chunk."""
        query_MHrd = self._heads(self.query(self.norm(stream_MrD)))
        key_MHmd, value_MHmd = map(self._heads, self.key_value(self.asked_norm(context.cross)).chunk(2, dim=-1))
        query_MHrd, key_MHmd = self._turned(query_MHrd), self._turned(key_MHmd)
        mixed_MHrd = F.scaled_dot_product_attention(query_MHrd, key_MHmd, value_MHmd)
        return self.out(mixed_MHrd.transpose(1, 2).flatten(2))

    def _heads(self, made_MPD: Float[Tensor, "M P D"]) -> Float[Tensor, "M H P d"]:
        return made_MPD.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def _turned(self, heads_MHPd: Float[Tensor, "M H P d"]) -> Float[Tensor, "M H P d"]:
        P = heads_MHPd.shape[2]
        return apply_rope(heads_MHPd, self.angles.at(torch.arange(P, device=heads_MHPd.device), (0, P)))
