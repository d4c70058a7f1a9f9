"""The characteristic effect of each part of the decoder, on the smallest task that shows it.

An `Effect` trains the plain decoder, some changes of it, and the plain one again, from three seeds each. A seed counts
only if the plain decoder learned the task from it. An effect without such a seed has no result. A `Measurement`
makes its own models, or none. To add an effect of a part, add an entry to EFFECTS.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from memlm.base.progress import Progress
from memlm.bench import sequences
from memlm.bench.depths import bits_by_depth
from memlm.bench.grid import bench_decisions
from memlm.bench.learning import Learned, config_for, learn, score
from memlm.bench.swapped_store import swapped_store
from memlm.bench.tasks import (
    Assignments,
    CountsInOrder,
    FarDictionary,
    GappedInduction,
    LibraryText,
    OffsetCopy,
    Recall,
    RunningParity,
    Task,
)
from memlm.errors import InvalidInput

SEEDS = 3
PLAIN, AGAIN = "plain", "plain again"

Figures = dict[str, float]


def accuracy(learned: Learned) -> Figures:
    """The share of right answers in the last stage, and the number of stages passed."""
    return {"accuracy": learned.accuracy, "stage": float(learned.stage)}


def bits(learned: Learned) -> Figures:
    """The loss in bits an answer, as for text."""
    return {"bits": learned.loss / math.log(2)}


def longer(learned: Learned) -> Figures:
    """The accuracy, and that in texts of twice as many bits as the model has read."""
    bits_read = learned.task.stages[-1]
    twice, _ = score(learned.decoder, RunningParity(stages=(2 * bits_read,)), seed=learned.seed)
    return {**accuracy(learned), "accuracy_at_twice_the_length": twice}


@dataclass(frozen=True)
class Effect:
    """A comparison of configs that learn one task.

    `configs` are changes of the plain config by name. The key `training` of a change has fields of `TrainConfig` for
    that config alone. `shape` and `training` change all of them. A run ends after `steps`, when the task is learned, or
    after `minutes` on one thread, which cut it on slow machines only. `expects` says what the paper claims.
    """

    part: str
    expects: str
    task: Task
    configs: Mapping[str, Mapping[str, Any]]
    steps: int
    minutes: float
    figures: Callable[[Learned], Figures] = accuracy
    shape: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[str, ...]:
        """The configs in order, the plain one first and last."""
        return (PLAIN, *self.configs, AGAIN)

    def run(self, row: str, seed: int, device: str) -> Figures:
        """Trains one config from one seed. The plain one that comes again has seeds of its own."""
        change = dict(self.configs.get(row, {}))
        training = {**self.training, **change.pop("training", {})}
        learned = learn(
            config_for(self.task, **{**self.shape, **change}), self.task, steps=self.steps, seconds=60 * self.minutes,
            seed=seed + (SEEDS if row == AGAIN else 0), device=device, training=training,
        )  # fmt: skip
        return {
            **self.figures(learned),
            "is_learned": float(learned.is_learned),
            "steps": float(learned.steps),
            "seconds": learned.seconds,
        }


@dataclass(frozen=True)
class Measurement:
    """A comparison of its own kind. `measure` takes a seed and returns figures by row. All seeds count."""

    part: str
    expects: str
    measure: Callable[[int], Mapping[str, Figures]]
    minutes: float


def _mixer(kind: str, **fields: Any) -> dict[str, Any]:
    return {"layers": [{"mixer": {"kind": kind, **fields}}]}


def _above_a_window(kind: str, **fields: Any) -> dict[str, Any]:
    """Attention to the 16 latest tokens in the first layer, and a mixer in the second."""
    return {"layers": [{"mixer": "attention"}, {"mixer": {"kind": kind, **fields}}], "windows": (16, 0)}


def _channel(kind: str, **fields: Any) -> dict[str, Any]:
    return {"layers": [{"channel": {"kind": kind, **fields}}]}


DILATED = {"kind": "pattern", "rule": "dilated", "window": 16}
EFFECTS: tuple[Effect | Measurement, ...] = (
    Effect(
        "patterns",
        "a copy 47 tokens back in two layers: beyond two windows of 16, and no multiple of a dilation of 3; two hops of"
        " strided, of dilations 1 and 3, and of blocks reach it; fixed has 4 places for 16 tokens; random sees a part",
        OffsetCopy(length=48),
        {
            "window": {"windows": (16, 16)},
            "global": _mixer("pattern", rule="global", window=16, num_global=4),
            "dilated": {"layers": [{"mixer": {**DILATED, "dilation": 3}}]},
            "dilated by layer": {"layers": [{"mixer": {**DILATED, "dilation": each}} for each in (1, 3)]},
            "strided": _mixer("pattern", rule="strided", stride=16),
            "fixed": _mixer("pattern", rule="fixed", block=16, summary=4),
            "random": _mixer("pattern", rule="random", window=16, num_global=4, block=8, num_random=3),
            "blocks": _mixer("pattern", rule="blocks", block=16),
        },
        steps=400,
        minutes=1.0,
        shape={"num_heads": 4, "num_kv_heads": 4},
        training={"learning_rate": 1e-2},
    ),
    Effect(
        "experts",
        "one of 8 experts costs a token as much as the plain feed-forward; the loss at equal tokens is lower (Switch)",
        LibraryText(),
        {
            "switch": _channel("switch", experts=8),
            "hash": _channel("hash", experts=8),
            "base": _channel("base", experts=8),
            "top 2 of 8, half as wide": _channel("experts", experts=8, top=2, expert_dim=64),
        },
        steps=600,
        minutes=1.5,
        figures=bits,
        training={"batch_size": 16},
    ),
    Effect(
        "differential",
        "attention to noise cancels, so that recall of 2 pairs among 60 noise tokens is learned in fewer steps"
        " or better than by plain attention of as many parameters; the second version has half the last projection",
        Recall(stages=(2,), noise_tokens=60),
        {"differential": _mixer("differential"), "differential v2": _mixer("differential_v2")},
        steps=600,
        minutes=1.5,
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
        "names that come again beyond a window are found by their cluster; local and clustered heads beat local ones",
        GappedInduction(),
        {
            "window": {"windows": (16, 16)},
            "half routing": _mixer("routing", clusters=8, local_heads=2, local_window=16),
        },
        steps=800,
        minutes=2.0,
        shape={"num_heads": 4, "num_kv_heads": 4},
    ),
    Effect(
        "memories",
        "pairs of the first segment, asked for in the third, are beyond any window of a segment: chance 1/16, and more"
        " with a memory (Recurrent Memory Transformer, Linformer's matrix as a compression, Compressive Transformer)",
        FarDictionary(),
        {
            "window": {"windows": (16, 16)},
            "xl": {"xl_length": 8},
            "compressive": {"xl_length": 8, "compression": {"length": 16, "rate": 2}},
            "linformer": {"xl_length": 8, "compression": {"length": 16, "rate": 2, "kind": "linear"}},
            "recurrent memory": {"border": {"kind": "recurrent_memory", "memories": 8, "unroll": 3}},
        },
        steps=2000,
        minutes=1.5,
    ),
    Effect(
        "infinite",
        "symbols are put in the order of their counts in a text of several segments, better than with a Transformer-XL"
        " memory or a compressive one of the same segment (infinity-former, section 4.1)",
        CountsInOrder(),
        {
            "infinite": {"xl_length": 64, **_mixer("infinite", bumps=64, samples=128)},
            "xl of a segment": {"xl_length": 64},
            "compressive": {"xl_length": 64, "compression": {"length": 64, "rate": 4}},
        },
        steps=600,
        minutes=2.0,
    ),
    Effect(
        "simplified",
        "blocks without values, last projections and skips reach the loss of plain ones at equal tokens, with fewer"
        " parameters (He and Hofmann)",
        LibraryText(),
        {
            "sas": {**_mixer("shaped"), "join": "skipless"},
            "sas-p": {**_mixer("shaped"), "join": "skipless", "parallel_residual": True},
        },
        steps=600,
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
        "selective",
        "values that were overwritten are hidden, so that the latest one is learned in fewer steps",
        Assignments(stages=(4, 8, 16, 32)),
        {"selective": _mixer("selective")},
        steps=1000,
        minutes=1.5,
    ),
    Effect(
        "linear attention",
        "sums of features blur what softmax finds exactly: a copy is learned worse at equal steps (Performer, RFA)",
        OffsetCopy(),
        {"performer": _mixer("performer"), "rfa": _mixer("rfa"), "rfa without gate": _mixer("rfa", gate=False)},
        steps=400,
        minutes=1.0,
        shape={"num_heads": 4, "num_kv_heads": 4},
        training={"learning_rate": 1e-2},
    ),
    Measurement(
        "retro",
        "values that the store alone has are read from it: after it is swapped, the answers are the new ones, and with"
        " values of other keys they are chance (RETRO)",
        swapped_store,
        minutes=1.3,
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
        steps=500,
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
        steps=300,
        minutes=1.5,
        figures=bits,
        shape={"num_layers": 8},
        training={"batch_size": 16},
    ),
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
)


class Job(NamedTuple):
    """One run in a process of its own. A measurement has no row."""

    part: str
    row: str
    seed: int


def bench_effects(only: Iterable[str], *, jobs: int, device: str, progress: Progress) -> dict[str, Any]:
    """Returns rows by effect and config: means over the seeds that count, with least and most. `jobs` runs go on side
    by side, each on one thread.

    Raises InvalidInput for an unknown part.
    """
    effects = chosen_effects(only)
    planned = [job for effect in sorted(effects, key=lambda each: -each.minutes) for job in _jobs_of(effect)]
    done: dict[Job, Mapping[str, Figures] | str] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(run, job, device): job for job in planned}
        for future in as_completed(futures):
            job = futures[future]
            error = future.exception()
            # One config that fails leaves the others their results.
            done[job] = f"{type(error).__name__}: {error}" if error else future.result()
            progress("effects", len(done), len(planned), f"{job.part}: {job.row}" if job.row else job.part)
    rows = [row for effect in effects for row in _rows_of(effect, done)]
    return {
        "expects": {effect.part: effect.expects for effect in effects},
        "no_result": [e.part for e in effects if not any(row["effect"] == e.part and row["seeds"] for row in rows)],
        "crashed": {effect.part: why for effect in effects if (why := _crash_of(effect, done))},
        "errors": {" ".join(map(str, job)): result for job, result in done.items() if isinstance(result, str)},
        "rows": rows,
    }


def chosen_effects(only: Iterable[str]) -> list[Effect | Measurement]:
    """Returns the effects of some parts, or all. Raises InvalidInput for a part without one."""
    names, known = set(only), {effect.part for effect in EFFECTS}
    if unknown := sorted(names - known):
        raise InvalidInput(f"{unknown[0]!r} has no effect; expected some of {', '.join(sorted(known))}", field="only")
    return [effect for effect in EFFECTS if not names or effect.part in names]


def run(job: Job, device: str) -> Mapping[str, Figures]:
    """Returns the figures of a job by row."""
    (effect,) = chosen_effects([job.part])
    if isinstance(effect, Measurement):
        return effect.measure(job.seed)
    return {job.row: effect.run(job.row, job.seed, device)}


def _jobs_of(effect: Effect | Measurement) -> list[Job]:
    rows = ("",) if isinstance(effect, Measurement) else effect.rows
    return [Job(effect.part, row, seed) for row in rows for seed in range(SEEDS)]


def _crash_of(effect: Effect | Measurement, done: Mapping[Job, Mapping[str, Figures] | str]) -> str:
    """Says that all runs crashed on which the others are counted, those of the plain config, and why. Else empty."""
    needed = [job for job in _jobs_of(effect) if job.row in ("", PLAIN)]
    errors = [result for job in needed if isinstance(result := done[job], str)]
    whose = "run" if isinstance(effect, Measurement) else "run of the plain decoder"
    return f"each {whose} crashed ({errors[0]})" if len(errors) == len(needed) else ""


def _rows_of(effect: Effect | Measurement, done: Mapping[Job, Mapping[str, Figures] | str]) -> list[dict[str, Any]]:
    """Returns a row a config, of the seeds from which the plain config learned."""
    found: dict[str, dict[int, Figures]] = {}
    for job in _jobs_of(effect):
        result = done[job]
        for config, figures in ({} if isinstance(result, str) else result).items():
            found.setdefault(config, {})[job.seed] = figures
    counted = set(range(SEEDS))
    if isinstance(effect, Effect):
        counted = {seed for seed, figures in found.get(PLAIN, {}).items() if figures["is_learned"]}
    rows = []
    for config, by_seed in found.items():
        each_seed = [figures for seed, figures in by_seed.items() if seed in counted]
        row: dict[str, Any] = {"effect": effect.part, "config": config, "seeds": len(each_seed)}
        if isinstance(effect, Effect):
            row |= {"chance": effect.task.chance, "stages": len(effect.task.stages)}
        for name in each_seed[0] if each_seed else ():
            values = [figures[name] for figures in each_seed]
            row |= {name: statistics.mean(values), f"{name}_least": min(values), f"{name}_most": max(values)}
        rows.append(row)
    return rows
