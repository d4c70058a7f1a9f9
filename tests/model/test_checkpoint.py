import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from memlm.api.params import SamplingParams
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.language_model import load
from memlm.model.files import checkpoint as checkpoint_module
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.model.kernels import cpu


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_model_is_the_same_after_saving_and_loading(checkpoint, tmp_path):
    save_checkpoint(tmp_path / "again", checkpoint.decoder, checkpoint.tokenizer)
    again = load_checkpoint(tmp_path / "again")
    assert again.fingerprint == checkpoint.fingerprint
    for name, tensor in checkpoint.decoder.state_dict().items():
        assert torch.equal(again.decoder.state_dict()[name], tensor)


def test_weights_that_are_left_are_read_later_unless_the_files_have_changed(folder, checkpoint):
    one, other = load_checkpoint(folder, weights=False), load_checkpoint(folder, weights=False)
    assert one.fingerprint == checkpoint.fingerprint
    one.read_weights()
    one.read_weights()
    assert torch.equal(one.decoder(torch.tensor([[3, 4]]))[0], checkpoint.decoder(torch.tensor([[3, 4]]))[0])
    change_config(folder, note="changed")
    for _ in range(2):
        with pytest.raises(Incompatible, match="changed while the model was loaded"):
            other.read_weights()


def test_two_fine_tunes_of_one_shape_have_two_fingerprints(checkpoint, folder):
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] += 1e-6
    save_file(weights, folder / "model.safetensors")
    assert load_checkpoint(folder).fingerprint != checkpoint.fingerprint


def test_bfloat16_is_warned_of_where_it_is_slow(folder, monkeypatch, caplog):
    load_checkpoint(folder, dtype="bfloat16")
    assert bool(caplog.records) == (not cpu.multiplies_bfloat16())
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    caplog.clear()
    load_checkpoint(folder, dtype="float32")
    assert not caplog.records
    load_checkpoint(folder, dtype="bfloat16")
    assert "auto takes what is faster" in caplog.text


def test_what_is_no_model_is_named(tmp_path):
    (tmp_path / "weights.bin").touch()
    for name, problem in (
        (tmp_path, r"it has no config\.json; make one with `memlm train`"),
        (tmp_path / "nosuch", "there is no such folder; check the path, or take a name that `memlm models list` shows"),
        ("smollm", "there is no such folder; check the path"),
        (tmp_path / "weights.bin", r"it is a file, and no \.gguf file; give one, or a model's folder"),
        ("nosuch/model.gguf", "there is no such file; check the path"),
    ):
        with pytest.raises(NotFound, match=f"no model at {name}: {problem}"):
            load_checkpoint(name)


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_that_means_all_tokens_is_left_out(folder, top_k):
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": top_k, "top_p": 0.5}))
    sampling = load_checkpoint(folder).sampling
    assert (sampling.top_k, sampling.top_p) == (SamplingParams().top_k, 0.5)


def test_tokens_that_the_model_has_not_are_refused_where_they_are_used(folder, checkpoint, caplog):
    """As a fine-tune leaves them, whose tokenizer has one more for padding."""
    described, size = json.loads((folder / "tokenizer.json").read_text()), checkpoint.decoder.config.vocab_size
    for number, (text, is_special) in enumerate({"<pad>": True, "<extra>": False}.items()):
        described["added_tokens"].append(
            {"id": size + number, "content": text, "special": is_special}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        )
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with load(folder) as lm:
        tokenizer = lm.checkpoint.tokenizer
        assert "2 tokens more than the model" in caplog.text
        assert (tokenizer.vocab_size, len(tokenizer.token_bytes)) == (size, size)
        text = "a <pad> or an <extra>"  # is plain text
        assert tokenizer.encode(text).tolist() == checkpoint.tokenizer.encode(text).tolist()
        assert len(list(lm.generate(text, max_tokens=2, temperature=0))) <= 2
        for number, token in enumerate(("<pad>", "<extra>")):  # where a template writes them, they are not
            with pytest.raises(InvalidInput, match=rf"'{token}' \({size + number}\) .* the model has {size:,} tokens"):
                tokenizer.encode_special(f"a {token} b")
        with pytest.raises(InvalidInput, match=f"{size}, outside the vocabulary of {size}"):
            list(lm.generate([size], max_tokens=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, size]}))
    with pytest.raises(Corrupt, match=f"the token {size} starts or ends texts, and the model has {size:,}"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model_type": "mystery"}, Incompatible, "mystery|model_type"),
        ({"format_version": 99}, Incompatible, "format 99"),
        ({"surprise": 1}, Corrupt, "surprise"),
        ({"dim": 31, "head_dim": 0}, Corrupt, "dim"),
        ({"num_layers": "two"}, Corrupt, "config.json"),
        ({"ff_dim": 64}, Corrupt, "gate_up"),
        ({"num_layers": 3}, Corrupt, "blocks.2"),
        ({"vocab_size": 10}, Corrupt, "embedding.weight should be"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(folder, changes, error, says):
    change_config(folder, **changes)
    with pytest.raises(error, match=says):
        load_checkpoint(folder)


def test_truncated_and_missing_weights_are_refused_by_name(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(Corrupt, match="safetensors"):
        load_checkpoint(folder)
    weights.unlink()
    with pytest.raises(Corrupt, match="missing"):
        load_checkpoint(folder)


def test_a_file_that_another_replaces_stays_the_models_own(folder, checkpoint):
    tokens_BT = torch.arange(12)[None]
    loaded = load_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "other.safetensors")
    (folder / "other.safetensors").replace(folder / "model.safetensors")
    with torch.inference_mode():
        hidden_BTD, expected_BTD = loaded.decoder(tokens_BT)[0], checkpoint.decoder(tokens_BT)[0]
    assert torch.equal(hidden_BTD, expected_BTD)
    with pytest.raises(Incompatible, match="changed after the model was loaded"):
        loaded.fingerprint  # noqa: B018  it is computed here


def test_a_file_that_changes_while_it_is_read_is_not_taken(folder, monkeypatch):
    class Slow(checkpoint_module.Decoder):
        def __init__(self, config):
            super().__init__(config)
            (folder / "model.safetensors").touch()

    monkeypatch.setattr(checkpoint_module, "Decoder", Slow)
    with pytest.raises(Incompatible, match="changed while the model was loaded"):
        load_checkpoint(folder)


def test_tensors_that_are_no_plain_numbers_are_named_and_odd_offsets_are_read(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "norm.weight": weights["norm.weight"].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(Incompatible, match=r"norm\.weight is of the type I8.*BF16"):
        load_checkpoint(folder)
    save_file(weights, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    odd = (size + 1).to_bytes(8, "little") + content[8 : 8 + size] + b" " + content[8 + size :]
    (folder / "model.safetensors").write_bytes(odd)
    read = load_checkpoint(folder).decoder.weights()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_loading_a_model_does_not_load_a_compiler(model_folder: Path) -> None:
    """torch's takes a second and a half, which every command would wait for."""
    code = (
        f"import sys; from memlm.model.files.checkpoint import load_checkpoint; load_checkpoint({str(model_folder)!r})"
    )
    code += "; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"torch._dynamo", "sympy", "torch.distributed.fsdp"} & set(loaded)
