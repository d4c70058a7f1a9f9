"""A decoder reads vectors in the place of tokens, with the same bits and the same promises."""

from dataclasses import replace

import pytest
import torch
from decoders import UNBOUNDED, make, tokens_of
from zoo.cross_twins import kind_of
from zoo.test_rules import ZOO

from memlm.errors import InvalidInput
from memlm.model import Decoder

NAMES = ("learned", "sinusoidal", "alibi", "sandwich norms", "sinks rotary")
READ_TOKENS = {name for name, config in ZOO.items() if any(part.needs_tokens for part in config.parts)}
CONFIGS = {
    **{name: UNBOUNDED[name] for name in NAMES},
    **{name: config for name, config in ZOO.items() if name not in READ_TOKENS},
}


@pytest.fixture(params=CONFIGS, scope="module")
def decoder(request) -> Decoder:
    return make(CONFIGS[request.param], made=kind_of(CONFIGS[request.param]))


def test_embedded_tokens_are_read_as_the_tokens_are_in_any_pieces_and_rows(decoder):
    tokens_BT = torch.tensor([tokens_of(21, seed) for seed in range(2)])
    states = [decoder.new_state(batch_size=2, capacity=40) for _ in range(2)]
    begin = 0
    with torch.inference_mode():
        for new_B in ([5, 5], [1, 1], [7, 2], [0, 5], [3, 3]):
            piece_BT = tokens_BT[:, begin : begin + max(new_B)]
            vectors_BTD = decoder.token_vectors(piece_BT)
            given_BTD = vectors_BTD.clone()
            expected = decoder(piece_BT, states[0], new_B=new_B)
            got = decoder.read(vectors_BTD, states[1], new_B=new_B)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
            assert torch.equal(vectors_BTD, given_BTD)
            begin += max(new_B)
    assert states[0].save() == states[1].save()


def test_vectors_are_taken_back_as_tokens_are(decoder):
    tokens_BT = torch.tensor([tokens_of(12)])
    states = [decoder.new_state(capacity=20) for _ in range(2)]
    with torch.inference_mode():
        for state in states:
            decoder(tokens_BT[:, :8], state)
        room = min(3, *states[0].draft_room_B())
        draft_BT = tokens_BT[:, 8 : 8 + room]
        decoder(draft_BT, states[0])
        decoder.read(decoder.token_vectors(draft_BT), states[1])
        for state in states:
            decoder.crop(state, [9])
        read = [decoder(tokens_BT[:, 9:], state)[0] for state in states]
    assert torch.equal(*read)


def test_gradients_reach_the_vectors_and_other_vectors_read_otherwise():
    decoder = make(UNBOUNDED["rotary"])
    vectors_BTD = decoder.token_vectors(torch.tensor([tokens_of(9)])).detach().requires_grad_()
    decoder.read(vectors_BTD)[0][0, 4].sum().backward()
    assert (vectors_BTD.grad[0, :5].abs().sum(dim=1) > 0).all()
    assert not vectors_BTD.grad[0, 5:].any()


def test_a_document_may_begin_at_a_vector():
    decoder, tokens_BT = make(UNBOUNDED["rotary"]), torch.tensor([tokens_of(9)])
    starts_BT = torch.zeros(1, 9, dtype=torch.bool)
    starts_BT[0, 4] = True
    with torch.inference_mode():
        expected = decoder(tokens_BT, starts_BT=starts_BT)[0]
        assert torch.equal(decoder.read(decoder.token_vectors(tokens_BT), starts_BT=starts_BT)[0], expected)


def test_what_cannot_be_read_is_refused():
    with pytest.raises(InvalidInput, match=r"17 wide.*16"):
        make(UNBOUNDED["rotary"]).read(torch.zeros(1, 3, 17))
    with pytest.raises(InvalidInput, match="hash"):
        make(ZOO["hash"]).read(torch.zeros(1, 3, 16))


def test_vectors_that_a_later_layer_refuses_change_no_state():
    """The first layer adds to its sums before the second one chooses experts."""
    decoder = make(replace(UNBOUNDED["rotary"], layers=[{"mixer": "rfa"}, {"channel": "hash"}], num_layers=2))
    state = decoder.new_state(capacity=20)
    with torch.inference_mode():
        decoder(torch.tensor([tokens_of(5)]), state)
        before = state.save()
        with pytest.raises(InvalidInput, match="hash chooses by tokens") as refused:
            decoder.read(decoder.token_vectors(torch.tensor([tokens_of(3)])), state)
    assert refused.value.field == "channel"
    assert state.save() == before
