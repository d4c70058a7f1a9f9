from copy import deepcopy

import numpy as np
import pytest
import torch
from reference import decode_plainly

from memlm.errors import InvalidInput
from memlm.model import Decoder, ModelConfig
from memlm.model.kernels import cpu
from memlm.model.kernels.cpu import ACTIVATIONS, can_pack
from memlm.model.kernels.linear import Linear

SHAPES = {
    "grouped": ModelConfig(50, 16, 2, 4, 2, 24, 32),
    "multi-query": ModelConfig(50, 16, 3, 4, 1, 24, 32),
    "multi-head": ModelConfig(50, 24, 1, 2, 2, 40, 32),
}


@pytest.fixture(params=SHAPES, scope="module")
def decoder(request) -> Decoder:
    torch.manual_seed(1)
    decoder = Decoder(SHAPES[request.param]).double().eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(10) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) * 0.3)
    return decoder


def tokens_of(decoder: Decoder, length: int, seed: int = 0) -> list[int]:
    return torch.randint(decoder.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_decoder_equals_its_plain_twin(decoder):
    tokens = tokens_of(decoder, 12)
    with torch.inference_mode():
        hidden_BTD, keys_BTD = decoder(torch.tensor([tokens]))
        logprobs_TV = torch.log_softmax(decoder.logits(hidden_BTD[0]), dim=-1)
    expected_TV, expected_TD = decode_plainly(decoder, tokens)
    np.testing.assert_allclose(logprobs_TV.numpy(), expected_TV, atol=1e-6)
    np.testing.assert_allclose(keys_BTD[0].numpy(), expected_TD, atol=1e-6)
    np.testing.assert_allclose(decoder.keys(torch.tensor([tokens]))[0].detach().numpy(), expected_TD, atol=1e-6)


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 6], [1, 11]])
def test_reading_in_pieces_equals_reading_at_once(decoder, pieces):
    tokens = tokens_of(decoder, 12)
    with torch.inference_mode():
        whole_TD, whole_keys_TD = (each[0] for each in decoder(torch.tensor([tokens])))
        state, place = decoder.new_state(), 0
        for size in pieces:
            hidden_BTD, keys_BTD = decoder(torch.tensor([tokens[place : place + size]]), state)
            torch.testing.assert_close(hidden_BTD[0], whole_TD[place : place + size])
            torch.testing.assert_close(keys_BTD[0], whole_keys_TD[place : place + size])
            place += size
    assert state.length == 12


def test_a_later_token_changes_nothing_before_it(decoder):
    tokens = tokens_of(decoder, 12)
    for place in range(12):
        changed = [*tokens]
        changed[place] = (changed[place] + 1) % decoder.config.vocab_size
        with torch.inference_mode():
            before, after = (decoder(torch.tensor([each]))[0][0] for each in (tokens, changed))
        assert torch.equal(before[:place], after[:place])
        assert not torch.allclose(before[place], after[place])


def test_rows_of_a_batch_do_not_see_each_other(decoder):
    rows = [tokens_of(decoder, 9, seed) for seed in range(4)]
    with torch.inference_mode():
        together = decoder(torch.tensor(rows))[0]
        for row, tokens in enumerate(rows):
            torch.testing.assert_close(together[row], decoder(torch.tensor([tokens]))[0][0])


def test_a_fork_goes_its_own_way(decoder):
    tokens = tokens_of(decoder, 8)
    with torch.inference_mode():
        state = decoder.new_state()
        decoder(torch.tensor([tokens]), state)
        fork = state.fork()
        decoder(torch.tensor([[1, 2, 3]]), fork)
        alone, _ = decoder(torch.tensor([[7]]), state)
        expected, _ = decoder(torch.tensor([[*tokens, 7]]))
    assert (state.length, fork.length) == (9, 11)
    torch.testing.assert_close(alone[0, -1], expected[0, -1])


def test_a_text_longer_than_the_context_is_refused(decoder):
    with pytest.raises(InvalidInput, match="do not fit"):
        decoder(torch.zeros(1, 33, dtype=torch.int64))
    state = decoder.new_state(capacity=4)
    with pytest.raises(InvalidInput, match="4 places left"):
        decoder(torch.zeros(1, 5, dtype=torch.int64), state)


@pytest.mark.parametrize("change", [{"dim": 30}, {"num_kv_heads": 3}, {"num_layers": 0}, {"num_heads": 16}])
def test_shapes_that_do_not_fit_together_are_refused(change):
    shape = {"vocab_size": 50, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 24}
    with pytest.raises(InvalidInput):
        ModelConfig(**{**shape, "context_length": 32, **change})


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_weights_multiply_and_activate_as_plain_ones_do(activation, dtype, tolerance):
    if not can_pack(torch.zeros(1, dtype=dtype)):
        pytest.skip("this torch packs no such weights on this processor")
    torch.manual_seed(0)
    layer, inputs_RI = Linear(24, 40).to(dtype), torch.randn(7, 24).to(dtype)
    with torch.inference_mode():
        plain_RO = layer(inputs_RI, activation)
        layer.pack()
        torch.testing.assert_close(layer(inputs_RI, activation), plain_RO, atol=tolerance, rtol=tolerance)


def test_what_the_processor_cannot_pack_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    layer, inputs_RI = Linear(24, 40).to(torch.bfloat16), torch.randn(7, 24).to(torch.bfloat16)
    with torch.inference_mode():
        before_RO = layer(inputs_RI)
        layer.pack()
        assert layer.packed is None
        torch.testing.assert_close(layer(inputs_RI), before_RO, atol=0, rtol=0)


def test_bfloat16_that_is_only_emulated_is_attended_to_in_float32(decoder, monkeypatch):
    rounded, tokens_BT = (
        deepcopy(decoder).to(torch.bfloat16),
        torch.tensor([tokens_of(decoder, 24, seed) for seed in (1, 2)]),
    )
    with torch.inference_mode():
        exact_BTV = deepcopy(rounded).double().logits(deepcopy(rounded).double()(tokens_BT)[0])
        errors = []
        for emulated in (False, True):
            monkeypatch.setattr(cpu, "is_emulated", lambda tensor, e=emulated: e and tensor.dtype == torch.bfloat16)
            errors.append((rounded.logits(rounded(tokens_BT)[0]) - exact_BTV).square().mean().sqrt() / exact_BTV.std())
    plain, upcast = errors
    assert upcast < 1.2 * plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows_at_once", [1, 7, 40])
def test_bfloat16_that_is_only_emulated_is_multiplied_in_float32(monkeypatch, activation, bias, rows_at_once):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(cpu, "UPCAST_BYTES", 4 * 24 * rows_at_once)
    torch.manual_seed(0)
    layer, inputs_BTI = Linear(24, 40, bias=bias).to(torch.bfloat16), torch.randn(3, 5, 24).to(torch.bfloat16)
    with torch.inference_mode():
        expected_BTO = deepcopy(layer).float()(inputs_BTI.float(), activation).to(torch.bfloat16)
        layer.pack()
        assert layer.packed is None
        torch.testing.assert_close(layer(inputs_BTI, activation), expected_BTO, atol=0, rtol=1e-2)  # a last bit
    layer(inputs_BTI).sum().backward()  # it can still learn
    assert layer.weight.grad is not None
