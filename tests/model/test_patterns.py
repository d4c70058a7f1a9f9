"""Patterns at decode: the places that a token sees are copied, and no others are read. tests/zoo has the rules."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of

from memlm.model.attention import patterns
from memlm.model.attention.patterns import seen_places

RULES = {
    "strided": {"stride": 16},
    "fixed": {"block": 32, "summary": 4},
    "dilated": {"window": 8, "dilation": 3},
    "global": {"window": 20, "num_global": 3},
    "random": {"window": 20, "block": 16, "num_random": 2},
    "blocks": {"block": 32},
}


def test_the_places_are_those_that_are_visible():
    generator = torch.Generator().manual_seed(0)
    visible_RHS = torch.rand(3, 5, 40, generator=generator) < torch.tensor([0.1, 0.9, 0.2, 0.02, 1.0])[:, None]
    visible_RHS[:, :, 7] = True
    heads = []
    for head_n, place_RnK, shown_Rn1K in seen_places(visible_RHS):
        heads += head_n.tolist()
        for number, head in enumerate(head_n.tolist()):
            for row in range(3):
                kept = place_RnK[row, number][shown_Rn1K[row, number, 0]].tolist()
                assert kept == visible_RHS[row, head].nonzero()[:, 0].tolist()
    assert sorted(heads) == list(range(5))


@pytest.mark.parametrize("rule", RULES)
def test_a_token_behind_many_places_reads_those_that_it_sees_alone(rule, monkeypatch):
    monkeypatch.setattr(patterns, "MANY_PLACES", 600)  # so that the whole texts are soon read
    decoder = make(
        replace(SHAPE, context_length=800, layers=[{"mixer": {"kind": "pattern", "rule": rule, **RULES[rule]}}])
    )
    texts, new = [tokens_of(size, seed) for seed, size in enumerate((700, 640))], tokens_of(6, seed=5)
    state = decoder.new_state(batch_size=2, capacity=800)
    with torch.inference_mode():
        padded = [(text + [0] * 60)[:700] for text in texts]
        decoder(torch.tensor(padded), state, new_B=[700, 640])
        keys, attend = [], torch.nn.functional.scaled_dot_product_attention

        def spied(query, key, value, **given):
            keys.append(key.shape[2])
            return attend(query, key, value, **given)

        monkeypatch.setattr(patterns.F, "scaled_dot_product_attention", spied)
        read = [decoder.logits(decoder(torch.tensor([[token], [token]]), state)[0])[:, 0] for token in new]
        monkeypatch.setattr(patterns.F, "scaled_dot_product_attention", attend)
        assert max(keys) < 180
        monkeypatch.setattr(patterns, "MANY_PLACES", 10**9)
        for row, text in enumerate(texts):
            expected = logits(decoder, [*text, *new])[len(text) :]
            torch.testing.assert_close(torch.stack([each[row] for each in read]), expected, atol=1e-10, rtol=1e-10)


def test_a_token_that_sees_most_places_copies_none(monkeypatch):
    rule = {"kind": "pattern", "rule": "global", "window": 4096}
    decoder = make(replace(SHAPE, context_length=2500, layers=[{"mixer": rule}]))
    state, keys = decoder.new_state(batch_size=1, capacity=2300), list[int]()
    attend = torch.nn.functional.scaled_dot_product_attention

    def spied(query, key, value, **given):
        keys.append(key.shape[2])
        return attend(query, key, value, **given)

    with torch.inference_mode():
        decoder(torch.tensor([tokens_of(2100)]), state)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
        monkeypatch.setattr(patterns, "_rows_at", None)
        decoder(torch.tensor([[5]]), state)
    assert min(keys) > 2000
