"""Recurrent Memory Transformer: vectors that a segment hands to the next one (arXiv 2207.06881).

A segment is read as [M; x; M], causally. The tokens x read the memory M in front of them, and the copy behind them
reads all. The final hidden states of that copy are the memory in front of the next segment. A document starts from a
learned memory. Here, a document that begins within a segment reads no memory until the next segment, but writes it.

While learning, gradients reach the memory through the segments of one pass, and not through earlier passes.

Shapes: B batch, M memory vectors, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.mask import AttentionMask
from memlm.model.config import ABSOLUTE, ModelConfig
from memlm.model.experts import HashExperts
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part
from memlm.model.state.decoder_state import DecoderState
from memlm.model.state.fields import Field

if TYPE_CHECKING:
    from memlm.model.decoder import Decoder

MEMORY, WRITTEN = "model.memory", "model.written"


@dataclass(frozen=True, slots=True)
class RecurrentMemory(Part):
    """A border with `memories` vectors. A training step reads `unroll` segments, through which gradients go.

    With an `xl_length`, tokens also read those of earlier segments, as in the paper's combination with Transformer-XL.
    """

    seam: ClassVar[str] = "border"
    kind: ClassVar[str] = "recurrent_memory"

    memories: int = 8
    unroll: int = 2

    def __post_init__(self) -> None:
        check_range("memories", self.memories, least=1, whole=True)
        check_range("unroll", self.unroll, least=1, whole=True)

    @property
    def num_front(self) -> int:
        """The memory that a segment reads."""
        return self.memories

    @property
    def num_behind(self) -> int:
        """The copy that reads the segment."""
        return self.memories

    @property
    def segments_at_once(self) -> int:
        """The segments that a training step reads."""
        return self.unroll

    def model_fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The memory, and the position at which it was written, 0 where a document has written none."""
        return (
            Field("memory", (self.memories, config.dim), of_segments=True),
            Field("written", (1,), torch.int64, of_segments=True),
        )

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> RecurrentMemoryBorder:
        """Returns the border with its learned first memory."""
        return RecurrentMemoryBorder(config, self.memories)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput for layers and positions that vectors of no token cannot go through."""
        if config.positions in ABSOLUTE:
            raise InvalidInput(
                f"recurrent_memory reads vectors that have no {config.positions} positions; choose others",
                field="positions",
            )
        if config.memorizing:
            raise InvalidInput("recurrent_memory ends segments without a kNN memory; leave one out", field="memorizing")
        for layer in config.layers:
            mixer, channel = layer.mixer, layer.channel
            if mixer is not None and (not mixer.caches or any(field.changes for field in mixer.fields(config))):
                raise InvalidInput(
                    f"recurrent_memory reads its vectors twice, which the sums of {mixer.kind} would count; choose"
                    " mixers that keep tokens",
                    field="border",
                )
            if isinstance(channel, HashExperts):
                raise InvalidInput(
                    "recurrent_memory reads vectors that are no tokens, by which hash chooses experts", field="border"
                )


class RecurrentMemoryBorder(nn.Module):
    """Reads the memory in front of each segment, and writes it at its end."""

    def __init__(self, config: ModelConfig, num_memories: int) -> None:
        super().__init__()
        self.config, self.num_memories = config, num_memories
        self.first_MD = nn.Parameter(torch.zeros(num_memories, config.dim))

    def begin(self, decoder: Decoder, state: DecoderState) -> None:
        """Reads the memory into the front of the rows that stand at the begin of a segment."""
        if torch.is_grad_enabled() and state.live is None:
            state.live = {}
        begins_B = [row.length % self.config.context_length == 0 for row in state.rows]
        if not any(begins_B):
            return
        M, rows = self.num_memories, state.rows
        floor_B1 = torch.tensor([[row.floor] for row in rows], device=state.device)
        position_BM = floor_B1 - M + torch.arange(M, device=state.device)
        span = int(floor_B1.min()) - M, int(floor_B1.max())
        first_BM, first_B = position_BM[:, :1].expand(-1, M), position_BM[:, 0]
        mask = AttentionMask(position_BM, position_BM, span, span, first_BM, first_B)
        state.rows = [replace(row, length=row.base - M) for row in rows]  # the next place is the first in front
        try:
            self._read(decoder, state, mask, begins_B, finishes=False)
        finally:
            state.rows = rows

    def end(self, decoder: Decoder, state: DecoderState) -> None:
        """Writes the memory of the rows that have just filled a segment."""
        rows, ends_B = state.rows, [row.length % self.config.context_length == 0 for row in state.rows]
        if not any(ends_B):
            return
        written_B = state.field(WRITTEN)[:, 0].tolist()
        is_new_B = [row.start < row.length != written for row, written in zip(rows, written_B, strict=True)]
        if any(writes_B := [ends and is_new for ends, is_new in zip(ends_B, is_new_B, strict=True)]):
            self._write(decoder, state, writes_B)
        for row, ends in zip(rows, ends_B, strict=True):
            if ends:
                row.floor = max(row.floor, row.length - self.config.xl_length)
        state.compact()

    def _write(self, decoder: Decoder, state: DecoderState, writes_B: Sequence[bool]) -> None:
        new_B = [self.num_memories * writes for writes in writes_B]
        mask = state.attention_mask(new_B, self.num_memories, None)
        assert mask.segment_R is not None
        # The copy behind a segment belongs to it. For the state, the next one has begun.
        mask = replace(mask, segment_R=mask.segment_R - self.config.context_length)
        read_BMD = self._read(decoder, state, mask, writes_B, finishes=True)
        writes_B11 = torch.tensor(writes_B, device=state.device)[:, None, None]
        memory_BMD = torch.where(writes_B11, read_BMD.to(state.dtype), self._kept(state))
        if state.live is not None:
            state.live = {MEMORY: memory_BMD}
        state.field(MEMORY).copy_(memory_BMD.detach())
        length_B1 = torch.tensor([[row.length] for row in state.rows], device=state.device)
        written_B1 = state.field(WRITTEN)
        written_B1.copy_(torch.where(writes_B11[:, 0], length_B1, written_B1))

    def _read(
        self, decoder: Decoder, state: DecoderState, mask: AttentionMask, reads_B: Sequence[bool], *, finishes: bool
    ) -> Float[Tensor, "B M D"]:
        """Reads the memory of some rows where the mask says, and returns the final hidden states with `finishes`."""
        new_B = [self.num_memories * reads for reads in reads_B]
        context = ForwardContext(mask, new_B, decoder.dtype, state, decoder.rotary, decoder.relative_bias)
        return decoder.through_blocks(self._memory(state).to(decoder.dtype), context, finishes=finishes)[0]

    def _memory(self, state: DecoderState) -> Float[Tensor, "B M D"]:
        """The memory of each row: the learned one until its document has filled a segment."""
        kept_BMD = self._kept(state)
        return torch.where(state.field(WRITTEN)[:, :, None] > 0, kept_BMD, self.first_MD.to(kept_BMD.dtype))

    def _kept(self, state: DecoderState) -> Float[Tensor, "B M D"]:
        """The memory that was written last, with its gradients if that was in this pass."""
        live = None if state.live is None else state.live.get(MEMORY)
        return state.field(MEMORY).clone() if live is None else live
