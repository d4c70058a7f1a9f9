"""Effects of memories beyond a segment, and of stores."""

from __future__ import annotations

from memlm.bench.effect import Effect, Measurement, mixer
from memlm.bench.swapped_store import swapped_store
from memlm.bench.tasks import CountsInOrder, FarDictionary

MEMORY: tuple[Effect | Measurement, ...] = (
    Effect(
        "memories",
        "a pair of the first segment, asked for in the third, is beyond two windows of half a segment: chance 1/16, and"
        " more with a memory (Recurrent Memory Transformer, Linformer's matrix as a compression, Compressive"
        " Transformer)",
        FarDictionary(stages=((1, 2), (1, 3))),
        {
            "window": {"windows": (8, 8)},
            "xl": {"xl_length": 8},
            "compressive": {"xl_length": 8, "compression": {"length": 16, "rate": 2}},
            "linformer": {"xl_length": 8, "compression": {"length": 16, "rate": 2, "kind": "linear"}},
            "recurrent memory": {"border": {"kind": "recurrent_memory", "memories": 8, "unroll": 3}},
        },
        steps=800,
        minutes=1.5,
    ),
    Effect(
        "infinite",
        "symbols are put in the order of their counts in a text of several segments, better than with a Transformer-XL"
        " memory or a compressive one of the same segment (infinity-former, section 4.1)",
        CountsInOrder(stages=(1, 4)),
        {
            "infinite": {"xl_length": 64, **mixer("infinite", bumps=64, samples=128)},
            "xl of a segment": {"xl_length": 64},
            "compressive": {"xl_length": 64, "compression": {"length": 64, "rate": 4}},
        },
        steps=600,
        minutes=4.0,
        training={"batch_size": 16},
    ),
    Measurement(
        "retro",
        "values that the store alone has are read from it: after it is swapped, the answers are the new ones, and with"
        " values of other keys they are chance (RETRO)",
        swapped_store,
        minutes=1.3,
    ),
)
