"""A pass of new tokens of each row in one native call, through all layers of plain attention.

It covers rotary, learned, sinusoidal or no positions, norms before the sub-layers, sliding windows, attention sinks,
and weights in panels. The decoder computes every other pass and every other model in torch, to the same results up to
rounding.

The call has a row for each new token. A token's results have the same bits whatever other tokens the pass reads,
earlier ones of its own sequence included: each row adds in an order of its own, and the attention of a layer begins
when all of its keys and values are written.

Shapes: B batch, T new tokens of a row at most, N new tokens of all rows, D width, r rotated numbers of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memlm.model.forward import ForwardContext
from memlm.model.kernels.linear import Linear
from memlm.model.kernels.native import Matrix, library
from memlm.model.kernels.quantized import PanelWeight
from memlm.model.norms import OffsetRMSNorm
from memlm.model.positions import Angles

if TYPE_CHECKING:
    from memlm.model.decoder import Decoder

ACTIVATIONS = ("swiglu", "geglu", "gelu", "gelu_tanh", "relu")  # as native.cpp numbers them
POSITIONS = ("rotary", "learned", "sinusoidal", "none")
VECTOR = 8  # heads are a multiple of this wide


class _Norm(Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("epsilon", c_float),
        ("centers", c_int32),
    ]


class _Layer(Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        *((name, _Norm) for name in ("attention_norm", "ff_norm", "query_norm", "key_norm")),
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        ("window", c_int32),
        ("rope", c_int32),
    ]


class _Model(Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        ("layers", POINTER(_Layer)),
        ("norm", _Norm),
        *(
            (name, c_int32)
            for name in (
                "num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ff_dim", "rotary_dim", "activation",
                "is_gated", "is_parallel",
            )
        ),
        ("query_scale", c_float),
    ]  # fmt: skip


class _Step(Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        *((name, c_void_p) for name in ("hidden", "keys", "cache")),
        *((name, c_int64) for name in ("layer_stride", "value_stride", "sequence_stride", "head_stride")),
        *((name, c_void_p) for name in ("sequences", "places", "firsts", "sinks")),
        ("ropes", c_void_p * 2),
        ("sink_ropes", c_void_p * 2),
        *((name, c_int32) for name in ("num_rows", "num_threads", "num_sinks", "finishes")),
    ]


class NativeStep:
    """The layers of a decoder, as the library takes them. The decoder's weights must not change."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self._kept: list[Tensor] = []  # what the structures point to
        self._angles: list[Angles] = []  # each with a layer that turns by it
        self._rope_layers: list[int] = []
        self._layers: Array[_Layer] = (_Layer * config.num_layers)()
        for number, block in enumerate(decoder.blocks):
            layer, attention = self._layers[number], block.attention
            layer.attention_norm, layer.ff_norm = self._norm(block.attention_norm), self._norm(block.ff_norm)
            layer.query_norm, layer.key_norm = self._norm(attention.query_norm), self._norm(attention.key_norm)
            layer.qkv, layer.out = self._matrix(attention.qkv), self._matrix(attention.out)
            layer.up, layer.down = self._matrix(block.ff.inner), self._matrix(block.ff.down)
            layer.window, layer.rope = attention.window, self._rope(decoder, number)
        self._model = _Model(
            self._layers, self._norm(decoder.norm), config.num_layers, config.dim, config.num_heads,
            config.num_kv_heads, config.head_dim, config.ff_dim, config.rotary_dim,
            ACTIVATIONS.index(config.activation), config.activation in ("swiglu", "geglu"), config.parallel_residual,
            config.query_scale / math.sqrt(config.head_dim),
        )  # fmt: skip

    @classmethod
    def of(cls, decoder: Decoder) -> NativeStep | None:
        """Returns the step of a decoder, or None where torch has to compute it."""
        config = decoder.config
        has_plain_layers = (
            config.is_plain
            and config.positions in POSITIONS
            and config.norm_order == "pre"
            and not (config.qk_norm and config.qk_norm_over != "head")
            and not (config.is_segmented or config.memorizing or config.extended_attention)
            and config.head_dim % VECTOR == 0
        )
        linears = [module for module in decoder.blocks.modules() if isinstance(module, Linear)]  # type: ignore[attr-defined]
        is_quantized = all(isinstance(linear.packed, PanelWeight) for linear in linears)
        return cls(decoder) if has_plain_layers and is_quantized and library() is not None else None

    def takes(self, context: ForwardContext) -> bool:
        """Whether this computes a pass: behind the tokens of a state, without gradients, unwatched, and within a
        document.
        """
        state = context.state
        return (
            state is not None
            and context.watch is None
            and context.mask.continues_RT is None
            and state.dtype == torch.float32
            and not state.training
            and not torch.is_grad_enabled()
        )

    def __call__(
        self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext, *, finishes: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the final hidden states, or without `finishes` the residual stream before the last feed-forward, and
        the inputs of the last feed-forward. Both are zero where `context.new_B` has padding, which takes no time.

        Writes keys and values of the tokens to the state.
        """
        state, kernels = context.state, library()
        assert state is not None
        assert kernels is not None
        B, T, D = hidden_BTD.shape
        numbers = [(row, new) for row, count in enumerate(context.new_B) for new in range(count)]
        tokens_N = torch.tensor([row * T + new for row, new in numbers], dtype=torch.int64)
        hidden_ND = hidden_BTD.reshape(-1, D)[tokens_N]
        keys_ND = torch.empty_like(hidden_ND)
        places_B, cache = state.places_B(), state.cache_L2BGSd
        F = state.num_front
        firsts_B = [F + max(row.floor, row.start, row.base) - row.base for row in state.rows]
        sinks_B = [min(row.start, F) for row in state.rows]
        ropes = [self._turns(context.query_rope(layer), B)[tokens_N] for layer in self._rope_layers]
        sink_layers = self._rope_layers if F else ()
        sink_ropes = [self._turns(context.sink_rope(layer), B)[tokens_N] for layer in sink_layers]
        integers = c_int32 * len(numbers)
        sequences = integers(*(row for row, _ in numbers))
        firsts, sinks = (integers(*(each_B[row] for row, _ in numbers)) for each_B in (firsts_B, sinks_B))
        places = integers(*(places_B[row] + new for row, new in numbers))
        step = _Step(
            hidden_ND.data_ptr(), keys_ND.data_ptr(), cache.data_ptr(), *cache.stride()[:4],
            addressof(sequences), addressof(places), addressof(firsts), addressof(sinks),
            (c_void_p * 2)(*(rope.data_ptr() for rope in ropes)),
            (c_void_p * 2)(*(rope.data_ptr() for rope in sink_ropes)),
            len(numbers), torch.get_num_threads(), F, finishes,
        )  # fmt: skip
        kernels.memlm_step(byref(self._model), byref(step))
        if len(numbers) == B * T:
            return hidden_ND.view(B, T, D), keys_ND.view(B, T, D)
        padded = (hidden_BTD.new_zeros(B * T, D).index_copy_(0, tokens_N, part) for part in (hidden_ND, keys_ND))
        hidden_BTD, keys_BTD = (part.view(B, T, D) for part in padded)
        return hidden_BTD, keys_BTD

    def _turns(self, rope: Float[Tensor, "2 *R T r"] | None, batch_size: int) -> Float[Tensor, "B*T 2 r"]:
        assert rope is not None
        T, r = rope.shape[-2:]
        return rope.reshape(2, -1, T, r).permute(1, 2, 0, 3).expand(batch_size, -1, -1, -1).reshape(-1, 2, r)

    def _rope(self, decoder: Decoder, layer: int) -> int:
        angles = None if decoder.rotary is None else decoder.rotary.of_layer(layer)
        if angles is None:
            return -1
        known = [number for number, other in enumerate(self._angles) if other is angles]
        if not known:
            self._angles.append(angles)
            self._rope_layers.append(layer)
        return known[0] if known else len(self._angles) - 1

    def _norm(self, norm: nn.Module | None) -> _Norm:
        if norm is None:
            return _Norm()
        weight: Any = norm.weight
        offset = 1 if isinstance(norm, OffsetRMSNorm) else 0
        is_centered = isinstance(norm, nn.LayerNorm)
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        epsilon: Any = norm.eps
        return _Norm(
            self._pointer(weight + offset), None if bias is None else self._pointer(bias), epsilon, is_centered
        )

    def _matrix(self, linear: Linear) -> Matrix:
        assert isinstance(linear.packed, PanelWeight)
        bias: Any = linear.bias
        self._kept.append(linear.packed.panels_PKB)
        return Matrix(
            linear.packed.panels_PKB.data_ptr(), None if bias is None else self._pointer(bias),
            linear.packed.out_features, linear.packed.in_features, linear.packed.layout_number,
        )  # fmt: skip

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()
