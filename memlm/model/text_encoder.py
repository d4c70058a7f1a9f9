"""An encoder: token ids of whole texts -> hidden states that have seen the whole text (BERT, arXiv 1810.04805).

It is made of the decoder's layers, under a bidirectional mask. A token's hidden state depends on all others of its
text, so an encoder has no state and continues nothing. Padding changes nothing.

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_choice
from memlm.model.attention.mask import AttentionMask
from memlm.model.attention.watch import Watch
from memlm.model.config import ModelConfig
from memlm.model.embedding import Embedding
from memlm.model.forward import ForwardContext
from memlm.model.kernels.linear import Linear
from memlm.model.layers import Block
from memlm.model.norms import make_norm

POOLINGS = ("mean", "first")


class TextEncoder(nn.Module):
    """A bidirectional encoder of the shape `config`, with learned positions and post-norms, as BERT has them.

    `num_segments` is how many segments a text may have, each of which has an embedding. With `has_head` it scores
    tokens, by a head that shares the embedding: `config.tied_embeddings` says the same. Parameters start as BERT's do.
    Seed torch before for reproducible ones. Raises InvalidInput for a config with parts that an encoder lacks.
    """

    def __init__(self, config: ModelConfig, *, num_segments: int = 2, has_head: bool = True) -> None:
        super().__init__()
        _check(config, has_head)
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context_length, config.dim)
        self.segments = nn.Embedding(num_segments, config.dim)
        self.embedding_norm = make_norm(config)
        self.blocks: Sequence[Block] = nn.ModuleList(Block(config, n) for n in range(config.num_layers))  # type: ignore[assignment]
        self.head: Linear | None = None
        if has_head:
            self.transform, self.transform_norm = Linear(config.dim, config.dim), make_norm(config)
            self.head = Linear(config.dim, config.vocab_size, bias=False)
            self.head_bias_V = nn.Parameter(torch.zeros(config.vocab_size))
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters and of the computation."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(
        self,
        tokens_BT: Int[Tensor, "B T"],
        new_B: list[int] | None = None,
        *,
        segments_BT: Int[Tensor, "B T"] | None = None,
        watch: Watch | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Reads a whole text in each row and returns the hidden states behind the last layer.

        `new_B` counts the tokens of each row that are text. The others are padding behind them, whose hidden states
        mean nothing. `segments_BT` numbers the segments (default: all tokens are of segment 0). Raises InvalidInput for
        a row without text, and for more tokens than the model has positions.
        """
        tokens_BT = tokens_BT.to(self.device)
        B, T = tokens_BT.shape
        new_B = [T] * B if new_B is None else new_B
        if self.config.context_length < T:
            raise InvalidInput(
                f"{T} tokens do not fit into the encoder's {self.config.context_length} places; shorten the text",
                field="text",
            )
        if min(new_B, default=0) < 1 or max(new_B) > T:
            raise InvalidInput(f"rows of {T} tokens have {new_B} of text; expected 1 to {T} each", field="text")
        mask = AttentionMask.bidirectional(new_B, T, self.device)
        context = ForwardContext(mask, new_B, self.dtype, watch=watch, tokens_BT=tokens_BT)
        segments_BT = torch.zeros_like(tokens_BT) if segments_BT is None else segments_BT.to(self.device)
        segment_BTD = self.segments(segments_BT)
        hidden_BTD = self.embedding(tokens_BT) + self.positions(mask.query_RT) + segment_BTD
        hidden_BTD = self.embedding_norm(hidden_BTD)
        for block in self.blocks:
            hidden_BTD = block.finish(*block.attend(hidden_BTD, context), context)
        return hidden_BTD

    def logits(self, hidden: Float[Tensor, "*P D"]) -> Float[Tensor, "*P V"]:
        """Returns scores of the token at each place, as the masked language model learnt them.

        Raises InvalidInput for an encoder without a head.
        """
        if self.head is None:
            raise InvalidInput(
                "the encoder has no head that scores tokens; load a checkpoint of masked language models"
            )
        activation: Any = self.config.activation
        return self.head(self.transform_norm(self.transform(hidden, activation))) + self.head_bias_V

    def vectors(
        self, tokens_BT: Int[Tensor, "B T"], new_B: list[int], *, pooling: str = "mean"
    ) -> Float[Tensor, "B D"]:
        """Returns a vector of length 1 for each text, in float32: the direction of the mean of its hidden states, or of
        the first one.
        """
        check_choice("pooling", pooling, POOLINGS)
        hidden_BTD = self(tokens_BT, new_B).float()
        if pooling == "first":
            return F.normalize(hidden_BTD[:, 0], dim=1)
        lengths_B1 = torch.tensor(new_B, device=hidden_BTD.device)[:, None]
        is_text_BT1 = (torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device) < lengths_B1)[..., None]
        return F.normalize((hidden_BTD * is_text_BT1).sum(dim=1) / lengths_B1, dim=1)


def _check(config: ModelConfig, has_head: bool) -> None:
    expected = {
        "positions": (config.positions, "learned"),
        "norm_order": (config.norm_order, "post"),
        "windows": (config.windows, ()),
        "xl_length": (config.xl_length, 0),
        "memorizing": (config.memorizing, None),
        "norm": (config.norm, "layer"),
        "num_kv_heads": (config.num_kv_heads, config.num_heads),
        "qk_norm": (config.qk_norm, False),
        **{name: (getattr(config, name), True) for name in ("qkv_bias", "out_bias", "ff_bias")},
    }
    for name, (value, needed) in expected.items():
        if value != needed:
            raise InvalidInput(f"{name} is {value!r}; an encoder has {needed!r}", field=name)
    if not config.is_plain:
        raise InvalidInput("an encoder has plain layers; leave layers, join, stack and border out", field="layers")
    if config.tied_embeddings != has_head:
        raise InvalidInput(
            f"tied_embeddings is {config.tied_embeddings}; an encoder's head shares the embedding, if it has one",
            field="tied_embeddings",
        )
