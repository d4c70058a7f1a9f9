"""Our library against llama.cpp, on the same weights: greedy texts of one and several streams, prompts, and loading."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memlm.base.progress import Progress
from memlm.bench.llama_cpp import LlamaCpp, convert, library
from memlm.bench.texts import alternately, median_ratio, workplace
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel, load
from memlm.model.files.catalog import find_model
from memlm.model.files.gguf import is_gguf

STREAMS = (1, 4, 16)
START_TOKENS, NEW_TOKENS, PROMPT_TOKENS = 32, 64, 512
FIRST_TOKEN = (
    """
import time; begin = time.perf_counter()
from memlm import load
imported = time.perf_counter()
lm = load(PATH)
lm.generate("The", max_tokens=1, temperature=0).result()
""",
    """
import time; begin = time.perf_counter()
from memlm.bench.llama_cpp import LlamaCpp, library
from pathlib import Path
library()
imported = time.perf_counter()
LlamaCpp(Path(PATH), streams=1, context=512, threads=THREADS).read([504])
""",
)  # of ours and of theirs


def bench_versus_llama_cpp(
    model: str | Path, store: str | Path | None = None, *, repeats: int, progress: Progress
) -> dict[str, Any]:
    """`<kind>_<streams>_over_llama_cpp` are our tokens/s relative to theirs with the weights in that kind: `source` as
    they are in the file, Q8_0 and F16 as llama.cpp converts them. `<kind>_prompt` compares prompts of 512 tokens,
    `<kind>_first_token` the time from a model on the disk to the first token, without the imports, and
    `<kind>_process` the time of such a process.

    Ours is the library with `--dtype auto`, theirs is called below its Python interface. Both use as many threads as
    torch. With a datastore, `<kind>_1_with_store_over_without` is our speed with it over that without. Raises
    InvalidInput for a model that is no GGUF file.
    """
    library()
    path = find_model(model)
    if not is_gguf(path):
        raise InvalidInput(f"{model} is no GGUF file, and llama.cpp reads no other; give one", field="model")
    figures: dict[str, Any] = {"tokens": NEW_TOKENS}
    with workplace() as folder:
        files = {"source": path} | {kind: convert(path, kind, folder / f"{kind}.gguf") for kind in ("Q8_0", "F16")}
        for number, (kind, file) in enumerate(files.items()):
            progress("compare", number, len(files), kind)
            searched = store if file is path else None  # other types of weights give other keys
            with _both(file, searched) as (ours, theirs):
                figures |= _compared(kind, ours, theirs, repeats)
                if searched is not None:
                    figures |= _with_store(kind, ours, repeats)
            figures |= _first_tokens(kind, file, repeats)
        progress("compare", len(files), len(files))
    return figures


@contextmanager
def _both(file: Path, store: str | Path | None) -> Iterator[tuple[LanguageModel, LlamaCpp]]:
    context = PROMPT_TOKENS + NEW_TOKENS
    theirs = LlamaCpp(file, streams=max(STREAMS), context=context, threads=torch.get_num_threads())
    try:
        with load(file, [] if store is None else [store]) as ours:
            ours.engine.prefixes.max_bytes = 0  # each repetition reads its prompt
            yield ours, theirs
    finally:
        theirs.close()


def _compared(kind: str, ours: LanguageModel, theirs: LlamaCpp, repeats: int) -> dict[str, Any]:
    prompt = _prompt(ours, PROMPT_TOKENS)
    figures: dict[str, Any] = {"dtype": ours.info.dtype} if kind == "source" else {}
    for streams in STREAMS:
        pair = (
            lambda streams=streams: _our_speed(ours, prompt[:START_TOKENS], streams),
            lambda streams=streams: _their_speed(theirs, prompt[:START_TOKENS], streams),
        )
        figures |= _ratio(f"{kind}_{streams}", "tokens_per_s", repeats, *pair)
    return figures | _ratio(
        f"{kind}_prompt", "tokens_per_s", repeats,
        lambda: PROMPT_TOKENS / _seconds(lambda: _generated(ours, [prompt], 1)),
        lambda: PROMPT_TOKENS / _seconds(lambda: theirs.read(prompt)),
    )  # fmt: skip


def _with_store(kind: str, ours: LanguageModel, repeats: int) -> dict[str, Any]:
    prompt = _prompt(ours, START_TOKENS)
    speeds = alternately(
        repeats, lambda: _our_speed(ours, prompt, 1, use_store=True), lambda: _our_speed(ours, prompt, 1)
    )
    return _named(f"{kind}_1_with_store_over_without", median_ratio(*speeds))


def _first_tokens(kind: str, file: Path, repeats: int) -> dict[str, Any]:
    runs = [[_first_token(script, file) for script in FIRST_TOKEN] for _ in range(repeats)]
    figures: dict[str, Any] = {}
    for number, name in enumerate(("process", "first_token")):
        ours, theirs = ([run[side][number] for run in runs] for side in range(2))
        medians = [statistics.median(each) for each in (ours, theirs)]
        figures |= dict(zip((f"{kind}_{name}_s", f"{kind}_{name}_llama_cpp_s"), medians, strict=True))
        figures |= _named(f"{kind}_{name}_over_llama_cpp", median_ratio(ours, theirs))
    return figures


def _first_token(script: str, file: Path) -> tuple[float, float]:
    """Seconds of a process from its start to a token, and of those after its imports."""
    code = f"PATH, THREADS = {str(file)!r}, {torch.get_num_threads()}\n{script}\nprint(time.perf_counter() - imported)"
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, float(done.stdout.split()[-1])


def _ratio(
    name: str, unit: str, repeats: int, ours: Callable[[], float], theirs: Callable[[], float]
) -> dict[str, Any]:
    ours()  # warms both sides up
    theirs()
    speeds = alternately(repeats, ours, theirs)
    medians = [statistics.median(each) for each in speeds]
    return {f"{name}_{unit}": medians[0], f"{name}_llama_cpp_{unit}": medians[1]} | _named(
        f"{name}_over_llama_cpp", median_ratio(*speeds)
    )


def _named(name: str, ratio: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_least", f"{name}_most"), ratio, strict=True))


def _prompt(ours: LanguageModel, num_tokens: int) -> list[int]:
    """Numbers in words, which a model continues without an end."""
    text = ", ".join(f"{number} times {number} is {number * number}" for number in range(num_tokens))
    return ours.tokenizer.encode(text).tolist()[:num_tokens]


def _our_speed(ours: LanguageModel, prompt: Sequence[int], streams: int, *, use_store: bool = False) -> float:
    """Tokens/s after the first token of each stream."""
    first = _seconds(lambda: _generated(ours, [prompt] * streams, 1, use_store=use_store))
    all_of_them = _seconds(lambda: _generated(ours, [prompt] * streams, NEW_TOKENS + 1, use_store=use_store))
    return streams * NEW_TOKENS / (all_of_them - first)


def _generated(ours: LanguageModel, prompts: Sequence[Sequence[int]], count: int, *, use_store: bool = False) -> None:
    # A draft would measure the text, not the engine.
    completions = ours.generate_batch(prompts, max_tokens=count, temperature=0, use_store=use_store, drafts=0)
    if any(len(completion.tokens) != count for completion in completions):
        raise InvalidInput("the model ends its text early; give another one", field="model")


def _their_speed(theirs: LlamaCpp, prompt: Sequence[int], streams: int) -> float:
    tokens = theirs.read(prompt, streams)

    def steps() -> None:
        drawn = tokens
        for number in range(NEW_TOKENS):
            drawn = theirs.step(drawn, len(prompt) + number)

    return streams * NEW_TOKENS / _seconds(steps)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
