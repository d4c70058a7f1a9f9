"""What the paper of adaptive spans says of them (arXiv 1905.07799)."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from zoo.weights import weights_of

from memlm.errors import InvalidInput

PLAIN = replace(SHAPE, context_length=40)


def with_spans(**fields):
    return replace(PLAIN, layers=[{"mixer": {"kind": "adaptive_span", "ramp": 4, **fields}}])


def like(config, decoder, share=None):
    """A decoder of another config with the same weights, and with one share for all heads."""
    other = make(config)
    other.load_state_dict(decoder.state_dict(), strict=False)
    if share is not None:
        with torch.no_grad():
            for block in other.blocks:
                block.attention.share_H.fill_(share)
    return other


def test_a_span_beyond_the_text_is_plain_attention():
    plain = make(PLAIN)
    torch.testing.assert_close(
        logits(like(with_spans(), plain, 1.0), tokens_of(40)), logits(plain, tokens_of(40)), atol=1e-12, rtol=0
    )


def test_without_a_span_a_head_sees_the_ramp_alone_and_it_fades():
    decoder = like(replace(with_spans(), num_layers=1), make(replace(PLAIN, num_layers=1)), 0.0)
    assert decoder.blocks[0].attention.reach == 4
    tokens, other = tokens_of(20), tokens_of(20, seed=1)
    (weights_1HTT,) = weights_of(decoder, tokens)
    age = torch.arange(20)[:, None] - torch.arange(20)
    assert torch.equal(weights_1HTT[0] > 0, ((age >= 0) & (age < 4)).expand(4, -1, -1))
    last = logits(decoder, tokens)[-1]
    assert not torch.equal(logits(decoder, [*tokens[:16], other[16], *tokens[17:]])[-1], last)
    assert torch.equal(logits(decoder, [*other[:16], *tokens[16:]])[-1], last)


def test_windows_of_the_widest_reach_change_nothing():
    decoder = make(with_spans(longest=12))
    windows = tuple(block.attention.reach for block in decoder.blocks)
    assert max(windows) < 20
    rolled = like(replace(decoder.config, windows=windows), decoder)
    torch.testing.assert_close(logits(rolled, tokens_of(40)), logits(decoder, tokens_of(40)), atol=1e-12, rtol=0)


def test_the_loss_is_the_penalty_times_the_mean_span_of_each_layer():
    decoder = like(with_spans(penalty=0.01, longest=20), make(PLAIN), 0.25)
    decoder(torch.tensor([tokens_of(9)]))
    assert decoder.take_losses().item() == pytest.approx(2 * 0.01 * 5)


def test_a_share_beyond_its_bounds_comes_back_in_training():
    decoder = like(with_spans(penalty=1.0), make(PLAIN), -0.5).train()
    decoder(torch.tensor([tokens_of(9)]))
    decoder.take_losses().backward()
    for block in decoder.blocks:
        assert block.attention.share_H.eq(0).all()
        assert block.attention.share_H.grad.ne(0).all()


@pytest.mark.parametrize("fields", [{"ramp": 0}, {"longest": -1}, {"start": 1.5}, {"penalty": -1}])
def test_what_makes_no_span_is_refused(fields):
    with pytest.raises(InvalidInput, match=f"{next(iter(fields))} is"):
        with_spans(**fields)
