"""Pass keys in a long text that a model is asked for: how often it says the right digits, by how long the text is.

A text of the given documents has one sentence, or several that differ in a name and the digits, within the first
window. After one, two, four and eight windows the model is asked for each key. With several it must tell them apart. A
window that moves has left the keys by then. The context cache and extended attention reach them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32

from memlm.base.progress import Progress
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.model.state.decoder_state import DecoderState
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.own_past import ContextSettings, OwnPast
from memlm.retrieval.result import mix_memory

LENGTHS = (1, 2, 4, 8)  # windows of a text before a question
KEYS = (1, 4)  # in a text
NAMES = ("Maria", "Robert", "Anna", "Thomas", "Laura", "Peter", "Susan", "Henry")
QUESTION = "\n\nThe pass key of {} is "


class Needles(NamedTuple):
    """The tokens of a text, and the name and the digits of each key that it tells."""

    ids: list[int]
    keys: list[tuple[str, str]]


class Answer(NamedTuple):
    """Whether each token of an answer would be generated without sampling, and minus its log-probability."""

    is_right: bool
    nats: float


def bench_needles(
    model: Path,
    texts: Corpus,
    settings: ContextSettings,
    *,
    window: int,
    extended_attention: int,
    trials: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows by way, keys of a text and its length in windows: the share of right answers and their nats, over `trials`
    texts with one key and as many with four. Each way reads with the window, and `extended_attention` with so many
    tokens beyond it.

    Raises InvalidInput if the documents are too short.
    """
    checkpoints = {
        "attention_window": load_checkpoint(model, attention_window=window),
        "extended_attention": load_checkpoint(model, attention_window=window, extended_attention=extended_attention),
    }
    answers, done = defaultdict[tuple[int, int, str], list[Answer]](list), 0
    fillers = filler(checkpoints["attention_window"].tokenizer, texts, LENGTHS[-1] * window, trials)
    for trial, filler_ids in enumerate(fillers):
        for num_keys in KEYS:
            needles = hide(checkpoints["attention_window"].tokenizer, filler_ids, num_keys, window, seed=trial)
            for way, checkpoint in checkpoints.items():
                past = settings if way == "attention_window" else None
                for length, is_past, answer in _answers(checkpoint, needles, window, past):
                    answers[num_keys, length, "context_cache" if is_past else way].append(answer)
            done += 1
            progress("needles", done, len(KEYS) * trials)
    return [
        {
            "keys": num_keys, "windows": length, "way": way, "answers": len(given),
            "right": float(np.mean([answer.is_right for answer in given])),
            "nats_of_answer": float(np.mean([answer.nats for answer in given])),
        }
        for (num_keys, length, way), given in answers.items()
    ]  # fmt: skip


def hide(tokenizer: Tokenizer, filler_ids: Sequence[int], num_keys: int, window: int, *, seed: int) -> Needles:
    """Puts keys at random places of the first window, as far as they fit, and cuts the text after the last length."""
    generator = random.Random(f"{seed} {num_keys}")
    names = generator.sample(NAMES, num_keys)
    keys = [(name, str(generator.randrange(10_000, 100_000))) for name in names]
    told = [tokenizer.encode(f"{QUESTION.format(name)}{digits}.\n\n").tolist() for name, digits in keys]
    room = max(0, window // 2 - sum(map(len, told)))
    ids, begin = [tokenizer.start_id], 0
    for place, sentence in zip(sorted(generator.choices(range(room + 1), k=num_keys)), told, strict=True):
        ids += [*filler_ids[begin:place], *sentence]
        begin = place
    return Needles([*ids, *filler_ids[begin:]][: LENGTHS[-1] * window], keys)


def filler(tokenizer: Tokenizer, texts: Corpus, size: int, trials: int) -> Iterator[list[int]]:
    """As many texts of `size` tokens as trials, of consecutive documents.

    Raises InvalidInput if the documents are too short.
    """
    ids, made = list[int](), 0
    for document in texts:
        ids += tokenizer.encode(document.text).tolist()
        while len(ids) >= size and made < trials:
            yield ids[:size]
            ids, made = ids[size:], made + 1
        if made == trials:
            return
    raise InvalidInput(
        f"the documents make {made} texts of {size:,} tokens; give more documents, or ask for fewer or shorter texts",
        field="texts",
    )


@torch.inference_mode()
def _answers(
    checkpoint: Checkpoint, needles: Needles, window: int, settings: ContextSettings | None
) -> Iterator[tuple[int, bool, Answer]]:
    """Yields the length, whether the past was searched, and the answer, of each question after each length."""
    decoder, read = checkpoint.decoder, 0
    state = decoder.new_state(capacity=len(needles.ids) + window)  # behind the text, a question
    past = None if settings is None else OwnPast(settings, ContextCache(decoder.config.dim))
    for length in LENGTHS:
        ids = needles.ids[read : length * window]
        keys_1TD = decoder.keys(torch.tensor([ids]), state)
        read += len(ids)
        if past is not None:
            past.read(ids, keys_1TD[0].float().cpu().numpy())
        for name, digits in needles.keys:
            question = checkpoint.tokenizer.encode(QUESTION.format(name)).tolist()
            answer_ids = checkpoint.tokenizer.encode(digits).tolist()
            for is_past, answer in enumerate(answers_of(checkpoint, state.fork(), past, question, answer_ids)):
                yield length, bool(is_past), answer


def answers_of(
    checkpoint: Checkpoint, state: DecoderState, past: OwnPast | None, question: list[int], answer: list[int]
) -> Iterator[Answer]:
    """Yields the answer of the model alone, and with a past that of the mixture. Reads into the state."""
    decoder, count = checkpoint.decoder, len(answer)
    ids_1T = torch.tensor([[*question, *answer[:-1]]])
    hidden_1TD, keys_1TD = decoder(ids_1T, state)
    logprobs_NV, keys_TD = decoder.logprobs(hidden_1TD[0, -count:]).cpu().numpy(), keys_1TD[0].float().cpu().numpy()
    yield _judged(logprobs_NV, answer)
    if past is None:
        return
    size = len(past.cache)
    past.read([*question, *answer[:-1]], keys_TD)
    found = past.search(keys_TD[-count:], logprobs_NV.max(axis=1))
    past.cache.crop(size)
    rows = enumerate(torch.from_numpy(logprobs_NV))
    mixed = [mix_memory(logprobs_V, found, row).logprobs_V.numpy() for row, logprobs_V in rows]
    yield _judged(np.stack(mixed), answer)


def _judged(logprobs_NV: Float32[np.ndarray, "N V"], answer: Sequence[int]) -> Answer:
    is_right = logprobs_NV.argmax(axis=1).tolist() == list(answer)
    return Answer(is_right, -float(logprobs_NV[np.arange(len(answer)), answer].sum(dtype=np.float64)))
