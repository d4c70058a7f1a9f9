"""Depth on demand: what it leaves out, what it promises, and what it costs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoders import ALL, make, tokens_of

from memlm.data.corpus import Corpus
from memlm.errors import Corrupt, InvalidInput, NotFound
from memlm.generation.early_exit import calibrate, load_rule
from memlm.language_model import load
from memlm.model import Decoder
from memlm.model.early_exit import ExitRule, forward_early_exit, hoeffding_bentkus
from memlm.model.files.checkpoint import load_checkpoint


def read(decoder: Decoder, tokens: list[int], rule: ExitRule) -> tuple[torch.Tensor, list[int]]:
    state, hidden, layers = decoder.new_state(), [], []
    with torch.inference_mode():
        for token in tokens:
            one, used = forward_early_exit(decoder, torch.tensor([[token]]), state, rule)
            hidden.append(one[0])
            layers.append(used)
    return torch.cat(hidden), layers


@pytest.mark.parametrize("measure", ["softmax", "state"])
@pytest.mark.parametrize("kind", ["rotary", "everything", "post-norm layer-norm relu", "memorizing", "xl t5"])
def test_a_threshold_of_one_is_the_whole_model(kind, measure):
    decoder, tokens = make(ALL[kind]), tokens_of(20)
    hidden, layers = read(decoder, tokens, ExitRule(measure, 1.0))
    with torch.inference_mode():
        expected = decoder(torch.tensor([tokens]))[0][0]
    assert set(layers) == {2}
    torch.testing.assert_close(hidden, expected, atol=1e-6, rtol=1e-6)


def test_layers_left_out_keep_keys_and_values_of_the_state_that_was_reached():
    """Leaving after one layer, the second layer's cache holds the projections of the first one's output."""
    decoder = make(ALL["rotary"])
    _, layers = read(decoder, tokens_of(6), ExitRule("state", 0.0))
    assert layers == [1] * 6
    state = decoder.new_state()
    with torch.inference_mode():
        outputs = []
        hook = decoder.blocks[0].ff.register_forward_hook(lambda _m, i, out: outputs.append((i[0], out)))
        for token in tokens_of(6):
            forward_early_exit(decoder, torch.tensor([[token]]), state, ExitRule("state", 0.0))
        hook.remove()
        values = state.cache_L2BGSd[1, 1, 0, :, :6]
        whole = decoder.new_state()
        decoder(torch.tensor([tokens_of(6)]), whole)
    assert values.abs().sum(dim=(0, 2)).min() > 0
    assert state.rows == whole.rows
    assert state.length == 6
    torch.testing.assert_close(state.cache_L2BGSd[0], whole.cache_L2BGSd[0])
    # the first token attends to itself alone, so its layer-0 output is the same in both readings
    torch.testing.assert_close(values[:, 0], whole.cache_L2BGSd[1, 1, 0, :, 0])


@pytest.mark.parametrize("measure", ["softmax", "state"])
def test_the_lower_the_threshold_the_fewer_the_layers(measure):
    decoder = make(replace(ALL["rotary"], num_layers=5))
    used = [sum(read(decoder, tokens_of(20), ExitRule(measure, t))[1]) for t in (1.0, 0.9, 0.6, 0.3, 0.0)]
    assert used == sorted(used, reverse=True)
    assert used[0] == 100
    assert used[-1] == 20


def test_the_p_value_is_small_only_where_the_risk_is_surely_low():
    assert hoeffding_bentkus(0.2, 0.1, 1000) == 1.0
    assert hoeffding_bentkus(0.09, 0.1, 50) > 0.3
    assert hoeffding_bentkus(0.01, 0.1, 500) < 1e-10
    assert hoeffding_bentkus(0.0, 0.05, 100) == pytest.approx(0.95**100, rel=1e-9)
    assert hoeffding_bentkus(0.0, 0.05, 100) < hoeffding_bentkus(0.0, 0.05, 50)


def test_a_false_threshold_rarely_passes():
    """Of many samples whose true risk is just too high, at most epsilon pass the test."""
    generator = torch.Generator().manual_seed(1)
    risks = (torch.rand(2000, 60, generator=generator) < 0.1).double().mean(dim=1)
    assert sum(hoeffding_bentkus(float(risk), 0.1, 60) <= 0.05 for risk in risks) / 2000 <= 0.05


@pytest.fixture(scope="module")
def trained(corpus_folder, tmp_path_factory) -> Path:
    """A model that has learnt something to be sure of."""
    from memlm.training.config import TrainConfig
    from memlm.training.train import train

    folder = tmp_path_factory.mktemp("trained") / "model"
    config = TrainConfig(
        dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ff_dim=64, context_length=64, vocab_size=300,
        batch_size=8, steps=150,
    )  # fmt: skip
    train(Corpus([corpus_folder]), folder, config)
    return folder


def test_calibrating_keeps_a_rule_that_generation_goes_by(trained, corpus_folder, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "model"))
    texts = Corpus([corpus_folder])
    with load(folder) as lm, pytest.raises(NotFound, match="memlm calibrate"):
        lm.generate("the memory", early_exit=True)
    report = calibrate(folder, texts, measure="state", delta=0.5, epsilon=0.1, prompts=40)
    assert report.rule is not None
    assert report.p_value <= 0.1
    assert report.disagreement < 0.5
    assert 0 < report.layers_share < 1
    assert load_rule(folder) == report.rule
    before = load_checkpoint(trained).fingerprint
    assert load_checkpoint(folder).fingerprint == before  # the rule is no part of what datastores go by
    with load(folder) as lm:
        drawn = [token.id for token in lm.generate("the memory of", early_exit=True, temperature=0, max_tokens=12)]
        decoder, tokenizer = lm.checkpoint.decoder, lm.checkpoint.tokenizer
        prompt, expected = tokenizer.prompt("the memory of"), []
        state = decoder.new_state()
        with torch.inference_mode():
            hidden, _ = decoder(torch.tensor([prompt]), state)
            for _ in range(12):
                expected.append(int(decoder.logprobs(hidden[0, -1]).argmax()))
                hidden, _ = forward_early_exit(decoder, torch.tensor([[expected[-1]]]), state, report.rule)
    assert drawn == expected[: len(drawn)]
    assert len(drawn) > 3


def test_a_promise_that_cannot_be_kept_is_not_made(trained, corpus_folder, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "model"))
    report = calibrate(folder, Corpus([corpus_folder]), delta=0.001, epsilon=0.001, prompts=20)
    assert report.rule is None
    assert not (folder / "early_exit.json").exists()


def test_early_exit_and_a_datastore_do_not_go_together(lm):
    with pytest.raises(InvalidInput, match="without a datastore"):
        lm.generate("the memory", early_exit=True)


def test_what_means_nothing_is_refused(trained, corpus_folder, tmp_path):
    for bad in ({"measure": "mood"}, {"threshold": 1.5}, {"first_layer": 0}):
        with pytest.raises(InvalidInput):
            ExitRule(**{"measure": "state", "threshold": 0.5, **bad})
    for bad in ({"delta": 0.0}, {"epsilon": 1.0}, {"measure": "mood"}):
        with pytest.raises(InvalidInput):
            calibrate(trained, Corpus([corpus_folder]), **bad)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(InvalidInput, match="more text"):
        calibrate(trained, Corpus([tmp_path / "a.txt"]))
    (tmp_path / "early_exit.json").write_text(json.dumps({"rule": {"measure": "state"}}))
    with pytest.raises(Corrupt, match="again"):
        load_rule(tmp_path)
