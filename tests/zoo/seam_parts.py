"""The least part for each seam and each kind of field, to test the seams by themselves. They mean nothing.

`decay` remembers a sum of a token's inputs. `fatigue` adds to fields of earlier places. `gate` joins, `repeated` reads
each block again, and `carry` fills a place in front of each segment. `told` is RETRO, with neighbors that follow from
the tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from memlm.model.attention.attention import Attention
from memlm.model.kernels.linear import Linear
from memlm.model.parts import KNOWN, Part
from memlm.model.state.fields import PLACES, Field
from memlm.zoo.retro.cross import Retro
from memlm.zoo.retro.encoder import NOTHING


@dataclass(frozen=True, slots=True)
class Decay(Part):
    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "decay"
    caches: ClassVar[bool] = False
    has_scores: ClassVar[bool] = False

    rate: float = 0.7

    def fields(self, config):
        return (Field("sum", (config.dim,), wide=True),)

    def build(self, config, layer, sublayer=""):
        return DecayMixer(config.dim, layer, self.rate)


class DecayMixer(nn.Module):
    def __init__(self, dim: int, layer: int, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = layer, rate
        self.inner, self.out = Linear(dim, dim, bias=False), Linear(dim, dim, bias=False)

    def forward(self, hidden_BTD, context):
        new_BTD, sum_BD, read = self.inner(hidden_BTD), context.field(self.layer, "sum").clone(), []
        for t in range(hidden_BTD.shape[1]):
            sum_BD = torch.where(context.begins_BT[:, t, None], 0, sum_BD)
            later_BD = self.rate * sum_BD + new_BTD[:, t]
            sum_BD = torch.where(context.is_real_BT[:, t, None], later_BD, sum_BD)
            read.append(sum_BD.to(hidden_BTD.dtype))
        context.field(self.layer, "sum").copy_(sum_BD.detach())
        return self.out(torch.stack(read, dim=1))

    def keep(self, hidden_BTD, context):
        self(hidden_BTD, context)


@dataclass(frozen=True, slots=True)
class Fatigue(Part):
    """Scores fall by what later tokens before the query added to a place."""

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "fatigue"

    def fields(self, config):
        return (Field("mark", (1, PLACES)), Field("tired", (PLACES,), wide=True, adds=True))

    def build(self, config, layer, sublayer=""):
        return FatigueAttention(config, layer)


class FatigueAttention(Attention):
    is_explicit = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.marks = Linear(config.dim, 2, bias=False)

    def forward(self, hidden_BTD, context):
        self._tire(hidden_BTD, context)
        return super().forward(hidden_BTD, context)

    def _tire(self, hidden_BTD, context):
        marks_BT2, state = self.marks(hidden_BTD), context.state
        B, T, _ = marks_BT2.shape
        mark_BS = context.write_field(self.layer, "mark", marks_BT2[:, None, :, 0])[:, 0]
        S, field_BS = mark_BS.shape[1], context.field(self.layer, "tired")
        ends = state.places_B()
        tired_BS, self.tired = field_BS[:, :S].clone(), []
        for row, end in enumerate(ends):
            tired_BS[row, end:] = 0
        place_S = torch.arange(S)
        query_BT = context.mask.query_RT.expand(B, -1)
        start_BT = context.mask.document_RT.expand(B, -1)
        for t in range(T):
            self.tired.append(tired_BS)
            before_BS = place_S < (torch.tensor(ends) + t)[:, None]  # places before this token's
            mine_BS = context.mask.key_RS.expand(B, -1) >= start_BT[:, t, None]
            counts_BS = before_BS & mine_BS & context.is_real_BT[:, t, None]
            tired_BS = tired_BS + counts_BS * torch.relu(marks_BT2[:, t, 1, None] * mark_BS)
        field_BS[:, :S] = tired_BS.detach()
        assert query_BT.shape == (B, T)

    def scores(self, query_BHTd, heads, key_BHSd, context):
        return super().scores(query_BHTd, heads, key_BHSd, context) - torch.stack(self.tired, dim=1)[:, None]

    def keep(self, hidden_BTD, context):
        self._tire(hidden_BTD, context)
        super().keep(hidden_BTD, context)


@dataclass(frozen=True, slots=True)
class Gate(Part):
    seam: ClassVar[str] = "join"
    kind: ClassVar[str] = "gate"

    def build(self, config, layer, sublayer=""):
        return None if sublayer == "ff" and layer == 0 else GatedSum(config.dim)


class GatedSum(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = Linear(dim, dim, bias=False)

    def initialize(self) -> None:
        nn.init.constant_(self.gate.weight, 0.25)

    def forward(self, stream_BTD: Tensor, change_BTD: Tensor) -> Tensor:
        return stream_BTD + torch.sigmoid(self.gate(stream_BTD)) * change_BTD


@dataclass(frozen=True, slots=True)
class Repeated(Part):
    seam: ClassVar[str] = "stack"
    kind: ClassVar[str] = "repeated"

    rounds: int = 2

    def num_blocks(self, config):
        return config.num_layers // self.rounds

    def build(self, config, layer, sublayer=""):
        return RepeatedStack(self.rounds)


class RepeatedStack(nn.Module):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def read(self, blocks, hidden_BTD, context, *, finishes):
        for number in range(self.rounds):
            context.layer_offset = number * len(blocks)
            for block in blocks:
                attended_BTD, key_BTD = block.attend(hidden_BTD, context)
                is_last = number == self.rounds - 1 and block is blocks[-1]
                hidden_BTD = attended_BTD
                if finishes or not is_last:
                    hidden_BTD = block.finish(attended_BTD, key_BTD, context)
        context.layer_offset = 0
        return hidden_BTD, key_BTD


@dataclass(frozen=True, slots=True)
class Carry(Part):
    """In front of each segment stands the mean of a segment's inputs, after the first a mean with the one before."""

    seam: ClassVar[str] = "border"
    kind: ClassVar[str] = "carry"
    keeps_inputs: ClassVar[bool] = True

    front: int = 1

    @property
    def num_front(self):
        return self.front

    def fields(self, config):
        return (Field("mean", (config.dim,), of_segments=True),)

    def build(self, config, layer, sublayer=""):
        return CarryBorder()


class CarryBorder(nn.Module):
    def begin(self, decoder, state):
        self._fill(decoder, state)

    def end(self, decoder, state):
        L = decoder.config.context_length
        for row, marks in enumerate(state.rows):
            if marks.length % L == 0 and marks.length > marks.base:
                begin = max(0, marks.start - marks.base)
                used = slice(state.num_front + begin, state.places_B()[row])
                for layer in range(decoder.config.num_layers):
                    mean_D = state.field(f"{layer}.mean")[row]
                    new_D = state.inputs_LBSD[layer, row, used].mean(dim=0)
                    mean_D.copy_(new_D if marks.start >= marks.base else (mean_D + new_D) / 2)
                marks.floor = marks.length
        state.compact()

    def _fill(self, decoder, state):
        with torch.no_grad():
            for layer, block in enumerate(decoder.blocks):
                heads = block.attention.project(state.field(f"{layer}.mean")[:, None])
                cache = state.cache_L2BGSd[state.cache_places[layer]]
                cache[0, :, :, : state.num_front] = heads.key_BGTd
                cache[1, :, :, : state.num_front] = heads.value_BGTd


@dataclass(frozen=True, slots=True)
class Told(Retro):
    kind: ClassVar[str] = "told"

    def build_shared(self, config):
        shared = Retro.build_shared(self, config)
        shared.neighbors = lambda chunk_Nm: torch.tensor(
            [padded(told(chunk, self.neighbors, self.length), self.length) for chunk in chunk_Nm.tolist()]
        )
        return shared


def told(chunk: list[int], count: int, most: int) -> list[list[int]]:
    """Neighbors of a chunk, of which some are short and some have no token."""
    seed = sum((place + 1) * token for place, token in enumerate(chunk))
    lengths = [(seed * (number + 3) + 5 * number + chunk[-1]) % (most + 1) for number in range(count)]
    return [
        [(seed + (number + 2) * place**2 + 11 * number) % 40 for place in range(n)] for number, n in enumerate(lengths)
    ]


def padded(found: list[list[int]], length: int) -> list[list[int]]:
    return [[*tokens, *[NOTHING] * (length - len(tokens))] for tokens in found]


for known in (Decay, Fatigue, Gate, Repeated, Carry, Told):
    KNOWN[known.seam][known.kind] = f"zoo.seam_parts:{known.__name__}"
