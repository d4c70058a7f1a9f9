"""MEGABYTE (arXiv 2305.07185) beside a plain decoder of bytes: the work until equal quality, speed and memory.

All rates are of seconds of the processor, on one thread, so that other processes change them less.

Shapes: B rows, T bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlm.bench.learning import TEST_STEP
from memlm.bench.tasks import LibraryText
from memlm.model import Decoder, ModelConfig
from memlm.zoo.fitting import fit
from memlm.zoo.megabyte import Megabyte, MegabyteConfig

PATCH, CONTEXT = 4, 8192
SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "context_length": CONTEXT}
PLAIN = ModelConfig(vocab_size=256, dim=128, num_layers=4, ff_dim=256, **SHAPE)
# A wide model that reads a quarter of the places, and a small one behind it.
PATCHES = MegabyteConfig(
    PATCH,
    ModelConfig(vocab_size=1, dim=192, num_layers=3, ff_dim=384, **SHAPE),
    ModelConfig(vocab_size=256, dim=64, num_layers=2, ff_dim=128, **SHAPE),
)
TEXT = LibraryText(length=512)
STEPS, STEPS_OF_PATCHES, CHECK_EVERY = 60, 180, 20
BATCH, SCORED, DECODED, READ = 8, 16, 256, 1024
Logits = Callable[[Tensor], Tensor]


class Check(NamedTuple):
    """Bits a byte of held-out text after some steps, and the seconds that the steps took."""

    bits: float
    steps: int
    seconds: float


def bench_patches(seed: int) -> Mapping[str, dict[str, float]]:
    """Trains a plain decoder and MEGABYTE. Returns of both the bits a byte, the bytes read and the seconds until
    MEGABYTE predicts held-out text as well as the plain decoder in the end, or to its own end, bytes/s of learning and
    of decoding behind 1,024 bytes, KiB of a state for 8,192 bytes, and parameters.
    """
    torch.manual_seed(seed)
    decoder = Decoder(PLAIN)
    plain = _learn(decoder, lambda bytes_BT: decoder.logits(decoder(bytes_BT[:, :-1])[0]), seed, STEPS)[-1]
    torch.manual_seed(seed)
    model = Megabyte(PATCHES)
    checks = _learn(model, lambda bytes_BT: model.predict(bytes_BT)[:, 1:], seed, STEPS_OF_PATCHES)
    equal = next((check for check in checks if check.bits <= plain.bits), checks[-1])
    return {
        "plain": _figures(plain, decoder) | decode_plain(decoder),
        "megabyte": _figures(equal, model) | decode_patches(model),
    }


def _figures(check: Check, model: nn.Module) -> dict[str, float]:
    num_bytes = float(check.steps * BATCH * TEXT.length)
    return {
        "bits_a_byte": check.bits,
        "learned_bytes": num_bytes,
        "learning_seconds": check.seconds,
        "learned_bytes_per_s": num_bytes / check.seconds,
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
    }


def _learn(model: nn.Module, logits_of: Logits, seed: int, steps: int) -> list[Check]:
    """Trains a model, with a check every `CHECK_EVERY` steps and at the end. `logits_of` returns the scores of all
    bytes of texts but the first, which a plain model cannot predict.
    """
    torch.optim.AdamW(model.parameters())  # its first one in a process imports for seconds
    checks, begin, apart = list[Check](), time.process_time(), 0.0

    def loss_of(bytes_BT: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(bytes_BT).flatten(0, 1), bytes_BT[:, 1:].flatten())

    def check(step: int) -> None:
        nonlocal apart
        begin_check = time.process_time()
        with torch.inference_mode():
            nats = float(loss_of(_texts(TEXT.held_out, [seed, TEST_STEP], SCORED)))
        checks.append(Check(nats / math.log(2), step, begin_check - begin - apart))
        apart += time.process_time() - begin_check

    def loss_at(step: int) -> Tensor:
        if step and step % CHECK_EVERY == 0:
            check(step)
        return loss_of(_texts(TEXT, [seed, step], BATCH))

    fit(model, loss_at, steps=steps)
    check(steps)
    return checks


def _texts(task: LibraryText, seed: list[int], rows: int) -> Tensor:
    return torch.from_numpy(task.draw(np.random.default_rng(seed), rows, None).inputs_BT)


def _prompt() -> Tensor:
    return _texts(TEXT.held_out, [0], READ // TEXT.length).reshape(1, -1)


@torch.inference_mode()
def decode_plain(decoder: Decoder) -> dict[str, float]:
    """Returns bytes/s behind a prompt, and KiB of the state."""
    state = decoder.new_state(capacity=CONTEXT)
    hidden_1TD, _ = decoder(_prompt(), state)
    next_11, begin = decoder.logits(hidden_1TD[:, -1]).argmax(dim=1, keepdim=True), time.process_time()
    for _ in range(DECODED):
        next_11 = decoder.logits(decoder(next_11, state)[0][:, -1]).argmax(dim=1, keepdim=True)
    return _decoded(begin, state.num_bytes)


@torch.inference_mode()
def decode_patches(model: Megabyte) -> dict[str, float]:
    """Returns bytes/s behind a prompt, and KiB of the state."""
    state = model.new_state(capacity=CONTEXT - PATCH)  # one place is that of the vector before the first patch
    model.read(_prompt(), state)
    begin = time.process_time()
    model.generate(num_bytes=DECODED, temperature=0, state=state)
    return _decoded(begin, state.num_bytes)


def _decoded(begin: float, state_bytes: int) -> dict[str, float]:
    return {
        "decoded_bytes_per_s": DECODED / (time.process_time() - begin),
        "kib_a_session": state_bytes / 1024,
    }
