"""The end of a segment: memories take over the tokens that local attention will not see again.

The oldest local tokens of a row, all but the latest `xl_length`, go into the kNN caches of the memorizing layers, and
are compressed into the compressive memory of each layer, or taken by a mixer that has an `end_segment`. No token is in
two places at once. Rows that hand over equally many tokens are processed together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memlm.model.attention.attention import Attention
from memlm.model.attention.compression import group_size
from memlm.model.attention.knn_attention import unit
from memlm.model.layers import Block
from memlm.model.positions import Rotary, apply_rope
from memlm.model.state.decoder_state import DecoderState


def update_memories_at_boundary(blocks: Sequence[Block], rotary: Rotary | None, state: DecoderState) -> None:
    """Updates the memories of every row that has just filled a segment."""
    config = state.config
    group = group_size(config.compression)
    leaving: dict[int, list[int]] = defaultdict(list)
    at_boundary = [row for row in range(state.batch_size) if state.rows[row].length % config.context_length == 0]
    for row in at_boundary:
        over = state.rows[row].length - config.xl_length - state.rows[row].floor
        if over >= group:
            leaving[over // group * group].append(row)
    if not at_boundary:
        return
    for count, rows in leaving.items():
        for layer, block in enumerate(blocks):
            if layer in state.knn_caches:
                _memorize(block, rotary, state, layer, rows, count)
            if block.compressor is not None:
                _compress(block, state, layer, rows, count)
            if (end_segment := getattr(block.attention, "end_segment", None)) is not None:
                for row in rows:
                    end_segment(state, layer, row, _begin(state, row), count)
        for row in rows:
            marks = state.rows[row]
            marks.floor += count
            if config.compression:
                marks.compressed = min(config.compression.length, marks.compressed + count // config.compression.rate)
    state.compact()
    if config.compression:
        _project_compressed(blocks, rotary, state)


def _begin(state: DecoderState, row: int) -> int:
    """The place of a row's oldest local token."""
    return state.num_front + state.rows[row].floor - state.rows[row].base


def _memorize(
    block: Block, rotary: Rotary | None, state: DecoderState, layer: int, rows: list[int], count: int
) -> None:
    """Moves pairs into the kNN caches. Their keys lose their rotation, because kNN attention has no positions."""
    for row in rows:
        begin = _begin(state, row)
        keys_GNd, values_GNd = state.cache_L2BGSd[state.cache_places[layer], :, row, :, begin : begin + count]
        if rotary is not None and (angles := rotary.of_layer(layer)) is not None:
            floor = state.rows[row].floor
            positions = torch.arange(floor, floor + count, device=keys_GNd.device)
            keys_GNd = apply_rope(keys_GNd, angles.at(positions, (floor, floor + count)), inverse=True)
        if block.attention.knn is not None and not block.attention.knn.normalizes_all:
            keys_GNd = unit(keys_GNd)
        state.knn_caches[layer][row].add(keys_GNd, values_GNd)


def _compress(block: Block, state: DecoderState, layer: int, rows: list[int], count: int) -> None:
    """Compresses the inputs of the oldest tokens. In training, adds up the compression loss."""
    compressor, compression, inputs_LBSD = block.compressor, state.config.compression, state.inputs_LBSD
    assert compressor is not None
    assert compression is not None
    assert inputs_LBSD is not None
    places = [(row, _begin(state, row)) for row in rows]
    old_BND = torch.stack([inputs_LBSD[layer, row, begin : begin + count] for row, begin in places])
    usage_BN = None
    if state.usage_LBS is not None:
        usage_BN = torch.stack([state.usage_LBS[layer, row, begin : begin + count] for row, begin in places])
    compressed_BCD = compressor(old_BND, usage_BN)
    if compressor.learns and compressed_BCD.requires_grad:  # not where only an adapter learns
        loss = _loss(block, state, layer, rows, old_BND, compressed_BCD) * len(rows) / state.batch_size
        state.compression_loss = loss if state.compression_loss is None else state.compression_loss + loss
    for row, new_CD in zip(rows, compressed_BCD.detach(), strict=True):
        front_FD = inputs_LBSD[layer, row, : state.num_front]
        front_FD.copy_(torch.cat([front_FD, new_CD.to(front_FD.dtype)])[-state.num_front :].clone())


def _loss(
    block: Block, state: DecoderState, layer: int, rows: list[int], old_BND: Tensor, compressed_BCD: Tensor
) -> Tensor:
    assert block.compressor is not None
    assert state.config.compression is not None
    assert state.inputs_LBSD is not None
    if state.config.compression.loss == "autoencoding":
        return block.compressor.autoencoding_loss(old_BND, compressed_BCD)
    T = state.config.context_length
    ends = state.places_B()
    latest = [state.inputs_LBSD[layer, row, ends[row] - T : ends[row]] for row in rows]
    return reconstruction_loss(block.attention, torch.stack(latest), old_BND, compressed_BCD)


def reconstruction_loss(attention: Attention, query_BTD: Tensor, old_BND: Tensor, compressed_BCD: Tensor) -> Tensor:
    """Returns the mean square difference of attention over old states and over compressed ones.

    It has no positions, and gradients for the compression alone (arXiv 1911.05507, algorithm 2).
    """
    learning = [parameter for parameter in attention.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        query_BHTd = attention.project(query_BTD.detach()).query_BHTd
        read = []
        for states_BND in (old_BND.detach(), compressed_BCD):
            heads = attention.project(states_BND)
            is_grouped = query_BHTd.shape[1] != heads.key_BGTd.shape[1]
            read.append(
                F.scaled_dot_product_attention(query_BHTd, heads.key_BGTd, heads.value_BGTd, enable_gqa=is_grouped)
            )
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
    return F.mse_loss(read[1], read[0])


def _project_compressed(blocks: Sequence[Block], rotary: Rotary | None, state: DecoderState) -> None:
    """Computes keys and values of all compressed memories at their new positions."""
    assert state.inputs_LBSD is not None
    front, floors = state.num_front, [row.floor for row in state.rows]
    span = min(floors) - front, max(floors)
    with torch.no_grad():
        for layer, block in enumerate(blocks):
            heads = block.attention.project(state.inputs_LBSD[layer, :, :front])
            key_BGFd = heads.key_BGTd
            if rotary is not None and (angles := rotary.of_layer(layer)) is not None:
                floor_B1 = torch.tensor(floors, device=key_BGFd.device)[:, None]
                positions_BF = floor_B1 - front + torch.arange(front, device=key_BGFd.device)
                key_BGFd = apply_rope(key_BGFd, angles.at(positions_BF, span)[:, :, None])
            state.cache_L2BGSd[state.cache_places[layer], 0, :, :, :front] = key_BGFd
            state.cache_L2BGSd[state.cache_places[layer], 1, :, :, :front] = heads.value_BGTd
