"""Scores of attention heads, from the weights behind their softmax.

Shapes: B rows, T tokens, P positions of a text, S places of a pass, E = S and the keys of a memory, L layers, H heads,
d width of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from memlm.inspect.texts import Needle, RepeatedText
from memlm.model.attention.mask import AttentionMask
from memlm.model.config import ModelConfig
from memlm.model.decoder import Decoder

HeadId: TypeAlias = tuple[int, int]  # layer and head, from 0


class PlaceScores:
    """A watch that adds up each head's attention to chosen places, which are the same in all rows.

    `sums` has L x H numbers for each name of `chosen`, and the mass on memories that are no token's place: `knn` and
    `compressed`. `maps_LHPP` has the attention of the first row among its first `mapped` tokens. `layers` are those
    that have attention weights.
    """

    def __init__(self, config: ModelConfig, chosen: Mapping[str, Float[Tensor, "P P"]], *, mapped: int = 0) -> None:
        size = config.num_layers, config.num_heads
        self.sums = {name: torch.zeros(size, dtype=torch.float64) for name in (*chosen, "knn", "compressed")}
        self.maps_LHPP = torch.zeros(*size, mapped, mapped)
        self._chosen, self._mapped = chosen, mapped
        self.layers = set[int]()
        self._compresses = config.compression is not None
        self._share_BHT1: Tensor | None = None

    def weights(self, layer: int, weights_BHTE: Float[Tensor, "B H T E"], mask: AttentionMask) -> None:
        """Keeps the weights until it is known whether a gate shares them."""
        self._piece = weights_BHTE.detach().float().cpu(), mask

    def gate(self, layer: int, share_BHT: Float[Tensor, "B H T"]) -> None:
        """Keeps the share of kNN attention."""
        self._share_BHT1 = share_BHT.detach().float().cpu()[..., None]

    def heads(self, layer: int, mixed_BHTd: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """Counts the layer's weights, and changes nothing."""
        self.layers.add(layer)
        (weights_BHTE, mask), share_BHT1 = self._piece, self._share_BHT1
        self._share_BHT1 = None
        if share_BHT1 is not None:
            weights_BHTE = weights_BHTE * (1 - share_BHT1)
            self._add_mass("knn", layer, share_BHT1)
        S = mask.num_places
        self._add_mass("knn", layer, weights_BHTE[..., S:])
        query_T, key_S = mask.query_RT[0].cpu(), mask.key_RS[0].cpu()
        is_front_S = torch.arange(S) < mask.num_front
        if self._compresses:
            self._add_mass("compressed", layer, weights_BHTE[..., :S][..., is_front_S])
        is_token_S = key_S <= query_T[-1]
        if self._compresses:
            is_token_S = is_token_S & ~is_front_S
        weights_BHTS, key_S = weights_BHTE[..., :S][..., is_token_S], key_S[is_token_S]
        for name, chosen_PP in self._chosen.items():
            mean_HTS = weights_BHTS.double().mean(dim=0)
            self.sums[name][layer] += (mean_HTS * chosen_PP[query_T][:, key_S]).sum(dim=(1, 2))
        self._map(layer, weights_BHTS[0], query_T.tolist(), key_S)
        return mixed_BHTd

    def _add_mass(self, name: str, layer: int, weights_BHTX: Tensor) -> None:
        """Adds the mass of some weights, summed over the tokens of the piece. `mean_mass` divides."""
        self.sums[name][layer] += weights_BHTX.double().mean(dim=0).sum(dim=(1, 2))

    def _map(self, layer: int, weights_HTS: Tensor, query_T: list[int], key_S: Tensor) -> None:
        near_S = key_S < self._mapped
        for row, position in enumerate(query_T):
            if position < self._mapped:
                self.maps_LHPP[layer, :, position, key_S[near_S]] = weights_HTS[:, row, near_S]


class Silence:
    """A watch that replaces the outputs of some heads by their means over rows and tokens of the pass.

    The mean removes the part that depends on the token and keeps the rest, so that later layers still get inputs of
    their usual size.
    """

    def __init__(self, heads: Collection[HeadId]) -> None:
        self._heads = frozenset(heads)

    def weights(self, layer: int, weights_BHTE: Float[Tensor, "B H T E"], mask: AttentionMask) -> None:
        """Ignores the weights."""

    def gate(self, layer: int, share_BHT: Float[Tensor, "B H T"]) -> None:
        """Ignores the gate."""

    def heads(self, layer: int, mixed_BHTd: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """Returns the outputs with the means."""
        silenced = [head for at, head in self._heads if at == layer]
        if not silenced:
            return mixed_BHTd
        mixed_BHTd = mixed_BHTd.clone()
        mixed_BHTd[:, silenced] = mixed_BHTd[:, silenced].mean(dim=(0, 2), keepdim=True)
        return mixed_BHTd


class _Peaks:
    """A watch that counts for each head whether its greatest weight from a position lies on another one."""

    def __init__(self, config: ModelConfig, needle: Needle) -> None:
        self._needle = needle
        self.hits_LHA = torch.zeros(config.num_layers, config.num_heads, len(needle.answers))

    def weights(self, layer: int, weights_BHTE: Float[Tensor, "B H T E"], mask: AttentionMask) -> None:
        """Compares the places of the greatest weights with those of the sentence."""
        query_T, key_S = mask.query_RT[0].tolist(), mask.key_RS[0].tolist()
        rows, front = {position: row for row, position in enumerate(query_T)}, mask.num_front
        peaks_HT = weights_BHTE[0].argmax(dim=2)
        for number, (query, key) in enumerate(self._needle.answers):
            if query in rows and key in key_S[front:]:
                self.hits_LHA[layer, :, number] = (peaks_HT[:, rows[query]] == front + key_S[front:].index(key)).cpu()

    def gate(self, layer: int, share_BHT: Float[Tensor, "B H T"]) -> None:
        """Ignores the gate: the greatest local weight stays the greatest."""

    def heads(self, layer: int, mixed_BHTd: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """Changes nothing."""
        return mixed_BHTd


def place_scores(decoder: Decoder, text: RepeatedText, *, mapped: int = 0) -> PlaceScores:
    """Reads the text, and returns the scores of all heads at the places of `text.chosen()`.

    The control is scored at the places of the text in order. A model that reads segments also gets `xl`, the mass on
    tokens of earlier segments. Masses are means over all tokens.
    """
    config, chosen = decoder.config, text.chosen()
    if config.is_segmented:
        segment_T = torch.arange(text.length) // config.context_length
        chosen["xl"] = (segment_T[None] < segment_T[:, None]).float() / text.length
    scores = PlaceScores(config, chosen, mapped=mapped)
    with torch.inference_mode():
        decoder(text.tokens_BT, watch=scores)
    for name in ("knn", "compressed"):
        scores.sums[name] /= text.length
    return scores


def uniform_scores(text: RepeatedText) -> dict[str, float]:
    """The scores of a head that attends to all places before alike."""
    visible_T1 = torch.arange(1, text.length + 1)[:, None]
    return {name: float((mask_TT / visible_T1).sum()) for name, mask_TT in text.chosen().items()}


def losses(decoder: Decoder, text: RepeatedText, silenced: Collection[HeadId] = ()) -> Float[Tensor, " T"]:
    """The mean loss of each token from the second on, in nats, while some heads are silenced."""
    with torch.inference_mode():
        hidden_BTD, _ = decoder(text.tokens_BT, watch=Silence(silenced) if silenced else None)
        rows = [
            -decoder.logprobs(hidden_TD[:-1]).gather(1, tokens_T[1:, None].to(hidden_TD.device))[:, 0]
            for hidden_TD, tokens_T in zip(hidden_BTD, text.tokens_BT, strict=True)
        ]
    return torch.stack(rows).double().mean(dim=0).cpu()


def repeat_losses(losses_T: Float[Tensor, " T"], text: RepeatedText) -> list[float]:
    """The mean loss of each repeat. The first token of a text without prefix is predicted by none."""
    begins = [text.prefix + number * text.period for number in range(text.repeats)]
    return [float(losses_T[max(begin - 1, 0) : begin - 1 + text.period].mean()) for begin in begins]


def retrieval_scores(decoder: Decoder, texts: Iterable[Needle]) -> Float[Tensor, "L H"] | None:
    """The share of a sentence's tokens that the model repeats while the head looks most at the token to repeat.

    As in arXiv 2404.15574, but the answer is given token by token, and a token counts where the model's likeliest one
    is right. Returns None where no text fits the model.
    """
    config, found = decoder.config, list[Tensor]()
    for needle in texts:
        peaks = _Peaks(config, needle)
        with torch.inference_mode():
            hidden_BTD, _ = decoder(torch.tensor([needle.ids]), watch=peaks)
            queries, keys = zip(*needle.answers, strict=True)
            likeliest_A = decoder.logits(hidden_BTD[0, list(queries)]).argmax(dim=1).cpu()
        right_A = likeliest_A == torch.tensor([needle.ids[key] for key in keys])
        found.append((peaks.hits_LHA * right_A).mean(dim=2))
    return torch.stack(found).double().mean(dim=0) if found else None
