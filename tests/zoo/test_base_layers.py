"""Experts that share a batch evenly: the assignment, and one token alone (BASE layers, arXiv 2103.16716)."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of

from memlm.errors import InvalidInput
from memlm.zoo.base_layers import Base, balanced

PLAIN = replace(SHAPE, context_length=40, num_layers=1)


def value(scores, experts):
    return scores[np.arange(len(scores)), list(experts)].sum()


def brute_force(scores):
    """The greatest sum of scores among all balanced assignments, which are tried one by one."""
    N, E = scores.shape
    best = -np.inf
    for experts in product(range(E), repeat=N):
        counts = np.bincount(experts, minlength=E)
        if counts.min() >= N // E and counts.max() <= -(-N // E):
            best = max(best, value(scores, experts))
    return best


@pytest.mark.parametrize(("tokens", "experts"), [(4, 2), (5, 2), (6, 3), (7, 3), (8, 3), (2, 3), (1, 2), (6, 1)])
def test_no_balanced_assignment_has_a_greater_sum(tokens, experts):
    for seed in range(12):
        generator = np.random.default_rng(seed)
        scores = generator.normal(size=(tokens, experts))
        if seed % 3 == 0:
            scores[:, 0] += 3  # all want one expert
        if seed % 4 == 0:
            scores = scores.round()  # ties
        got = balanced(scores)
        counts = np.bincount(got, minlength=experts)
        assert counts.max() - counts.min() <= 1
        assert value(scores, got) == pytest.approx(brute_force(scores), abs=1e-9)


def test_many_tokens_have_the_sum_of_the_hungarian_method():
    optimize = pytest.importorskip("scipy.optimize")
    for seed in range(5):
        scores = np.random.default_rng(seed).normal(size=(96, 6)) + np.arange(6)
        rows, columns = optimize.linear_sum_assignment(np.repeat(scores, 16, axis=1), maximize=True)
        got = balanced(scores)
        assert np.bincount(got).tolist() == [16] * 6
        assert value(scores, got) == pytest.approx(np.repeat(scores, 16, axis=1)[rows, columns].sum(), abs=1e-9)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1.7e308])
def test_scores_that_are_not_finite_or_too_far_apart_end(wrong):
    scores = np.random.default_rng(0).normal(size=(7, 3))
    for places in (np.s_[2, 1], np.s_[:, 0], np.s_[:, :]):
        given = scores.copy()
        given[places] = wrong
        if np.isfinite(wrong):
            given[:, 1:] = -wrong  # no difference of two scores is a number
        with np.errstate(over="ignore"):
            got = balanced(given)
        assert got.shape == (7,)
        assert got.tolist() == given.argmax(axis=1).tolist() or np.isfinite(wrong)


def experts_of(decoder, tokens_BT, **options):
    """The expert of each token, from what each expert reads."""
    ff, read = decoder.blocks[0].ff, []
    hooks = [
        e.register_forward_hook(lambda _m, i, _o, n=n: read.append((n, len(i[0])))) for n, e in enumerate(ff.experts)
    ]
    hidden, _ = decoder(tokens_BT, **options)
    for hook in hooks:
        hook.remove()
    return dict(read), hidden


def test_experts_share_the_real_tokens_evenly_while_learning_and_take_their_own_ones_otherwise():
    decoder = make(replace(PLAIN, layers=[{"channel": Base(experts=3)}]))
    tokens_BT = torch.tensor([tokens_of(12), tokens_of(12, 1)])
    own, _ = experts_of(decoder, tokens_BT)
    assert max(own.values()) > 8
    shared, _ = experts_of(decoder.train(), tokens_BT)
    assert shared == {0: 8, 1: 8, 2: 8}
    with torch.no_grad():  # nothing learns
        assert experts_of(decoder, tokens_BT)[0] == own
    state = decoder.new_state(batch_size=2)
    decoder.zero_grad()
    padded, hidden = experts_of(decoder, tokens_BT, state=state, new_B=[12, 3])
    assert sum(padded.values()) == 24  # padding is read too, and its experts do not count
    hidden[0].sum().backward()
    assert decoder.blocks[0].ff.router.weight.grad.abs().sum() > 0


def test_a_token_reads_the_same_in_any_company():
    decoder, tokens = make(replace(PLAIN, layers=[{"channel": Base(experts=4)}])), tokens_of(20)
    with torch.inference_mode():
        together = decoder.logits(decoder(torch.tensor([tokens, tokens_of(20, 1)]))[0])
    torch.testing.assert_close(together[0], logits(decoder, tokens), atol=1e-12, rtol=0)


def test_an_expert_without_a_vector_is_half_a_feed_forward():
    """sigmoid(0) = 1 / 2."""
    decoder = make(replace(PLAIN, layers=[{"channel": Base(experts=1)}]))
    plain = make(PLAIN)
    weights = {name.replace("ff.experts.0.", "ff."): tensor for name, tensor in decoder.state_dict().items()}
    del weights["blocks.0.ff.router.weight"]
    weights["blocks.0.ff.down.weight"] = weights["blocks.0.ff.down.weight"] / 2
    plain.load_state_dict(weights)
    with torch.no_grad():
        decoder.blocks[0].ff.router.weight.zero_()
    torch.testing.assert_close(logits(decoder, tokens_of(20)), logits(plain, tokens_of(20)), atol=1e-12, rtol=0)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(InvalidInput, match="experts is 0"):
        Base(experts=0)
