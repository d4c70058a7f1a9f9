"""Muon in float32, for processors that only emulate bfloat16: torch's own, but for the rounding."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from reference import orthogonal_plainly
from torch import nn

from memlm.model import Compression, Decoder, ModelConfig
from memlm.training import optimizers
from memlm.training.config import TrainConfig
from memlm.training.optimizers import Float32Muon, newton_schulz, optimizers_for

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
SHAPES = [(48, 48), (96, 32), (32, 96)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_moves_singular_values_alone(shape):
    matrix = np.random.default_rng(0).standard_normal(shape)
    moved = newton_schulz(torch.from_numpy(matrix), COEFFICIENTS, 5, 1e-7).numpy()
    np.testing.assert_allclose(moved, orthogonal_plainly(matrix, COEFFICIENTS, 5), atol=1e-9)
    assert 0.6 < np.linalg.svd(moved, compute_uv=False).min() < np.linalg.svd(moved, compute_uv=False).max() < 1.3


def moved_by(optimizer: torch.optim.Optimizer, matrices: list[nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()


def fresh() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_it_moves_as_torchs_does_and_goes_on_from_its_state():
    theirs, ours, taken_up = fresh(), fresh(), fresh()
    their_muon, our_muon = torch.optim.Muon(theirs, **OPTIONS), Float32Muon(ours, **OPTIONS)
    moved_by(their_muon, theirs, 0, 3)
    moved_by(our_muon, ours, 0, 3)
    for begun, mine, other in zip(fresh(), ours, theirs, strict=True):
        assert (mine - other).norm() < 0.02 * (other - begun).norm()  # bfloat16 has three digits
    second = Float32Muon(taken_up, **OPTIONS)
    second.load_state_dict(deepcopy(their_muon.state_dict()))
    with torch.no_grad():
        for matrix, other in zip(taken_up, theirs, strict=True):
            matrix.copy_(other)
    before = [matrix.clone() for matrix in taken_up]
    moved_by(their_muon, theirs, 3, 4)
    moved_by(second, taken_up, 3, 4)
    for begun, mine, other in zip(before, taken_up, theirs, strict=True):
        assert (mine - other).norm() < 0.02 * (other - begun).norm()


@pytest.mark.parametrize(("fast", "kind"), [(True, torch.optim.Muon), (False, Float32Muon)])
def test_the_processor_decides(monkeypatch, fast, kind):
    monkeypatch.setattr(optimizers, "has_fast_bfloat16", lambda: fast)
    decoder = Decoder(
        ModelConfig(dim=12, num_layers=1, num_heads=2, num_kv_heads=1, ff_dim=16, context_length=8, vocab_size=300)
    )
    muon, _ = optimizers_for(TrainConfig(), decoder)
    assert type(muon) is kind


def test_a_matrix_over_places_is_no_matrix_for_muon():
    shape = ModelConfig(
        dim=12, num_layers=1, num_heads=2, num_kv_heads=1, ff_dim=16, context_length=8, vocab_size=300, xl_length=4,
        compression=Compression(length=4, rate=2, kind="linear"),
    )  # fmt: skip
    decoder = Decoder(shape)
    both = optimizers_for(TrainConfig(), decoder)
    muon, rest = ([p for group in each.param_groups for p in group["params"]] for each in both)
    places = decoder.blocks[0].compressor.places_rn
    assert not any(parameter is places for parameter in muon)
    assert any(parameter is places for parameter in rest)
