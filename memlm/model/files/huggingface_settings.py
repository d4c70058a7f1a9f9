"""Settings that the configs of several families share, as memlm names them."""

from __future__ import annotations

from typing import Any

import torch

from memlm.errors import Incompatible, InvalidInput
from memlm.model.files.family import JsonDict
from memlm.model.mechanisms import RopeScaling


def shape_of(
    c: JsonDict,
    *,
    dim: str = "hidden_size",
    num_layers: str = "num_hidden_layers",
    num_heads: str = "num_attention_heads",
    context_length: str = "max_position_embeddings",
) -> dict[str, Any]:
    """The sizes, which families have under several names. `ff_dim` is left out where the config has none."""
    shape = {"vocab_size": c["vocab_size"], "dim": c[dim], "num_layers": c[num_layers], "num_heads": c[num_heads]}
    if "intermediate_size" in c:
        shape["ff_dim"] = c["intermediate_size"]
    return {**shape, "context_length": c[context_length]}


def rope_of(c: JsonDict) -> JsonDict:
    """The settings of rotary positions, under their new name or their old one."""
    return c.get("rope_parameters") or c.get("rope_scaling") or {}


def rotary_of(c: JsonDict, *, theta: float) -> dict[str, Any]:
    """Rotary positions and their scaling. Raises Incompatible for a scaling that this version lacks."""
    rope = rope_of(c)
    theta = float(rope.get("rope_theta", c.get("rope_theta", theta)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    original = rope.get("original_max_position_embeddings") or c.get("original_max_position_embeddings")
    known = {
        "original_length": original or c["max_position_embeddings"],
        **{
            name: rope[name]
            for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
            if name in rope
        },
    }
    try:
        scaling = RopeScaling(kind, float(rope["factor"]), **known)
    except (InvalidInput, KeyError) as error:
        raise Incompatible(f"rotary positions are scaled in a way that this version does not know: {error}") from error
    if kind == "yarn":
        factor = rope.get("attention_factor") or 0.1 * torch.log(torch.tensor(scaling.factor)).item() + 1.0
        scaling = RopeScaling(kind, scaling.factor, **known, attention_factor=factor)
    return {"rope_theta": theta, "rope_scaling": scaling}


def activation_of(name: str) -> str:
    """An activation of a feed-forward without a gate. Raises Incompatible for one that this version lacks."""
    known = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
    }
    if name not in known:
        raise Incompatible(f"the activation is {name!r}; this version knows {', '.join(known)}")
    return known[name]


def refuse_others(c: JsonDict, family: str, **expected: Any) -> None:
    """Raises Incompatible for a setting that is there and is not the expected one."""
    for name, value in expected.items():
        if c.get(name, value) != value:
            raise Incompatible(f"this {family} model has {name}={c[name]}; this version reads {name}={value} only")
