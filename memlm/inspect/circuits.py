"""Circuits in the weights of a head: the tokens that it copies (OV) and matches (QK), and the heads that it reads.

"A Mathematical Framework for Transformer Circuits" (transformer-circuits.pub/2021/framework) defines all three. The
gains of norms are folded into the projections. Their division is left out, because it scales a whole vector, and so are
biases. Both tables of tokens are centered: a sum that all tokens share changes no probability and distinguishes none.

Shapes: V vocabulary, D width, L layers, H heads, G key-value heads, d width of a head, N heads of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.inspect.heads import HeadId
from memlm.model.attention.attention import Attention
from memlm.model.attention.mask import AttentionMask
from memlm.model.decoder import Decoder
from memlm.model.forward import ForwardContext
from memlm.model.norms import OffsetRMSNorm
from memlm.model.positions import apply_rope

DISTANCES = (1, 8, 64)  # between query and key, at which rotary heads are compared
KINDS = ("K", "Q", "V")
DRAWS = 100
SAMPLED, COMPARED = 8192, 256  # tokens of the vocabulary, and among them those whose logits are compared
TOP_SHARE = 0.02  # of the compared tokens: the five raised most of 256
ROWS_AT_ONCE = 2048


class HeadWeights(NamedTuple):
    """The projections of a layer, one for each query head, with the gains of norms: queries, keys and values of the
    residual stream, and back.
    """

    query_HdD: Float[Tensor, "H d D"]
    key_HdD: Float[Tensor, "H d D"]
    value_HdD: Float[Tensor, "H d D"]
    out_HDd: Float[Tensor, "H D d"]


@dataclass(frozen=True, slots=True)
class Composition:
    """How much of a head's input is written by an earlier one: |A B| / (|A| |B|), in Frobenius norms.

    In kind `K`, A is the later head's QK circuit and the earlier one writes to its keys, in `Q` to its queries. In `V`,
    A is its OV circuit. B is the earlier head's OV circuit. A rotary QK circuit is that of distance 0.
    """

    kind: str
    source: HeadId
    target: HeadId
    score: float


def gain_of(norm: nn.Module, like: Tensor) -> Float[Tensor, " D"]:
    """The factor on each number behind a norm."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
    return weight.detach().to(like) + (1 if isinstance(norm, OffsetRMSNorm) else 0)


def has_head_weights(decoder: Decoder, layer: int) -> bool:
    """Whether a layer has the projections of attention heads. Other mixers have no such circuits."""
    config, attention = decoder.config, decoder.blocks[layer].attention
    if not isinstance(attention, Attention):
        return False
    H, G, d = config.num_heads, config.num_kv_heads, config.head_dim
    return attention.qkv.out_features == (H + 2 * G) * d and attention.out.in_features == H * d


def head_weights(decoder: Decoder, layer: int) -> HeadWeights:
    """Returns the projections of a layer, in float32 or wider."""
    config, block = decoder.config, decoder.blocks[layer]
    attention, H, G, d = block.attention, config.num_heads, config.num_kv_heads, config.head_dim
    qkv_CD, out_DC = wide(attention.qkv.dense()), wide(attention.out.dense())
    if block.has_input_norm:
        qkv_CD = qkv_CD * gain_of(block.attention_norm, qkv_CD)
        if isinstance(block.attention_norm, nn.LayerNorm):  # it subtracts the mean
            qkv_CD = qkv_CD - qkv_CD.mean(dim=1, keepdim=True)
    if config.norm_order in ("output", "sandwich"):
        norm = block.attention_norm if config.norm_order == "output" else block.attention_out_norm
        out_DC = out_DC * gain_of(norm, out_DC.T)[:, None]
    query_HdD, key_GdD, value_GdD = qkv_CD.unflatten(0, (-1, d)).split([H, G, G])
    if attention.query_norm is not None and attention.key_norm is not None:
        query_HdD, key_GdD = _normed(query_HdD, attention.query_norm), _normed(key_GdD, attention.key_norm)
    key_HdD, value_HdD = (part.repeat_interleave(H // G, dim=0) for part in (key_GdD, value_GdD))
    return HeadWeights(query_HdD, key_HdD, value_HdD, out_DC.unflatten(1, (H, d)).transpose(0, 1))


def _normed(heads_HdD: Float[Tensor, "H d D"], norm: nn.Module) -> Float[Tensor, "H d D"]:
    """Folds the gains of a norm over a head, or over all heads together."""
    gain = gain_of(norm, heads_HdD.flatten(0, 1).T)
    return heads_HdD * gain.view(-1, heads_HdD.shape[1], 1)


def wide(weight: Tensor) -> Tensor:
    """Returns a weight in float32, or in float64 if it is, on the processor."""
    return weight.detach().cpu().to(torch.promote_types(weight.dtype, torch.float32))


class TokenTables:
    """Tokens as heads read them, and as logits are read off, for the vocabulary or a sample of 8,192 tokens.

    Layers behind the first read embeddings with the first feed-forward, which gives tokens the form that later layers
    know ("effective embedding", arXiv 2310.04625). Rows of both tables are centered.
    """

    def __init__(self, decoder: Decoder, ids: Sequence[int], *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids_N = torch.tensor(ids)[torch.randperm(len(ids), generator=generator)[:SAMPLED]]
        output_ND = wide(decoder.output_embedding_VD[self.ids_N.to(decoder.device)])
        output_ND = output_ND * gain_of(decoder.norm, output_ND)
        if isinstance(decoder.norm, nn.LayerNorm):
            output_ND = output_ND - output_ND.mean(dim=1, keepdim=True)
        self.output_ND = output_ND - output_ND.mean(dim=0)
        with torch.inference_mode():
            embedded_ND = decoder.embedding(self.ids_N.to(decoder.device)) * decoder.config.embedding_scale
            block = decoder.blocks[0]
            after = [
                block.finish(
                    rows_nD[None],
                    (block.ff_norm(rows_nD) if block.has_input_norm else rows_nD)[None],
                    _context_of(decoder, ids_n),
                )[0]
                for ids_n, rows_nD in zip(
                    self.ids_N.to(decoder.device).split(ROWS_AT_ONCE), embedded_ND.split(ROWS_AT_ONCE), strict=True
                )
            ]
        self._inputs = [_centered(wide(embedded_ND)), _centered(wide(torch.cat(after)))]
        self._in_out = [(input_ND.T @ self.output_ND).double() for input_ND in self._inputs]
        self._in_in = [(input_ND.T @ input_ND).double() for input_ND in self._inputs]

    def input_ND(self, layer: int) -> Float[Tensor, "N D"]:
        """Returns the tokens as a layer reads them."""
        return self._inputs[min(layer, 1)]

    def in_out_DD(self, layer: int) -> Float[Tensor, "D D"]:
        """Returns the product of the layer's inputs and the outputs, summed over tokens."""
        return self._in_out[min(layer, 1)]

    def in_in_DD(self, layer: int) -> Float[Tensor, "D D"]:
        """Returns the product of the layer's inputs with themselves, summed over tokens."""
        return self._in_in[min(layer, 1)]


def _context_of(decoder: Decoder, ids_n: Int[Tensor, " n"]) -> ForwardContext:
    """A step of these tokens, by which hash experts choose."""
    places = torch.arange(len(ids_n), device=ids_n.device)[None]
    span, zero = (0, len(ids_n)), torch.zeros(1, dtype=torch.int64, device=ids_n.device)
    mask = AttentionMask(
        query_RT=places, key_RS=places, query_span=span, key_span=span, document_RT=torch.zeros_like(places),
        floor_R=zero, num_front=0, sink_cap=0, causal_only=True,
    )  # fmt: skip
    return ForwardContext(mask, [len(ids_n)], decoder.dtype, tokens_BT=ids_n[None])


def _centered(rows_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    return rows_ND - rows_ND.mean(dim=0)


def positive_share(matrices_HXX: Float[Tensor, "H X X"]) -> Float[Tensor, " H"]:
    """Returns sum λ / sum |λ| over the eigenvalues of each matrix: 1 if all are positive, -1 if all are negative.

    NaN for a matrix of zeros.
    """
    values_HX = torch.linalg.eigvals(matrices_HXX.double())
    return values_HX.real.sum(dim=1) / values_HX.abs().sum(dim=1)


def copying_scores(decoder: Decoder, tables: TokenTables) -> Float[Tensor, "L H"]:
    """The copying score of each head: 1 if attention to a token raises the logit of this token, -1 if it lowers it.
    NaN in layers without head weights, as the other two scores.

    It is the share of positive eigenvalues of the V x V map U W_O W_V E'. They are those of the d x d matrix
    W_V E'U W_O, since the eigenvalues of A B and B A are equal but for zeros. E has the tokens as the layer reads them.
    """
    scores = []
    for layer in range(decoder.config.num_layers):
        if not has_head_weights(decoder, layer):
            scores.append(_no_score(decoder))
            continue
        weights = head_weights(decoder, layer)
        scores.append(positive_share(weights.value_HdD.double() @ tables.in_out_DD(layer) @ weights.out_HDd.double()))
    return torch.stack(scores)


def copied_scores(decoder: Decoder, tables: TokenTables) -> Float[Tensor, "L H"]:
    """The share of tokens whose own logit is among the 2 % that the head's OV circuit raises most, less the share of
    those whose own is among the 2 % that it lowers most.

    256 tokens are compared with each other, so that a head without meaning has 0.02 - 0.02 = 0. It is the copy score
    of arXiv 2211.00593, and shows whether the positive eigenvalues of a copying score belong to the tokens themselves.
    """
    scores, output_nD = [], tables.output_ND[:COMPARED]
    top = max(1, round(TOP_SHARE * len(output_nD)))
    for layer in range(decoder.config.num_layers):
        if not has_head_weights(decoder, layer):
            scores.append(_no_score(decoder))
            continue
        weights, input_nD = head_weights(decoder, layer), tables.input_ND(layer)[:COMPARED]
        written_HnD = (input_nD @ weights.value_HdD.mT) @ weights.out_HDd.mT
        logits_Hnn = written_HnD @ output_nD.T
        own_Hn1 = logits_Hnn.diagonal(dim1=1, dim2=2)[..., None]
        raised_H, lowered_H = (
            ((beyond_Hnn.sum(dim=2) < top) & own_Hn1[..., 0].ne(0)).double().mean(dim=1)
            for beyond_Hnn in (logits_Hnn > own_Hn1, logits_Hnn < own_Hn1)
        )
        scores.append(raised_H - lowered_H)
    return torch.stack(scores)


def matching_scores(decoder: Decoder, tables: TokenTables) -> Float[Tensor, "L H"]:
    """The matching score of each head: 1 if a token looks at equal tokens, -1 if it avoids them.

    It is the share of positive eigenvalues of the V x V map E W_Q' R W_K E', and their mean over some distances for a
    layer whose queries are turned by R.
    """
    scores = []
    for layer in range(decoder.config.num_layers):
        if not has_head_weights(decoder, layer):
            scores.append(_no_score(decoder))
            continue
        weights = head_weights(decoder, layer)
        keys_HdD = weights.key_HdD.double() @ tables.in_in_DD(layer)
        turned = _turned_queries(decoder, layer, weights.query_HdD.double())
        scores.append(torch.stack([positive_share(keys_HdD @ query_HdD.mT) for query_HdD in turned]).mean(dim=0))
    return torch.stack(scores)


def _no_score(decoder: Decoder) -> Float[Tensor, " H"]:
    """The scores of a layer without head weights."""
    return torch.full((decoder.config.num_heads,), math.nan, dtype=torch.float64)


def _turned_queries(decoder: Decoder, layer: int, query_HdD: Tensor) -> list[Float[Tensor, "H d D"]]:
    """The query projection, turned by each of the distances."""
    angles = None if decoder.rotary is None else decoder.rotary.of_layer(layer)
    if angles is None:
        return [query_HdD]
    turns = [angles.at(torch.tensor([distance]), (distance, distance + 1)).cpu() for distance in DISTANCES]
    return [apply_rope(query_HdD.mT, cos_sin).mT for cos_sin in turns]


def compositions(decoder: Decoder, targets: Sequence[HeadId]) -> list[Composition]:
    """How much each target reads of each head of earlier layers, in all three kinds. Layers without head weights are
    left out.

    Takes 6 D d^2 operations for each pair.
    """
    last = max((at for at, _ in targets), default=0)
    sources = [layer for layer in range(last) if has_head_weights(decoder, layer)]
    by_layer = [_written(head_weights(decoder, layer)) for layer in sources]
    found = list[Composition]()
    for layer, head in sorted(targets):
        num_earlier = sum(source < layer for source in sources)
        if not num_earlier or not has_head_weights(decoder, layer):
            continue
        weights = head_weights(decoder, layer)
        query_dD, key_dD = weights.query_HdD[head], weights.key_HdD[head]
        value_dD, out_Dd = weights.value_HdD[head], weights.out_HDd[head]
        written_NDd = torch.cat(by_layer[:num_earlier])
        H = decoder.config.num_heads
        for kind, left_Dd, right_dD in (
            ("K", query_dD.T, key_dD), ("Q", key_dD.T, query_dD), ("V", out_Dd, value_dD),
        ):  # fmt: skip
            scores_N = _composed(left_Dd, right_dD, written_NDd).tolist()
            found += [
                Composition(kind, (sources[n // H], n % H), (layer, head), score) for n, score in enumerate(scores_N)
            ]
    return found


def _written(weights: HeadWeights) -> Float[Tensor, "H D d"]:
    """Matrices with the Frobenius norms of each head's OV circuit, also as right factors of a product."""
    lower_Hdd = torch.linalg.qr(weights.value_HdD.mT).R.mT
    return weights.out_HDd @ lower_Hdd


def _composed(left_Dd: Tensor, right_dD: Tensor, written_NDd: Tensor) -> Float[Tensor, " N"]:
    """Returns |L R W| / (|L R| |W|) for each W."""
    reading_dD = torch.linalg.qr(left_Dd).R @ right_dD
    norms_N = torch.linalg.matrix_norm(reading_dD @ written_NDd)
    scale_N = torch.linalg.matrix_norm(reading_dD) * torch.linalg.matrix_norm(written_NDd)
    return (norms_N / scale_N.clamp(min=1e-30)).double()


def random_composition(dim: int, head_dim: int, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """The mean and the 95th percentile of the composition of random heads of this shape."""
    generator = torch.Generator().manual_seed(seed)
    scores = []
    for _ in range(draws):
        query_Dd, key_Dd, out_Dd, value_Dd = torch.randn(4, dim, head_dim, generator=generator) / math.sqrt(dim)
        written_Dd = out_Dd @ torch.linalg.qr(value_Dd).R.mT
        scores.append(float(_composed(query_Dd, key_Dd.T, written_Dd[None])))
    ordered = torch.tensor(scores).double()
    return float(ordered.mean()), float(ordered.quantile(0.95))
