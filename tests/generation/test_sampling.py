import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from memlm.api.params import SamplingParams
from memlm.errors import Corrupt, InvalidInput
from memlm.generation import sampling
from memlm.generation.sampling import keep_min_p, keep_top_k, keep_top_p, penalize_repetition, sample

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def kept(logprobs_V: torch.Tensor) -> list[int]:
    return torch.isfinite(logprobs_V).nonzero()[:, 0].tolist()


def draw(params: SamplingParams, seed: int = 0, seen: tuple[int, ...] = ()) -> int:
    return sample(PROBS.log(), params, list(seen), np.random.default_rng(seed))


def test_greedy_takes_the_likeliest():
    assert draw(SamplingParams(temperature=0)) == 0


def test_draws_follow_the_probabilities():
    drawn = torch.bincount(torch.tensor([draw(SamplingParams(), seed) for seed in range(4000)]), minlength=5) / 4000
    torch.testing.assert_close(drawn, PROBS, atol=0.03, rtol=0)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [torch.full((5,), torch.nan), torch.tensor([-1.0, torch.nan, -1, -2, -3])])
def test_what_is_not_a_number_is_not_drawn_from(bad, temperature):
    with pytest.raises(Corrupt, match="weights may be damaged"):
        sample(bad, SamplingParams(temperature=temperature), [], np.random.default_rng(0))


def test_temperature_sharpens_and_flattens():
    cold = [draw(SamplingParams(temperature=0.25), seed) for seed in range(500)]
    hot = [draw(SamplingParams(temperature=4.0), seed) for seed in range(500)]
    assert cold.count(0) > 450
    assert hot.count(4) > 50


def test_the_same_seed_draws_the_same():
    assert [draw(SamplingParams(), 7) for _ in range(3)] == [draw(SamplingParams(), 7)] * 3


@pytest.mark.parametrize(("k", "expected"), [(1, [0]), (3, [0, 1, 2]), (99, [0, 1, 2, 3, 4]), (None, [0, 1, 2, 3, 4])])
def test_top_k(k, expected):
    assert kept(keep_top_k(PROBS.log(), k)) == expected


@pytest.mark.parametrize(
    ("p", "expected"), [(0.01, [0]), (0.5, [0]), (0.51, [0, 1]), (0.8, [0, 1, 2]), (1.0, [0, 1, 2, 3, 4])]
)
def test_top_p_keeps_the_smallest_set_that_holds_the_mass(p, expected):
    assert kept(keep_top_p(PROBS.log(), p)) == expected


def top_p_by_sorting(logprobs_V, top_p):
    """All tokens in order, in float64, until those before hold the mass; and all that tie with the last one."""
    ordered = sorted(logprobs_V.double().tolist(), reverse=True)
    masses = np.exp(np.array(ordered) - float(logprobs_V.logsumexp(dim=0)))
    last = max(number for number in range(len(ordered)) if number == 0 or masses[:number].sum() < top_p)
    return [token for token, logprob in enumerate(logprobs_V.double().tolist()) if logprob >= ordered[last]]


@pytest.mark.parametrize("top_p", [1e-39, 1e-6, 0.1, 0.5, 0.9, 0.97, 0.9999])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("kind", ["plain", "ties", "few"])
def test_top_p_is_that_of_a_whole_sort(kind, spread, top_p, monkeypatch):
    monkeypatch.setattr(sampling, "LIKELY", 20)
    generator = torch.Generator().manual_seed(int(10 * spread))
    logits_V = spread * torch.randn(300, generator=generator)
    if kind == "ties":
        logits_V = logits_V.round()
    elif kind == "few":
        logits_V[torch.randperm(300, generator=generator)[:290]] = -torch.inf
    logprobs_V = logits_V.log_softmax(dim=0)
    expected = [token for token in top_p_by_sorting(logprobs_V, top_p) if logprobs_V[token] > -torch.inf]
    assert kept(keep_top_p(logprobs_V, top_p)) == expected


@pytest.mark.parametrize(("p", "expected"), [(0.0, [0, 1, 2, 3, 4]), (0.1, [0, 1, 2, 3]), (0.4, [0, 1]), (1.0, [0])])
def test_min_p(p, expected):
    assert kept(keep_min_p(PROBS.log(), p)) == expected


def test_repetition_penalty_makes_seen_tokens_rarer_and_leaves_its_argument_alone():
    before = PROBS.log()
    after = penalize_repetition(before, [0, 0, 2], 2.0)
    torch.testing.assert_close(after, torch.tensor([2.0, 1, 2, 1, 1]) * before)
    assert torch.equal(before, PROBS.log())
    assert draw(SamplingParams(temperature=0, repetition_penalty=3.0), seen=(0,)) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-39, 1e-30])
def test_as_the_temperature_nears_0_draws_become_greedy(temperature):
    assert {draw(SamplingParams(temperature=temperature), seed) for seed in range(20)} == {0}


@pytest.mark.parametrize("top_p", [5e-324, 1e-46, 1e-39])
def test_as_top_p_nears_0_the_likeliest_token_is_left(top_p):
    assert kept(keep_top_p(PROBS.log(), top_p)) == [0]
    assert draw(SamplingParams(top_p=top_p)) == 0


def test_a_huge_temperature_draws_evenly_from_the_tokens_that_have_any_mass():
    few_logprobs = torch.tensor([0.999, 0.0, 0.001]).log()
    params = SamplingParams(temperature=1e308)
    drawn = [sample(few_logprobs, params, [], np.random.default_rng(seed)) for seed in range(200)]
    assert drawn.count(1) == 0
    assert 60 < drawn.count(2) < 140


@given(
    st.lists(st.sampled_from([0.0, -1e-7, -0.7, -20.0, -1e4, -np.inf]), min_size=1, max_size=6),
    st.floats(0, 1e308),
    st.none() | st.floats(0, 1, exclude_min=True),
    st.none() | st.floats(0, 1),
    st.floats(5e-324, 1e308),
    st.integers(0, 9),
)
@example([0.0, -np.inf], 5e-324, 5e-324, 5e-324, 5e-324, 0)
@example([0.0, -np.inf], 1e308, 1.0, 1.0, 1e308, 0)
def test_no_settings_make_log_probabilities_into_what_cannot_be_drawn_from(
    logprobs, temperature, top_p, min_p, penalty, seed
):
    logprobs_V = torch.tensor([-0.1, *logprobs])
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    drawn = sample(logprobs_V, params, range(len(logprobs_V)), np.random.default_rng(seed))
    assert logprobs_V[drawn] > -torch.inf


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1},
        {"min_p": float("nan")}, {"repetition_penalty": 0}, {"max_tokens": 0}, {"seed": -1}, {"stop": ("",)},
        {"stop": ("x",) * 17},
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_name(bad):
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(**bad)
    assert caught.value.field in bad
