"""Pass keys in texts that are far longer than the window: a heat map of answers by length and depth of the text.

A text tells one key, at one depth. The model reads it in a moving window, and is asked for the key behind its end: with
the window alone, with the context cache, and with extended attention. Extended attention remembers while the text is
read, and searches for the question alone, because each search takes time in proportion to the text.

The texts of one trial differ in their keys alone, and a key changes nothing beyond the reach of the windows of all
layers. So one text without a key is read whole, and each text with one from its key up to that reach.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float16

from benchmarks.needles import NAMES, QUESTION, Answer, answers_of, filler
from memlm.base.progress import Progress
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.model.attention.extended_attention import ExtendedAttention, remembering_alone
from memlm.model.attention.knn_memory import UNBOUNDED
from memlm.model.config import ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.model.state.decoder_state import DecoderState
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.own_past import ContextSettings, OwnPast

DEPTHS = tuple(tenth / 10 for tenth in range(11))
WAYS = ("attention_window", "context_cache", "extended_attention")
PIECE = 512  # tokens that are read at once
# The mean and the fit of docs/reports/context.md, for smollm2.
UNTUNED = ContextSettings(k=64, temperature=2.09, lam=0.448)


def bench_passkeys(
    model: Path,
    texts: Corpus,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    window: int,
    extended_attention: int,
    trials: int,
    dtype: str,
    device: str,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows by length of the text in tokens, depth of the key (of DEPTHS), and way: the share of right answers, and
    their nats, over `trials` texts.

    The context cache has the model's own settings (`memlm tune`), and UNTUNED without any. Raises InvalidInput
    if the documents are too short, or for another depth.
    """
    if strange := sorted(set(depths) - set(DEPTHS)):
        raise InvalidInput(f"a depth of {strange[0]} is not a multiple of 0.1 from 0 to 1", field="depth")
    checkpoint = load_checkpoint(
        model, dtype=dtype, device=device, attention_window=window, extended_attention=extended_attention
    )
    settings = ContextSettings.load(model) or UNTUNED
    given, steps = defaultdict[tuple[int, float, str], list[Answer]](list), count(1)
    depths = sorted(set(depths))

    def told() -> None:
        progress("texts read", next(steps), len(lengths) * trials * len(depths))

    for length in lengths:
        for trial, filler_ids in enumerate(filler(checkpoint.tokenizer, texts, length, trials)):
            for depth, answers in _asked(checkpoint, filler_ids, settings, depths, seed=trial, told=told):
                for way, answer in zip(WAYS, answers, strict=True):
                    given[length, depth, way].append(answer)
    return [
        {
            "tokens": length, "depth": depth, "way": way, "answers": len(answers),
            "right": float(np.mean([answer.is_right for answer in answers])),
            "nats_of_answer": float(np.mean([answer.nats for answer in answers])),
        }
        for (length, depth, way), answers in sorted(given.items())
    ]  # fmt: skip


class _Text:
    """A text from its beginning, or from a key on, as far as it was read with the window alone."""

    def __init__(self, checkpoint: Checkpoint, state: DecoderState, begin: int) -> None:
        self._checkpoint, self.state, self.begin = checkpoint, state, begin
        self.pairs = state.knn_caches
        self._ids, self._keys = list[int](), list[Float16[np.ndarray, " D"]]()

    @property
    def end(self) -> int:
        """Tokens from the beginning of the whole text on."""
        return self.begin + len(self._ids)

    def read(self, ids: Sequence[int]) -> None:
        """Goes on with some tokens, and remembers them."""
        with remembering_alone(_extended(self._checkpoint)):
            for first in range(0, len(ids), PIECE):
                keys_1TD = self._checkpoint.decoder.keys(torch.tensor([ids[first : first + PIECE]]), self.state)
                self._keys += list(keys_1TD[0].half().cpu().numpy())
        self._ids += ids

    def branch(self, capacity: int) -> _Text:
        """Another text with the same beginning, whose memories begin here."""
        state = self._checkpoint.decoder.new_state(capacity=capacity)
        pairs = {layer: list(caches) for layer, caches in state.knn_caches.items()}
        state.copy_row(0, self.state, 0)
        state.knn_caches = pairs
        return _Text(self._checkpoint, state, self.end)

    def tell(self, past: OwnPast, begin: int) -> None:
        """Adds the tokens and keys from a place on to a context cache of the text before it."""
        past.cache.crop(begin)
        for first in range(begin - self.begin, len(self._ids), PIECE):
            piece = slice(first, first + PIECE)
            past.read(self._ids[piece], np.stack(self._keys[piece]))

    def swap_pairs(self, other: _Text) -> None:
        """Exchanges the pairs of another text for those at the same places of this one."""
        for layer, (cache,) in self.pairs.items():
            (others,) = other.pairs[layer]
            ids_G1N = torch.arange(len(other._ids)).expand(self.state.config.num_kv_heads, 1, -1).to(self.state.device)
            kept, told = cache.pairs(ids_G1N + other.begin), others.pairs(ids_G1N)
            cache.replace(other.begin, *(each_G1Nd[:, 0] for each_G1Nd in told))
            others.replace(0, *(each_G1Nd[:, 0] for each_G1Nd in kept))


@torch.inference_mode()
def _asked(
    checkpoint: Checkpoint,
    filler_ids: Sequence[int],
    settings: ContextSettings,
    depths: Sequence[float],
    *,
    seed: int,
    told: Callable[[], None] = lambda: None,
) -> Iterator[tuple[float, list[Answer]]]:
    """Yields each of the rising depths, the last one first, with the answer in each of WAYS. Calls `told` when the key
    of a depth was read.
    """
    decoder, tokenizer, draw = checkpoint.decoder, checkpoint.tokenizer, random.Random(seed)
    keys = {depth: (draw.choice(NAMES), str(draw.randrange(10_000, 100_000))) for depth in DEPTHS}
    capacity = len(filler_ids) + PIECE  # behind the text, a question
    whole = _Text(checkpoint, decoder.new_state(capacity=capacity), 0)
    whole.read([tokenizer.start_id])
    branches = []
    for depth in depths:
        name, digits = keys[depth]
        sentence = tokenizer.encode(f"{QUESTION.format(name)}{digits}.\n\n").tolist()
        place = round(depth * (len(filler_ids) - len(sentence)))
        whole.read(filler_ids[whole.end - 1 : place])
        branch, rest = whole.branch(capacity), filler_ids[place + len(sentence) :]
        branch.read([*sentence, *rest[: _reach(decoder.config, branch.begin)]])
        question, answer = (tokenizer.encode(text).tolist() for text in (QUESTION.format(name), digits))
        branches.append((depth, branch, question, answer))
        told()
    whole.read(filler_ids[whole.end - 1 :])
    past = OwnPast(settings, ContextCache(decoder.config.dim))
    whole.tell(past, 0)
    for depth, branch, question, answer in reversed(branches):
        branch.tell(past, branch.begin)
        whole.tell(past, branch.end)
        whole.swap_pairs(branch)
        state = whole.state
        if branch.end == whole.end:
            state = branch.state
            state.knn_caches = whole.pairs
        yield depth, _answers(checkpoint, state, past, question, answer)
        whole.swap_pairs(branch)


def _reach(config: ModelConfig, begin: int) -> int:
    """How many tokens behind a key's sentence differ by it: a window a layer, or all if sinks are of the sentence."""
    return config.num_layers * (max(config.windows) - 1) if begin >= config.num_sinks else UNBOUNDED


def _answers(
    checkpoint: Checkpoint, state: DecoderState, past: OwnPast, question: list[int], answer: list[int]
) -> list[Answer]:
    """The answers in each of WAYS. Leaves the state as it was."""
    length = state.length
    with remembering_alone(_extended(checkpoint)):
        alone, cached = answers_of(checkpoint, state, past, question, answer)
    state.crop([length])
    (extended,) = answers_of(checkpoint, state, None, question, answer)
    state.crop([length])
    return [alone, cached, extended]


def _extended(checkpoint: Checkpoint) -> list[ExtendedAttention]:
    return [block.attention.extended for block in checkpoint.decoder.blocks if block.attention.extended]
