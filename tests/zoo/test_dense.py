"""Averages over the depth (DenseFormer, arXiv 2402.02622)."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.training.config import TrainConfig
from memlm.training.optimizers import optimizers_for
from memlm.zoo.dense import Dense

PLAIN = replace(SHAPE, context_length=40, num_layers=4)
DENSE = replace(PLAIN, stack="dense")


def test_a_fresh_model_equals_the_plain_one_to_the_bit():
    read = []
    for config in (PLAIN, DENSE, replace(PLAIN, stack=Dense(dilation=2, period=3))):
        torch.manual_seed(4)
        read.append(logits(Decoder(config).double().eval(), tokens_of(20)))
    assert torch.equal(read[0], read[1])
    assert torch.equal(read[0], read[2])


@pytest.mark.parametrize(("dilation", "period", "expected"), [(1, 1, 4 * 7 // 2), (2, 1, 1 + 2 + 2 + 3), (1, 2, 3 + 5)])
def test_there_are_as_many_weights_as_outputs_to_average(dilation, period, expected):
    stack = make(replace(PLAIN, stack=Dense(dilation, period))).stack
    assert sum(parameter.numel() for parameter in stack.parameters()) == expected


def test_a_weight_alone_passes_the_embedding_to_the_end():
    decoder, tokens = make(DENSE), tokens_of(12)
    with torch.no_grad():
        decoder.stack.weights["4"].copy_(torch.tensor([1.0, 0, 0, 0, 0]))
        expected = decoder.logits(decoder.norm(decoder.embedding(torch.tensor(tokens))))
    torch.testing.assert_close(logits(decoder, tokens), expected, atol=1e-12, rtol=0)


def test_no_optimizer_decays_the_weights_or_takes_them_for_matrices():
    decoder = make(DENSE)
    weights = {id(parameter) for parameter in decoder.stack.parameters()}
    for optimizer in optimizers_for(TrainConfig(), decoder):
        for group in optimizer.param_groups:
            if weights & {id(parameter) for parameter in group["params"]}:
                assert isinstance(optimizer, torch.optim.AdamW)
                assert group["weight_decay"] == 0
                weights -= {id(parameter) for parameter in group["params"]}
    assert not weights


@pytest.mark.parametrize("part", [Dense(dilation=5), Dense(period=5)])
def test_averages_of_nothing_are_refused(part):
    with pytest.raises(InvalidInput, match="leave no average in 4 layers"):
        replace(PLAIN, stack=part)
