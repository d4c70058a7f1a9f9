"""Encoder-decoders learn answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memlm.model import ModelConfig
from memlm.training.validation import PADDING
from memlm.zoo.shapes.encoder_decoder import EncoderDecoder
from memlm.zoo.shapes.seq2seq_training import answer_logits, answer_loss, learn_answers
from memlm.zoo.shapes.source_attention import SourceAttention
from memlm.zoo.shapes.span_corruption import corrupt_spans

SMALL = ModelConfig(
    vocab_size=33, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ff_dim=24, context_length=24, positions="t5",
    activation="relu", cross=SourceAttention(),
)  # fmt: skip
PAIRS = [([3, 4, 5], [5, 4, 3, 2]), ([6], [6, 2]), ([7, 8], [8, 7, 2])]


def test_the_loss_is_the_mean_over_the_tokens_of_all_answers():
    torch.manual_seed(0)
    model, nats = EncoderDecoder(SMALL).double(), []
    for source, answer in PAIRS:
        state = model.new_state(sources_B=model.encode(torch.tensor([source])))
        hidden_BTD, _ = model(torch.tensor([[0, *answer[:-1]]]), state)
        nats += F.cross_entropy(model.logits(hidden_BTD[0]), torch.tensor(answer), reduction="none").tolist()
    assert answer_loss(model, PAIRS, start_id=0).item() == pytest.approx(sum(nats) / len(nats), abs=1e-6)
    _, answers_BT = answer_logits(model, PAIRS, start_id=0)
    assert answers_BT.tolist() == [[5, 4, 3, 2], [6, 2, PADDING, PADDING], [8, 7, 2, PADDING]]


def test_a_model_learns_to_copy_and_equal_seeds_learn_alike():
    def draw(generator: np.random.Generator):
        source_BN = generator.integers(1, 9, size=(32, 2)).tolist()
        return [(source, source) for source in source_BN]

    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        model = EncoderDecoder(SMALL)
        losses.append(learn_answers(model, draw, start_id=0, num_steps=120, learning_rate=1e-2, seed=3))
    assert losses[0] == losses[1]
    assert losses[0][0] > 2.5
    assert np.mean(losses[0][-5:]) < 1.0
    assert not model.training


def test_corrupted_spans_are_pairs_to_learn_from():
    def draw(generator: np.random.Generator):
        texts = generator.integers(1, 9, size=(4, 14)).tolist()
        return [corrupt_spans(text, generator, range(32, 20, -1)) for text in texts]

    losses = learn_answers(EncoderDecoder(SMALL), draw, start_id=0, num_steps=3)
    assert len(losses) == 3
    assert np.isfinite(losses).all()
