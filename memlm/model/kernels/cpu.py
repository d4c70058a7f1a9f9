"""Linear layers and attention as this processor computes them fastest, beside their plain twins.

`linear()` and `sdpa()` choose the kernel. The plain twins `plain_linear` and `plain_sdpa` train, run on every device,
and are the reference for the tests. The other kernels only predict. benchmarks/log (2026-11-21 and 22) has the timings.

Shapes: B batch, T queries, S places, H query heads, G key-value heads, r = H / G, d width of a head, I inputs,
O outputs, N = B G.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import memlm.model.kernels.native as native
from memlm.model.attention.mask import AttentionMask
from memlm.model.kernels.quantized import BlockWeight, PanelWeight

UPCAST_BYTES = 8 << 20  # what stays in a processor's cache
QUERY_BLOCK = 256

PACKED_DTYPES = (torch.float32, torch.bfloat16)
ROWS_HINT = 16  # the layout that is best for 16 rows is best, or nearly, for one and for many
SMALL_WEIGHT = 1 << 19  # below this many numbers, and for a row or two, calling oneDNN costs more than it saves
FEW_ROWS = 4
MANY_ROWS = 8  # from here on, upcasting bfloat16 weights costs less than emulating their product

Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh"]
# Each as oneDNN names it and its algorithm, and as torch computes it.
ACTIVATIONS: dict[Activation, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "relu": ("relu", "", F.relu),
    "gelu": ("gelu", "none", F.gelu),
    "gelu_tanh": ("gelu", "tanh", partial(F.gelu, approximate="tanh")),
}
Sdpa: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionMask, int, Tensor | None], Tensor]


def linear(
    x: Float[Tensor, "*P I"],
    weight_OI: Tensor,
    bias_O: Float[Tensor, " O"] | None,
    activation: Activation | None = None,
    *,
    packed: Tensor | PanelWeight | None = None,
) -> Float[Tensor, "*P O"]:
    """Returns activation(x W' + b). `packed` is the result of `pack`; `weight_OI` is then empty if it is large."""
    if isinstance(packed, PanelWeight):
        return panel_linear(x, packed, bias_O, activation)
    if packed is not None and (x.numel() >= FEW_ROWS * x.shape[-1] or not weight_OI.numel()):
        return _packed_linear(x, packed, bias_O, activation)
    if is_emulated(weight_OI) and x.numel() >= MANY_ROWS * x.shape[-1] and not torch.is_grad_enabled():
        return _upcast_linear(x, weight_OI, bias_O, activation)
    return plain_linear(x, weight_OI, bias_O, activation)


def plain_linear(
    x: Float[Tensor, "*P I"], weight_OI: Tensor, bias_O: Float[Tensor, " O"] | None, activation: Activation | None
) -> Float[Tensor, "*P O"]:
    """Returns activation(x W' + b) by torch's product, on every device and with gradients."""
    y = F.linear(x, weight_OI, bias_O)
    return y if activation is None else ACTIVATIONS[activation][2](y)


def quantize(weight_OI: Float[Tensor, "O I"], bits: int) -> BlockWeight:
    """Rounds a weight to 8 or 4 bits."""
    return (native.quantize(weight_OI) if bits == 8 else None) or BlockWeight.rounded(weight_OI, bits)


def panel_linear(
    x: Float[Tensor, "*P I"],
    weight: PanelWeight,
    bias_O: Float[Tensor, " O"] | None,
    activation: Activation | None,
) -> Float[Tensor, "*P O"]:
    """Returns activation(x W' + b) for a weight in panels. Where there are no native kernels, `x` is not rounded."""
    y = native.multiply(x, weight, bias_O)
    if y is None:
        return plain_linear(x, weight.to_dense().to(x.dtype), bias_O, activation)
    return y if activation is None else ACTIVATIONS[activation][2](y)


def pack(weight_OI: Float[Tensor, "O I"]) -> Tensor | None:
    """Returns the weight in oneDNN's own layout, or None where this processor has no product for it.

    The plain product reaches a quarter of the memory's bandwidth for one row and a third of the processor's peak for
    many. The packed one reaches most of both.
    """
    if not can_pack(weight_OI):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), ROWS_HINT)


def _packed_linear(x: Tensor, packed: Tensor, bias_O: Tensor | None, activation: Activation | None) -> Tensor:
    name, algorithm, _ = ("none", "", None) if activation is None else ACTIVATIONS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias_O, name, [], algorithm)


def _upcast_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None) -> Tensor:
    """Multiplies in float32, as many rows of the weight at a time as stay in the processor's cache.

    An emulated bfloat16 product takes as long again for each row of `x`.
    """
    out_features, in_features = weight_OI.shape
    x_RI = x.reshape(-1, in_features).float()
    y_RO = x.new_empty(len(x_RI), out_features)
    size = max(1, UPCAST_BYTES // (4 * in_features))
    for begin in range(0, out_features, size):
        outputs = slice(begin, begin + size)
        bias_o = None if bias_O is None else bias_O[outputs].float()
        y_RO[:, outputs] = plain_linear(x_RI, upcast_buffer(weight_OI[outputs], torch.float32), bias_o, activation)
    return y_RO.view(*x.shape[:-1], out_features)


def sdpa(
    query_BHTd: Float[Tensor, "B H T d"],
    key_BGSd: Float[Tensor, "B G S d"],
    value_BGSd: Float[Tensor, "B G S d"],
    mask: AttentionMask,
    window: int,
    bias_RHTS: Float[Tensor, "R H T S"] | None = None,
) -> Float[Tensor, "B H T d"]:
    """Returns softmax(q k / sqrt(d) + bias) v over the places that `mask` shows to a layer with this `window`."""
    return choose_sdpa(query_BHTd)(query_BHTd, key_BGSd, value_BGSd, mask, window, bias_RHTS)


def choose_sdpa(query_BHTd: Float[Tensor, "B H T d"]) -> Sdpa:
    """Returns the fastest attention kernel for these queries on this processor.

    In bfloat16 without matrix units, the fused kernel takes two to five times as long as plain products. With them,
    the products take longer, because they copy their inputs first.
    """
    if query_BHTd.dtype != torch.bfloat16 or query_BHTd.device.type != "cpu" or torch.is_grad_enabled():
        return plain_sdpa
    if query_BHTd.shape[2] > 1 and is_emulated(query_BHTd):
        return _upcast_sdpa
    if has_matrix_units():
        return plain_sdpa
    return sdpa_of_one if query_BHTd.shape[2] == 1 else sdpa_in_blocks


def plain_sdpa(
    query_BHTd: Tensor,
    key_BGSd: Tensor,
    value_BGSd: Tensor,
    mask: AttentionMask,
    window: int,
    bias_RHTS: Tensor | None = None,
) -> Float[Tensor, "B H T d"]:
    """Attention by torch's fused kernel, on every device and with gradients."""
    shown = mask.for_window(window)
    if bias_RHTS is not None:
        shown = bias_RHTS.to(query_BHTd.dtype).masked_fill(~mask.visible(window), -torch.inf)
    is_causal = isinstance(shown, str)
    return F.scaled_dot_product_attention(
        query_BHTd, key_BGSd, value_BGSd, attn_mask=None if isinstance(shown, str) else shown, is_causal=is_causal,
        enable_gqa=query_BHTd.shape[1] != key_BGSd.shape[1],
    )  # fmt: skip


def _upcast_sdpa(
    query_BHTd: Tensor,
    key_BGSd: Tensor,
    value_BGSd: Tensor,
    mask: AttentionMask,
    window: int,
    bias_RHTS: Tensor | None = None,
) -> Float[Tensor, "B H T d"]:
    mixed_BHTd = plain_sdpa(query_BHTd.float(), key_BGSd.float(), value_BGSd.float(), mask, window, bias_RHTS)
    return mixed_BHTd.to(query_BHTd.dtype)


def sdpa_in_blocks(
    query_BHTd: Tensor,
    key_BGSd: Tensor,
    value_BGSd: Tensor,
    mask: AttentionMask,
    window: int,
    bias_RHTS: Tensor | None = None,
) -> Float[Tensor, "B H T d"]:
    """Attention by plain products, a block of queries at a time, the heads that share keys side by side.

    A block leaves out the places after its last query, unless the mask is bidirectional.
    """
    B, H, T, d = query_BHTd.shape
    G, S = key_BGSd.shape[1:3]
    groups = G, H // G
    query_BGrTd = query_BHTd.unflatten(1, groups) / math.sqrt(d)
    mixed = []
    for begin in range(0, T, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, T)
        size, seen = end - begin, S - T + end if mask.ends_R is None else S
        rows_BGQd = query_BGrTd[:, :, :, begin:end].reshape(B, G, -1, d)
        scores = (rows_BGQd @ key_BGSd[:, :, :seen].mT).unflatten(2, (H // G, size))
        if bias_RHTS is not None:
            scores = scores + bias_RHTS[:, :, begin:end, :seen].unflatten(1, groups).to(scores.dtype)
        scores = mask.hide(scores, window, begin, end)
        weights_BGQS = scores.softmax(dim=-1).flatten(2, 3)
        mixed.append((weights_BGQS @ value_BGSd[:, :, :seen]).view(B, H, size, d))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


def sdpa_of_one(
    query_BH1d: Tensor,
    key_BGSd: Tensor,
    value_BGSd: Tensor,
    mask: AttentionMask,
    window: int,
    bias_RH1S: Tensor | None = None,
) -> Float[Tensor, "B H 1 d"]:
    """Attention of one query per row, in float32.

    Products of bfloat16 would copy the keys and values that they read. These are upcast instead, as many heads at a
    time as stay in the processor's cache.
    """
    B, H, _, d = query_BH1d.shape
    G, S = key_BGSd.shape[1:3]
    wide = torch.promote_types(query_BH1d.dtype, torch.float32)
    query_Nrd = query_BH1d.reshape(-1, H // G, d).to(wide) * (1 / math.sqrt(d))
    key_NSd, value_NSd = key_BGSd.flatten(0, 1), value_BGSd.flatten(0, 1)
    size = max(1, UPCAST_BYTES // (S * d * wide.itemsize))
    blocks = [slice(begin, begin + size) for begin in range(0, len(query_Nrd), size)]
    scores_NrS, mixed_Nrd = query_Nrd.new_empty(*query_Nrd.shape[:2], S), torch.empty_like(query_Nrd)
    for heads in blocks:
        torch.bmm(query_Nrd[heads], upcast_buffer(key_NSd[heads], wide).mT, out=scores_NrS[heads])
    scores_BGrS = scores_NrS.view(B, G, H // G, S)
    if bias_RH1S is not None:
        scores_BGrS += bias_RH1S.to(wide).reshape(-1, G, H // G, S)
    if (hidden_RS := mask.hidden_from_last(window)) is not None:
        scores_BGrS.masked_fill_(hidden_RS[:, None, None], -torch.inf)
    weights_NrS = scores_NrS.softmax(dim=2)
    for heads in blocks:
        torch.bmm(weights_NrS[heads], upcast_buffer(value_NSd[heads], wide), out=mixed_Nrd[heads])
    return mixed_Nrd.to(query_BH1d.dtype).view(B, H, 1, d)


class _UpcastBuffer(threading.local):
    """Copies a tensor into a wider type. The result is valid until the thread's next call.

    Each thread keeps its memory, because the system would clear new memory every time.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tensor: Tensor, wide: torch.dtype) -> Tensor:
        size = tensor.numel() * wide.itemsize
        if self._bytes.numel() < size:
            self._bytes = torch.empty(max(UPCAST_BYTES, 1 << size.bit_length()), dtype=torch.uint8)
        return self._bytes[:size].view(wide).view(tensor.shape).copy_(tensor)


upcast_buffer = _UpcastBuffer()


def can_pack(weight: Tensor) -> bool:
    """Whether this torch packs such a weight on this processor. oneDNN refuses bfloat16 that it cannot multiply."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and (weight.dtype != torch.bfloat16 or multiplies_bfloat16())
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_emulated(tensor: Tensor) -> bool:
    """Whether the tensor holds bfloat16 numbers on a processor without instructions for them."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not multiplies_bfloat16()


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and supported())


@cache
def has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware."""
    return bool(_capabilities().get("avx512_bf16") or _capabilities().get("amx_bf16"))


@cache
def has_matrix_units() -> bool:
    """Whether the processor has Intel's AMX units for bfloat16."""
    return bool(_capabilities().get("amx_bf16"))


def _capabilities() -> Mapping[str, object]:
    return getattr(torch.cpu, "get_capabilities", dict)()
