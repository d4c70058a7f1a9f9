"""Effects of the mixers that replace attention."""

from __future__ import annotations

from typing import Any

from memlm.bench.effect import Effect, Measurement, mixer
from memlm.bench.keys_read import accuracy_and_keys
from memlm.bench.spans import learned_spans
from memlm.bench.tasks import Assignments, OffsetCopy, Recall

DILATED = {"kind": "pattern", "rule": "dilated", "window": 16}


def _above_a_window(kind: str, **fields: Any) -> dict[str, Any]:
    """Attention to the 16 latest tokens in the first layer, and a mixer in the second."""
    return {"layers": [{"mixer": "attention"}, {"mixer": {"kind": kind, **fields}}], "windows": (16, 0)}


ATTENTION: tuple[Effect | Measurement, ...] = (
    Effect(
        "patterns",
        "a copy 47 tokens back in two layers: beyond two windows of 16, and no multiple of a dilation of 3; two hops of"
        " strided, of dilations 1 and 3, and of blocks reach it; fixed has 4 places for 16 tokens; random sees a part",
        OffsetCopy(length=48),
        {
            "window": {"windows": (16, 16)},
            "global": mixer("pattern", rule="global", window=16, num_global=4),
            "dilated": {"layers": [{"mixer": {**DILATED, "dilation": 3}}]},
            "dilated by layer": {"layers": [{"mixer": {**DILATED, "dilation": each}} for each in (1, 3)]},
            "strided": mixer("pattern", rule="strided", stride=16),
            "fixed": mixer("pattern", rule="fixed", block=16, summary=4),
            "random": mixer("pattern", rule="random", window=16, num_global=4, block=8, num_random=3),
            "blocks": mixer("pattern", rule="blocks", block=16),
        },
        steps=400,
        minutes=1.0,
        shape={"num_heads": 4, "num_kv_heads": 4},
        training={"learning_rate": 1e-2},
    ),
    Effect(
        "differential",
        "attention to noise cancels, so that recall of 2 pairs among 60 noise tokens is learned in fewer steps"
        " or better than by plain attention of as many parameters; the second version has half the last projection",
        Recall(stages=(2,), noise_tokens=60),
        {"differential": mixer("differential"), "differential v2": mixer("differential_v2")},
        steps=1500,
        minutes=3.0,
        shape={"num_heads": 4, "num_kv_heads": 2},
    ),
    Effect(
        "lsh",
        "a copy of tokens that occur once in each half, 47 tokens back: equal tokens share a bucket at any distance,"
        " and a window of 16 cannot see them; more rounds find more (Reformer). A window below tells a token which one"
        " came before it",
        OffsetCopy(length=48, unique=True),
        {
            "window": {"windows": (16, 16)},
            **{f"{n} rounds above a window": _above_a_window("lsh", buckets=16, rounds=n) for n in (1, 4)},
            "attention above a window": {"windows": (16, 0)},
        },
        steps=400,
        minutes=1.0,
        shape={"num_heads": 4, "num_kv_heads": 4},
        training={"learning_rate": 1e-2},
    ),
    Effect(
        "routing",
        "a copy of tokens that occur once in each half, 47 tokens back: equal tokens share a cluster at any distance,"
        " so that local and clustered heads beat local ones (Routing Transformer)",
        OffsetCopy(length=48, unique=True),
        {
            "window": {"windows": (16, 16)},
            "half routing": mixer("routing", clusters=8, local_heads=2, local_window=16),
            "routing above a window": _above_a_window("routing", clusters=8),
        },
        steps=400,
        minutes=1.0,
        shape={"num_heads": 4, "num_kv_heads": 4},
        training={"learning_rate": 1e-2},
    ),
    Effect(
        "selective",
        "values that were overwritten are hidden, so that the latest one is learned in fewer steps",
        Assignments(stages=(4, 8, 16, 32)),
        {"selective": mixer("selective")},
        steps=1000,
        minutes=1.5,
    ),
    Effect(
        "linear attention",
        "sums of features blur what softmax finds exactly: a copy is learned worse at equal steps (Performer, RFA)",
        OffsetCopy(),
        {"performer": mixer("performer"), "rfa": mixer("rfa"), "rfa without gate": mixer("rfa", gate=False)},
        steps=400,
        minutes=1.0,
        shape={"num_heads": 4, "num_kv_heads": 4},
        training={"learning_rate": 1e-2},
    ),
    Measurement(
        "adaptive span",
        "heads that see 96 tokens at first keep short spans for a copy from near, and long ones for a copy from far",
        learned_spans,
        minutes=2.0,
    ),
    Effect(
        "hyper",
        "a copy of tokens that occur once in each half, 47 tokens back: likely keys by hash and a sample of the others"
        " find what a window of 16 does not, with a part of the products (HyperAttention)",
        OffsetCopy(length=48, unique=True),
        {
            "window": {"windows": (16, 16)},
            **{f"{n} keys of a run": _above_a_window("hyper", block=n, samples=n) for n in (4, 8)},
        },
        steps=300,
        minutes=2.0,
        figures=accuracy_and_keys,
        shape={"num_heads": 4, "num_kv_heads": 4},
        training={"learning_rate": 1e-2, "batch_size": 16},
    ),
)
