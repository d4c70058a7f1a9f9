"""What the papers of linear attention say of it: kernels, orthogonality, gates, long sums and constant memory."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from zoo.weights import Weights

from memlm.errors import InvalidInput
from memlm.model.draws import normals
from memlm.model.state.size import row_bytes
from memlm.zoo import linear_attention
from memlm.zoo.linear_attention import Chunk, Sums, read_chunk
from memlm.zoo.performer import log_features, orthogonal
from memlm.zoo.rfa import waves

PLAIN = replace(SHAPE, context_length=40)
KINDS = {"performer": {"kind": "performer", "features": 8}, "rfa": {"kind": "rfa", "draws": 6}}


def with_mixer(mixer, **changes):
    return replace(PLAIN, layers=[{"mixer": mixer}], **changes)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_normal_draws_have_the_moments_of_the_distribution():
    x = normals(3, torch.arange(400)[:, None], torch.arange(500))
    assert x.mean().abs() < 4 / len(x.flatten()) ** 0.5
    assert (x**2).mean().item() == pytest.approx(1, abs=0.02)
    assert (x**4).mean().item() == pytest.approx(3, abs=0.15)


def test_products_of_positive_features_have_the_mean_of_the_softmax_kernel():
    q, k = 0.8 * vectors(3, 4), 0.8 * vectors(3, 4, seed=1)
    directions = torch.cat([orthogonal(0, 0, head, 4, 4) for head in range(1024)])
    logs = log_features(q, directions) + log_features(k, directions)
    drawn = logs.exp()
    error = drawn.std(dim=1) / len(directions) ** 0.5
    assert ((drawn.mean(dim=1) - ((q * k).sum(1) / 2).exp()).abs() < 3 * error).all()


def test_directions_are_orthogonal_in_blocks_and_as_long_as_gaussian_ones():
    w = orthogonal(1, 0, 0, 10, 4)
    products = w @ w.T
    for block in (slice(0, 4), slice(4, 8), slice(8, 10)):
        inner = products[block, block]
        torch.testing.assert_close(inner, inner.diagonal().diag())
    assert products[0, 4:8].abs().min() > 1e-3
    long = torch.cat([orthogonal(seed, 0, 0, 4, 4) for seed in range(500)])
    assert long.square().sum(1).mean().item() == pytest.approx(4, rel=0.05)


def test_orthogonal_directions_estimate_the_kernel_no_worse_than_independent_ones():
    q, k = 0.5 * vectors(200, 8), 0.5 * vectors(200, 8, seed=1)
    exact = ((q * k).sum(1) / 8**0.5).exp()

    def error(directions: torch.Tensor) -> float:
        estimate = (log_features(q, directions) + log_features(k, directions)).exp().mean(1)
        return ((estimate - exact) / exact).square().mean().item()

    independent = [error(normals(seed, torch.arange(8)[:, None], torch.arange(8))) for seed in range(60)]
    orthogonal_ones = [error(orthogonal(seed, 0, 0, 8, 8)) for seed in range(60)]
    assert sum(orthogonal_ones) < 0.9 * sum(independent)


def test_products_of_waves_have_the_mean_of_the_gaussian_kernel():
    x, y = vectors(3, 4), vectors(3, 4, seed=1)
    directions = normals(5, torch.arange(40_000)[:, None], torch.arange(4))
    got = (waves(x, directions) * waves(y, directions)).sum(1)
    torch.testing.assert_close(got, (-(x - y).square().sum(1) / 2).exp(), atol=0.015, rtol=0)


def chunk_of(length: int, dtype: torch.dtype = torch.float64, gate: float | None = None, seed: int = 0) -> Chunk:
    features = vectors(1, 1, 2, length, 3, seed=seed).exp().to(dtype)
    values = torch.cat([vectors(1, 1, length, 2, seed=seed + 1), torch.ones(1, 1, length, 1)], dim=3).to(dtype)
    begins = torch.zeros(1, length, dtype=torch.bool)
    begins[0, 0] = seed == 0
    gates = torch.zeros(1, 1, length, dtype=dtype) + (0.0 if gate is None else gate)
    enters = gates if gate is None else torch.nn.functional.logsigmoid(-gates)
    keeps = gates if gate is None else torch.nn.functional.logsigmoid(gates)
    return Chunk(features[:, :, :1], features[:, :, 1], enters, keeps, values, begins)


NOTHING = Sums(torch.zeros(1, 1, 3, 3, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))


def read(chunk: Chunk) -> torch.Tensor:
    _, sums, _ = read_chunk(chunk, NOTHING)
    return (sums[..., :-1] / sums[..., -1:])[0, 0, 0]


def test_a_constant_gate_weighs_by_its_powers_and_a_closed_one_reads_the_last_token_alone():
    chunk, g = chunk_of(12, gate=1.2), torch.tensor(1.2, dtype=torch.float64).sigmoid()
    products = chunk.query_BGrTm[0, 0, 0] @ chunk.key_BGTm[0, 0].T
    age = torch.arange(12)[:, None] - torch.arange(12)
    weights = (products * g ** age.clamp(min=0)).tril()
    torch.testing.assert_close(read(chunk), weights / weights.sum(1, keepdim=True) @ chunk.value_BGTe[0, 0, :, :-1])
    closed = chunk_of(12, gate=-60.0)
    torch.testing.assert_close(read(closed), closed.value_BGTe[0, 0, :, :-1])


def test_sums_of_a_hundred_thousand_tokens_hold_in_float32():
    exact, sums = torch.zeros(3, 3, dtype=torch.float64), Sums(*(each.float() for each in NOTHING))
    for seed in range(400):
        chunk = chunk_of(250, torch.float32, seed=seed)
        _, _, sums = read_chunk(chunk, sums)
        exact += chunk.key_BGTm[0, 0].double().T @ chunk.value_BGTe[0, 0].double()
    assert exact[:, -1].min() > 1e5
    means, got = (each[:, :-1] / each[:, -1:] for each in (exact, sums.sums_BGme[0, 0].double()))
    assert (got - means).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_chunks_changes_nothing(kind, monkeypatch):
    decoder, read = make(with_mixer(KINDS[kind])), []
    for size in (1, 7, 128):
        monkeypatch.setattr(linear_attention, "CHUNK", size)
        read.append(logits(decoder, tokens_of(23)))
    for other in read[1:]:
        torch.testing.assert_close(other, read[0], atol=1e-10, rtol=1e-10)


def test_keys_of_any_length_neither_overflow_nor_vanish():
    narrow, wide = (make(with_mixer(KINDS["performer"], num_layers=1)) for _ in range(2))
    with torch.no_grad():
        for decoder in (narrow, wide):
            decoder.blocks[0].attention.qkv.weight[: 6 * 4].mul_(8)  # the exponents of most keys vanish in float32
    torch.testing.assert_close(
        logits(narrow.float(), tokens_of(30)), logits(wide, tokens_of(30)).float(), atol=1e-3, rtol=1e-3
    )


def test_with_many_features_it_comes_near_plain_attention():
    """The error of a mean falls with the root of their number, here by a factor of eight."""
    plain = make(replace(PLAIN, num_layers=1))
    with torch.no_grad():
        plain.blocks[0].attention.qkv.weight.mul_(0.3)
    errors = {}
    for features in (32, 2048):
        errors[features] = 0.0
        for seed in range(6):
            linear = make(with_mixer({"kind": "performer", "features": features, "seed": seed}, num_layers=1))
            linear.load_state_dict(plain.state_dict())
            errors[features] += (logits(linear, tokens_of(20)) - logits(plain, tokens_of(20))).square().mean().item()
    assert (errors[2048] / errors[32]) ** 0.5 < 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_has_the_same_bytes_for_a_text_of_any_length(kind):
    config, features = with_mixer(KINDS[kind]), {"performer": 8, "rfa": 12}[kind]
    expected = config.num_layers * 4 * config.num_kv_heads * (features * (config.head_dim + 1) + 1)
    assert [row_bytes(config, tokens, torch.float32) for tokens in (1, 40_000)] == [expected, expected]


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_those_of_a_seed_in_every_process_and_differ_by_seed(kind):
    one, again, other = (make(with_mixer({**KINDS[kind], "seed": seed})) for seed in (0, 0, 1))
    assert torch.equal(logits(one, tokens_of(9)), logits(again, tokens_of(9)))
    assert not torch.equal(logits(one, tokens_of(9)), logits(other, tokens_of(9)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_sees_the_weights_spelled_out(kind):
    decoder, watch = make(with_mixer(KINDS[kind], num_layers=1)), Weights()
    with torch.inference_mode():
        read = decoder.logits(decoder(torch.tensor([tokens_of(20)]), watch=watch)[0])[0]
    (weights_BHTS,) = watch.of_layer.values()
    assert weights_BHTS.shape == (1, 4, 20, 20)
    assert weights_BHTS.triu(1).eq(0).all()
    torch.testing.assert_close(read, logits(decoder, tokens_of(20)), atol=1e-10, rtol=1e-10)
    if kind == "performer":
        torch.testing.assert_close(weights_BHTS.sum(3), torch.ones(1, 4, 20, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mixer", "changes", "message"),
    [
        ({"kind": "performer", "features": 0}, {}, "features is 0"),
        ({"kind": "rfa", "draws": 0}, {}, "draws is 0"),
        ({"kind": "rfa", "seed": -1}, {}, "seed is -1"),
        ("rfa", {"positions": "alibi"}, "rfa has no scores that alibi positions"),
        ("performer", {"windows": (3, 3)}, "layer 0 is performer, which keeps no tokens for windows"),
    ],
)
def test_what_does_not_go_together_is_refused(mixer, changes, message):
    with pytest.raises(InvalidInput, match=message):
        with_mixer(mixer, **changes)
