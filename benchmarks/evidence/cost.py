"""Evidence: what each way of remembering costs, in time, bytes and energy.

The ways take turns, prompt by prompt, so that a slow minute of the machine meets all of them. Times are medians over
the prompts, and ratios are medians of the ratios to the model alone on the same prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.energy import EnergyMeter, gpu_joules, resident_bytes
from benchmarks.evidence.domains import ADAPTIVE, ALONE, BOTH, CACHE, ONE_LAM, Prepared
from benchmarks.evidence.passages import QUERY_TOKENS, ROOM, check_lengths, passage_tokens
from benchmarks.evidence.texts import Domain
from memlm.base.progress import Progress
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.context_cache import ContextCache

PASSAGES = "passages"
PROMPT_TOKENS, TOKENS = 256, 64
DERIVED = ("words.sqlite", "cuts.sqlite", "passages.bin", "vectors.bin", "chunks.sqlite")  # of a segment, for passages
NOTHING: dict[str, Any] = {"context_cache": 0}  # of the text's own past
FOR_KEYS = ("keys.npy", "index.faiss")  # of a segment, which passages do not need


@dataclass(frozen=True, slots=True)
class Way:
    """A way of remembering: a model, with a datastore or without, and the options of a request."""

    name: str
    lm: LanguageModel
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds up to the first token and between the first and the last one, the number of tokens, and joules of the
    processor and of the GPU, None where the machine does not tell.
    """

    first_s: float
    rest_s: float
    tokens: int
    joules: float | None
    gpu_joules: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens behind the first one."""
        return (self.tokens - 1) / self.rest_s

    @property
    def s_per_token(self) -> float:
        """Seconds of the whole answer, over its tokens."""
        return (self.first_s + self.rest_s) / self.tokens


def cost(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each way: greedy continuations of the test documents' first tokens, without drafts.

    `disk_bytes` are those of the files that a way reads, `ram_bytes` by how much the process grew with it, or the
    arrays of the context cache. Each is left out where the system does not tell.
    """
    tokenizer, meter = checkpoint.tokenizer, EnergyMeter()
    prompts = [tokenizer.encode(document.text)[:PROMPT_TOKENS].tolist() for document in prepared.domain.test]
    alone, read_each = LanguageModel(checkpoint, max_prefix_bytes=0), LanguageModel(checkpoint, max_prefix_bytes=0)
    with alone as bare, read_each as lm:  # each way reads the same prompts
        for each in (bare, lm):
            each.engine.sessions.context_settings = prepared.past
        ways, ram = _ways(bare, lm, prepared.store, prompts[0], meter)
        turns: dict[str, list[Turn]] = {way: [] for way in ways}
        for number, prompt in enumerate(prompts):
            for way in ways.values():
                turns[way.name].append(_turn(way, prompt, meter))
            progress("generate", number + 1, len(prompts))
    store, text = (disk_bytes(prepared.store, leave_out) for leave_out in (DERIVED, FOR_KEYS))
    disk = {ALONE: 0, ONE_LAM: store, ADAPTIVE: store, CACHE: 0, BOTH: store, PASSAGES: text}
    return [
        {"text": prepared.domain.name, "way": way, "documents": len(prompts), **figures_of(turns[way], turns[ALONE]),
         "disk_bytes": disk[way], **({} if ram is None else {"ram_bytes": ram[way]})}
        for way in ways
    ]  # fmt: skip


def check_cost(checkpoint: Checkpoint, domain: Domain) -> None:
    """Raises InvalidInput for a model whose context is too short for an answer behind passages and a prompt."""
    check_lengths(checkpoint, domain, window=ROOM + PROMPT_TOKENS + TOKENS, document=1)


def _ways(
    bare: LanguageModel, lm: LanguageModel, store: Path, prompt: Sequence[int], meter: EnergyMeter
) -> tuple[dict[str, Way], dict[str, int] | None]:
    """Loads the datastore into one of two models. Returns each way, and the RAM that it needs beside the model."""
    sizes = [_resident_after(Way(ALONE, bare, NOTHING), prompt, meter)]
    lm.load_datastore(store)
    lam = lm.engine.stores.model_store().snapshot.defaults.lam
    every = (
        Way(ALONE, bare, NOTHING),
        Way(ONE_LAM, lm, {**NOTHING, "lam": lam}),
        Way(ADAPTIVE, lm, NOTHING),
        Way(CACHE, bare, {}),
        Way(BOTH, lm, {}),
        Way(PASSAGES, lm, {**NOTHING, "use_store": False}),
    )
    ways = {way.name: way for way in every}
    sizes += [_resident_after(ways[name], prompt, meter) for name in (ADAPTIVE, PASSAGES)]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return ways, None
    of_store, of_passages = (max(0, after - before) for before, after in pairwise(known))
    cache = ContextCache(lm.checkpoint.decoder.config.dim).num_bytes(PROMPT_TOKENS + TOKENS)
    return ways, {
        ALONE: 0, ONE_LAM: of_store, ADAPTIVE: of_store, CACHE: cache, BOTH: of_store + cache, PASSAGES: of_passages,
    }  # fmt: skip


def _resident_after(way: Way, prompt: Sequence[int], meter: EnergyMeter) -> int | None:
    """RAM of the process after an answer, with which a way allocates what it needs."""
    _turn(way, prompt, meter)
    return resident_bytes()


def _turn(way: Way, prompt: Sequence[int], meter: EnergyMeter) -> Turn:
    """One answer. The time of finding passages counts as time before the first token."""
    lm, device = way.lm, way.lm.checkpoint.decoder.device
    gpu_before, before, begin_s = gpu_joules(device), meter.read(), time.perf_counter()
    found = passage_tokens(lm, lm.detokenize(prompt[-QUERY_TOKENS:])) if way.name == PASSAGES else []
    with lm.generate([*found, *prompt], temperature=0, max_tokens=TOKENS, drafts=0, **way.options) as stream:
        next(stream)
        first_s, count = time.perf_counter(), 1 + sum(1 for _ in stream)
    end_s, joules, gpu_after = time.perf_counter(), meter.joules(before, meter.read()), gpu_joules(device)
    of_gpu = None if gpu_before is None or gpu_after is None else gpu_after - gpu_before
    return Turn(first_s - begin_s, end_s - first_s, count, joules, of_gpu)


def figures_of(turns: Sequence[Turn], alone: Sequence[Turn]) -> dict[str, float]:
    """Medians over the turns with the least and the most. `time_over_alone` compares whole answers, token by token."""
    figures = {
        "tokens_per_s": [turn.tokens_per_s for turn in turns],
        "first_token_ms": [1000 * turn.first_s for turn in turns],
        "time_over_alone": [turn.s_per_token / other.s_per_token for turn, other in zip(turns, alone, strict=True)],
        "joules_per_token": [turn.joules / turn.tokens for turn in turns if turn.joules is not None],
        "gpu_joules_per_token": [turn.gpu_joules / turn.tokens for turn in turns if turn.gpu_joules is not None],
    }
    named = dict[str, float]()
    for name, values in figures.items():
        if values:
            named |= {name: statistics.median(values), f"{name}_least": min(values), f"{name}_most": max(values)}
    return named


def disk_bytes(store: Path, leave_out: Collection[str] = ()) -> int:
    """Bytes of the files of a datastore, but for those of some names."""
    files = (file for file in store.rglob("*") if file.is_file() and file.name not in leave_out)
    return sum(file.stat().st_size for file in files)
