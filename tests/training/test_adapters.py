"""Training an adapter: the model stays as it is, and the adapter alone is learned, kept and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import TINY, Killed, kill_at, loss_on

from memlm.cli.train import train_config
from memlm.data.corpus import Corpus
from memlm.errors import AlreadyExists, InvalidInput
from memlm.model.files.adapter_files import load_adapter, merge_adapter
from memlm.model.files.checkpoint import fingerprint_of, load_checkpoint
from memlm.training.config import TrainConfig
from memlm.training.train import train

LORA = replace(TINY, adapter="lora:rank=4", learning_rate=5e-3, optimizer="adamw", dtype="float32", model_fields={})
CONFIGS = {
    "lora": LORA,
    "lora by muon": replace(LORA, optimizer="muon"),
    "lora of a part": replace(LORA, adapter="lora:rank=2,targets=q_proj+down_proj"),
    "bottleneck": replace(LORA, adapter="bottleneck:width=6"),
    "shorter windows": replace(LORA, model_fields={"context_length": 12}),
}


@pytest.fixture(scope="module")
def corpus(corpus_folder) -> Corpus:
    return Corpus([corpus_folder])


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    train(corpus, folder, replace(TINY, steps=40))
    return folder


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_adapter_learns_and_the_model_stays_as_it_is(corpus, base, tmp_path, config):
    before = fingerprint_of(base)
    report = train(corpus, tmp_path / "a", replace(config, steps=40), valid=corpus, init_from=base)
    assert fingerprint_of(base) == before
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "metrics.csv",
    ]  # fmt: skip
    checkpoint = load_checkpoint(base)
    decoder, adapter = checkpoint.decoder, load_adapter(tmp_path / "a", checkpoint)
    assert adapter.num_parameters == report.num_parameters < decoder.num_parameters
    plain = loss_on(corpus, decoder, checkpoint.tokenizer)
    decoder.adapters.attach("a", adapter, decoder)
    decoder.adapters.default = "a"
    assert report.valid_loss < plain - 0.02
    if config.model_fields == {}:
        assert loss_on(corpus, decoder, checkpoint.tokenizer) == pytest.approx(report.valid_loss, abs=1e-5)
    decoder.adapters.detach("a", decoder)
    assert loss_on(corpus, decoder, checkpoint.tokenizer) == plain


@pytest.mark.parametrize("name", ["lora", "bottleneck"])
def test_a_resumed_run_continues_to_the_same_losses_and_weights(corpus, base, tmp_path, name):
    whole = train(corpus, tmp_path / "whole", CONFIGS[name], init_from=base)
    for killed_at in (3, 9):
        folder = tmp_path / f"killed-{killed_at}"
        with pytest.raises(Killed):
            train(corpus, folder, CONFIGS[name], init_from=base, progress=kill_at(killed_at))
        kept = folder / "training" / "checkpoint.pt"
        assert kept.exists() == (killed_at > 5)
        if kept.exists():  # holds no tensor of the model
            names = torch.load(kept, weights_only=True)["decoder"]
            assert all(name.startswith("layers.") for name in names)
        assert train(corpus, folder, resume=True).losses == whole.losses
        weights = [(each / "adapter_model.safetensors").read_bytes() for each in (folder, tmp_path / "whole")]
        assert weights[0] == weights[1]
        with pytest.raises(AlreadyExists, match="holds an adapter whose training is complete"):
            train(corpus, folder, resume=True)
    with pytest.raises(AlreadyExists, match="holds an adapter already"):
        train(corpus, folder, CONFIGS[name], init_from=base)


def test_the_best_weights_are_kept_where_the_text_is_scored(corpus, base, tmp_path):
    config = replace(LORA, steps=12, valid_every=2, patience=2)
    report = train(corpus, tmp_path / "a", config, valid=corpus, init_from=base)
    checkpoint = load_checkpoint(base)
    decoder = checkpoint.decoder
    decoder.adapters.attach("a", load_adapter(tmp_path / "a", checkpoint), decoder)
    decoder.adapters.default = "a"
    assert loss_on(corpus, decoder, checkpoint.tokenizer) == pytest.approx(report.valid_loss, abs=1e-5)


def test_models_with_memory_learn_adapters_too(corpus, tmp_path):
    fields = {"xl_length": 8, "memorizing": {"layers": [0], "top_k": 4, "capacity": 40},
              "compression": {"length": 4, "rate": 4}}  # fmt: skip
    train(corpus, tmp_path / "base", replace(TINY, model_fields=fields))
    report = train(corpus, tmp_path / "a", replace(LORA, steps=30), valid=corpus, init_from=tmp_path / "base")
    checkpoint = load_checkpoint(tmp_path / "base")
    assert report.valid_loss < loss_on(corpus, checkpoint.decoder, checkpoint.tokenizer)


def test_a_merged_model_predicts_as_the_attached_adapter(corpus, base, tmp_path):
    report = train(corpus, tmp_path / "a", replace(LORA, steps=20), valid=corpus, init_from=base)
    merge_adapter(base, tmp_path / "a", tmp_path / "merged")
    merged = load_checkpoint(tmp_path / "merged")
    assert loss_on(corpus, merged.decoder, merged.tokenizer) == pytest.approx(report.valid_loss, abs=1e-5)
    with pytest.raises(AlreadyExists, match="choose another place for the merged model"):
        merge_adapter(base, tmp_path / "a", tmp_path / "merged")


def test_settings_that_do_not_go_with_an_adapter_are_refused(corpus, base, tmp_path):
    with pytest.raises(InvalidInput, match="an adapter changes a trained model; give it as --init-from"):
        train(corpus, tmp_path / "a", LORA)
    with pytest.raises(InvalidInput, match="xl_length would change the model"):
        train(corpus, tmp_path / "a", replace(LORA, model_fields={"xl_length": 8}), init_from=base)
    with pytest.raises(InvalidInput, match="targets has q; this model's linear layers are"):
        train(corpus, tmp_path / "a", replace(LORA, adapter="lora:targets=q"), init_from=base)
    assert not (tmp_path / "a").exists()
    with pytest.raises(InvalidInput, match="expected lora or bottleneck"):
        TrainConfig(adapter="prefix")
    with pytest.raises(InvalidInput, match="compile is given with an adapter"):
        replace(LORA, compile=True)


def test_a_file_of_settings_may_name_the_adapter(tmp_path):
    (tmp_path / "run.toml").write_text('adapter = "bottleneck:width=4"\nsteps = 3\n')
    config = train_config("tiny", tmp_path / "run.toml", {}, fine_tuning=True)
    assert (config.adapter, config.learning_rate) == ("bottleneck:width=4", 1e-3)
    assert train_config("tiny", None, {"adapter": "lora"}, fine_tuning=True).learning_rate == 1e-3
    assert train_config("tiny", None, {}, fine_tuning=True).learning_rate == 3e-4
