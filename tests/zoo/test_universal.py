"""Rounds over the same blocks: adaptive computation time (arXiv 1603.08983, 1807.03819) and loops (2301.13196)."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from zoo.twins import ZooTwin

from memlm.errors import InvalidInput
from memlm.model import Decoder, ModelConfig
from memlm.zoo.universal import Halting, Looped, Universal

PLAIN = replace(SHAPE, context_length=40, num_layers=4)


def universal(bias: float, **fields) -> Decoder:
    """A universal model of four rounds whose every token halts with the same probability."""
    decoder = make(replace(PLAIN, stack=Universal(signals=False, **fields)))
    with torch.no_grad():
        decoder.stack.halt.weight.zero_()
        decoder.stack.halt.bias.fill_(bias)
    return decoder


def same_weights(decoder: Decoder, config: ModelConfig) -> Decoder:
    other = make(config)
    weights = {name: tensor for name, tensor in decoder.state_dict().items() if not name.startswith("stack.")}
    other.load_state_dict(weights)
    return other


def test_sure_tokens_take_one_round_and_unsure_ones_all():
    tokens = tokens_of(20)
    sure, unsure = universal(40.0), universal(-40.0)
    one = same_weights(sure, replace(PLAIN, num_layers=1))
    torch.testing.assert_close(logits(sure, tokens), logits(one, tokens), atol=1e-12, rtol=0)
    every = same_weights(unsure, replace(PLAIN, stack=Looped(injects=False)))
    torch.testing.assert_close(logits(unsure, tokens), logits(every, tokens), atol=1e-12, rtol=0)


def test_the_weights_of_the_rounds_sum_to_one():
    p_NBT = torch.rand(6, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones_BTD = torch.ones(3, 50, 2, dtype=torch.float64)
    mean = Halting(ones_BTD, torch.ones(3, 50, dtype=torch.bool), enough=0.99)
    for number, p_BT in enumerate(p_NBT):
        mean.add(p_BT, ones_BTD, 2 * ones_BTD, number == 5)
    torch.testing.assert_close(mean.stream_BTD, ones_BTD, atol=1e-12, rtol=0)
    torch.testing.assert_close(mean.key_BTD, 2 * ones_BTD, atol=1e-12, rtol=0)
    assert mean.is_over


def test_rounds_that_no_token_takes_are_left_out_and_their_keys_are_written(monkeypatch):
    decoder, tokens = universal(0.5), torch.tensor([tokens_of(6)])  # p = 0.62: two rounds
    calls = []
    block = decoder.blocks[0]
    monkeypatch.setattr(block, "finish", lambda *given, finish=block.finish: calls.append(1) or finish(*given))
    stopped, whole = decoder.new_state(), decoder.new_state()
    with torch.inference_mode():
        read = decoder(tokens, stopped)
        assert len(calls) == 2
        monkeypatch.setattr(Halting, "is_over", False)
        expected = decoder(tokens, whole)
    assert len(calls) == 2 + 4
    torch.testing.assert_close(read, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(stopped.cache_L2BGSd, whole.cache_L2BGSd, atol=1e-12, rtol=0)
    assert whole.cache_L2BGSd[:, :, :, :, :6].abs().amin(dim=(1, 2, 3, 4, 5)).min() > 0


def test_the_loss_counts_rounds_and_remainders_of_real_tokens():
    decoder, tokens = make(replace(PLAIN, num_layers=6, stack=Universal(ponder=0.5))), tokens_of(20)
    twin = ZooTwin(decoder)
    twin.logits(tokens[:9])
    assert len(set(twin.rounds)) > 2  # tokens differ
    rows = torch.tensor([[*tokens[:9], *[0] * 11], tokens])
    decoder(rows, decoder.new_state(batch_size=2), new_B=[9, 0])
    told = decoder.take_losses().item()
    remainders = told / 0.5 * 9 - sum(twin.rounds)
    assert 0 < remainders < 9
    sure, unsure = universal(40.0, ponder=0.5), universal(-40.0, ponder=0.5)
    for each, expected in ((sure, 0.5 * (1 + 1)), (unsure, 0.5 * (4 + 1))):
        each(torch.tensor([tokens]))
        assert each.take_losses().item() == pytest.approx(expected)


def test_pondering_less_follows_the_slope_of_the_loss():
    decoder = universal(-1.0, ponder=1.0)  # p = 0.27: four rounds, the remainder is 1 - 3 p

    def cost(bias: float) -> torch.Tensor:
        with torch.no_grad():
            decoder.stack.halt.bias.fill_(bias)
        decoder(torch.tensor([tokens_of(9)]))
        return decoder.take_losses()

    slope = (cost(-1.0 + 1e-5) - cost(-1.0 - 1e-5)).item() / 2e-5
    cost(-1.0).backward()
    assert decoder.stack.halt.bias.grad.item() == pytest.approx(slope, rel=1e-6)
    assert slope == pytest.approx(-3 * 0.26894 * (1 - 0.26894), rel=1e-3)


def test_one_round_is_the_plain_model_and_more_rounds_need_no_more_weights():
    tokens, plain = tokens_of(20), make(PLAIN)
    for injects in (True, False):
        one = same_weights(plain, replace(PLAIN, stack=Looped(blocks=4, injects=injects)))
        assert torch.equal(logits(one, tokens), logits(plain, tokens))
    short, long = (make(replace(PLAIN, num_layers=depth, stack=Looped(blocks=2))) for depth in (4, 12))
    long.load_state_dict(short.state_dict())
    assert short.num_parameters == long.num_parameters
    assert logits(long, tokens).isfinite().all()
    assert long.new_state(capacity=20).num_bytes == 3 * short.new_state(capacity=20).num_bytes


def test_an_injected_text_reaches_every_round(monkeypatch):
    decoder, tokens, read, made = make(replace(PLAIN, stack=Looped())), tokens_of(20), [], []
    block = decoder.blocks[0]
    monkeypatch.setattr(block, "attend", lambda x, c, attend=block.attend: read.append(x) or attend(x, c))
    monkeypatch.setattr(block, "finish", lambda *g, finish=block.finish: made.append(finish(*g)) or made[-1])
    logits(decoder, tokens)
    embedded = decoder.embedding(torch.tensor([tokens]))
    torch.testing.assert_close(read[0], embedded)
    for number in range(1, 4):
        torch.testing.assert_close(read[number], made[number - 1] + embedded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack": Looped(blocks=3)}, "3 blocks do not repeat evenly through a depth of 4"),
        ({"stack": Looped(), "windows": (3, 3, 0, 3)}, "expected equal ones in each round"),
        ({"stack": Universal(), "no_rope_layers": (1,)}, "no_rope_layers differ between rounds"),
        ({"stack": Universal(), "windows": (9,) * 4, "num_sinks": 2, "extended_attention": 3}, "extended_attention"),
    ],
)
def test_layers_that_differ_between_rounds_are_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(PLAIN, **changes)


@pytest.mark.parametrize("fields", [{"blocks": 0}, {"ponder": -1}, {"epsilon": 0}])
def test_numbers_out_of_range_are_refused(fields):
    with pytest.raises(InvalidInput, match=next(iter(fields))):
        Universal(**fields)
