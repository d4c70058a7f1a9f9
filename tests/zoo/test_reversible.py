"""Reversible layers (arXiv 1707.04585, Reformer 2001.04451)."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decoders import SHAPE, make, tokens_of
from random_adapters import SPECS, random_adapter

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.model.attention.knn_attention import exact
from memlm.model.experts import Switch
from memlm.zoo import reversible
from memlm.zoo.reversible import ReversibleStack, change, mix

REVERSIBLE = replace(SHAPE, context_length=40, num_layers=3, stack="reversible")
KINDS = {
    "attention": REVERSIBLE,
    "t5": replace(REVERSIBLE, positions="t5"),  # a bias that all layers share
    "experts": replace(REVERSIBLE, layers=[{"channel": Switch(experts=3, balance=0.3)}]),
    "patterns": replace(REVERSIBLE, layers=[{"mixer": "pattern", "window": 3}]),
}


def plainly(self, blocks, hidden_BTD, context, *, finishes):
    """The same streams, with the numbers of all layers kept."""
    first = second = exact(hidden_BTD)
    for block in blocks:
        first = first + reversible.mix(block, second, context)
        second = second + reversible.change(block, first, context)
    return (first + second) / 2, blocks[-1].ff_norm(first)


def gradients(decoder: Decoder) -> tuple[float, dict[str, torch.Tensor]]:
    decoder.zero_grad()
    tokens = torch.tensor([tokens_of(20, seed) for seed in range(2)])
    hidden, keys = decoder(tokens[:, :-1])
    loss = F.cross_entropy(decoder.logits(hidden).flatten(0, 1), tokens[:, 1:].flatten()) + keys.square().mean()
    told = decoder.take_losses()
    loss = loss if told is None else loss + told
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_kept_numbers(kind, monkeypatch):
    assert_gradients_are_plain(make(KINDS[kind]), monkeypatch)


def assert_gradients_are_plain(decoder: Decoder, monkeypatch) -> None:
    loss, got = gradients(decoder)
    monkeypatch.setattr(ReversibleStack, "read", plainly)
    expected_loss, expected = gradients(decoder)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-10, rtol=1e-8, msg=name)


def test_what_layers_compute_once_is_computed_anew_on_the_way_back(monkeypatch):
    """What a pass without gradients left in the context has none."""

    def scaled(block, first_BTD, context):
        if "scale" not in context.shared:
            context.shared["scale"] = block.ff_norm.weight.exp().mean()
        return context.shared["scale"] * change(block, first_BTD, context)

    monkeypatch.setattr(reversible, "change", scaled)
    decoder = make(replace(REVERSIBLE, num_layers=1))
    with torch.no_grad():
        decoder.blocks[0].ff_norm.weight.mul_(1.5)
    assert_gradients_are_plain(decoder, monkeypatch)


@pytest.mark.parametrize("kind", SPECS)
def test_adapters_take_part_in_the_gradients(kind, monkeypatch):
    decoder = make(REVERSIBLE)
    adapter = random_adapter(SPECS[kind], decoder)
    decoder.adapters.attach("a", adapter, decoder, trainable=True)
    decoder.adapters.default = None
    plain, _ = gradients(decoder)
    decoder.adapters.default = "a"
    assert gradients(decoder)[0] != plain
    assert_gradients_are_plain(decoder, monkeypatch)


def saved_bytes(config) -> int:
    """Bytes that one loss keeps for its backward pass, parameters left out."""
    decoder, kept = make(config), Counter[int]()
    own = {parameter.data_ptr() for parameter in decoder.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden, _ = decoder(torch.tensor([tokens_of(30)]))
        loss = decoder.logits(hidden).square().mean()
    assert loss.requires_grad
    return sum(kept.values())


def test_what_is_kept_does_not_grow_with_the_depth():
    flat = [saved_bytes(replace(REVERSIBLE, num_layers=depth)) for depth in (2, 8)]
    plain = [saved_bytes(replace(REVERSIBLE, num_layers=depth, stack=None)) for depth in (2, 8)]
    assert flat[0] == flat[1]
    assert plain[1] > 3 * plain[0] / 2
    assert flat[0] < plain[0]


def test_layers_are_taken_back_to_their_inputs(monkeypatch):
    decoder, forth, back = make(replace(REVERSIBLE, num_layers=6)), [], []
    monkeypatch.setattr(
        reversible, "mix", lambda b, x, c: (back if torch.is_grad_enabled() else forth).append(x) or mix(b, x, c)
    )
    gradients(decoder)
    assert len(forth) == len(back) == 6
    for first, second in zip(forth, reversed(back), strict=True):
        torch.testing.assert_close(second.detach(), first, atol=1e-12, rtol=0)


def test_streams_of_narrow_models_are_wide(monkeypatch):
    decoder, widths = make(REVERSIBLE).bfloat16(), []
    monkeypatch.setattr(reversible, "mix", lambda b, x, c: widths.append(x.dtype) or mix(b, x, c))
    hidden, keys = decoder(torch.tensor([tokens_of(9)]))
    assert hidden.dtype == keys.dtype == torch.bfloat16
    hidden.float().sum().backward()
    assert set(widths) == {torch.float32}


@pytest.mark.parametrize("changes", [{"norm_order": "post"}, {"parallel_residual": True}, {"join": "gated"}])
def test_layers_that_cannot_be_taken_back_are_refused(changes):
    with pytest.raises(InvalidInput, match="reversible layers need norm_order pre"):
        replace(REVERSIBLE, **changes)
