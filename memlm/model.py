"""The decoder: token ids -> hidden states, keys and log-probabilities.

Pre-norm (RMSNorm, arXiv 1910.07467), rotary positions (2104.09864), SwiGLU (2002.05202), grouped-query attention
(2305.13245), tied embeddings. The *key* of a position is the input of the last layer's feed-forward, after its
norm, as in kNN-LM (1911.00172, section 3); it predicts the next token.

Shapes: B batch, T time, D width, H query heads, G key-value heads, S places in the cache, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput

FEW_TOKENS = 4
ONE_THREAD_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Raises InvalidInput for shapes that do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ff_dim: int
    context_length: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Checks that every size is positive and that heads divide what they must."""
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim", "context_length"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; expected at least 1", field=name)
        if self.dim % self.num_heads or self.head_dim % 2:
            raise InvalidInput(f"dim {self.dim} over {self.num_heads} heads is no even number", field="num_heads")
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"{self.num_kv_heads} kv heads do not divide {self.num_heads} heads", field="num_kv_heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


class DecoderState:
    """The keys and values one batch of sequences has cached: all the decoder remembers of what it has read.

    Places are reserved once, for `capacity` tokens; `length` counts those in use.
    """

    def __init__(self, config: ModelConfig, batch_size: int, capacity: int, dtype: torch.dtype) -> None:
        """Reserves 2 x layers x B x G x capacity x head_dim numbers."""
        shape = (config.num_layers, 2, batch_size, config.num_kv_heads, capacity, config.head_dim)
        self.cache_L2BGSd = torch.zeros(shape, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        """How many tokens there is room for."""
        return self.cache_L2BGSd.shape[4]

    def fork(self) -> DecoderState:
        """A copy that goes its own way from here."""
        twin = object.__new__(DecoderState)
        twin.cache_L2BGSd, twin.length = self.cache_L2BGSd.clone(), self.length
        return twin


class Attention(nn.Module):
    """Causal self-attention with grouped queries and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        """One fused projection for queries, keys and values."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self,
        hidden_BTD: Float[Tensor, "B T D"],
        rotation_2Td: Float[Tensor, "2 T d"],
        cache_2BGSd: Float[Tensor, "2 B G S d"] | None,
        length: int,
    ) -> Float[Tensor, "B T D"]:
        """Attends to the cached places before `length` and, causally, to the T new ones, which it caches."""
        B, T, D = hidden_BTD.shape
        heads = self.qkv(hidden_BTD).view(B, T, -1, self.head_dim).transpose(1, 2)
        rotated, value_BGTd = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        query_BHTd, key_BGTd = rotate(rotated, rotation_2Td).split([self.num_heads, self.num_kv_heads], dim=1)
        if cache_2BGSd is not None:
            cache_2BGSd[0, :, :, length : length + T] = key_BGTd
            cache_2BGSd[1, :, :, length : length + T] = value_BGTd
            key_BGTd, value_BGTd = cache_2BGSd[0, :, :, : length + T], cache_2BGSd[1, :, :, : length + T]
        mixed_BHTd = F.scaled_dot_product_attention(
            query_BHTd,
            key_BGTd,
            value_BGTd,
            attn_mask=_causal_mask(T, length) if length and T > 1 else None,
            is_causal=length == 0 and T > 1,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.out(mixed_BHTd.transpose(1, 2).reshape(B, T, D))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        """One fused projection for gate and value."""
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ff_dim, bias=False)
        self.down = nn.Linear(config.ff_dim, config.dim, bias=False)

    def forward(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """down(silu(gate x) * up x)."""
        gate, up = self.gate_up(hidden_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(self, config: ModelConfig) -> None:
        """Two sub-layers, each behind its norm."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ff_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ff = FeedForward(config)


class Decoder(nn.Module):
    """A causal language model. `config` is its shape; parameters start as GPT-2's do, scaled by depth."""

    def __init__(self, config: ModelConfig) -> None:
        """Builds and initialises; seed torch first for a given start."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks: Sequence[Block] = nn.ModuleList(Block(config) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.rotation_2Sd: Tensor
        self.register_buffer("rotation_2Sd", rotary_table(config), persistent=False)
        self._initialise()

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters are stored and computed in."""
        return self.embedding.weight.dtype

    @cached_property
    def num_bytes(self) -> int:
        """Size of the parameters, as loaded."""
        return self.num_parameters * self.dtype.itemsize

    @property
    def num_parameters(self) -> int:
        """All of them, the tied embedding once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def new_state(self, *, batch_size: int = 1, capacity: int | None = None) -> DecoderState:
        """An empty state with room for `capacity` tokens (the context length if not given)."""
        return DecoderState(self.config, batch_size, capacity or self.config.context_length, self.dtype)

    def forward(
        self, tokens_BT: Int[Tensor, "B T"], state: DecoderState | None = None
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Reads T tokens after those in `state`, which takes them up; gives the final hidden states and the keys.

        Raises InvalidInput where the tokens do not fit behind what the state holds.
        """
        residual_BTD, keys_BTD = self._body(tokens_BT, state)
        return self.norm(residual_BTD + self.blocks[-1].ff(keys_BTD)), keys_BTD

    def keys(self, tokens_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The keys alone: what building a datastore needs, without the last feed-forward."""
        return self._body(tokens_BT, None)[1]

    def logits(self, hidden: Float[Tensor, "*P D"]) -> Float[Tensor, "*P V"]:
        """Scores of the next token, in the parameters' dtype."""
        return F.linear(hidden, self.embedding.weight)

    def logprobs(self, hidden: Float[Tensor, "*P D"]) -> Float[Tensor, "*P V"]:
        """Log-probabilities of the next token, in float32."""
        return torch.log_softmax(self.logits(hidden).float(), dim=-1)

    def _body(
        self, tokens_BT: Int[Tensor, "B T"], state: DecoderState | None
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Everything up to the last feed-forward: the residual stream before it, and its normed input."""
        begin, T = (state.length if state else 0), tokens_BT.shape[1]
        if begin + T > (state.capacity if state else self.config.context_length):
            room = (state.capacity if state else self.config.context_length) - begin
            raise InvalidInput(f"{T} tokens do not fit into the {room} places left; shorten the text", field="prompt")
        rotation_2Td = self.rotation_2Sd[:, begin : begin + T]
        hidden_BTD = self.embedding(tokens_BT)
        for layer, block in enumerate(self.blocks):
            cache = state.cache_L2BGSd[layer] if state else None
            hidden_BTD = hidden_BTD + block.attention(block.attention_norm(hidden_BTD), rotation_2Td, cache, begin)
            normed_BTD = block.ff_norm(hidden_BTD)
            if layer < self.config.num_layers - 1:
                hidden_BTD = hidden_BTD + block.ff(normed_BTD)
        if state:
            state.length += T
        return hidden_BTD, normed_BTD

    def _initialise(self) -> None:
        into_residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=into_residual if name.endswith(("out.weight", "down.weight")) else 0.02)


@contextmanager
def decoding_threads(decoder: Decoder, num_tokens: int) -> Iterator[None]:
    """Reads a few tokens of a small model on one thread: more save nothing, and waiting for each other can cost
    everything.

    A step of the tiny preset takes 0.43 ms on one thread and on two; where the second core is taken for a moment,
    two took 30 ms (docs/log.md).
    """
    before = torch.get_num_threads()
    small = num_tokens <= FEW_TOKENS and decoder.num_bytes < ONE_THREAD_BYTES
    if before > 1 and small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1 and small:
            torch.set_num_threads(before)


def rotary_table(config: ModelConfig) -> Float[Tensor, "2 S d"]:
    """Cosine and signed sine of each position's angles, doubled to the head's width."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(config.context_length).float(), frequencies)
    sine = angles.sin()
    return torch.stack([torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-sine, sine], dim=-1)])


def rotate(heads: Float[Tensor, "*P T d"], rotation_2Td: Float[Tensor, "2 T d"]) -> Float[Tensor, "*P T d"]:
    """Turns each half-pair of a head by its position's angle."""
    cosine, sine = rotation_2Td.to(heads.dtype)
    return heads * cosine + heads.roll(heads.shape[-1] // 2, dims=-1) * sine


def _causal_mask(num_new: int, num_cached: int) -> Tensor:
    """True where query i, itself at place `num_cached + i`, may see place j."""
    return torch.ones(num_new, num_cached + num_new, dtype=torch.bool).tril(num_cached)
