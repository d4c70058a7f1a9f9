"""The count of keys is that of the mixer, or of the window."""

import pytest
import torch

from memlm.bench.keys_read import accuracy_and_keys, keys_read
from memlm.bench.learning import config_for, learn
from memlm.bench.tasks import OffsetCopy
from memlm.model import Decoder
from memlm.zoo.hyper import Hyper

TASK = OffsetCopy(symbols=30, length=25)


@pytest.mark.parametrize("part", [Hyper(block=4, samples=3), Hyper(block=2, samples=5)])
def test_the_count_is_that_of_the_keys_with_a_weight(part):
    config = config_for(TASK, dim=16, ff_dim=16, layers=[{"mixer": "attention"}, {"mixer": part}], windows=(4, 0))
    layer = Decoder(config).blocks[1].attention
    generator = torch.Generator().manual_seed(0)
    query_HQ, key_HN = (torch.randint(1 << part.projections, (2, 50), generator=generator) for _ in range(2))
    seen_HQN = layer.counts(query_HQ, key_HN, torch.arange(50)) > 0
    seen_HQN &= torch.ones(50, 50, dtype=torch.bool).tril()
    assert seen_HQN.sum(dim=2)[1].tolist() == [keys_read(position, config) for position in range(50)]


def test_a_window_bounds_the_count_and_plain_attention_reads_all():
    window, plain = (config_for(TASK, dim=16, ff_dim=16, windows=windows) for windows in ((0, 3), ()))
    assert [keys_read(position, window) for position in range(5)] == [1, 2, 3, 3, 3]
    assert [keys_read(position, plain) for position in range(5)] == [1, 2, 3, 4, 5]
    assert accuracy_and_keys(learn(plain, TASK, steps=1))["keys_read"] == 1
    assert accuracy_and_keys(learn(window, TASK, steps=1))["keys_read"] == (1 + 2 + 47 * 3) / (49 * 50 / 2)
