"""Reversal and sorting of symbols, by an encoder-decoder and by a decoder of equal size (T5, arXiv 1910.10683).

Shapes: B batch, N symbols, T tokens of the decoder's text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from memlm.model import Decoder, ModelConfig
from memlm.model.cross import SourceAttention
from memlm.model.encoder_decoder import EncoderDecoder
from memlm.training.fit import fit
from memlm.training.seq2seq import Pair, answer_logits, learn_answers

SYMBOLS, LENGTH, START = 32, 12, 0  # symbols are 1 to 32; START stands between source and answer
ROWS, TEST_ROWS = 64, 512
STEPS, LEARNING_RATE = 400, 3e-3
# 2 layers of an encoder and 2 of a decoder have 40 D^2 weights with a feed-forward of 2 D, as 4 with one of 3 D.
BOTH = ModelConfig(
    vocab_size=SYMBOLS + 1, dim=64, num_layers=2, num_heads=4, num_kv_heads=4, ff_dim=128, context_length=2 * LENGTH,
    positions="t5", activation="relu", cross=SourceAttention(),
)  # fmt: skip
ALONE = replace(BOTH, num_layers=4, ff_dim=192, cross=None)
ORDERS = {"reverse": lambda source_BN: source_BN[:, ::-1], "sort": lambda source_BN: np.sort(source_BN, axis=1)}


def drawn(order: str, generator: np.random.Generator, rows: int) -> tuple[Any, Any]:
    """Returns random symbols (B, N), and the same in another order."""
    source_BN = generator.integers(1, SYMBOLS + 1, size=(rows, LENGTH))
    return source_BN, ORDERS[order](source_BN).copy()


def pairs_of(order: str, generator: np.random.Generator, rows: int) -> list[Pair]:
    """Returns sources and answers as lists of ids."""
    return list(zip(*(each_BN.tolist() for each_BN in drawn(order, generator, rows)), strict=True))


def decoder_logits(decoder: Decoder, source_BN: Int[Tensor, "B N"], answer_BN: Int[Tensor, "B N"]) -> Tensor:
    """Returns the scores of the answers (B, N, V) of a decoder that reads source, START and answer as one text."""
    text_BT = torch.cat([source_BN, torch.full_like(source_BN[:, :1], START), answer_BN[:, :-1]], dim=1)
    return decoder.logits(decoder(text_BT)[0][:, LENGTH:])


def exact_match(logits_BNV: Tensor, answer_BN: Int[Tensor, "B N"]) -> float:
    """Returns the share of answers whose every symbol is the likeliest after those before: greedy ones are right."""
    return (logits_BNV.argmax(dim=2) == answer_BN).all(dim=1).float().mean().item()


def measure(seed: int, *, steps: int = STEPS) -> Mapping[str, dict[str, float]]:
    """Trains both models on both orders. Returns the exact match of new texts, and seconds, by row."""
    figures = dict[str, dict[str, float]]()
    for order in ORDERS:
        for kind, train in (("encoder-decoder", _encoder_decoder), ("decoder alone", _decoder)):
            torch.manual_seed(seed)
            begin = time.perf_counter()
            match = train(order, seed, steps)
            figures[f"{order}, {kind}"] = {"exact_match": match, "seconds": time.perf_counter() - begin}
    return figures


def _encoder_decoder(order: str, seed: int, steps: int) -> float:
    model = EncoderDecoder(BOTH)
    learn_answers(
        model, lambda generator: pairs_of(order, generator, ROWS), start_id=START, num_steps=steps,
        learning_rate=LEARNING_RATE, seed=seed,
    )  # fmt: skip
    with torch.inference_mode():
        return exact_match(*answer_logits(model, pairs_of(order, _test(seed), TEST_ROWS), start_id=START))


def _decoder(order: str, seed: int, steps: int) -> float:
    decoder, generator = Decoder(ALONE), np.random.default_rng(seed)

    def loss_of(step: int) -> Tensor:
        source_BN, answer_BN = map(torch.from_numpy, drawn(order, generator, ROWS))
        return F.cross_entropy(decoder_logits(decoder, source_BN, answer_BN).flatten(0, 1), answer_BN.flatten())

    fit(decoder, loss_of, num_steps=steps, learning_rate=LEARNING_RATE)
    with torch.inference_mode():
        source_BN, answer_BN = map(torch.from_numpy, drawn(order, _test(seed), TEST_ROWS))
        return exact_match(decoder_logits(decoder, source_BN, answer_BN), answer_BN)


def _test(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 1])
