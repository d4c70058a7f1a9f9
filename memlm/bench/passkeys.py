"""Pass keys in texts that are far longer than the window: a heat map of answers by length and depth of the text.

A text tells one key, at one depth. The model reads it in a moving window, and is asked for the key behind its end. The
context cache and extended attention keep what has left the window. Extended attention remembers while the text is read,
and searches for the question alone, because each search takes time in proportion to the text.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memlm.base.progress import Progress
from memlm.bench.needles import NAMES, QUESTION, Answer, answers_of, filler
from memlm.data.corpus import Corpus
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.model.extended_attention import remembering_alone
from memlm.model.state import DecoderState
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.own_past import ContextSettings, OwnPast

DEPTHS = tuple(tenth / 10 for tenth in range(11))
PIECE = 512  # tokens that are read at once
# The mean and the fit of docs/reports/context.md, for smollm2.
UNTUNED = ContextSettings(k=64, temperature=2.09, lam=0.448)


def bench_passkeys(  # noqa: PLR0913 - the command's options
    model: Path,
    texts: Corpus,
    *,
    lengths: Sequence[int],
    window: int,
    extended_attention: int,
    trials: int,
    dtype: str,
    device: str,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows by length of the text in tokens, depth of the key from 0 to 1, and way: the share of right answers, and
    their nats, over `trials` texts.

    The context cache has the model's own settings (`memlm tune-context`), and UNTUNED without any. Raises InvalidInput
    if the documents are too short.
    """
    settings = ContextSettings.load(model) or UNTUNED
    given, done = defaultdict[tuple[int, float, str], list[Answer]](list), 0
    for way, extended in (("attention_window", None), ("extended_attention", extended_attention)):
        checkpoint = load_checkpoint(
            model, dtype=dtype, device=device, attention_window=window, extended_attention=extended
        )
        ways = [way] if extended else [way, "context_cache"]
        for length in lengths:
            for trial, filler_ids in enumerate(filler(checkpoint.tokenizer, texts, length, trials)):
                for depth, answers in _asked(checkpoint, filler_ids, None if extended else settings, seed=trial):
                    for each, answer in zip(ways, answers, strict=True):
                        given[length, depth, each].append(answer)
                    done += 1
                    progress("pass keys", done, 2 * len(lengths) * trials * len(DEPTHS))
    return [
        {
            "tokens": length, "depth": depth, "way": way, "answers": len(answers),
            "right": float(np.mean([answer.is_right for answer in answers])),
            "nats_of_answer": float(np.mean([answer.nats for answer in answers])),
        }
        for (length, depth, way), answers in sorted(given.items())
    ]  # fmt: skip


@torch.inference_mode()
def _asked(
    checkpoint: Checkpoint, filler_ids: Sequence[int], settings: ContextSettings | None, *, seed: int
) -> Iterator[tuple[float, list[Answer]]]:
    """Yields each depth with the answer of the model, and with `settings` also that with its past.

    The text before a key is read once for all depths behind it.
    """
    decoder, tokenizer, draw = checkpoint.decoder, checkpoint.tokenizer, random.Random(seed)
    state = decoder.new_state(capacity=len(filler_ids) + PIECE)  # behind the text, a question
    past = None if settings is None else OwnPast(settings, ContextCache(decoder.config.dim))
    _read(checkpoint, [tokenizer.start_id], state, past)
    read = 0
    for depth in DEPTHS:
        name, digits = draw.choice(NAMES), str(draw.randrange(10_000, 100_000))
        told, question, answer = (
            tokenizer.encode(text).tolist()
            for text in (f"{QUESTION.format(name)}{digits}.\n\n", QUESTION.format(name), digits)
        )
        place = round(depth * (len(filler_ids) - len(told)))
        _read(checkpoint, filler_ids[read:place], state, past)
        read, size = place, 0 if past is None else len(past.cache)
        branch = state.fork()
        _read(checkpoint, [*told, *filler_ids[place : len(filler_ids) - len(told)]], branch, past)
        yield depth, list(answers_of(checkpoint, branch, past, question, answer))
        if past is not None:
            past.cache.crop(size)


def _read(checkpoint: Checkpoint, ids: Sequence[int], state: DecoderState, past: OwnPast | None) -> None:
    """Reads a text with the window alone, into the memories."""
    extended = [block.attention.extended for block in checkpoint.decoder.blocks if block.attention.extended]
    with remembering_alone(extended):
        for begin in range(0, len(ids), PIECE):
            piece = ids[begin : begin + PIECE]
            keys_1TD = checkpoint.decoder.keys(torch.tensor([piece]), state)
            if past is not None:
                past.read(piece, keys_1TD[0].float().cpu().numpy())
