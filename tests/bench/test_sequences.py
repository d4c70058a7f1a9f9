"""The comparison of an encoder-decoder and a decoder is fair, and counts whole answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memlm.bench.sequences import ALONE, BOTH, decoder_logits, exact_match, measure, pairs_of
from memlm.model import Decoder
from memlm.model.encoder_decoder import EncoderDecoder


def test_both_models_of_the_comparison_are_of_one_size_and_read_the_same_pairs():
    sizes = [sum(p.numel() for p in model.parameters()) for model in (EncoderDecoder(BOTH), Decoder(ALONE))]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    for order, expected in (("reverse", lambda source: source[::-1]), ("sort", sorted)):
        assert all(answer == expected(source) for source, answer in pairs_of(order, np.random.default_rng(0), 8))
    pairs = pairs_of("sort", np.random.default_rng(0), 4)
    source_BN, answer_BN = (torch.tensor(each) for each in zip(*pairs, strict=True))
    decoder = Decoder(ALONE)
    with torch.no_grad():
        before_BNV = decoder_logits(decoder, source_BN, answer_BN)
        changed_BN = answer_BN.clone()
        changed_BN[:, 5] = 1 + changed_BN[:, 5] % 32
        after_BNV = decoder_logits(decoder, source_BN, changed_BN)
    assert torch.equal(before_BNV[:, :6], after_BNV[:, :6])  # the answer at a place is not read before it
    assert not torch.equal(before_BNV[:, 6], after_BNV[:, 6])


def test_an_answer_counts_only_as_a_whole():
    answer_BN = torch.tensor([[1, 2, 3], [3, 2, 1]])
    right_BNV = F.one_hot(answer_BN, 5).float()
    assert exact_match(right_BNV, answer_BN) == 1
    assert exact_match(right_BNV, torch.tensor([[1, 2, 3], [3, 2, 2]])) == 0.5


def test_the_comparison_has_a_row_for_each_order_and_model():
    figures = measure(0, steps=1)
    assert list(figures) == [
        "reverse, encoder-decoder", "reverse, decoder alone", "sort, encoder-decoder", "sort, decoder alone",
    ]  # fmt: skip
    assert all(row["exact_match"] < 0.1 and row["seconds"] > 0 for row in figures.values())
