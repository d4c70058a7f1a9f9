"""Tiny real parts, made once a session: text, a tokenizer, a model, a datastore."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memlm.build import build_index
from memlm.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from memlm.corpus import Corpus
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.tokenizer import Tokenizer

SHAPE = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 48, "context_length": 48}
WORDS = [
    "the",
    "memory",
    "of",
    "a",
    "model",
    "can",
    "be",
    "read",
    "and",
    "edited",
    "while",
    "it",
    "serves;",
    "delete",
    "a",
    "page,",
    "and",
    "it",
    "is",
    "silent:",
    "é",
    "猫",
    "🙂",
]


def make_text(seed: int, num_words: int) -> str:
    """Sentences of few words, so that there is something to remember."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(num_words)]
    return " ".join(word + ("\n" if rng.random() < 0.25 else "") for word in words)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        (folder / f"doc-{number}.txt").write_text(make_text(number, 40 + 37 * number), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(corpus_folder: Path) -> Tokenizer:
    return Tokenizer.train((document.text for document in Corpus([corpus_folder])), vocab_size=300)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A decoder with random parameters, large enough that its predictions differ from place to place."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    decoder = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    save_checkpoint(folder, decoder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def checkpoint(model_folder: Path) -> Checkpoint:
    return load_checkpoint(model_folder)


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path) -> Path:
    """A datastore that tests only read."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    build_index(model_folder, Corpus([corpus_folder]), folder)
    return folder


@pytest.fixture
def lm(model_folder: Path, store_folder: Path) -> Iterator[LanguageModel]:
    with LanguageModel(load_checkpoint(model_folder), [store_folder]) as lm:
        yield lm
