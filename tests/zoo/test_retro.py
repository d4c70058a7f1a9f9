"""RETRO: what the paper says of it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decoders import SHAPE, logits, make, tokens_of
from zoo.seam_parts import padded, told

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.model.early_exit import ExitRule, forward_early_exit
from memlm.zoo.retro.cross import Retro, retrofit

BASE = replace(SHAPE, context_length=40)
CROSS = Retro(chunk=4, length=6)


def given(decoder: Decoder, changes: dict[int, list[list[int]]] | None = None) -> list[list[int]]:
    """Gives a decoder the neighbors that `told` makes up, with others for some chunks by their number of calls.

    Returns the chunks that are asked for, in order.
    """
    asked = list[list[int]]()

    def neighbors(chunk_Nm):
        found = []
        for chunk in chunk_Nm.tolist():
            other = (changes or {}).get(len(asked))
            found.append(padded(told(chunk, 2, 6) if other is None else other, 6))
            asked.append(chunk)
        return torch.tensor(found)

    decoder.cross.neighbors = neighbors
    return asked


@pytest.mark.parametrize("number", [0, 2])
def test_the_neighbors_of_a_chunk_change_what_its_last_token_and_all_but_the_last_of_the_next_chunk_read(number):
    decoder, tokens = make(replace(BASE, num_layers=1, cross=CROSS)), tokens_of(18)
    given(decoder)
    before = logits(decoder, tokens)
    given(decoder, {number: [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]})
    moved = (logits(decoder, tokens) - before).abs().amax(dim=1) > 1e-6
    assert moved.nonzero()[:, 0].tolist() == list(range(4 * number + 3, 4 * number + 7))


def test_only_what_follows_the_similar_chunk_counts_too():
    decoder, tokens = make(replace(BASE, num_layers=1, cross=CROSS)), tokens_of(9)
    read = []
    for last in (30, 31):
        given(decoder, {0: [[*tokens[:4], 5, last], []], 1: [[], []]})
        read.append(logits(decoder, tokens))
    assert torch.equal(read[0][:3], read[1][:3])
    assert ((read[0] - read[1])[3:7].abs().amax(dim=1) > 1e-6).all()


def test_each_chunk_is_looked_up_once_whatever_pieces_the_text_comes_in():
    decoder, tokens = make(replace(BASE, cross=CROSS)), tokens_of(18)
    chunks = [tokens[begin : begin + 4] for begin in range(0, 16, 4)]
    for pieces in ([18], [1] * 18, [3, 3, 5, 7]):
        asked, state, begin = given(decoder), decoder.new_state(), 0
        for piece in pieces:
            logits(decoder, tokens[begin : begin + piece], state)
            begin += piece
        assert asked == chunks


def test_chunks_are_counted_from_the_begin_of_a_document():
    decoder, tokens = make(replace(BASE, cross=CROSS)), tokens_of(18)
    starts_BT = torch.zeros(1, 18, dtype=torch.bool)
    starts_BT[0, 6] = True
    asked = given(decoder)
    decoder(torch.tensor([tokens]), starts_BT=starts_BT)
    assert asked == [tokens[:4], tokens[6:10], tokens[10:14], tokens[14:18]]


@pytest.mark.parametrize("neighbors", [None, lambda chunk_Nm: chunk_Nm.new_full((len(chunk_Nm), 2, 6), -1)])
def test_a_model_that_finds_nothing_computes_what_its_base_does(neighbors):
    decoder, tokens = make(replace(BASE, cross=CROSS)), tokens_of(18)
    base = Decoder(BASE).double()
    base.load_state_dict({name: weight for name, weight in decoder.state_dict().items() if "cross." not in name})
    decoder.cross.neighbors = neighbors
    assert torch.equal(logits(decoder, tokens), logits(base, tokens))


def test_a_base_that_is_fitted_computes_what_it_did_and_learns_to_read_alone():
    base, tokens = make(BASE), tokens_of(18)
    decoder = retrofit(base, CROSS)
    given(decoder)
    assert torch.equal(logits(decoder, tokens), logits(base, tokens))
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    for _ in range(2):  # the encoder gets gradients once the last projection is not zero
        hidden_BTD, _ = decoder(torch.tensor([tokens[:-1]]))
        F.cross_entropy(decoder.logits(hidden_BTD[0]), torch.tensor(tokens[1:])).backward()
        optimizer.step()
    learned, before = decoder.weights(), base.weights()
    assert all(torch.equal(learned[name], weight) for name, weight in before.items())
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in decoder.named_parameters() if "cross." in name)
    assert not torch.equal(logits(decoder, tokens), logits(base, tokens))


@pytest.mark.parametrize("conditioned", [False, True])
def test_only_a_conditioned_encoder_knows_who_asks(conditioned):
    decoder = make(replace(BASE, cross=replace(CROSS, conditioned=conditioned)))
    same = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    given(decoder, {0: same, 1: same})
    state = decoder.new_state(batch_size=2)
    decoder(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), state)
    one, other = state.field("model.read")
    assert torch.equal(one, other) != conditioned


def test_tokens_that_skip_the_layers_leave_the_neighbors_of_their_chunk_to_later_ones():
    decoder, tokens = make(replace(BASE, cross=CROSS)), tokens_of(8)
    given(decoder)
    whole, early = decoder.new_state(), decoder.new_state()
    logits(decoder, tokens, whole)
    with torch.inference_mode():
        for token in tokens:
            _, used = forward_early_exit(decoder, torch.tensor([[token]]), early, ExitRule("state", 0.0))
            assert used == 1
    assert early.field("model.read").any()
    torch.testing.assert_close(early.field("model.read"), whole.field("model.read"))


def test_the_upper_half_reads_in_each_third_layer_as_in_the_paper():
    assert CROSS.reads_in(replace(BASE, num_layers=12)) == (5, 8, 11)
    assert CROSS.reads_in(BASE) == (1,)


def test_what_cannot_read_neighbors_is_refused():
    decoder = make(replace(BASE, cross=CROSS))
    with pytest.raises(InvalidInput, match="vectors"):
        decoder.read(torch.zeros(1, 4, 16))
    decoder.cross.neighbors = lambda chunk_Nm: chunk_Nm[:, None]
    with pytest.raises(InvalidInput, match=r"\(1, 1, 4\); the model reads \(1, 2, 6\)"):
        decoder(torch.tensor([[1, 2, 3, 4]]))
    for changes in (
        {"stack": "looped"},
        {"border": "recurrent_memory"},
        {"cross": {"kind": "retro", "layers": [2]}},
        {"cross": {"kind": "retro", "chunk": 1}},
    ):
        with pytest.raises(InvalidInput):
            replace(BASE, **{"cross": CROSS, **changes})
