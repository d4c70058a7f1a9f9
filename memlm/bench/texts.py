"""Inputs of the benches: the standard library of the running Python, and a model of the demo's shape."""

from __future__ import annotations

import shutil
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from memlm.api.handles import TokenStream
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.model import Decoder
from memlm.model.files.checkpoint import save_checkpoint
from memlm.training.config import PRESETS

PROMPT = "import os\n\n\ndef main("
TOKENS = 200
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


@contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder."""
    with TemporaryDirectory(prefix="memlm-bench-") as folder:
        yield Path(folder)


def library_texts(folder: Path, num_bytes: int) -> Path:
    """Copies modules of the standard library, tests included, up to a number of bytes. Returns the folder."""
    library, taken = Path(sysconfig.get_path("stdlib")), 0
    for module in sorted(library.rglob("*.py")):
        if LEFT_OUT & set(module.relative_to(library).parts):
            continue
        target = folder / module.relative_to(library)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, target)
        taken += module.stat().st_size
        if taken >= num_bytes:
            break
    return folder


def model_for(given: Path | None, folder: Path, texts: Path) -> Path:
    """The given model, or an untrained one of the demo's shape."""
    if given is not None:
        return given
    config = PRESETS["tiny"]
    tokenizer = Tokenizer.train((document.text for document in Corpus([texts])), vocab_size=config.vocab_size)
    torch.manual_seed(0)
    save_checkpoint(folder, Decoder(config.model(tokenizer.vocab_size)), tokenizer)
    return folder


def alternately(repeats: int, *works: Callable[[], float]) -> list[list[float]]:
    """Runs functions in turn, so that a slow minute hits them all. Returns the results of each."""
    results: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for result, work in zip(results, works, strict=True):
            result.append(work())
    return results


def median_ratio(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """The median, minimum and maximum of the ratios of paired runs."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def time_per_token(generate: Callable[..., TokenStream], seed: int, **options: Any) -> float:
    """Milliseconds per token after the first one, over at least `TOKENS` tokens of one or more texts."""
    seconds, drawn = 0.0, 0
    while drawn < TOKENS:
        with generate(PROMPT, max_tokens=TOKENS, seed=seed, drafts=0, **options) as stream:
            next(stream)
            begin = time.perf_counter()
            drawn += sum(1 for _ in stream)
            seconds += time.perf_counter() - begin
        seed += 1_000_000
    return 1000 * seconds / drawn
