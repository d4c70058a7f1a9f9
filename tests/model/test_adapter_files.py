"""Adapters in files: PEFT's layout for every family, against transformers' weights, and against PEFT where it is."""

import json
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from other_families import save_as_others_do
from random_adapters import SPECS, random_adapter, save_random_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from memlm.errors import Corrupt, Incompatible, NotFound
from memlm.model.adapters import Adapter, Bottleneck, LoRA
from memlm.model.files.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterNames, load_adapter, save_adapter
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

ATOL = 1e-4  # float32, as in test_huggingface.py
TOKENIZER = {"model": "gpt2", "pre": "gpt-2", "tokens": [f"t{number}" for number in range(300)], "eos_token_id": 0}
TOKENS_BT = torch.randint(300, (2, 30), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=["gpt2", "gpt_neox", "llama", "llama biases", "qwen3", "gemma3", "phi3"], scope="module")
def foreign(request, tmp_path_factory, tokenizer) -> Path:
    return save_as_others_do(request.param, tmp_path_factory.mktemp("foreign"), tokenizer)


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tokenizer) -> Path:
    return save_as_others_do("llama", tmp_path_factory.mktemp("llama"), tokenizer)


def theirs(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_with(checkpoint: Checkpoint, adapter: Adapter, tokens_BT: torch.Tensor = TOKENS_BT) -> torch.Tensor:
    decoder = checkpoint.decoder
    decoder.adapters.attach("a", adapter, decoder)
    try:
        with torch.inference_mode():
            state = decoder.new_state(batch_size=len(tokens_BT), capacity=64, adapters_B=["a"] * len(tokens_BT))
            return decoder.logits(decoder(tokens_BT, state)[0]).float()
    finally:
        decoder.adapters.detach("a", decoder)


@pytest.mark.parametrize("targets", [("all-linear",), None], ids=["all", "some"])
def test_a_saved_lora_changes_the_weights_of_transformers_as_its_formula_says(foreign, tmp_path, targets):
    checkpoint = load_checkpoint(foreign)
    ends = sorted(
        {part.name.rpartition(".")[2] for parts in AdapterNames.of(checkpoint).parts.values() for part in parts}
    )
    adapter = random_adapter(
        LoRA(rank=3, alpha=4.5, targets=targets or tuple(ends[1::2])), checkpoint.decoder, AdapterNames.of(checkpoint)
    )
    save_adapter(tmp_path, adapter, checkpoint)
    model, tensors = theirs(foreign), load_file(tmp_path / ADAPTER_WEIGHTS)
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert config["target_modules"] == (ends if targets else ends[1::2])
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        delta_OI = 1.5 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        weight = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")).weight
        weight.data += delta_OI.T if config["fan_in_fan_out"] else delta_OI
    with torch.inference_mode():
        expected_BTV = model(TOKENS_BT).logits
        plain_BTV = theirs(foreign)(TOKENS_BT).logits
    assert not torch.allclose(expected_BTV, plain_BTV, atol=0.1)
    torch.testing.assert_close(logits_with(checkpoint, adapter), expected_BTV, atol=4 * ATOL, rtol=0)
    loaded = load_adapter(tmp_path, checkpoint)
    assert torch.equal(logits_with(checkpoint, loaded), logits_with(checkpoint, adapter))
    assert loaded.fingerprint


@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers, about each other
def test_peft_reads_what_is_saved_and_what_it_saves_is_read(foreign, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    checkpoint = load_checkpoint(foreign)
    adapter = random_adapter(LoRA(rank=3, alpha=4.5), checkpoint.decoder, AdapterNames.of(checkpoint))
    save_adapter(tmp_path / "ours", adapter, checkpoint)
    model = peft.PeftModel.from_pretrained(theirs(foreign), tmp_path / "ours")
    with torch.inference_mode():
        torch.testing.assert_close(logits_with(checkpoint, adapter), model(TOKENS_BT).logits, atol=4 * ATOL, rtol=0)
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(theirs(foreign), settings).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(tmp_path / "theirs")
    with torch.inference_mode():
        expected_BTV = model(TOKENS_BT).logits
    found = load_adapter(tmp_path / "theirs", checkpoint)
    torch.testing.assert_close(logits_with(checkpoint, found), expected_BTV, atol=4 * ATOL, rtol=0)
    save_adapter(tmp_path / "again", found, checkpoint)  # the scale of rslora is in B now
    again = load_adapter(tmp_path / "again", checkpoint)
    torch.testing.assert_close(logits_with(checkpoint, again), expected_BTV, atol=4 * ATOL, rtol=0)


def test_ranks_may_differ_from_layer_to_layer(llama, tmp_path):
    checkpoint = load_checkpoint(llama)
    adapter = random_adapter(
        LoRA(rank=3, alpha=3.0, targets=("q_proj", "v_proj")), checkpoint.decoder, AdapterNames.of(checkpoint)
    )
    layer = adapter.by_name["blocks.1.attention.qkv"]
    layer.downs[1], layer.ups[1] = (
        torch.nn.Parameter(torch.randn(shape) * 0.3) for shape in ((5, 48), (layer.parts[1].size, 5))
    )
    save_adapter(tmp_path, adapter, checkpoint)
    assert json.loads((tmp_path / ADAPTER_CONFIG).read_text())["rank_pattern"] == {"model.layers.1.self_attn.v_proj": 5}
    loaded = load_adapter(tmp_path, checkpoint)
    torch.testing.assert_close(logits_with(checkpoint, loaded), logits_with(checkpoint, adapter))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_own_model_keeps_its_adapters_and_says_which_files_they_were_trained_on(
    model_folder, tmp_path, spec, caplog
):
    checkpoint = load_checkpoint(model_folder)
    adapter = random_adapter(spec, checkpoint.decoder, AdapterNames.of(checkpoint))
    save_adapter(tmp_path / "adapter", adapter, checkpoint)
    loaded = load_adapter(tmp_path / "adapter", checkpoint)
    assert not caplog.records
    assert torch.equal(logits_with(checkpoint, loaded), logits_with(checkpoint, adapter))
    save_checkpoint(
        tmp_path / "half", load_checkpoint(model_folder, trainable=True).decoder.half(), checkpoint.tokenizer
    )
    assert load_adapter(tmp_path / "adapter", load_checkpoint(tmp_path / "half")).names == adapter.names
    assert "was trained on other files" in caplog.text


def test_a_gguf_file_takes_the_adapter_of_the_model_that_it_was_made_of(llama, tmp_path):
    """Its queries and keys lie in another order in the file."""
    write_gguf(tmp_path / "model.gguf", theirs(llama), TOKENIZER)
    checkpoint, quantized = load_checkpoint(llama), load_checkpoint(tmp_path / "model.gguf", dtype="float32")
    adapter = random_adapter(LoRA(rank=3), checkpoint.decoder, AdapterNames.of(checkpoint))
    save_adapter(tmp_path / "adapter", adapter, checkpoint)
    found = logits_with(quantized, load_adapter(tmp_path / "adapter", quantized))
    torch.testing.assert_close(found, logits_with(checkpoint, adapter), atol=ATOL, rtol=0)


def written(
    folder: Path, change: dict[str, object] | None = None, tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    """The folder, with settings or tensors of its adapter changed."""
    config, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    config.write_text(json.dumps(json.loads(config.read_text()) | (change or {})))
    save_file({**load_file(weights), **(tensors or {})}, weights)
    return folder


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"peft_type": "IA3"}, {}, Incompatible, "of the kind 'IA3'; this version reads LORA and bottlenecks"),
        ({"use_dora": True}, {}, Incompatible, "has use_dora=True; this version reads use_dora=False only"),
        ({"bias": "all"}, {}, Incompatible, "has bias='all'"),
        ({"modules_to_save": ["lm_head"]}, {}, Incompatible, "has modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, Incompatible, "which changes the model too"),
        ({"r": "many"}, {}, Corrupt, "has r='many'; expected the rank, a whole number from 1 on"),
        ({"r": 0}, {}, Corrupt, "has r=0; expected the rank"),
        ({"lora_alpha": "much"}, {}, Corrupt, "has lora_alpha='much'; expected a number"),
        ({}, {A: torch.ones(3, 47)}, Incompatible, r"q_proj has \(3, 47\) and \(48, 3\); .* takes \(r, 48\) and"),
        ({}, {A: torch.full((3, 48), torch.nan)}, Corrupt, "numbers that are not finite"),
        ({}, {A.replace("0", "9"): torch.ones(3, 48)}, Incompatible, "has no such layer in its blocks"),
        ({}, {"base_model.model.lm_head.lora_A.weight": torch.ones(3, 48)}, Incompatible, "lm_head"),
        ({}, {A.replace("lora_A", "lora_E"): torch.ones(3, 48)}, Incompatible, "lora_E"),
    ],
)
def test_other_adapters_and_damaged_ones_are_refused_with_their_reason(
    llama, tmp_path, config, tensors, error, message
):
    checkpoint = load_checkpoint(llama)
    save_random_adapter(tmp_path, checkpoint, LoRA(rank=3))
    with pytest.raises(error, match=message):
        load_adapter(written(tmp_path, config, tensors), checkpoint)


def test_folders_without_an_adapter_and_adapters_of_another_shape_are_refused(llama, model_folder, tmp_path):
    checkpoint = load_checkpoint(llama)
    with pytest.raises(NotFound, match=r"has no adapter_config\.json; make one with `memlm train --adapter`"):
        load_adapter(tmp_path, checkpoint)
    save_random_adapter(tmp_path, checkpoint, Bottleneck(4))
    with pytest.raises(Incompatible, match="is an adapter of a model of another shape than"):
        load_adapter(tmp_path, load_checkpoint(model_folder))
    (tmp_path / ADAPTER_CONFIG).write_text("[]")
    with pytest.raises(Incompatible, match="of the kind None"):
        load_adapter(tmp_path, checkpoint)
    (tmp_path / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(Corrupt, match="is not JSON"):
        load_adapter(tmp_path, checkpoint)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 3}))
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(Corrupt, match=r"adapter_model\.safetensors cannot be read"):
        load_adapter(tmp_path, checkpoint)
    (tmp_path / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(NotFound, match="safe_serialization=True"):
        load_adapter(tmp_path, checkpoint)
