"""GGUF files: the format's header, its quantized tensors, and the settings of each architecture.

The header is walked with bounds on every count and offset, so that a damaged or hostile file costs no more memory than
it has bytes. The block formats come from the `gguf` package. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.model.config import ModelConfig, RopeScaling
from memlm.model.huggingface import Family, Source, Table, same

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS, MAX_KEYS, MAX_NAME_BYTES, MAX_DIMS = 65_536, 65_536, 65_535, 4
ARRAY_DEPTH = 4
# GGUF's value types: numbers by `struct` code, then the two that have a length.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0  # how Llama 3.1 and 3.2 stretch; a file holds the result only


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its shape as PyTorch has it, its block format, and its first byte."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


class Header:
    """Reads a header's values one after the other. Raises Corrupt if the file is too short."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path, self._data, self.position = path, data, 0

    def number(self, code: str) -> Any:
        """The next number of a `struct` type."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))
        return value

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        end = self.position + size
        if end > len(self._data):
            raise self.corrupt(f"its header ends after {len(self._data):,} bytes, in the middle of a value")
        taken, self.position = self._data[self.position : end], end
        return taken

    def count(self, what: str, most: int) -> int:
        """The next count of things, each of which takes at least a byte."""
        count = int(self.number("Q"))
        if count > min(most, len(self._data) - self.position):
            raise self.corrupt(f"it announces {count:,} {what}, more than it has room for")
        return count

    def text(self) -> str:
        """The next string."""
        content = bytes(self.take(self.count("bytes of a string", len(self._data))))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a string of its header is not UTF-8 ({error})") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value of a GGUF type. Arrays of numbers become numpy arrays."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth == ARRAY_DEPTH:
            raise self.corrupt(f"its header has a value of the unknown type {kind}, or arrays in arrays")
        element = self.number("I")
        count = self.count("elements of an array", len(self._data))
        if element in NUMBERS:
            dtype = np.dtype(NUMBERS[element]).newbyteorder("<")
            return np.frombuffer(bytes(self.take(count * dtype.itemsize)), dtype)
        return [self.value(element, depth + 1) for _ in range(count)]

    def corrupt(self, problem: str) -> Corrupt:
        """The error for a problem of the file."""
        return Corrupt(f"{self._path} cannot be read as GGUF: {problem}; fetch the file again")


class GgufFile:
    """An open GGUF file: `metadata` by key and `tensors` by name. Its tensors stay on the disk until they are read.

    Raises NotFound for no file, Corrupt for a damaged one, Incompatible for a version, an architecture or a block
    format that this version does not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise NotFound(f"no model at {path} ({error.strerror})", kind="model", name=str(path)) from error
        except ValueError as error:  # an empty file
            raise Corrupt(f"{path} is empty; fetch the file again") from error
        header = Header(self.path, memoryview(self._map))
        num_tensors, num_keys = self._begin(header)
        self.metadata = self._read_metadata(header, num_keys)
        self.tensors = self._read_tensors(header, num_tensors)

    @property
    def names(self) -> set[str]:
        """Names of all tensors but those that are computed from settings."""
        return set(self.tensors)

    @property
    def folder(self) -> Path:
        """The path, as errors name it."""
        return self.path

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`."""
        return self._text("general.architecture")

    @property
    def family(self) -> Family:
        """How the architecture's settings and tensors are read. Raises Incompatible for an unknown one."""
        if self.architecture not in ARCHITECTURES:
            raise Incompatible(
                f"{self.path} is a model of the architecture {self.architecture!r}; this version reads GGUF files of"
                f" {', '.join(ARCHITECTURES)}"
            )
        return ARCHITECTURES[self.architecture]

    @property
    def config(self) -> ModelConfig:
        """The model's shape. Raises Incompatible for a setting that this version does not have."""
        prefix = f"{self.architecture}."
        settings = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        try:
            return ModelConfig(**self.family.config({**settings, "file": self}))
        except KeyError as error:
            raise Corrupt(f"{self.path} lacks the setting {prefix}{error.args[0]}; fetch the file again") from error
        except (InvalidInput, TypeError, ValueError) as error:
            raise Incompatible(f"the settings of {self.path} do not fit together: {error}") from error

    @property
    def fingerprint(self) -> str:
        """A hash of the whole file."""
        digest = hashlib.sha256()
        for begin in range(0, len(self._map), 1 << 20):
            digest.update(self._map[begin : begin + (1 << 20)])
        return digest.hexdigest()[:32]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as PyTorch has it."""
        return self.tensors[name].shape

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Some tensors in float32, or in the file's own type where that is float16 or bfloat16."""
        return [self._read(name) for name in names]

    def _read(self, name: str) -> Tensor:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        if info.kind in (plain := {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}):
            content = bytearray(self._map[info.offset : info.offset + info.num_bytes])
            return torch.frombuffer(content, dtype=plain[info.kind]).reshape(info.shape)
        blocks = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        weights = dequantize(blocks.reshape(*info.shape[:-1], -1), GGMLQuantizationType[info.kind])
        return torch.from_numpy(weights).reshape(info.shape)

    def _begin(self, header: Header) -> tuple[int, int]:
        if bytes(header.take(4)) != MAGIC:
            raise header.corrupt("it does not begin with GGUF")
        version = header.number("I")
        if version not in VERSIONS:
            raise Incompatible(f"{self.path} is GGUF of version {version}; this version reads {VERSIONS[0]} and 3")
        return header.count("tensors", MAX_TENSORS), header.count("keys", MAX_KEYS)

    def _read_metadata(self, header: Header, num_keys: int) -> dict[str, Any]:
        metadata = dict[str, Any]()
        for _ in range(num_keys):
            key = header.text()
            if key in metadata:
                raise header.corrupt(f"its header has the key {key!r} twice")
            metadata[key] = header.value(header.number("I"))
        return metadata

    def _read_tensors(self, header: Header, num_tensors: int) -> dict[str, TensorInfo]:
        found = dict[str, tuple[tuple[int, ...], str, int]]()
        for _ in range(num_tensors):
            name = header.text()
            num_dims = header.number("I")
            if name in found or len(name) > MAX_NAME_BYTES or not 1 <= num_dims <= MAX_DIMS:
                raise header.corrupt(f"the tensor {name[:80]!r} is there twice, or has {num_dims} dimensions")
            shape = tuple(header.number("Q") for _ in range(num_dims))[::-1]  # GGUF counts the fastest dimension first
            kind = _type_name(header.number("I"))
            found[name] = shape, kind, header.number("Q")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise header.corrupt(f"general.alignment is {alignment!r}")
        begin = -(-header.position // alignment) * alignment
        return {name: self._checked(header, name, begin, *fields) for name, fields in found.items()}

    def _checked(
        self, header: Header, name: str, begin: int, shape: tuple[int, ...], kind: str, offset: int
    ) -> TensorInfo:
        if kind not in TENSOR_TYPES:
            raise Incompatible(
                f"{self.path}: the tensor {name} is of the type {kind}; this version reads {', '.join(TENSOR_TYPES)}"
            )
        block_size, block_bytes = _block(kind)
        if shape[-1] % block_size:
            raise header.corrupt(f"the rows of {name} are {shape[-1]} long, which {kind} blocks do not divide")
        num_bytes = prod(shape) // block_size * block_bytes
        if begin + offset + num_bytes > len(self._map):
            raise header.corrupt(f"the tensor {name} lies past the end of the file")
        return TensorInfo(shape, kind, begin + offset, num_bytes)

    def _text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise Corrupt(f"{self.path} lacks {key}; fetch the file again")
        return value


def _type_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return str(number)


def _block(kind: str) -> tuple[int, int]:
    """Numbers and bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def is_gguf(model: str | Path) -> bool:
    """Whether a model's name is that of a GGUF file."""
    return Path(model).suffix.lower() == SUFFIX


def companion(model: Path, name: str) -> Path:
    """The path of a file that belongs to a model: in its folder, or beside a GGUF file and with that file's name."""
    return model.with_name(f"{model.name}.{name}") if is_gguf(model) else model / name


def _paired_to_halves(num_heads_of: Callable[[ModelConfig], Sequence[int]]) -> Callable[[Tensor, ModelConfig], Tensor]:
    """Undoes the order of Llama's GGUF files, in which the two numbers that rotate together are neighbors. Here, as in
    Hugging Face checkpoints, they are in different halves of a head.
    """

    def rearrange(tensor: Tensor, config: ModelConfig) -> Tensor:
        parts = tensor.split([heads * config.head_dim for heads in num_heads_of(config)])
        query, key, value = (part.unflatten(0, (-1, config.head_dim // 2, 2)) for part in parts)
        return torch.cat([query.transpose(1, 2).flatten(0, 2), key.transpose(1, 2).flatten(0, 2), value.flatten(0, 2)])

    return rearrange


def _by_kind(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_heads, config.num_kv_heads, config.num_kv_heads


QKV = ("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v")
SEPARATE_QKV: Table = {
    f"blocks.{{}}.attention.qkv.{kind}": same(*(f"{name}.{kind}" for name in QKV)) for kind in ("weight", "bias")
}
LLAMA_QKV: Table = {name: Source(source.names, _paired_to_halves(_by_kind)) for name, source in SEPARATE_QKV.items()}
FUSED_QKV: Table = {
    f"blocks.{{}}.attention.qkv.{kind}": same(f"blk.{{}}.attn_qkv.{kind}") for kind in ("weight", "bias")
}
COMMON: Table = {
    "embedding.weight": same("token_embd.weight"),
    "positions.weight": same("position_embd.weight"),
    "norm.weight": same("output_norm.weight"),
    "norm.bias": same("output_norm.bias"),
    "head.weight": same("output.weight"),
    **{
        f"blocks.{{}}.{ours}.{kind}": same(f"blk.{{}}.{theirs}.{kind}")
        for ours, theirs in {
            "attention_norm": "attn_norm",
            "attention.out": "attn_output",
            "attention.query_norm": "attn_q_norm",
            "attention.key_norm": "attn_k_norm",
            "ff_norm": "ffn_norm",
            "ff.up": "ffn_up",
            "ff.down": "ffn_down",
        }.items()
        for kind in ("weight", "bias")
    },
}
GATED: Table = {
    f"blocks.{{}}.ff.gate_up.{kind}": same(f"blk.{{}}.ffn_gate.{kind}", f"blk.{{}}.ffn_up.{kind}")
    for kind in ("weight", "bias")
}
LLAMA: Table = {**COMMON, **LLAMA_QKV, **GATED}
QWEN: Table = {**COMMON, **SEPARATE_QKV, **GATED}
GPT: Table = {**COMMON, **FUSED_QKV}
ROPE_FACTORS = "rope_freqs.weight"  # computed from the settings

Settings = Mapping[str, Any]


def _shape(c: Settings) -> dict[str, Any]:
    file: GgufFile = c["file"]
    heads = int(c["attention.head_count"])
    if int(c["block_count"]) > len(file.tensors):
        raise Corrupt(f"{file.path} has {c['block_count']:,} layers, and fewer tensors; fetch the file again")
    return {
        "vocab_size": file.shape("token_embd.weight")[0] if "token_embd.weight" in file.names else 0,
        "dim": int(c["embedding_length"]),
        "num_layers": int(c["block_count"]),
        "num_heads": heads,
        "num_kv_heads": int(c.get("attention.head_count_kv", heads)),
        "head_dim": int(c.get("attention.key_length", 0)),
        "ff_dim": int(c["feed_forward_length"]),
        "context_length": int(c["context_length"]),
        "tied_embeddings": "output.weight" not in file.names,
    }


def _llama(c: Settings) -> dict[str, Any]:
    file: GgufFile = c["file"]
    if c.get("expert_count"):
        raise Incompatible(f"{file.path} has {c['expert_count']} experts a layer; this version reads none")
    return {
        **_shape(c),
        **_rotary(c),
        "norm_eps": float(c["attention.layer_norm_rms_epsilon"]),
        "qkv_bias": "blk.0.attn_q.bias" in file.names,
        "out_bias": "blk.0.attn_output.bias" in file.names,
        "ff_bias": "blk.0.ffn_up.bias" in file.names,
    }


def _qwen3(c: Settings) -> dict[str, Any]:
    return {**_llama(c), "qk_norm": True}


def _gpt2(c: Settings) -> dict[str, Any]:
    return {**_gpt(c), "positions": "learned", "activation": "gelu_tanh"}


def _neox(c: Settings) -> dict[str, Any]:
    return {**_gpt(c), **_rotary(c), "activation": "gelu", "parallel_residual": bool(c["use_parallel_residual"])}


def _gpt(c: Settings) -> dict[str, Any]:
    return {
        **_shape(c),
        "norm": "layer",
        "norm_eps": float(c["attention.layer_norm_epsilon"]),
        "qkv_bias": True,
        "out_bias": True,
        "ff_bias": True,
    }


def _rotary(c: Settings) -> dict[str, Any]:
    return {
        "rope_theta": float(c.get("rope.freq_base", 10_000.0)),
        "rotary_dim": int(c.get("rope.dimension_count", 0)),
        "rope_scaling": _rope_scaling(c),
    }


def _rope_scaling(c: Settings) -> RopeScaling | None:
    file: GgufFile = c["file"]
    kind = c.get("rope.scaling.type", "none")
    original = int(c.get("rope.scaling.original_context_length", c["context_length"]))
    if ROPE_FACTORS in file.names:
        return _llama3(file, c)
    if kind == "none" or float(c.get("rope.scaling.factor", 1.0)) == 1.0:
        return None
    factor = float(c["rope.scaling.factor"])
    if kind == "yarn":
        attention_factor = 0.1 * float(np.log(factor)) + 1.0
        return RopeScaling("yarn", factor, original, attention_factor=attention_factor)
    return RopeScaling(kind, factor, original)


def _llama3(file: GgufFile, c: Settings) -> RopeScaling:
    """The scaling whose factors the file holds. Raises Incompatible where Llama 3's settings do not give them."""
    (factors,) = file.read([ROPE_FACTORS])
    theta, dim, factor = float(c["rope.freq_base"]), int(c["rope.dimension_count"]), float(factors.max())
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, dim, 2) / dim)
    smooth = (LLAMA3_LENGTH / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    blended = 1 / ((1 - smooth.clamp(0, 1)) / factor + smooth.clamp(0, 1))
    if factors.shape != blended.shape or not torch.allclose(factors, blended, rtol=1e-3):
        raise Incompatible(f"{file.path} stretches its rotary positions in a way that this version does not know")
    return RopeScaling("llama3", factor, LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH)


ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family(_llama, LLAMA, "", (ROPE_FACTORS,)),
    "qwen2": Family(_llama, QWEN, ""),
    "qwen3": Family(_qwen3, QWEN, ""),
    "gpt2": Family(_gpt2, GPT, ""),
    "gptneox": Family(_neox, GPT, ""),
}
