"""The load of experts: counted as the router says, and even where tokens are assigned."""

import pytest
import torch

from memlm.bench.expert_load import bits_and_load, busiest
from memlm.bench.learning import config_for, learn
from memlm.bench.tasks import LibraryText
from memlm.model import Decoder

TASK = LibraryText(length=32)


def decoder_with(**channel):
    torch.manual_seed(0)
    return Decoder(config_for(TASK, dim=16, ff_dim=16, num_layers=1, layers=[{"channel": channel}]))


def test_the_busiest_expert_of_a_table_is_that_with_the_most_tokens():
    decoder = decoder_with(kind="hash", experts=4)
    tokens_BT = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    count_E = torch.bincount(decoder.blocks[0].ff.table_V[tokens_BT].flatten(), minlength=4)
    assert busiest(decoder, tokens_BT, learns=False) == pytest.approx(count_E.max().item() / 16)
    assert count_E.max() > 16


def test_base_is_even_while_it_learns_and_only_then():
    decoder = decoder_with(kind="base", experts=4)
    tokens_BT = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    assert busiest(decoder, tokens_BT, learns=True) == 1
    assert busiest(decoder, tokens_BT, learns=False) > 1.1
    assert decoder.take_losses() is None
    assert not decoder.blocks[0].ff.experts[0]._forward_pre_hooks


@pytest.mark.parametrize("channel", [None, {"kind": "switch", "experts": 4}])
def test_only_a_model_with_experts_has_a_load(channel):
    config = config_for(TASK, dim=16, ff_dim=16, num_layers=2, layers=[{"channel": channel}])
    figures = bits_and_load(learn(config, TASK, steps=1))
    load = {"busiest_learning", "busiest_predicting"} if channel else set()
    assert figures.keys() == {"bits", *load}
    assert all(1 <= figures[name] <= 4 for name in load)
