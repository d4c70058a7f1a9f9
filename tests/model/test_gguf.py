"""GGUF files against `transformers` on the weights that they hold, and files that are damaged or hostile."""

import json
import random
import resource
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize
from gguf_files import K_QUANTS, write_gguf
from other_families import CONFIGS, GEMMA, LLAMA, ROPE
from transformers import AutoModelForCausalLM

from memlm.errors import Corrupt, Incompatible, InvalidInput, MemlmError, NotFound
from memlm.generation.early_exit import RULE_FILE
from memlm.language_model import load
from memlm.model.device import dtype_of
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.files.gguf import TENSOR_TYPES, GgufFile, companion
from memlm.model.files.gguf_architectures import config_of
from memlm.model.files.gguf_blocks import FORMATS, blocks_of, layout_of
from memlm.model.kernels import native
from memlm.model.kernels.quantized import BlockWeight, Layout

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}  # as the K formats need
BLOCKS_ATOL = 5e-3  # inputs in 16 bits; measured: at most 1.6e-3
ATOL = 1e-4  # float32; measured: at most 2e-5, for logits of a standard deviation of 1.4
TOKENIZER = {"model": "gpt2", "pre": "gpt-2", "tokens": [f"t{number}" for number in range(300)], "eos_token_id": 0}
LLAMA_3 = transformers.LlamaConfig(
    **LLAMA | {"max_position_embeddings": 16_384},
    rope_parameters={
        **ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
GEMMA_3 = transformers.Gemma3TextConfig(
    **GEMMA | {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 16},
    rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 40_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
)
OWN_KINDS = ("gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "olmo2", "phi3", "smollm3")
UNSAID = ("qwen2 windows", "llama 3 scaling", "smollm3 windows")  # what a file cannot say
MODELS = {name: config for name, config in CONFIGS.items() if config.model_type in OWN_KINDS and name not in UNSAID} | {
    "llama 3": LLAMA_3,
    "gemma3": GEMMA_3,
}


def make_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # biases and norms that could be left out unnoticed
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def difference(model: transformers.PreTrainedModel, path: Path, dtype: str = "float32") -> float:
    tokens_BT = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        decoder = load_checkpoint(path, dtype=dtype).decoder
        expected_BTV, logits_BTV = model(tokens_BT).logits, decoder.logits(decoder(tokens_BT)[0])
    assert expected_BTV.std() > 0.1
    return float((expected_BTV - logits_BTV).abs().max() / expected_BTV.std())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", make_model(CONFIGS["llama"]), TOKENIZER)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path, name):
    model = write_gguf(tmp_path / "model.gguf", make_model(MODELS[name]), TOKENIZER)
    assert difference(model, tmp_path / "model.gguf") < ATOL


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_logits_of_every_block_format_equal_those_of_its_numbers(tmp_path, kind):
    sizes = WIDE if kind in K_QUANTS else {}
    sizes = sizes or {"hidden_size": 64, "intermediate_size": 96}
    model = make_model(transformers.LlamaConfig(**LLAMA | sizes))
    assert difference(write_gguf(tmp_path / "model.gguf", model, TOKENIZER, kind), tmp_path / "model.gguf") < ATOL


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_blocks_are_the_numbers_of_the_gguf_package(tmp_path, monkeypatch, kind, dtype):
    monkeypatch.setattr("memlm.model.files.gguf.UNPACKED_AT_ONCE", 32 * 7)
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks_RB = np.random.default_rng(5).integers(0, 256, (40, 3 * num_bytes), dtype=np.uint8)
    for place in range(0, blocks_RB.shape[1], num_bytes):  # scales that are numbers, tiny and negative ones among them
        blocks_RB[:, [place + 1, place + 3]] &= 0xBF
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", blocks_RB, raw_dtype=gguf.GGMLQuantizationType[kind])
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    out_RS = torch.empty(40, 96, dtype=dtype)
    GgufFile(tmp_path / "m.gguf").copy("t", out_RS)
    expected_RS = torch.from_numpy(gguf.dequantize(blocks_RB, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(out_RS, expected_RS.to(dtype))


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_stand_for_the_numbers_that_the_package_reads(kind):
    """Bit for bit, for 13 rows: the second panel is filled up."""
    raw = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[raw]
    rows = np.random.default_rng(1).integers(0, 256, (13, 512 // size, num_bytes), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2)):
        rows[..., at + 1] &= 0b1011_1111  # scales below 2: all are finite
    rows = rows.reshape(13, -1)
    layout = layout_of([kind])
    weight = BlockWeight(blocks_of(torch.from_numpy(rows), kind).packed(layout), kind, 13, 512, layout)
    assert np.array_equal(weight.to_dense().numpy(), dequantize(rows, raw))
    packed = BlockWeight.empty(layout, kind, 13, 512)
    if native.pack(torch.from_numpy(rows), kind, packed):
        assert torch.equal(packed.panels_PKB, weight.panels_PKB)
    else:
        assert native.library() is None or kind not in native.PACKED_KINDS
    panels = blocks_of(torch.from_numpy(rows), kind).packed(Layout.INT8_WIDE)
    wide = BlockWeight(panels, kind, 13, 512, Layout.INT8_WIDE)
    assert torch.equal(wide.to_dense(), weight.to_dense())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_that_keeps_its_blocks_predicts_as_its_numbers_do(tmp_path, kind):
    path = tmp_path / "model.gguf"
    model = write_gguf(path, make_model(transformers.LlamaConfig(**LLAMA | WIDE)), TOKENIZER, kind)
    assert difference(model, path, "gguf") < BLOCKS_ATOL
    kept, plain = (load_checkpoint(path, dtype=dtype).decoder for dtype in ("gguf", "float32"))
    assert kept.dtype_name == kind
    assert kept.num_parameters == plain.num_parameters
    assert kept.num_bytes < 0.45 * plain.num_bytes
    for name, weight in kept.weights().items():
        assert torch.equal(weight, plain.state_dict()[name] if "norm" in name else plain.weights()[name]), name


def test_rows_of_different_formats_share_a_layer(tmp_path):
    """Files of the field keep values in six bits beside queries and keys in four."""
    path, others = tmp_path / "model.gguf", {"v_proj": "Q6_K", "down_proj": "F16", "up_proj": "Q8_0"}
    model = write_gguf(path, make_model(transformers.LlamaConfig(**LLAMA | WIDE)), TOKENIZER, "Q4_1", others)
    assert difference(model, path, "gguf") < BLOCKS_ATOL
    block = load_checkpoint(path, dtype="gguf").decoder.blocks[0]
    kinds = {"qkv": block.attention.qkv.packed, "up": block.ff.gate_up.packed}
    assert {name: (weight.kind, weight.layout) for name, weight in kinds.items()} == {
        "qkv": ("Q4_1", Layout.INT8_WIDE), "up": ("Q4_1", Layout.INT8_WIDE)
    }  # fmt: skip
    assert not isinstance(block.ff.down.packed, BlockWeight)


@pytest.mark.parametrize("first", TENSOR_TYPES)
def test_all_pairs_of_formats_share_fused_matrices(tmp_path, monkeypatch, first):
    """Each layer has another second format: of keys and values beside queries in the first, of gate beside up."""
    path, seconds = tmp_path / "model.gguf", dict(enumerate(TENSOR_TYPES[TENSOR_TYPES.index(first) :]))
    others = {f"layers.{layer}.self_attn.{name}_proj": kind for layer, kind in seconds.items() for name in "kv"}
    others |= {f"layers.{layer}.mlp.gate_proj": kind for layer, kind in seconds.items()}
    sizes = WIDE | {"num_hidden_layers": len(seconds), "initializer_range": 0.05}
    model = write_gguf(path, make_model(transformers.LlamaConfig(**LLAMA | sizes)), TOKENIZER, first, others)
    expected = weights_of(path, "float32")
    for library in (native.library(), None):
        monkeypatch.setattr(native, "library", lambda library=library: library)
        for name, weight in weights_of(path, "gguf").items():
            assert torch.equal(weight, expected[name]), name
        assert difference(model, path, "gguf") < 2 * BLOCKS_ATOL  # up to eleven layers add up


def weights_of(path: Path, dtype: str) -> dict[str, torch.Tensor]:
    return load_checkpoint(path, dtype=dtype).decoder.weights()


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "int8", "int4", "gguf"])
def test_mixed_formats_have_the_weights_of_their_numbers_in_every_dtype(tmp_path, dtype):
    """The formats of public Q4_K_M files whose width 256 does not divide."""
    others = {"v_proj": "Q8_0", "down_proj": "Q6_K", "embed_tokens": "Q8_0"}
    model = make_model(transformers.LlamaConfig(**LLAMA | {"hidden_size": 64, "intermediate_size": 256}))
    write_gguf(
        tmp_path / "plain.gguf", write_gguf(tmp_path / "mixed.gguf", model, TOKENIZER, "Q5_0", others), TOKENIZER
    )
    mixed, plain = (weights_of(tmp_path / name, dtype) for name in ("mixed.gguf", "plain.gguf"))
    for name, weight in plain.items():
        assert torch.equal(mixed[name], weight), name


def test_auto_keeps_blocks_where_this_processor_has_kernels(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model(transformers.LlamaConfig(**LLAMA | WIDE)), TOKENIZER, "Q8_0")
    for is_fast, expected in ((True, "Q8_0"), (False, str(dtype_of("auto", torch.device("cpu")))[6:])):
        monkeypatch.setattr(native, "is_fast", lambda is_fast=is_fast: is_fast)
        assert load_checkpoint(path).decoder.dtype_name == expected
    monkeypatch.setattr(native, "is_fast", lambda: True)
    assert load_checkpoint(path, trainable=True).decoder.dtype_name == "float32"
    with pytest.raises(InvalidInput, match="gguf, which predicts on the processor"):
        load_checkpoint(path, dtype="gguf", trainable=True)


def test_only_a_gguf_file_keeps_its_blocks(model_folder):
    with pytest.raises(InvalidInput, match="the model is no GGUF file"):
        load_checkpoint(model_folder, dtype="gguf")


def test_a_file_describes_itself(llama):
    file = GgufFile(llama)
    assert (file.architecture, config_of(file).num_layers, config_of(file).num_kv_heads) == ("llama", 3, 2)
    assert file.tensors["blk.0.attn_k.weight"].shape == (24, 48)


def test_two_files_that_differ_in_a_weight_have_two_fingerprints(llama):
    before = load_checkpoint(llama).fingerprint
    content = bytearray(llama.read_bytes())
    content[-5] ^= 1
    llama.write_bytes(content)
    assert load_checkpoint(llama).fingerprint != before


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", make_model(CONFIGS["llama"]), TOKENIZER, part_tensors=12)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_part_of_a_split_file_loads_all(tmp_path, parts, llama):
    expected = weights_of(llama, "float32")
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    loaded = [load_checkpoint(part, dtype="float32") for part in parts]
    for checkpoint in loaded:
        assert all(torch.equal(weight, expected[name]) for name, weight in checkpoint.decoder.weights().items())
    assert {checkpoint.path for checkpoint in loaded} == {parts[0]}
    (fingerprint,) = {checkpoint.fingerprint for checkpoint in loaded}
    content = bytearray(parts[2].read_bytes())
    content[-5] ^= 1
    parts[2].write_bytes(content)
    assert not loaded[0].is_current
    assert load_checkpoint(parts[0]).fingerprint != fingerprint


def test_a_part_that_is_missing_renamed_or_of_another_model_is_named(parts):
    content = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(Corrupt, match=r"m-00002-of-00003\.gguf is not part 2 of 3"):
        load_checkpoint(parts[0])
    parts[1].write_bytes(content)
    alone = parts[1].rename(parts[1].with_name("other.gguf"))
    with pytest.raises(NotFound, match=r"other.gguf is one of 3 parts.*model-00001-of-00003.gguf"):
        load_checkpoint(alone)
    for part in (parts[0], parts[2]):
        with pytest.raises(NotFound, match=r"m-00002-of-00003.gguf, part 2 of 3, is missing"):
            load_checkpoint(part)


def test_a_whole_file_may_have_the_name_of_a_part(llama):
    for name in ("m-00001-of-00001.gguf", "m-00001-of-00003.gguf", "m-00002-of-00003.gguf"):
        path = Path(shutil.copy(llama, llama.with_name(name)))
        assert load_checkpoint(path).path == path


def test_what_belongs_to_a_file_lies_beside_it_under_its_name(llama):
    with load(llama) as lm, pytest.raises(NotFound, match="memlm calibrate"):
        lm.generate("t1", max_tokens=1, early_exit=True)
    companion(llama, RULE_FILE).write_text(json.dumps({"rule": {"threshold": 0.5}}))
    assert (llama.parent / "model.gguf.early_exit.json").is_file()
    with load(llama) as lm, pytest.raises(Corrupt, match=r"model\.gguf\.early_exit\.json"):
        lm.generate("t1", max_tokens=1, early_exit=True)


def test_a_vocabulary_may_have_tokens_that_the_model_has_not(tmp_path):
    path, tokens = tmp_path / "model.gguf", [*TOKENIZER["tokens"], "a", "b", "ab", "<pad>"]
    kinds = [1] * (len(tokens) - 1) + [3]
    write_gguf(
        path, make_model(CONFIGS["llama"]), TOKENIZER | {"tokens": tokens, "token_type": kinds, "merges": ["a b"]}
    )
    tokenizer = load_checkpoint(path).tokenizer
    assert tokenizer.vocab_size == 300
    with pytest.raises(InvalidInput, match=r"the token 'ab' \(302\) .* the model has 300 tokens"):
        tokenizer.encode("ab")


def test_norms_may_lie_in_blocks(tmp_path):
    path, others = tmp_path / "model.gguf", {"norm.weight": "Q8_0"}
    model = make_model(transformers.LlamaConfig(**LLAMA | {"hidden_size": 64, "intermediate_size": 96}))
    assert difference(write_gguf(path, model, TOKENIZER, "F32", others), path) < ATOL


@pytest.mark.parametrize("size", [1 << 31, (1 << 31) - 8, (1 << 32) - 1])
def test_sizes_whose_bytes_overflow_are_refused(llama, size):
    """The length of a head follows from the width where a file does not say it."""
    content = llama.read_bytes().replace(b"key_length", b"key_lengtx").replace(b"dimension_count", b"dimension_counx")
    name = b"llama.embedding_length" + struct.pack("<I", 4)
    llama.write_bytes(content.replace(name + struct.pack("<I", 48), name + struct.pack("<I", size)))
    with pytest.raises(Incompatible, match=f"dim is {size}"):
        load_checkpoint(llama)


def test_what_is_no_file_or_no_gguf_is_refused_by_name(tmp_path, llama):
    with pytest.raises(NotFound, match=r"no model at .*: there is no such file; check the path"):
        load_checkpoint(tmp_path / "missing.gguf")
    for content, problem in ((b"", "is empty"), (b"PK\x03\x04" + bytes(40), "does not begin"), (b"GGUF", "ends after")):
        llama.write_bytes(content)
        with pytest.raises(Corrupt, match=problem):
            load_checkpoint(llama)


def test_an_unknown_version_architecture_or_block_format_is_named_with_the_known_ones(tmp_path, llama):
    content = llama.read_bytes()
    llama.write_bytes(content.replace(b"GGUF\x03", b"GGUF\x09"))
    with pytest.raises(Incompatible, match="version 9"):
        GgufFile(llama)
    llama.write_bytes(content.replace(b"llama", b"lamma"))
    with pytest.raises(Incompatible, match=r"'lamma'.* llama, qwen2"):
        load_checkpoint(llama)
    name = b"blk.0.attn_k.weight" + struct.pack("<IQQ", 2, 48, 24)
    llama.write_bytes(content.replace(name + struct.pack("<I", 0), name + struct.pack("<I", 16)))
    with pytest.raises(Incompatible, match=r"IQ2_XXS.*Q4_K"):
        GgufFile(llama)


def header(num_tensors: int, num_keys: int, *rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(rest)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE = {
    "many tensors": header(1 << 62, 0),
    "many keys": header(0, 1 << 62),
    "a long name": header(0, 1, struct.pack("<Q", 1 << 60)),
    "a long string": header(0, 1, key(b"a", 8, struct.pack("<Q", 1 << 60))),
    "a long array": header(0, 1, key(b"a", 9, struct.pack("<IQ", 4, 1 << 60))),
    "an array that only seems to fit": header(0, 1, key(b"a", 9, struct.pack("<IQ", 12, 40)), bytes(64)),
    "a long array of strings": header(0, 1, key(b"a", 9, struct.pack("<IQ", 8, 1 << 50))),
    "arrays in arrays": header(0, 1, key(b"a", 9, struct.pack("<IQ", 9, 1) * 900)),
    "an unknown type": header(0, 1, key(b"a", 77, bytes(8))),
    "a key twice": header(0, 2, key(b"a", 4, bytes(4)), key(b"a", 4, bytes(4))),
    "a key that is not UTF-8": header(0, 1, key(b"\xff\xfe", 4, bytes(4))),
    "a tensor twice": header(2, 0, tensor(b"t", (2,), 0, 0), tensor(b"t", (2,), 0, 0), bytes(64)),
    "no dimensions": header(1, 0, text(b"t"), struct.pack("<IIQ", 0, 0, 0), bytes(64)),
    "many dimensions": header(1, 0, text(b"t"), struct.pack("<I", 1 << 31), bytes(64)),
    "a tensor past the end": header(1, 0, tensor(b"t", (2,), 0, 1 << 40), bytes(64)),
    "a tensor larger than the file": header(1, 0, tensor(b"t", (1 << 40, 1 << 20), 0, 0), bytes(64)),
    "a shape whose product wraps": header(1, 0, tensor(b"t", (1 << 63, 2), 0, 0), bytes(64)),
    "a shape of nothing": header(1, 0, tensor(b"t", (0, (1 << 63)), 0, 0), bytes(64)),
    "half a block": header(1, 0, tensor(b"t", (33,), 8, 0), bytes(64)),
    "an alignment of nothing": header(0, 1, key(b"general.alignment", 4, bytes(4))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, name):
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(Corrupt, match=r"cannot be read as GGUF: .*fetch the file again"):
        GgufFile(path)


def test_more_layers_than_tensors_are_refused_at_once(llama):
    content = llama.read_bytes()
    name = b"llama.block_count" + struct.pack("<I", 4)
    llama.write_bytes(content.replace(name + struct.pack("<I", 3), name + struct.pack("<I", 1 << 31)))
    with pytest.raises(Corrupt, match="fewer tensors"):
        load_checkpoint(llama)


def test_cuts_and_flips_of_a_header_give_an_error_or_a_model_in_bounded_memory(llama):
    content, generator = llama.read_bytes(), random.Random(3)
    end = GgufFile(llama).tensors["token_embd.weight"].offset
    load_checkpoint(llama)
    before, outcomes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(1000):
        damaged = bytearray(content)
        if generator.random() < 0.3:
            damaged = damaged[: generator.randrange(end)]
        else:
            for _ in range(generator.choice((1, 1, 2, 8))):
                damaged[generator.randrange(end)] = generator.randrange(256)
        llama.write_bytes(damaged)
        outcomes.append(outcome_of_loading(llama))
    assert set(outcomes) == {"refused", "loaded"}
    assert outcomes.count("refused") > 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def outcome_of_loading(path: Path) -> str:
    try:
        load_checkpoint(path)
    except MemlmError as error:
        return "refused" if str(path) in str(error) else f"an error without a name: {error}"
    return "loaded"
