"""Infinity-former: its fits, its reading of a signal, the order it keeps, documents, and training."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from training_runs import TINY
from zoo.infinite_twins import middles as middles_twin

from memlm.data.corpus import Corpus, Document
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel
from memlm.model import ModelConfig
from memlm.model.files.checkpoint import load_checkpoint
from memlm.training.train import train
from memlm.zoo.infinite import Bumps, Infinite, middles

SEGMENT = SHAPE.context_length
SIGNAL = {"kind": "infinite", "bumps": 8, "samples": 6, "widths": (0.1, 0.2), "bins": 7}


def infinite(**changes) -> ModelConfig:
    return replace(SHAPE, xl_length=3, layers=[{"mixer": {**SIGNAL, **changes}}])


def test_a_fit_solves_its_normal_equations():
    bumps = Bumps(Infinite(bumps=8, widths=(0.05, 0.2), ridge=0.3))
    places_P, values_PD = middles(12), torch.randn(12, 5, dtype=torch.float64)
    coefficients_ND = bumps.fit(places_P, values_PD)
    basis_NP = bumps.overlaps(places_P, torch.zeros(12, dtype=torch.float64)).T
    left_ND = (basis_NP @ basis_NP.T + 0.3 * torch.eye(8, dtype=torch.float64)) @ coefficients_ND
    torch.testing.assert_close(left_ND, basis_NP @ values_PD, atol=1e-10, rtol=0)


def test_places_are_the_middles_of_equal_parts():
    assert middles(5).tolist() == pytest.approx(middles_twin(5))


def test_an_almost_free_fit_of_a_constant_is_read_as_that_constant_wherever_a_query_looks_inside():
    bumps = Bumps(Infinite(bumps=64, widths=(0.05,), ridge=1e-9))
    coefficients_ND = bumps.fit(middles(200), torch.full((200, 1), 3.0, dtype=torch.float64))
    read = bumps.overlaps(torch.tensor([0.3, 0.5, 0.7]).double(), torch.full((3,), 0.02**2).double()) @ coefficients_ND
    torch.testing.assert_close(read, torch.full_like(read, 3.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("sticky", [True, False])
def test_a_token_that_left_long_ago_still_changes_what_is_read_and_so_does_the_order_of_segments(sticky):
    decoder, tokens = make(infinite(sticky=sticky)), tokens_of(30)
    changed = [(tokens[0] + 1) % 40, *tokens[1:]]
    last = logits(decoder, tokens)[-1]
    assert (logits(decoder, changed)[-1] - last).abs().max() > 1e-6
    swapped = [*tokens[SEGMENT : 2 * SEGMENT], *tokens[:SEGMENT], *tokens[2 * SEGMENT :]]
    assert (logits(decoder, swapped)[-1] - last).abs().max() > 1e-6
    local = replace(SHAPE, xl_length=3)
    plain = make(local)
    assert torch.equal(logits(plain, changed)[-1], logits(plain, tokens)[-1])


def test_sticky_samples_lie_where_the_queries_looked():
    decoder = make(infinite())
    mixer, state = decoder.blocks[0].attention, decoder.new_state()
    state.field("0.looks")[0] = torch.tensor([0, 0, 0, 3.0, 1.0, 0, 0])
    samples = mixer._samples(state, 0, 0)
    expected = [(3 + 4 / 3 * share) / 7 if share <= 0.75 else (4 + 4 * (share - 0.75)) / 7 for share in middles(6)]
    torch.testing.assert_close(samples, torch.stack(expected), atol=1e-12, rtol=0)
    assert state.field("0.looks").abs().sum() == 0


def test_the_loss_is_the_divergence_of_the_densities_and_counts_tokens_with_a_signal_alone():
    decoder = make(infinite(penalty=2.0, spread=0.3))
    for block in decoder.blocks:
        torch.nn.init.zeros_(block.attention.variance.weight)  # so that every variance is softplus(0) = log 2
    state = decoder.new_state(training=True)
    decoder(torch.tensor([tokens_of(SEGMENT)]), state)
    assert decoder.take_losses() is None
    decoder(torch.tensor([tokens_of(SEGMENT)]), state)
    ratio = torch.tensor(2.0).double().log() / 0.3**2
    expected = 2 * 2.0 * (ratio - 1 - ratio.log()) / 2  # of two layers
    assert decoder.take_losses().item() == pytest.approx(expected.item(), rel=1e-9)


def test_a_model_learns_with_a_signal_and_generates_past_its_segments(tmp_path):
    texts = [Document(str(number), "a far word comes back, " * 30) for number in range(4)]
    config = replace(TINY, steps=3, model_fields={"xl_length": 8, "layers": [{"mixer": SIGNAL}]})
    report = train(Corpus(texts), tmp_path / "model", config)
    assert all(loss < 20 for loss in report.losses)
    model = LanguageModel(load_checkpoint(tmp_path / "model"))
    text = model.generate("a far word", max_tokens=60, temperature=0.0).result().text
    assert model.generate("a far word", max_tokens=60, temperature=0.0, drafts=0).result().text == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"xl_length": 0}, "give xl_length"),
        ({"qkv_bias": True}, "does not go with qkv_bias"),
        ({"memorizing": {"layers": (1,)}}, "does not go with memorizing"),
        ({"layers": [{"mixer": {**SIGNAL, "squeeze": 1.0}}]}, "squeeze is 1.0"),
        ({"layers": [{"mixer": {**SIGNAL, "bumps": 7}}]}, "as many as divide 7 bumps"),
        ({"layers": [{"mixer": {**SIGNAL, "ridge": 0}}]}, "ridge is 0"),
    ],
)
def test_configs_that_the_signal_does_not_go_with_are_refused_in_words(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(infinite(), **changes)
