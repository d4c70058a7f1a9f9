"""Texts with drafts follow the model's own law: a chi-square test against the probability of every text."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from batch_helpers import start
from conftest import SHAPE
from reference import decode_plainly, mix_plainly
from tokenizers.models import BPE

from memlm.api.generation import Completion, DraftSource, FinishReason
from memlm.api.params import GenerateRequest
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import END_OF_TEXT, Tokenizer
from memlm.generation.drive import complete_all
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

LETTERS = "abc"  # the tokens 1 to 3; token 0 ends a text
PROMPT, LENGTH, TEXTS, AT_ONCE = "abcab", 4, 2000, 250
FIRST_SEED = 10_000
MEMORY = {"k": 8, "lam": 0.4, "loop_guard": False}
LEAST_EXPECTED = 5.0  # texts of a cell, for chi-square to hold; rarer ones share a cell


@pytest.fixture(scope="module")
def four_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three letters and the end of text, of which none is rare."""
    vocabulary = {END_OF_TEXT: 0, **{letter: 1 + number for number, letter in enumerate(LETTERS)}}
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.add_special_tokens([END_OF_TEXT])
    torch.manual_seed(3)
    decoder = Decoder(ModelConfig(vocab_size=len(vocabulary), **SHAPE))
    with torch.no_grad():
        decoder.embedding.weight.mul_(3)
    folder = tmp_path_factory.mktemp("law") / "four-tokens"
    save_checkpoint(folder, decoder, Tokenizer(backend))
    return folder


@pytest.fixture(scope="module")
def plain(four_tokens: Path) -> LanguageModel:
    return LanguageModel(load_checkpoint(four_tokens))


@pytest.fixture(scope="module")
def with_memory(four_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Documents that go on after the prompt for 0, 1 and 2 tokens, so that drafts of 3 reach past their ends."""
    folder = tmp_path_factory.mktemp("law-store")
    for number, text in enumerate(("cabcab", "bcabca", "aabcabb", "abcabcb")):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    build_index(four_tokens, Corpus([folder]), folder / "store", check="none")
    return LanguageModel(load_checkpoint(four_tokens), [folder / "store"])


def law(checkpoint: Checkpoint, next_of: Callable[[Sequence[int]], np.ndarray]) -> dict[str, float]:
    """The probability of each text of at most LENGTH tokens. One that ended earlier carries a full stop."""
    start = [checkpoint.tokenizer.start_id, *checkpoint.tokenizer.encode(PROMPT).tolist()]
    growing, ended = {"": 1.0}, dict[str, float]()
    for _ in range(LENGTH):
        grown = dict[str, float]()
        for text, probability in growing.items():
            end, *others = next_of([*start, *(1 + LETTERS.index(letter) for letter in text)])
            ended[f"{text}."] = probability * end
            grown |= {text + letter: probability * other for letter, other in zip(LETTERS, others, strict=True)}
        growing = grown
    return {**ended, **growing}


def next_of_model(checkpoint: Checkpoint) -> Callable[[Sequence[int]], np.ndarray]:
    return lambda ids: np.exp(decode_plainly(checkpoint.decoder, list(ids))[0][-1])


def next_with_memory(lm: LanguageModel) -> Callable[[Sequence[int]], np.ndarray]:
    (store,) = lm.engine.stores
    snapshot = store.usable.snapshot
    temperature = snapshot.defaults.temperature

    def probabilities(ids: Sequence[int]) -> np.ndarray:
        logprobs_TV, keys_TD = decode_plainly(lm.checkpoint.decoder, list(ids))
        near = snapshot.search(keys_TD[-1:].astype(np.float32), MEMORY["k"])
        return mix_plainly(
            np.exp(logprobs_TV[-1]), near.distances_QK[0].tolist(), near.values_QK[0].tolist(),
            temperature, MEMORY["lam"],
        )  # fmt: skip

    return probabilities


def p_value(texts: Sequence[str], law: dict[str, float]) -> float:
    """Of Pearson's chi-square test: how likely texts of this law are at least as far from it."""
    counts, (seen, expected) = Counter(texts), (list[float](), list[float]())
    rare_seen = rare_expected = 0.0
    for text, probability in law.items():
        if probability * len(texts) >= LEAST_EXPECTED:
            seen.append(counts.pop(text, 0))
            expected.append(probability * len(texts))
        else:
            rare_seen, rare_expected = rare_seen + counts.pop(text, 0), rare_expected + probability * len(texts)
    assert not counts, f"texts outside the law: {counts}"
    if rare_expected:
        seen, expected = [*seen, rare_seen], [*expected, rare_expected]
    assert sum(expected) == pytest.approx(len(texts))
    statistic = sum((one - other) ** 2 / other for one, other in zip(seen, expected, strict=True))
    half_degrees, half_statistic = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, half_statistic))


def write(lm: LanguageModel, expected: Sequence[str], first_seed: int, **options: Any) -> list[Completion]:
    """One text for each expected one, of consecutive seeds."""
    options = {"max_tokens": LENGTH, **options}
    requests = [
        GenerateRequest.of(PROMPT, {**options, "draft": draft, "seed": first_seed + number})
        for number, draft in enumerate(expected)
    ]
    completions = list[Completion]()
    for begin in range(0, len(requests), AT_ONCE):
        generations = [start(lm, request) for request in requests[begin : begin + AT_ONCE]]
        completions += complete_all(lm.checkpoint, generations)
    return completions


def texts_of(completions: Sequence[Completion]) -> list[str]:
    """As `law` names them."""
    return [each.text + "." * (each.finished.reason == FinishReason.END) for each in completions]


def counts_of(completions: Sequence[Completion], source: DraftSource) -> tuple[int, int]:
    """How many tokens a source drafted, and how many of them were accepted."""
    found = [each for text in completions for each in text.finished.usage.drafts if each.source == source]
    return sum(each.drafted for each in found), sum(each.accepted for each in found)


@pytest.fixture(scope="module")
def undrafted(plain: LanguageModel) -> list[str]:
    return [each.text for each in write(plain, [""] * TEXTS, FIRST_SEED, drafts=0)]


def shifted(text: str) -> str:
    """Another letter at each place."""
    return text.translate(str.maketrans(LETTERS, LETTERS[1:] + LETTERS[:1]))


@pytest.mark.parametrize("kind", ["right", "wrong", "fixed", "beyond"])
def test_texts_follow_the_law_of_the_model(plain, undrafted, kind):
    """Drafts are the text of the same seed (right), never it (wrong), one for all seeds (fixed), or longer than it may
    become (beyond).
    """
    expected = {
        "right": undrafted,
        "wrong": [shifted(text) for text in undrafted],
        "fixed": ["abca"] * TEXTS,
        "beyond": [f"{text}abcabcabc" for text in undrafted],
    }[kind]
    found = write(plain, expected, FIRST_SEED, drafts=9)
    drafted, accepted = counts_of(found, DraftSource.REQUEST)
    assert drafted > TEXTS
    least, most = {"right": (1, 1), "wrong": (0, 0.01), "fixed": (0.2, 0.8), "beyond": (0.8, 1)}[kind]
    assert least <= accepted / drafted <= most
    assert p_value(texts_of(found), law(plain.checkpoint, next_of_model(plain.checkpoint))) > 0.01


def test_texts_follow_the_law_of_the_mixture_when_drafts_reach_past_a_document(with_memory):
    found = write(with_memory, [""] * TEXTS, FIRST_SEED, drafts=9, **MEMORY)
    for source in (DraftSource.NEIGHBORS, DraftSource.DATASTORE):
        drafted, accepted = counts_of(found, source)
        assert 0 < accepted < drafted
    assert p_value(texts_of(found), law(with_memory.checkpoint, next_with_memory(with_memory))) > 0.01
