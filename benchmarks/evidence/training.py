"""Evidence: a datastore against training on more text (arXiv 1911.00172, table 3).

Models of the tiny preset learn here. The first one reads a quarter of the domain's text, and a datastore of its keys
holds the rest. Beside it stand models that learn from all of the text: for equally many tokens, and for the processor
time that the first one and its datastore took together. All have the tokenizer of the first one.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.evidence.domains import (
    ALONE,
    CACHE,
    WAYS,
    ReadText,
    prepare,
    read_document,
    read_test,
    windows_for,
    work_clock,
)
from benchmarks.evidence.texts import Domain, Sizes
from benchmarks.per_token import per_token
from memlm.base.progress import Progress
from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.training.config import PRESETS, TrainConfig
from memlm.training.train import train

SHARE = 0.25  # of the text, for the first model
SETTINGS = PRESETS["tiny"]
QUARTER, EQUAL_TOKENS, EQUAL_TIME = "quarter", "equal_tokens", "equal_time"


class Learned(NamedTuple):
    """A model, and the steps, tokens and seconds of `work_clock` that its training took."""

    checkpoint: Checkpoint
    steps: int
    tokens_seen: int
    processor_s: float


class Stored(NamedTuple):
    """The test documents as a model with a datastore read them, the entries, and the seconds of `work_clock` for the
    datastore and its tuning.
    """

    texts: Sequence[ReadText]
    entries: int
    processor_s: float


def training(
    checkpoint: Checkpoint, domain: Domain, folder: Path, sizes: Sizes, progress: Progress
) -> list[dict[str, Any]]:
    """A row for each model and way: nats a token, and how many fewer than the first model alone has. `processor_s` are
    the seconds of the processor for the training, and for the datastore if the way has one. With a GPU they are seconds
    that pass.

    `checkpoint` gives the dtype and the device. Removes what an earlier run left in the folder, because times are of
    one run. Raises InvalidInput for a domain with too little text.
    """
    shutil.rmtree(folder, ignore_errors=True)
    part, rest = parts_of(domain.stored)
    tokenizer = Tokenizer.train((document.text for document in part), vocab_size=SETTINGS.vocab_size)

    def learned(name: str, documents: Sequence[Document], **length: Any) -> Learned:
        config = replace(SETTINGS, **length)
        return _learned(documents, tokenizer, folder / name, config, checkpoint, progress)

    def stored(name: str, model: Learned) -> Stored:
        return _stored(model.checkpoint, replace(domain, stored=rest), folder / f"{name}-datastore", sizes, progress)

    first = learned(QUARTER, part, minutes=sizes.minutes)
    first_stored = stored(QUARTER, first)
    rows = _rows(domain, QUARTER, first, first_stored, first_stored.texts)
    same = learned(EQUAL_TOKENS, domain.stored, steps=first.steps)
    texts = [_read(same.checkpoint, document) for document in domain.test]
    rows += _rows(domain, EQUAL_TOKENS, same, Stored(texts, 0, 0.0), first_stored.texts)
    steps = max(1, round(first.steps * (1 + first_stored.processor_s / first.processor_s)))
    longer = learned(EQUAL_TIME, domain.stored, steps=steps)
    return rows + _rows(domain, EQUAL_TIME, longer, stored(EQUAL_TIME, longer), first_stored.texts)


def parts_of(documents: Sequence[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """The first documents with a quarter of all bytes, and the others. Raises InvalidInput for fewer than two."""
    if len(documents) < 2:
        raise InvalidInput(
            f"there are {len(documents)} documents to learn from and to store; give two or more", field="domains"
        )
    sizes_D = np.cumsum([document.num_bytes for document in documents])
    count = int(np.searchsorted(sizes_D, SHARE * sizes_D[-1])) + 1
    count = min(count, len(documents) - 1)
    return tuple(documents[:count]), tuple(documents[count:])


def _learned(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    folder: Path,
    config: TrainConfig,
    like: Checkpoint,
    progress: Progress,
) -> Learned:
    device = like.decoder.device
    clock = work_clock(device)
    config, begin = replace(config, device="cuda" if device.type == "cuda" else "cpu"), clock()
    report = train(Corpus(documents), folder, config, tokenizer=tokenizer, progress=progress)
    processor_s = clock() - begin
    checkpoint = load_checkpoint(folder, dtype=like.decoder.dtype, device=device)
    return Learned(checkpoint, report.steps, report.tokens, processor_s)


def _stored(checkpoint: Checkpoint, domain: Domain, folder: Path, sizes: Sizes, progress: Progress) -> Stored:
    prepared = prepare(checkpoint, domain, folder, sizes, progress)
    with Datastore.open(prepared.store) as datastore:
        entries = datastore.snapshot.num_entries
    return Stored(read_test(checkpoint, prepared, progress), entries, prepared.store_s)


def _read(checkpoint: Checkpoint, document: Document) -> ReadText:
    read = read_document(checkpoint, document, windows_for(checkpoint))
    return ReadText(document, read, {ALONE: read.lm_logprobs_N})


def _rows(domain: Domain, name: str, model: Learned, stored: Stored, first: Sequence[ReadText]) -> list[dict[str, Any]]:
    """A row for the model alone and for each way of its datastore, if it has one."""
    rows = []
    for way in (ALONE, *WAYS) if stored.entries else (ALONE,):
        cost: dict[str, float] = {"entries": 0, "processor_s": model.processor_s}
        if way not in (ALONE, CACHE):
            cost = {"entries": stored.entries, "processor_s": model.processor_s + stored.processor_s}
        words = {"text": domain.name, "way": f"{name} {way}", **cost}
        same = {"documents": len(first), "steps": model.steps, "tokens_seen": model.tokens_seen}
        rows.append({**words, **same, **_nats(stored.texts, way, first)})
    return rows


def _nats(texts: Sequence[ReadText], way: str, first: Sequence[ReadText]) -> dict[str, float]:
    """Nats per token, and how many fewer than the first model alone has, with standard errors over documents."""
    sizes_D = np.array([len(text.logprobs[way]) for text in texts])
    nats_D = -np.array([text.logprobs[way].sum(dtype=np.float64) for text in texts])
    first_D = -np.array([text.logprobs[ALONE].sum(dtype=np.float64) for text in first])
    level, level_error = per_token(nats_D, sizes_D)
    less, error = per_token(first_D - nats_D, sizes_D)
    return {
        "nats_per_token": level, "nats_per_token_error": level_error, "nats_less": less, "nats_less_error": error,
    }  # fmt: skip
