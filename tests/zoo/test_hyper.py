"""HyperAttention: what it reads, how often keys count, and how near it comes to attention."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.zoo.hyper import Hyper

PLAIN = replace(SHAPE, context_length=40)


def with_hyper(**fields) -> Decoder:
    return make(replace(PLAIN, layers=[{"mixer": Hyper(**fields)}]))


def counts_of(num_keys: int, **fields) -> torch.Tensor:
    """How often each key counts for random hashes (H, N, N), later keys left out."""
    attention = with_hyper(**fields).blocks[0].attention
    hashes_HN = torch.randint(16, (4, num_keys), generator=torch.Generator().manual_seed(0))
    return attention.counts(hashes_HN, hashes_HN, torch.arange(num_keys)).tril()


@pytest.mark.parametrize("fields", [{"block": 2, "samples": 40}, {"block": 40, "samples": 1}])
def test_with_all_samples_or_one_block_it_is_attention(fields):
    plain = make(PLAIN)
    hyper = with_hyper(**fields)
    hyper.load_state_dict(plain.state_dict())
    torch.testing.assert_close(logits(hyper, tokens_of(35)), logits(plain, tokens_of(35)), atol=1e-11, rtol=0)


@pytest.mark.parametrize("samples", [1, 3, 8])
def test_the_keys_of_a_query_stand_for_all_of_its_past(samples):
    counts_HQN = counts_of(100, block=4, samples=samples)
    assert torch.equal(counts_HQN.sum(dim=2), torch.arange(1, 101).expand(4, -1))
    runs = torch.tensor([(q // 4).bit_count() for q in range(100)])
    assert ((counts_HQN > 0).sum(dim=2) <= 4 + runs * (4 + samples)).all()


def test_a_key_counts_once_on_average():
    mean = torch.stack([counts_of(64, block=4, samples=3, seed=seed).double() for seed in range(400)]).mean(dim=0)
    past = torch.ones(64, 64).tril().bool()
    assert (mean[:, past] - 1).abs().max() < 0.9  # the largest of 8,320 means with a standard error of at most 0.2
    assert (mean[:, past] - 1).abs().mean() < 0.1


def test_a_key_like_the_query_is_always_found():
    attention = with_hyper(block=4, samples=1, projections=15).blocks[0].attention
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 64, 4, dtype=torch.float64, generator=generator)
    hashes = attention.hashes(keys)[0].repeat_interleave(2, dim=0)
    for place in range(32):  # in the run of the first 32
        query_HQ = hashes[:, place : place + 1]
        same = (hashes[:, :32] == query_HQ).sum(dim=1)
        count = attention.counts(query_HQ, hashes, torch.tensor([47]))[:, 0, place]
        assert ((count == 1) | (same > 2)).all()
    assert attention.hashes(3 * keys).equal(attention.hashes(keys))


def test_hashes_that_differ_in_one_sign_are_neighbors():
    attention = with_hyper(projections=3).blocks[0].attention
    attention.projection_GdP = torch.eye(4, 3, dtype=torch.float64).expand(2, -1, -1)
    signs = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 1], [1, 0, 0]])
    vectors = torch.cat([2.0 * signs - 1, torch.ones(8, 1)], dim=1).double()
    assert attention.hashes(vectors.expand(1, 2, -1, -1))[0, 0].tolist() == list(range(8))


def test_the_error_halves_with_four_times_the_samples():
    value_N = torch.randn(129, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def error(samples: int) -> float:
        """Of the mean value at position 128, whose past is one run, where all scores are equal."""
        read = [counts_of(129, block=1, samples=samples, seed=seed)[:, -1].double() @ value_N for seed in range(60)]
        return (torch.stack(read) - value_N.sum()).square().mean().sqrt().item() / 129

    assert error(4) / error(16) == pytest.approx(2, rel=0.3)
    assert error(127) < 1e-12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": (5, 5)}, "hyper does not go with windows"),
        ({"xl_length": 5}, "sorts the whole past"),
        ({"layers": [{"mixer": "hyper", "projections": 16}]}, "projections is 16"),
        ({"layers": [{"mixer": "hyper", "block": 0}]}, "block is 0"),
    ],
)
def test_what_sorting_cannot_do_is_refused_in_words(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(PLAIN, **{"layers": [{"mixer": "hyper"}], **changes})
