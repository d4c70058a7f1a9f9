"""Models with a name: found where their package is installed, and read as any other."""

from pathlib import Path

import pytest
import torch
from gguf_files import read_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.errors import NotFound
from memlm.language_model import LanguageModel, load
from memlm.model.files import catalog
from memlm.model.files.catalog import MODELS, NamedModel, find_model
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
