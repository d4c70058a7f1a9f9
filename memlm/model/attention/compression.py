"""Compression of the states that leave the Transformer-XL memory (Compressive Transformer, arXiv 1911.05507).

`rate` states become one. Every state contributes to exactly one compressed state. Nothing is padded: an incomplete
group waits in the Transformer-XL memory.

The kind `linear` is Linformer's projection (arXiv 2006.04768) in a causal form: a group of n old states becomes r = n /
rate ones by a learned r x n matrix over places, which all heads, keys and values share. Linformer projects a whole text
of one length, so that a place would read later ones.

Shapes: B batch, N old states, C = N / rate compressed ones, D width, c = rate, n old states of a group, r compressed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from memlm.model.config import ModelConfig
from memlm.model.mechanisms import Compression


def group_size(compression: Compression | None) -> int:
    """How many states are compressed together. A dilated convolution and a linear one span several times `rate`."""
    if compression is None:
        return 1
    return compression.rate * {"dilated": compression.dilation, "linear": compression.states}.get(compression.kind, 1)


class Compressor(nn.Module):
    """The compression of one layer. Those that learn start as means. `back` decodes for the auto-encoding loss."""

    def __init__(self, config: ModelConfig, compression: Compression) -> None:
        super().__init__()
        self.compression = compression
        self.learns = compression.kind in ("conv", "dilated", "linear")
        if compression.kind == "linear":
            self.places_rn = nn.Parameter(torch.empty(compression.states, group_size(compression)))
            self.initialize()
        elif self.learns:
            kernel_OIc = torch.eye(config.dim)[:, :, None].repeat(1, 1, compression.rate) / compression.rate
            self.kernel_OIc = nn.Parameter(kernel_OIc)
            self.bias_O = nn.Parameter(torch.zeros(config.dim))
        if self.learns and compression.loss == "autoencoding":
            self.back = nn.Linear(config.dim, compression.rate * config.dim)

    def initialize(self) -> None:
        """Starts the linear kind as means of neighbors, after the decoder has drawn its matrices."""
        if self.compression.kind == "linear":
            means_rn = torch.eye(self.compression.states).repeat_interleave(self.compression.rate, dim=1)
            self.places_rn.data.copy_(means_rn / self.compression.rate)

    def forward(self, old_BND: Float[Tensor, "B N D"], usage_BN: Float[Tensor, "B N"] | None) -> Float[Tensor, "B C D"]:
        """Compresses N states, a multiple of `group_size`. `usage_BN` is the attention that each received."""
        if self.compression.kind == "most_used":
            return self._most_used(old_BND, usage_BN)
        if self.compression.kind == "linear":
            return (self.places_rn @ old_BND.unflatten(1, (-1, self.places_rn.shape[1]))).flatten(1, 2)
        groups_BCcD = self._groups(old_BND)
        if self.compression.kind == "mean":
            return groups_BCcD.mean(dim=2)
        if self.compression.kind == "max":
            return groups_BCcD.amax(dim=2)
        return torch.einsum("bkci,oic->bko", groups_BCcD, self.kernel_OIc) + self.bias_O

    def autoencoding_loss(
        self, old_BND: Float[Tensor, "B N D"], compressed_BCD: Float[Tensor, "B C D"]
    ) -> Float[Tensor, ""]:
        """Returns the mean square error of the old states decoded from the compressed ones (section 3.2)."""
        groups_BCcD = self._groups(old_BND)
        return F.mse_loss(self.back(compressed_BCD).view_as(groups_BCcD), groups_BCcD)

    def _groups(self, old_BND: Tensor) -> Float[Tensor, "B C c D"]:
        """Groups the states that become one: neighbors, or every `dilation`-th for a dilated kernel."""
        B, N, D = old_BND.shape
        rate = self.compression.rate
        if self.compression.kind != "dilated":
            return old_BND.view(B, N // rate, rate, D)
        apart = self.compression.dilation
        return old_BND.view(B, -1, rate, apart, D).transpose(2, 3).reshape(B, N // rate, rate, D)

    def _most_used(self, old_BND: Tensor, usage_BN: Tensor | None) -> Float[Tensor, "B C D"]:
        """Selects the states that received most attention, in their order."""
        if usage_BN is None:
            raise ValueError("most-used compression needs to know the use")
        C = old_BND.shape[1] // self.compression.rate
        kept_BC = usage_BN.topk(C, dim=1).indices.sort(dim=1).values
        return old_BND.gather(1, kept_BC[:, :, None].expand(-1, -1, old_BND.shape[2]))
