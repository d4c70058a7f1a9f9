"""Effects of the parts of a block beside attention, and of loops over blocks."""

from __future__ import annotations

from typing import Any

from memlm.bench.depths import bits_by_depth
from memlm.bench.effect import Effect, Figures, Measurement, accuracy, bits, mixer
from memlm.bench.expert_load import bits_and_load
from memlm.bench.kept_bytes import bits_and_bytes
from memlm.bench.learning import Learned, score
from memlm.bench.tasks import LibraryText, RunningParity


def longer(learned: Learned) -> Figures:
    """The accuracy, and that in texts of twice as many bits as the model has read."""
    bits_read = learned.task.stages[-1]
    twice, _ = score(learned.decoder, RunningParity(stages=(2 * bits_read,)), seed=learned.seed)
    return {**accuracy(learned), "accuracy_at_twice_the_length": twice}


def _channel(kind: str, **fields: Any) -> dict[str, Any]:
    return {"layers": [{"channel": {"kind": kind, **fields}}]}


BLOCKS: tuple[Effect | Measurement, ...] = (
    Effect(
        "experts",
        "one of 8 experts costs a token as much as the plain feed-forward; the loss at equal tokens is lower (Switch),"
        " and the experts of BASE share the tokens evenly without a loss for it, while learning",
        LibraryText(),
        {
            "switch": _channel("switch", experts=8),
            "switch without its loss": _channel("switch", experts=8, balance=0.0),
            "hash": _channel("hash", experts=8),
            "base": _channel("base", experts=8),
            "top 2 of 8, half as wide": _channel("experts", experts=8, top=2, expert_dim=64),
        },
        steps=400,
        minutes=1.5,
        figures=bits_and_load,
        training={"batch_size": 16},
    ),
    Effect(
        "simplified",
        "blocks without values, last projections and skips reach the loss of plain ones at equal tokens, with fewer"
        " parameters (He and Hofmann)",
        LibraryText(),
        {
            "sas": {**mixer("shaped"), "join": "skipless"},
            "sas-p": {**mixer("shaped"), "join": "skipless", "parallel_residual": True},
        },
        steps=400,
        minutes=1.5,
        figures=bits,
        training={"batch_size": 16},
    ),
    Effect(
        "rounds",
        "one block read four times learns parity with a quarter of the parameters, and goes on in longer texts better",
        RunningParity(),
        {"universal": {"stack": "universal"}, "looped": {"stack": "looped"}},
        steps=1000,
        minutes=1.5,
        figures=longer,
        shape={"num_layers": 4},
    ),
    Effect(
        "gated",
        "gates keep the loss of a good rate at rates where sums diverge (GTrXL)",
        LibraryText(),
        {
            "gated": {"join": "gated"},
            "plain at 10 times the rate": {"training": {"learning_rate": 3e-2}},
            "gated at 10 times the rate": {"join": "gated", "training": {"learning_rate": 3e-2}},
        },
        steps=400,
        minutes=1.0,
        figures=bits,
        training={"batch_size": 16},
    ),
    Effect(
        "exits",
        "exits that were trained have a lower loss at 1 to 3 of 4 layers than a plain model that is left there"
        " (CALM's rules), and about the loss of the plain one at all 4 (Depth-Adaptive Transformer)",
        LibraryText(),
        {
            "aligned": {"stack": "exits"},
            "aligned, weights by layer": {"stack": {"kind": "exits", "weighting": "linear"}},
            "mixed": {"stack": {"kind": "exits", "training": "mixed"}},
            "geometric halting": {"stack": {"kind": "exits", "halt": "geometric"}},
            "multinomial halting": {"stack": {"kind": "exits", "halt": "multinomial"}},
        },
        steps=300,
        minutes=2.0,
        figures=bits_by_depth,
        shape={"num_layers": 4},
        training={"batch_size": 16},
    ),
    Effect(
        "dense",
        "averages over all earlier layers lower the loss of deep models, by little at a depth of 8 (DenseFormer)",
        LibraryText(),
        {"dense": {"stack": "dense"}},
        steps=200,
        minutes=1.5,
        figures=bits,
        shape={"num_layers": 8},
        training={"batch_size": 16},
    ),
    Effect(
        "reversible",
        "the numbers kept for the backward pass are as many at any depth, for another forward pass and an equal loss"
        " (RevNets, Reformer)",
        LibraryText(),
        {"reversible": {"stack": "reversible"}},
        steps=200,
        minutes=1.5,
        figures=bits_and_bytes,
        shape={"num_layers": 8},
        training={"batch_size": 16},
    ),
)
