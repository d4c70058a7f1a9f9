"""An encoder-decoder (T5, arXiv 1910.10683): a source text -> states, which a decoder reads beside its own text.

The source is encoded once. Its keys and values are in the state of the decoder, which reads, forks, saves and takes
back its own tokens as any decoder does.

Shapes: B batch, N tokens of a source, T tokens of the decoder's text, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput
from memlm.model.attention.mask import AttentionMask
from memlm.model.config import ModelConfig
from memlm.model.decoder import Decoder
from memlm.model.forward import ForwardContext
from memlm.model.layers import Block
from memlm.model.norms import make_norm
from memlm.model.positions import T5Bias
from memlm.model.state.source import Source
from memlm.zoo.shapes.source_attention import SourceAttention, make_sources


class SourceEncoder(nn.Module):
    """The bidirectional layers of T5, with a bias by distance that all layers share, and a norm behind them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.relative_bias = T5Bias(config)
        self.blocks: Sequence[Block] = nn.ModuleList(Block(config, n) for n in range(config.num_layers))  # type: ignore[assignment]
        self.norm = make_norm(config)

    def forward(self, hidden_BND: Float[Tensor, "B N D"], new_B: list[int]) -> Float[Tensor, "B N D"]:
        """Returns the states of embedded texts of `new_B` tokens. Those of the padding behind them mean nothing."""
        mask = AttentionMask.bidirectional(new_B, hidden_BND.shape[1], hidden_BND.device)
        context = ForwardContext(mask, new_B, hidden_BND.dtype, relative_bias=self.relative_bias)
        for block in self.blocks:
            hidden_BND = block.finish(*block.attend(hidden_BND, context), context)
        return self.norm(hidden_BND)


class EncoderDecoder(Decoder):
    """The decoder of the shape `config`, which has the cross part `source` and T5's positions, and an encoder of
    `num_encoder_layers` such layers (default: as many). Both share the embedding.

    A pass needs a state with a source for each row: `new_state(sources_B=model.encode(...))`. Parameters start as the
    decoder's do. Raises InvalidInput for a config with parts that T5 lacks.
    """

    def __init__(self, config: ModelConfig, *, num_encoder_layers: int | None = None) -> None:
        _check(config)
        super().__init__(config)
        layers = config.num_layers if num_encoder_layers is None else num_encoder_layers
        self.encoder = SourceEncoder(replace(config, cross=None, num_layers=layers))
        self._initialize()

    def encoder_states(self, tokens_BN: Int[Tensor, "B N"], new_B: list[int] | None = None) -> Float[Tensor, "B N D"]:
        """Returns the encoder's states of whole texts. `new_B` counts the tokens of each row that are text.

        Raises InvalidInput for a row without text, and for more tokens than `context_length`.
        """
        tokens_BN = tokens_BN.to(self.device)
        B, N = tokens_BN.shape
        new_B = [N] * B if new_B is None else new_B
        if self.config.context_length < N:
            raise InvalidInput(
                f"{N} tokens of a source do not fit into the {self.config.context_length} places; shorten the text, or"
                " load the model with a greater context_length",
                field="source",
            )
        if min(new_B, default=0) < 1 or max(new_B) > N:
            raise InvalidInput(f"sources of {N} tokens have {new_B} of text; expected 1 to {N} each", field="source")
        return self.encoder(self.token_vectors(tokens_BN), new_B)

    def encode(self, tokens_BN: Int[Tensor, "B N"], new_B: list[int] | None = None) -> list[Source]:
        """Returns what the decoder's layers read of each text, for `new_state`. Raises as `encoder_states`."""
        length_B = [tokens_BN.shape[1]] * len(tokens_BN) if new_B is None else new_B
        return make_sources(self.blocks, self.encoder_states(tokens_BN, new_B), length_B)


def _check(config: ModelConfig) -> None:
    if not isinstance(config.cross, SourceAttention):
        raise InvalidInput("the decoder reads no source; give the config the cross source", field="cross")
    if not replace(config, cross=None).is_plain:
        raise InvalidInput(
            "an encoder-decoder has plain layers; leave layers, join, stack and border out", field="layers"
        )
    expected = {"positions": "t5", "norm": "rms", "windows": (), "xl_length": 0, "memorizing": None}
    for name, needed in expected.items():
        if (value := getattr(config, name)) != needed:
            raise InvalidInput(f"{name} is {value!r}; an encoder-decoder has {needed!r}", field=name)
