"""RETRO: layers that read texts like the latest chunk of their own, and how those went on (arXiv 2112.04426).

A document is cut into chunks of m tokens. For each complete chunk, a function finds neighbors: k texts of r tokens,
each a similar chunk and its continuation. An encoder reads each neighbor, and chosen layers attend to all of them. The
token that completes a chunk reads first, and the m - 1 tokens behind it follow. The first m - 1 tokens of a document
read nothing.

A step reads all of its chunks at once. A state keeps the last m - 1 tokens, and the keys and values of the neighbors of
the latest chunk. Gradients reach the encoder from tokens of the same pass alone.

Heads turn by rotary positions, where the paper adds relative logits: a neighbor's tokens are at 0 to r - 1, and the
token that completes a chunk is at m - 1, beside the end of the similar chunk.

Shapes: B batch, T new tokens, N chunks that end in a step, m tokens of a chunk, k neighbors, r tokens of a neighbor,
S = k r, Q queries, H heads, G key-value heads, d width of a head, D width, C layers that read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.kernels.linear import Linear
from memlm.model.norms import make_norm
from memlm.model.parts import Part
from memlm.model.positions import Angles, apply_rope
from memlm.model.state.fields import Field
from memlm.zoo.retro.encoder import NOTHING, NeighborEncoder, angles_of

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig
    from memlm.model.decoder import Decoder
    from memlm.model.forward import ForwardContext
    from memlm.model.state.decoder_state import DecoderState

# Chunks (N, m) -> the tokens of their neighbors (N, k, r), with NOTHING behind short ones and for missing ones.
Neighbors: TypeAlias = Callable[[Tensor], Tensor]
TAIL, READ, THERE, ASKED = "model.tail", "model.read", "model.there", "model.asked"


@dataclass(frozen=True, slots=True)
class Retro(Part):
    """A cross that reads `neighbors` texts of `length` tokens (0: two chunks) for each `chunk` of tokens.

    `layers` are those that read. By default each third of the upper half reads, up to the last. The encoder has
    `encoder_layers`. It may be `conditioned` on the states of the chunk in the first layer that reads, as the paper's
    is. Otherwise a neighbor's encoding depends on its text alone.
    """

    seam: ClassVar[str] = "cross"
    kind: ClassVar[str] = "retro"
    needs_tokens: ClassVar[bool] = True
    recipe: ClassVar[str] = "memlm.zoo.retro.training:RetroRecipe"
    unserved: ClassVar[str] = (
        "reads a chunk store by its cross retro, and a server gives it none; use it in process"
        " (`memlm.zoo.retro.datastore_chunks.read_chunks`), or serve the model that it was made of"
    )

    layers: tuple[int, ...] = ()
    chunk: int = 64
    neighbors: int = 2
    length: int = 0
    encoder_layers: int = 2
    conditioned: bool = False

    def __post_init__(self) -> None:
        check_range("chunk", self.chunk, least=2, whole=True)
        check_range("neighbors", self.neighbors, least=1, whole=True)
        check_range("length", self.length, least=0, whole=True)
        check_range("encoder_layers", self.encoder_layers, least=1, whole=True)
        if not self.length:
            object.__setattr__(self, "length", 2 * self.chunk)

    def reads_in(self, config: ModelConfig) -> tuple[int, ...]:
        """The layers that read, in order."""
        last = config.num_layers - 1
        return tuple(sorted(self.layers)) or tuple(range(last, max(0, config.num_layers // 2 - 1) - 1, -3))[::-1]

    def model_fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The tokens of the chunk that is not complete, and the neighbors of the last complete one."""
        places = self.neighbors * self.length
        shape = (len(self.reads_in(config)), 2, config.num_kv_heads, places, config.head_dim)
        fields = (
            Field("tail", (self.chunk - 1,), torch.int64),
            Field("read", shape),
            Field("there", (places,), torch.bool),
        )
        return (*fields, Field("asked", (self.chunk - 1, config.dim))) if self.conditioned else fields

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> NeighborAttention | None:
        """Returns the attention of a layer that reads."""
        reads = self.reads_in(config)
        return NeighborAttention(config, self, reads.index(layer)) if layer in reads else None

    def build_shared(self, config: ModelConfig) -> Retrieval:
        """Returns the encoder, which waits for a function that finds neighbors."""
        return Retrieval(config, self)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput for layers that do not exist, and for parts that read vectors or layers of their own."""
        if len(set(self.layers)) < len(self.layers) or not all(0 <= each < config.num_layers for each in self.layers):
            raise InvalidInput(
                f"retro reads in the layers {self.layers}; the model has 0 to {config.num_layers - 1}, each once",
                field="cross",
            )
        for name in ("stack", "border"):
            if getattr(config, name):
                raise InvalidInput(f"the cross retro does not go with a {name}; leave one out", field=name)


class Retrieval(nn.Module):
    """The encoder of neighbors, and the function that finds them. Without one, the model reads no neighbors."""

    def __init__(self, config: ModelConfig, part: Retro) -> None:
        super().__init__()
        self.part, self.encoder = part, NeighborEncoder(config, part.encoder_layers, part.length, part.conditioned)
        self.neighbors: Neighbors | None = None

    def begin(self, decoder: Decoder, context: ForwardContext) -> None:
        """Finds the neighbors of the chunks that end in a step. Raises InvalidInput for vectors that are no tokens, and
        for neighbors of another shape.
        """
        if context.tokens_BT is None:
            raise InvalidInput("retro finds neighbors by tokens, and vectors were read", field="cross")
        assert context.state is not None
        step = ChunkStep(self, context, context.state, context.tokens_BT)
        context.cross = step
        if step.num_ends:
            found_Nkr = self.find(step.chunk_Nm).to(decoder.device)
            step.take(found_Nkr, decoder.token_vectors(found_Nkr.clamp(min=0)))

    def find(self, chunk_Nm: Int[Tensor, "N m"]) -> Int[Tensor, "N k r"]:
        """Returns the neighbors of chunks."""
        shape = (len(chunk_Nm), self.part.neighbors, self.part.length)
        if self.neighbors is None:
            return chunk_Nm.new_full(shape, NOTHING)
        found_Nkr = self.neighbors(chunk_Nm)
        if tuple(found_Nkr.shape) != shape:
            raise InvalidInput(
                f"the neighbors of {shape[0]} chunks have the shape {tuple(found_Nkr.shape)}; the model reads {shape}",
                field="neighbors",
            )
        return found_Nkr


class ChunkStep:
    """The chunks of one step: their neighbors, and the tokens that read them.

    `slot_Q` and `place_Q` tell each token that reads its row in a table of all neighbors, those of the state first, and
    its place among the tokens that read the same ones. `age_Q` counts the tokens since the chunk was complete.
    """

    def __init__(self, shared: Retrieval, context: ForwardContext, state: DecoderState, tokens_BT: Tensor) -> None:
        self.shared, self.state, m = shared, state, shared.part.chunk
        B, T = tokens_BT.shape
        mask, is_real_BT = context.mask, context.is_real_BT
        count_BT = (mask.query_RT - mask.document_RT + 1).expand(B, T)  # tokens of the document so far
        age_BT = count_BT % m
        ends_BT = is_real_BT & (age_BT == 0)
        self.reads_BT = is_real_BT & (count_BT >= m)
        time_T = torch.arange(T, device=tokens_BT.device)
        row_BT = torch.arange(B, device=tokens_BT.device)[:, None].expand(B, T)
        is_older_BT = age_BT > time_T  # the chunk was complete before this step
        number_BT = ends_BT.flatten().cumsum(0).view(B, T) - 1
        self.slot_Q = torch.where(is_older_BT, row_BT, B + number_BT)[self.reads_BT]
        self.place_Q = torch.where(is_older_BT, time_T, age_BT)[self.reads_BT]
        self.age_Q, self.width = age_BT[self.reads_BT], min(m, T)
        self.row_N, self.time_N = ends_BT.nonzero(as_tuple=True)
        self.num_ends = len(self.row_N)
        last = {row: number for number, row in enumerate(self.row_N.tolist())}
        self.last = torch.tensor([list(last), list(last.values())], dtype=torch.int64, device=tokens_BT.device)
        self.next_B1 = torch.tensor(context.new_B, device=tokens_BT.device)[:, None]
        self.chunk_Nm = self._windows(TAIL, tokens_BT)
        self.there_US = state.field(THERE)
        self._encoded_NSD: Tensor | None = None
        self._has_encoded = False

    def take(self, found_Nkr: Int[Tensor, "N k r"], vector_NkrD: Float[Tensor, "N k r D"]) -> None:
        """Takes the neighbors of the chunks that end in this step, as tokens and as their embeddings."""
        self.found_Nkr, self.vector_NkrD = found_Nkr, vector_NkrD
        there_NS = (found_Nkr != NOTHING).flatten(1)
        self.there_US = torch.cat([self.there_US, there_NS])
        self._keep(self.state.field(THERE), there_NS)

    def encode(self, stream_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "N S D"] | None:
        """Returns the encoded neighbors, None if no chunk ends. They are of the first layer's stream for all layers."""
        if not self._has_encoded:
            asked_NmD = self._windows(ASKED, stream_BTD) if self.shared.part.conditioned else None
            if self.num_ends:
                self._encoded_NSD = self.shared.encoder(self.found_Nkr, self.vector_NkrD, asked_NmD)
            self._has_encoded = True
        return self._encoded_NSD

    def table(self, layer: int, new_N2GSd: Float[Tensor, "N 2 G S d"] | None) -> Float[Tensor, "U 2 G S d"]:
        """Returns keys and values of all slots, and leaves those of the latest chunks in the state."""
        kept_B2GSd = self.state.field(READ)[:, layer]
        if new_N2GSd is None:
            return kept_B2GSd.clone() if torch.is_grad_enabled() else kept_B2GSd
        table_U2GSd = torch.cat([kept_B2GSd.to(new_N2GSd.dtype), new_N2GSd])
        self._keep(kept_B2GSd, new_N2GSd)
        return table_U2GSd

    def _windows(self, name: str, new: Tensor) -> Tensor:
        """Returns the m tokens or states of each chunk that ends, and leaves the last m - 1 of each row in a field."""
        kept = self.state.field(name)
        both = torch.cat([kept.to(new.dtype), new], dim=1)
        place_Bm = self.next_B1 + torch.arange(kept.shape[1], device=new.device)
        kept.copy_(torch.stack([row[places] for row, places in zip(both.detach(), place_Bm, strict=True)]))
        place_Nm = self.time_N[:, None] + torch.arange(kept.shape[1] + 1, device=new.device)
        return both[self.row_N[:, None], place_Nm]

    def _keep(self, kept: Tensor, new: Tensor) -> None:
        rows, numbers = self.last
        kept[rows] = new[numbers].detach().to(kept.dtype)


def retrofit(decoder: Decoder, cross: Retro) -> Decoder:
    """Returns a trained decoder with a retrieval that is new, of which the encoder and the reading layers alone learn
    (RETROfit, arXiv 2112.04426, section 4.2). Seed torch before.

    Its results are those of the given decoder, to the bit, until it learns. The two share no numbers.
    """
    from memlm.model.decoder import Decoder as Fitted

    fitted = Fitted(replace(decoder.config, cross=cross)).to(decoder.device, decoder.dtype)
    fitted.load_state_dict(decoder.weights(), strict=False)
    for name, parameter in fitted.named_parameters():
        parameter.requires_grad_("cross." in name)
    return fitted


class NeighborAttention(nn.Module):
    """Attention of tokens to the neighbors of the chunk before them. Its last projection starts at zero, so that a
    trained model starts unchanged.
    """

    def __init__(self, config: ModelConfig, part: Retro, number: int) -> None:
        super().__init__()
        self.part, self.number, self.head_dim = part, number, config.head_dim
        self.norm = make_norm(config)
        self.query = Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.key_value = Linear(config.dim, 2 * config.num_kv_heads * config.head_dim, bias=False)
        self.out = Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.angles: Angles = angles_of(config.head_dim)

    def initialize(self) -> None:
        """Starts without any change of the stream."""
        nn.init.zeros_(self.out.weight)

    def forward(self, stream_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """Returns the change of each token by its neighbors, 0 for tokens that have none."""
        step: ChunkStep = context.cross
        table_U2GSd = step.table(self.number, self._keys_and_values(stream_BTD, step))
        if not len(step.slot_Q):
            return torch.zeros_like(stream_BTD)
        query_QHd = self.query(self.norm(stream_BTD))[step.reads_BT].unflatten(1, (-1, self.head_dim))
        place_Q1 = self.part.chunk - 1 + step.age_Q[:, None]
        # A second axis: one as long as the span would stand for all of it in order.
        query_QHd = apply_rope(query_QHd, self.angles.at(place_Q1, (0, 2 * self.part.chunk)))
        mixed_QHd = self._attend(query_QHd, table_U2GSd.to(query_QHd.dtype), step)
        mixed_BTD = stream_BTD.new_zeros(*stream_BTD.shape[:2], mixed_QHd[0].numel(), dtype=mixed_QHd.dtype)
        return self.out(mixed_BTD.index_put((step.reads_BT.nonzero(as_tuple=True)), mixed_QHd.flatten(1)))

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes the neighbors to the state for tokens that skip the layer."""
        context.cross.table(self.number, self._keys_and_values(hidden_BTD, context.cross))

    def _keys_and_values(self, stream_BTD: Tensor, step: ChunkStep) -> Float[Tensor, "N 2 G S d"] | None:
        """Keys and values of the new neighbors, None if no chunk ends."""
        encoded_NSD = step.encode(stream_BTD)
        if encoded_NSD is None:
            return None
        made_NS2Gd = self.key_value(encoded_NSD).unflatten(2, (2, -1, self.head_dim))
        key_NGSd, value_NGSd = made_NS2Gd.permute(2, 0, 3, 1, 4)
        r, k = self.part.length, self.part.neighbors
        cos_sin = self.angles.at(torch.arange(r, device=key_NGSd.device), (0, r)).repeat(1, k, 1)
        return torch.stack([apply_rope(key_NGSd, cos_sin), value_NGSd], dim=1)

    def _attend(
        self, query_QHd: Tensor, table_U2GSd: Float[Tensor, "U 2 G S d"], step: ChunkStep
    ) -> Float[Tensor, "Q H d"]:
        """Attends slot by slot: the tokens that read the same neighbors stand side by side."""
        U, width = len(table_U2GSd), step.width
        query_UWHd = query_QHd.new_zeros(U, width, *query_QHd.shape[1:])
        query_UWHd = query_UWHd.index_put((step.slot_Q, step.place_Q), query_QHd)
        any_U1: Bool[Tensor, "U 1"] = step.there_US.any(dim=1, keepdim=True)
        visible_U11S = (step.there_US | ~any_U1)[:, None, None]  # no row of weights may be empty. Missing values are 0
        key_UGSd, value_UGSd = table_U2GSd.unbind(1)
        mixed_UHWd = F.scaled_dot_product_attention(
            query_UWHd.transpose(1, 2), key_UGSd, value_UGSd, attn_mask=visible_U11S,
            enable_gqa=query_UWHd.shape[2] != key_UGSd.shape[1],
        )  # fmt: skip
        return mixed_UHWd[step.slot_Q, :, step.place_Q]
