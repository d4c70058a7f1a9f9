"""Models of one domain each, mixed by what they predicted so far (arXiv 2108.05036, 2208.03306).

The domains are Python's modules and Python's manual, both of which come with it.

Shapes: B rows, T bytes.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from memlm.bench.learning import TEST_STEP, config_for, learn
from memlm.bench.tasks import Drawn, LibraryText
from memlm.data.tokenizer import Tokenizer
from memlm.generation.model_mixture import MixedText, Reader
from memlm.model import Decoder
from memlm.model.checkpoint import Checkpoint

LENGTH, STEPS, SECONDS = 128, 400, 60.0
TEXTS = 24  # of each kind; a mixture reads one at a time
TRAINING = {"batch_size": 16}
DOMAINS = ("code", "prose")


@dataclass(frozen=True, eq=False)
class DomainText(LibraryText):
    """Windows of modules (`code`), of the topics of the manual (`prose`: English, with some code), or of one domain in
    half of the rows and of the other in the rest (`both`). A model begins as `begins`, or at random.
    """

    domain: str = "code"
    begins: Decoder | None = None

    @property
    def source(self) -> np.ndarray:
        """All bytes of one domain."""
        return super().source if self.domain == "code" else _manual_bytes()

    def prepare(self, decoder: Decoder) -> None:
        """Begins a model."""
        if self.begins is not None:
            decoder.load_state_dict(self.begins.state_dict())

    def draw(self, generator: np.random.Generator, rows: int, stage: Any) -> Drawn:
        """Returns random texts."""
        if self.domain != "both":
            return super().draw(generator, rows, stage)
        parts = [replace(self, domain=domain).draw(generator, rows // 2, stage) for domain in DOMAINS]
        return Drawn(*(np.concatenate(each) for each in zip(*parts, strict=True)))


@cache
def _manual_bytes() -> np.ndarray:
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)


def bench_domains(seed: int) -> Mapping[str, dict[str, float]]:
    """Trains a model on both domains, and then one branch of it on each domain, and one on both for as many steps as
    the two together. Returns bits a byte of held-out texts of each domain (`bits_code`, `bits_prose`) and of texts that
    change from one to the other in the middle (`bits_change`), of each branch and of the mixture. `share_N` of the
    mixture is the weight of the domain's own model behind N bytes.
    """
    begin = _learned(DomainText(LENGTH, domain="both"), STEPS, seed)
    models = {}
    for domain, steps in (("code", STEPS // 2), ("prose", STEPS // 2), ("both", STEPS)):
        learned = _learned(DomainText(LENGTH, domain=domain, begins=begin), steps, seed + 1000)
        models[domain] = Checkpoint(Path(domain), learned, _tokenizer())
    texts = held_out_texts(seed)
    rows = {
        f"branch of {name}": {f"bits_{kind}": bits([model], each) for kind, each in texts.items()}
        for name, model in models.items()
    }
    experts = [models[domain] for domain in DOMAINS]
    mixed = {f"bits_{kind}": bits(experts, each) for kind, each in texts.items()}
    for length in (8, 32):
        own = [shares(experts, texts[kind][:, :length])[:, number] for number, kind in enumerate(DOMAINS)]
        mixed[f"share_{length}"] = float(np.mean(own))
    return {**rows, "mixture of code and prose": mixed}


def held_out_texts(seed: int) -> dict[str, np.ndarray]:
    """Returns texts (B, T) of code, of prose, and half of each."""
    generator = np.random.default_rng([seed, TEST_STEP])
    code_BT, prose_BT = (
        DomainText(LENGTH, domain=domain).held_out.draw(generator, TEXTS, None).inputs_BT for domain in DOMAINS
    )
    half = LENGTH // 2
    changes = [(code_BT, prose_BT), (prose_BT, code_BT)]
    change_BT = np.concatenate([np.hstack([a[: TEXTS // 2, :half], b[: TEXTS // 2, half:]]) for a, b in changes])
    return {"code": code_BT, "prose": prose_BT, "change": change_BT}


def bits(models: list[Checkpoint], text_BT: np.ndarray) -> float:
    """Returns bits a byte of texts, but for their first bytes, in the mixture of some models."""
    logprobs = [each for text in text_BT.tolist() for each in _read(models, len(text)).logprobs(text)]
    return -float(np.mean(logprobs)) / math.log(2)


def shares(models: list[Checkpoint], text_BT: np.ndarray) -> np.ndarray:
    """Returns the weight of each model behind each text (B, D)."""
    posteriors = []
    for text in text_BT.tolist():
        mixed = _read(models, len(text))
        mixed.read(text)
        posteriors.append(mixed.posterior)
    return np.array(posteriors)


def _learned(task: DomainText, steps: int, seed: int) -> Decoder:
    limit_s = SECONDS * steps / STEPS
    return learn(config_for(task), task, steps=steps, seconds=limit_s, seed=seed, training=TRAINING).decoder.eval()


def _read(models: list[Checkpoint], capacity: int) -> MixedText:
    return MixedText([Reader(model) for model in models], [1.0] * len(models), top=0, capacity=capacity)


@cache
def _tokenizer() -> Tokenizer:
    """A tokenizer of bytes, which models of a mixture share. Texts here are ids already."""
    return Tokenizer.train([], vocab_size=257)
