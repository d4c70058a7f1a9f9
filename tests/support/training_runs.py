"""Tiny training runs, and ways to interrupt them."""

import csv
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.model import Decoder
from memlm.training.config import TrainConfig
from memlm.training.validation import HeldOut

TINY = TrainConfig(
    dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ff_dim=24, context_length=16, vocab_size=300,
    batch_size=4, steps=12, checkpoint_every=5,
)  # fmt: skip

MEMORY = {"xl_length": 8, "memorizing": {"layers": [0], "top_k": 4, "capacity": 40}}
REMEMBERING = replace(TINY, model_fields=MEMORY, dtype="float32")
COMPRESSING = replace(TINY, model_fields={"xl_length": 16, "compression": {"length": 4, "rate": 4}})


class Killed(Exception):
    """Stands for a kill in the middle of training."""


def kill_at(step: int):
    def progress(phase: str, done: int, total: int | None, note: str = "") -> None:
        if phase == "train" and done == step:
            raise Killed

    return progress


def loss_on(valid: Corpus, decoder: Decoder, tokenizer: Tokenizer) -> float:
    """Nats per token of documents, each read with an empty memory."""
    return HeldOut(valid, tokenizer).loss(decoder)


def token_file(folder: Path, sizes: list[int], end_id: int = 0) -> Path:
    """Documents whose tokens tell where they stand: 1000 x document + place."""
    documents = [[end_id, *(1000 * (n + 1) + place for place in range(size))] for n, size in enumerate(sizes)]
    np.array([*chain.from_iterable(documents), end_id], dtype="<u4").tofile(folder / "t")
    return folder / "t"


def metrics_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((path / "metrics.csv").read_text().splitlines()))
