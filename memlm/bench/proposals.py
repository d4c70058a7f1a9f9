"""Loss of a model on holes in a repository's files, with proposals for the prompt and without (RLPG, arXiv 2206.12839).

A hole is the second half of a line. Its prompt is the text before it, or a proposal and the text before it, in one
budget of tokens. A ranker is fitted on the holes of half of the files, and chooses for those of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memlm.base.progress import Progress, silent
from memlm.bench.past import per_token
from memlm.errors import InvalidInput, check_range
from memlm.generation.likelihood import loglikelihood
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.prompting.proposals import Proposal, ProposalRanker, hole_prompt, proposals

LEAST_CHARACTERS = 12  # of a line with a hole, without the spaces around it
LEAST_HOLES = 4
RULE = ("current", "after")  # the proposal that the rule takes: the lines behind the hole
NONE, PREFIX = "no context", "text before"
WAYS = (NONE, PREFIX, "by rule", "by ranker", "best of all")


@dataclass(frozen=True, slots=True)
class Hole:
    """The characters from `begin` to `end` of a file, the second half of a line."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A hole of so many tokens, its proposals, and the nats of the hole: alone, behind its prefix, and behind each
    proposal and its prefix.
    """

    hole: Hole
    num_tokens: int
    found: tuple[Proposal, ...]
    alone: float
    prefix: float
    with_each: tuple[float, ...]

    @property
    def by_rule(self) -> float:
        """The nats with the proposal of `RULE`, or with the prefix alone where there is none."""
        kinds = [(each.source, each.kind) for each in self.found]
        return self.with_each[kinds.index(RULE)] if RULE in kinds else self.prefix

    def by_ranker(self, ranker: ProposalRanker) -> float:
        """The nats with the likeliest proposal to help, or with the prefix alone where none is likelier than not."""
        chances = ranker.chances(self.found)
        best = int(np.argmax(chances)) if chances else -1
        return self.with_each[best] if best >= 0 and chances[best] > 0.5 else self.prefix


def bench_proposals(
    model: str | Path,
    folder: Path,
    *,
    minutes: float = 10.0,
    budget: int = 256,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Returns nats per token of holes in the Python files of a folder, in each of `WAYS`, and how much less than behind
    the text before the hole. A prompt has `budget` tokens. Hidden files and folders are left out.

    Holes are drawn at random, as many as are read in so many minutes. Errors are standard errors over holes. Raises
    InvalidInput for a folder of fewer than two files, and where too few holes were read.
    """
    check_range("minutes", minutes, above=0)
    paths = sorted(path for path in folder.rglob("*.py") if path.is_file() and not _is_hidden(path, folder))
    files = {path.relative_to(folder).as_posix(): path.read_text("utf-8", errors="replace") for path in paths}
    if len(files) < 2:
        raise InvalidInput(f"{folder} has {len(files)} files of Python; give a folder of at least two", field="folder")
    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    measured, begin_s = list[Measured](), time.perf_counter()
    for hole in holes(files, seed):
        if (passed := time.perf_counter() - begin_s) >= 60 * minutes:
            break
        measured.append(measure(checkpoint, files, hole, budget))
        progress("holes", int(passed), int(60 * minutes))
    progress("holes", 1, 1)
    if len(measured) < LEAST_HOLES:
        raise InvalidInput(f"{len(measured)} holes were read; give more minutes or longer files", field="minutes")
    return {"files": len(files), "holes": len(measured), "budget": budget, **compare(measured)}


def holes(files: Mapping[str, str], seed: int) -> Iterator[Hole]:
    """Yields the second halves of lines that are long enough, one a line, in a random order."""
    every = list[Hole]()
    for path, text in files.items():
        begin = 0
        for line in text.splitlines(keepends=True):
            code, indent = line.strip(), len(line) - len(line.lstrip())
            if len(code) >= LEAST_CHARACTERS and not code.startswith(("#", '"', "'")):
                first = begin + indent
                every.append(Hole(path, first + len(code) // 2, first + len(code)))
            begin += len(line)
    for number in np.random.default_rng(seed).permutation(len(every)):
        yield every[number]


def measure(checkpoint: Checkpoint, files: Mapping[str, str], hole: Hole, budget: int) -> Measured:
    """Returns the nats of a hole in every way."""
    tokenizer, text = checkpoint.tokenizer, files[hole.path]
    hole_ids, before_ids = (
        tokenizer.encode(piece).tolist() for piece in (text[hole.begin : hole.end], text[: hole.begin])
    )
    found = proposals(files, hole.path, hole.begin, hole.end)

    def nats(proposed: Sequence[int], before: Sequence[int]) -> float:
        context = tokenizer.framed(hole_prompt(proposed, before, budget), as_document=False)
        return -loglikelihood(checkpoint, context or [tokenizer.start_id], hole_ids, None)[0]

    return Measured(
        hole=hole,
        num_tokens=len(hole_ids),
        found=found,
        alone=nats((), ()),
        prefix=nats((), before_ids),
        with_each=tuple(nats(tokenizer.encode(f"{each.text}\n").tolist(), before_ids) for each in found),
    )


def compare(measured: Sequence[Measured]) -> dict[str, Any]:
    """Returns a row for each of `WAYS`. Files are dealt out to two halves, and each half is ranked by the other."""
    half_of = {path: number % 2 for number, path in enumerate(dict.fromkeys(each.hole.path for each in measured))}
    rankers = [_fitted([each for each in measured if half_of[each.hole.path] != half]) for half in (0, 1)]
    nats: dict[str, Callable[[Measured], float]] = {
        NONE: lambda each: each.alone,
        PREFIX: lambda each: each.prefix,
        "by rule": lambda each: each.by_rule,
        "by ranker": lambda each: each.by_ranker(rankers[half_of[each.hole.path]]),
        "best of all": lambda each: min((each.prefix, *each.with_each)),
    }
    sizes_H = np.array([each.num_tokens for each in measured], float)
    prefix_H, rows = np.array([each.prefix for each in measured]), []
    for way in WAYS:
        nats_H = np.array([nats[way](each) for each in measured])
        (mean, error), (less, less_error) = per_token(nats_H, sizes_H), per_token(prefix_H - nats_H, sizes_H)
        row = {"way": way, "nats_per_token": mean, "nats_per_token_error": error}
        rows.append({**row, "nats_less": less, "nats_less_error": less_error})
    helped = [with_one < each.prefix for each in measured for with_one in each.with_each]
    return {
        "tokens": int(sizes_H.sum()),
        "proposals": len(helped),
        "share_that_helps": float(np.mean(helped)),
        "rows": rows,
    }


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether a part of a path below the folder begins with a dot, as in a virtual environment."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _fitted(measured: Sequence[Measured]) -> ProposalRanker:
    """Fits a ranker to the holes. Raises InvalidInput for holes of one file alone, whose other half is empty."""
    features = [proposal.features for each in measured for proposal in each.found]
    if not features:
        raise InvalidInput("all holes lie in one file; give more minutes or more files", field="minutes")
    return ProposalRanker.fit(features, [nats < each.prefix for each in measured for nats in each.with_each])
