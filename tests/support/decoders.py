"""Tiny decoders of every kind, for tests of the model."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from memlm.model import Compression, Decoder, DecoderState, Memorizing, ModelConfig
from memlm.model.config import POSITIONS
from memlm.model.mechanisms import RopeScaling

SHAPE = ModelConfig(
    vocab_size=40, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ff_dim=20, context_length=6,
    num_buckets=8, max_distance=12,
)  # fmt: skip
MEMORY = Memorizing(layers=(1,), top_k=3, capacity=11, storage="model")
XL = replace(SHAPE, xl_length=5)
COMPRESSED = replace(SHAPE, xl_length=4, compression=Compression(length=3, rate=2, kind="mean"))
EVERYTHING = replace(
    SHAPE,
    xl_length=4,
    compression=Compression(length=3, rate=3, kind="conv"),
    memorizing=replace(MEMORY, layers=(0, 1)),
)


def plain(positions: str) -> ModelConfig:
    """A decoder without memory that takes a text of 40 tokens."""
    return replace(SHAPE, positions=positions, context_length=40)


SANDWICH = {  # as Gemma 3
    "norm": "rms_offset", "norm_order": "sandwich", "qk_norm": True, "activation": "geglu", "embedding_scale": 4.0,
    "query_scale": 0.7, "local_rope_theta": 50.0, "rope_scaling": RopeScaling("linear", 4.0),
}  # fmt: skip
OUTPUT_NORMS = {"norm_order": "output", "qk_norm": True, "qk_norm_over": "projection"}  # as OLMo 2

UNBOUNDED = {
    **{f"{positions}": plain(positions) for positions in POSITIONS},
    "post-norm layer-norm relu": replace(plain("sinusoidal"), norm_order="post", norm="layer", activation="relu"),
    "parallel gelu biases": replace(
        plain("rotary"), parallel_residual=True, activation="gelu", qkv_bias=True, out_bias=True, ff_bias=True,
        rotary_dim=2, norm="layer",
    ),
    "query and key norms": replace(plain("rotary"), qk_norm=True, tied_embeddings=False, head_dim=6),
    "sandwich norms": replace(plain("rotary"), **SANDWICH, windows=(5, 0)),
    "output norms": replace(plain("rotary"), **OUTPUT_NORMS),
    "a layer without rotation": replace(plain("rotary"), no_rope_layers=(1,)),
    "windows": replace(plain("rotary"), windows=(5, 3)),
    "window in one layer": replace(plain("alibi"), windows=(0, 3)),
    "sinks rotary": replace(plain("rotary"), windows=(5, 5), num_sinks=2),
    "sinks alibi": replace(plain("alibi"), windows=(4, 6), num_sinks=3),
}  # fmt: skip
WITH_MEMORY = {
    **{f"xl {positions}": replace(XL, positions=positions) for positions in POSITIONS if positions != "learned"},
    "xl windows": replace(XL, windows=(4, 7)),
    "xl longer than a segment": replace(SHAPE, xl_length=15, positions="transformer_xl"),
    **{
        f"compressive {kind}": replace(COMPRESSED, compression=Compression(length=5, rate=2, kind=kind))
        for kind in ("mean", "max", "conv", "dilated", "most_used")
    },
    "compressive linear": replace(COMPRESSED, compression=Compression(length=5, rate=2, kind="linear", states=3)),
    "compressive rate that divides nothing": replace(XL, compression=Compression(length=4, rate=4, kind="conv")),
    "compressive transformer-xl": replace(COMPRESSED, positions="transformer_xl"),
    "memorizing": replace(SHAPE, memorizing=MEMORY),
    "memorizing tanh": replace(SHAPE, memorizing=replace(MEMORY, mixing="tanh")),
    "memorizing joint": replace(SHAPE, memorizing=replace(MEMORY, mixing="joint")),
    "memorizing normalized alone": replace(SHAPE, memorizing=replace(MEMORY, normalize="memory")),
    "memorizing learned positions": replace(SHAPE, positions="learned", memorizing=MEMORY),
    "memorizing t5": replace(SHAPE, positions="t5", memorizing=MEMORY),
    "memorizing and xl": replace(XL, memorizing=MEMORY),
    "sandwich norms memorizing": replace(XL, **SANDWICH, windows=(3, 0), memorizing=replace(MEMORY, layers=(0, 1))),
    "output norms joint": replace(SHAPE, **OUTPUT_NORMS, memorizing=replace(MEMORY, mixing="joint")),
    "everything with sandwich norms": replace(EVERYTHING, **SANDWICH, windows=(3, 0)),
    "everything without rotation in a layer": replace(EVERYTHING, no_rope_layers=(1,)),
    "everything": EVERYTHING,
}
ALL = {**UNBOUNDED, **WITH_MEMORY}
# One of each mechanism. The others are tested against their twins and at random, and in full as `exhaustive`.
REPRESENTATIVE = (
    "rotary", "t5", "windows", "sinks rotary", "xl transformer_xl", "compressive most_used", "memorizing joint",
    "everything", "everything with sandwich norms",
)  # fmt: skip
assert set(REPRESENTATIVE) <= set(ALL)


def sampled(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the representative names, and the others marked `exhaustive`."""
    return [name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def make(config: ModelConfig, seed: int = 1, made: type[Decoder] = Decoder) -> Decoder:
    """A decoder in float64 whose every parameter matters."""
    torch.manual_seed(seed)
    decoder = made(config).double().eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.4 if parameter.dim() < 3 else 0.1))
            if name.endswith("gate_H"):
                parameter.copy_(torch.linspace(-1, 1, len(parameter)))
    return decoder


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(decoder: Decoder, tokens: list[int], state: DecoderState | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.logits(decoder(torch.tensor([tokens]), state)[0][0])
