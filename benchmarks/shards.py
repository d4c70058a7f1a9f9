"""Shards on this machine: the time of a hop, and of a token with shards over one process."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from memlm.base.progress import Progress
from memlm.bench.texts import TOKENS, alternately, median_ratio, workplace
from memlm.distributed.shards import Shards
from memlm.errors import InternalError
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.exclusion import search_views
from memlm.index.store.manifest import StoreSpec
from memlm.index.store.shards import split
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.writer import StoreWriter
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint

HOP_QUERIES, HOP_K, HOPS = 8, 64, 2000
ENDED_S = 60.0
WAYS: dict[str, dict[str, Any]] = {"no drafts": {"drafts": 0}, "drafts": {}}
PROMPTS = ("lemma ", "The ", "import os\n\n\ndef main(", "theorem ")


def bench_shards(
    model: Path, store: Path, *, shards: int, repeats: int, dtype: str, progress: Progress
) -> dict[str, Any]:
    """Each row compares a copy of the datastore in `shards` processes, on Unix sockets, with that copy in this process:
    the ratio of their times a token. `identical` says whether all texts were. A hop is a search of 8
    queries in a store of 64 entries in another process, beside the same search in this one.
    """
    with workplace() as folder, ExitStack() as held:
        copy = Path(shutil.copytree(store, folder / "store"))
        split(copy, shards, progress)
        checkpoint = load_checkpoint(model, dtype=dtype)
        hops = {name: _hop(folder / name, listen) for name, listen in (("tcp", "127.0.0.1:0"), ("unix", ""))}
        addresses = held.enter_context(_served(copy, shards, folder))
        alone = held.enter_context(LanguageModel(checkpoint, [copy]))
        sharded = held.enter_context(LanguageModel(checkpoint, [copy], shards=addresses))
        rows, identical = [], True
        for number, (name, options) in enumerate(WAYS.items()):
            texts: dict[LanguageModel, list[str]] = {alone: [], sharded: []}
            for lm in texts:
                _time_per_token(lm, texts[lm], options)
            progress("generate", number, 2)
            times = alternately(
                repeats,
                partial(_time_per_token, sharded, texts[sharded], options),
                partial(_time_per_token, alone, texts[alone], options),
            )
            ratio, least, most = median_ratio(*times)
            identical &= texts[alone] == texts[sharded]
            rows.append(
                {
                    "way": name, "sharded_over_alone": ratio,
                    "sharded_over_alone_least": least, "sharded_over_alone_most": most,
                    "ms_per_token_sharded": statistics.median(times[0]), "ms_per_token": statistics.median(times[1]),
                }
            )  # fmt: skip
        with Datastore.open(copy) as opened:
            entries, segments = opened.snapshot.num_entries, len(opened.snapshot.segments)
    return {
        "rows": rows, "identical": identical, "hops": hops, "shards": shards, "segments": segments, "entries": entries,
        "model": checkpoint.path.name,
    }  # fmt: skip


@contextmanager
def _served(store: Path, shards: int, folder: Path, listen: str = "") -> Iterator[list[str]]:
    """Starts the processes of all shards, on sockets in a folder unless `listen` has an address. Yields addresses."""
    started = list[subprocess.Popen[str]]()
    addresses = []
    try:
        for number in range(1, shards + 1):
            address = listen or f"unix:{folder}/{number}.sock"
            command = [sys.executable, "-m", "memlm", "shard", str(store), "--shard", f"{number}/{shards}"]
            started.append(subprocess.Popen([*command, "--listen", address], stderr=subprocess.PIPE, text=True))
        for process in started:
            assert process.stderr is not None
            output = ""
            while "entries at" not in output:
                if not (line := process.stderr.readline()):
                    raise InternalError(f"a shard did not start: {output}")
                output += line
            addresses.append(output.split("entries at", 1)[1].split()[0])
        yield addresses
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.communicate(timeout=ENDED_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _hop(folder: Path, listen: str) -> dict[str, float]:
    """Milliseconds of a search in another process, of one in this process, and of the hop between them."""
    keys_ND = np.random.default_rng(0).normal(size=(HOP_K, 576)).astype(np.float32)
    spec = StoreSpec(
        dim=keys_ND.shape[1], model_fingerprint="", tokenizer_fingerprint="", context=2, stride=1, index="Flat"
    )
    with StoreWriter.create(folder, spec) as writer:
        writer.begin_document("document")
        writer.append(keys_ND, np.arange(HOP_K))
        datastore = writer.commit()
    with datastore, _served(folder, 1, folder, listen) as addresses, Shards(addresses) as shards:
        views_Q, queries_QD = [datastore.snapshot] * HOP_QUERIES, keys_ND[:HOP_QUERIES]
        there, here = alternately(
            HOPS, lambda: _milliseconds(shards, views_Q, queries_QD), lambda: _milliseconds(None, views_Q, queries_QD)
        )
    p50, p99 = np.percentile(there, (50, 99)).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "here_p50_ms": statistics.median(here)}


def _milliseconds(shards: Shards | None, views_Q: Sequence[Snapshot], queries_QD: Float32[np.ndarray, "Q D"]) -> float:
    search = search_views if shards is None else shards.search
    begin = time.perf_counter()
    found: Neighbors = search(views_Q, queries_QD, HOP_K)
    took_s = time.perf_counter() - begin
    assert (found.ids_QK[:, 0] >= 0).all()
    return 1000 * took_s


def _time_per_token(lm: LanguageModel, texts: list[str], options: dict[str, Any]) -> float:
    """Milliseconds per token after the first one, over the prompts. Appends the texts."""
    seconds, drawn = 0.0, 0
    for prompt in PROMPTS:
        with lm.generate(prompt, max_tokens=TOKENS // len(PROMPTS), temperature=0, stop=(), **options) as stream:
            tokens = [next(stream).text]
            begin = time.perf_counter()
            tokens += [token.text for token in stream]
            seconds += time.perf_counter() - begin
        drawn += len(tokens) - 1
        texts.append("".join(tokens))
    return 1000 * seconds / max(1, drawn)
