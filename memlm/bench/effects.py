"""The characteristic effect of each part of the decoder, on the smallest task that shows it.

An `Effect` trains the plain decoder, some changes of it, and the plain one again, from three seeds each. A seed counts
only if the plain decoder learned the task from it. An effect without such a seed has no result. A `Measurement`
makes its own models, or none. To add an effect of a part, add an entry to the table of its family.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from memlm.base.progress import Progress
from memlm.bench.attention_effects import ATTENTION
from memlm.bench.block_effects import BLOCKS
from memlm.bench.effect import PLAIN, SEEDS, Effect, Figures, Measurement
from memlm.bench.memory_effects import MEMORY
from memlm.bench.model_effects import MODELS
from memlm.errors import InvalidInput

EFFECTS = (*ATTENTION, *MEMORY, *BLOCKS, *MODELS)


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
