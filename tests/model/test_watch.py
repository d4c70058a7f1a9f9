"""A watch sees the weights of every head and changes nothing, or silences the heads that it is to silence."""

from dataclasses import replace

import pytest
import torch
from decoders import ALL, make, sampled, tokens_of

from memlm.model import Decoder

LENGTH = 17


class Recorder:
    """Keeps all that a watch is given, and silences one head."""

    def __init__(self, silenced=None):
        self.seen, self.mixed, self.gates, self.silenced = {}, {}, {}, silenced

    def weights(self, layer, weights_BHTE, mask):
        self.seen.setdefault(layer, []).append((weights_BHTE, mask))

    def gate(self, layer, share_BHT):
        self.gates.setdefault(layer, []).append(share_BHT)

    def heads(self, layer, mixed_BHTd):
        self.mixed.setdefault(layer, []).append(mixed_BHTd)
        if self.silenced is None or self.silenced[0] != layer:
            return mixed_BHTd
        return mixed_BHTd.index_fill(1, torch.tensor([self.silenced[1]]), 0.0)


def read(decoder, watch=None):
    with torch.inference_mode():
        return decoder(torch.tensor([tokens_of(LENGTH)]), decoder.new_state(capacity=LENGTH), watch=watch)


@pytest.mark.parametrize("name", sampled(ALL))
def test_watching_changes_no_prediction(name):
    decoder, recorder = make(ALL[name]), Recorder()
    plain, watched = read(decoder), read(decoder, recorder)
    for each, other in zip(plain, watched, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-9, atol=1e-9)
    assert sorted(recorder.seen) == sorted(recorder.mixed) == list(range(decoder.config.num_layers))


@pytest.mark.parametrize("name", ["rotary", "windows", "memorizing joint", "everything", "sinks rotary"])
def test_weights_are_a_distribution_over_places_before(name):
    recorder = Recorder()
    read(make(ALL[name]), recorder)
    for pieces in recorder.seen.values():
        assert sum(weights.shape[2] for weights, _ in pieces) == LENGTH
        for weights_BHTE, mask in pieces:
            torch.testing.assert_close(weights_BHTE.sum(dim=3), torch.ones_like(weights_BHTE[..., 0]))
            later_RTS = mask.key_RS[:, None] > mask.query_RT[:, :, None]
            assert weights_BHTE[..., : mask.num_places].masked_select(later_RTS[:, None]).abs().sum() == 0


def test_weights_are_those_by_which_values_are_mixed():
    """In a decoder whose last layer has no memory, weights x values are the output that the watch gets behind them."""
    decoder, recorder = make(ALL["rotary"]), Recorder()
    state, tokens = decoder.new_state(capacity=LENGTH), torch.tensor([tokens_of(LENGTH)])
    with torch.inference_mode():
        decoder(tokens, state, watch=recorder)
    for layer in range(2):
        value_GSd = state.cache_L2BGSd[layer, 1, 0, :, :LENGTH]
        weights_HTS, mixed_HTd = recorder.seen[layer][0][0][0], recorder.mixed[layer][0][0]
        for head in range(4):
            for t in range(LENGTH):
                expected = sum(weights_HTS[head, t, s] * value_GSd[head // 2, s] for s in range(LENGTH))
                torch.testing.assert_close(mixed_HTd[head, t], expected)


def test_a_gate_is_seen_where_a_query_has_neighbors():
    decoder, recorder = make(ALL["memorizing"]), Recorder()
    read(decoder, recorder)
    shares_H = decoder.blocks[1].attention.knn.shares_H
    assert list(recorder.gates) == [1]
    for share_BHT in recorder.gates[1]:
        torch.testing.assert_close(share_BHT, shares_H[None, :, None].expand_as(share_BHT))
    assert sum(share.shape[2] for share in recorder.gates[1]) == LENGTH - 6  # the first segment has no past


def test_a_silenced_head_is_one_whose_output_weights_are_zero():
    decoder = make(ALL["rotary"])
    silenced = read(decoder, Recorder(silenced=(0, 2)))[0]
    with torch.no_grad():
        decoder.blocks[0].attention.out.weight[:, 2 * 4 : 3 * 4] = 0
    torch.testing.assert_close(silenced, read(decoder)[0])


def test_native_kernels_leave_a_watched_pass_to_torch():
    torch.manual_seed(0)
    decoder, recorder = Decoder(replace(ALL["rotary"], head_dim=8)).eval().pack(bits=8), Recorder()
    plain, watched = read(decoder), read(decoder, recorder)
    assert sorted(recorder.seen) == [0, 1]
    torch.testing.assert_close(plain[0], watched[0], rtol=1e-3, atol=1e-3)
