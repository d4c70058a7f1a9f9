"""Effects of models of other shapes, and of several models as one."""

from __future__ import annotations

from memlm.bench import sequences
from memlm.bench.chains import bench_chains
from memlm.bench.domains import bench_domains
from memlm.bench.effect import Effect, Measurement
from memlm.bench.grid import bench_decisions
from memlm.bench.patches import bench_patches

MODELS: tuple[Effect | Measurement, ...] = (
    Measurement(
        "decisions",
        "a Decision Transformer that learned from random walks gets more where more is asked for, and more than they"
        " got on average; without returns it walks as they do",
        bench_decisions,
        minutes=2.0,
    ),
    Measurement(
        "source",
        "whole answers of 12 symbols, reversed or sorted, by an encoder-decoder and by a decoder of equal size (T5)",
        sequences.measure,
        minutes=3.0,
    ),
    Measurement(
        "megabyte",
        "a global model over patches of 4 bytes and a small one within them reach the bits of a plain decoder sooner,"
        " decode faster and keep less of a text (MEGABYTE)",
        bench_patches,
        minutes=3.0,
    ),
    Measurement(
        "domains",
        "branches of a model that learned one domain each, mixed by the posterior, predict each domain about as well as"
        " its own branch, and better than one that went on with both (DEMix, Branch-Train-Merge)",
        bench_domains,
        minutes=3.0,
    ),
    Measurement(
        "chains",
        "small models that learned to write the steps of a sum or of a way through facts answer questions that models"
        " of equal size do not learn to answer at once (scratchpad, least-to-most, selection-inference)",
        bench_chains,
        minutes=3.0,
    ),
)
