"""GGUF files: the format's header and its quantized tensors.

The header is walked with bounds on every count and offset, so that a damaged or hostile file costs no more memory than
it has bytes. The block formats come from the `gguf` package. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from memlm.errors import Corrupt, Incompatible, NotFound
from memlm.model.files.gguf_blocks import blocks_of
from memlm.model.files.weight_files import MappedFile

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS, MAX_KEYS, MAX_NAME_BYTES, MAX_DIMS = 65_536, 65_536, 65_535, 4
MAX_PARTS = 65_535
ARRAY_DEPTH = 4
# GGUF's value types: numbers by `struct` code, then the two that have a length.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)  # the name of a part of a split file
UNPACKED_AT_ONCE = 1 << 19  # numbers; torch's operations have a price at every call


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its shape as PyTorch has it, its block format, and its first byte."""

    file: MappedFile
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


class Header:
    """Reads a header's values one after the other. Raises Corrupt if the file is too short."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self._data, self.position = path, data, 0

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
        if element == STRING:
            return self._texts(count)
        return [self.value(element, depth + 1) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """The next strings: `text` in a loop, in a tenth of its time, for the tokens of a vocabulary."""
        texts, data, position, end = list[bytes](), self._data, self.position, len(self._data)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = position + 8
            position = begin + length_at(data, position)[0] if begin <= end else end + 1
            if position > end:
                raise self.corrupt(f"its header ends after {end:,} bytes, in the middle of a string")
            texts.append(bytes(data[begin:position]))
        self.position = position
        try:
            return [content.decode() for content in texts]
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a string of its header is not UTF-8 ({error})") from error

    def corrupt(self, problem: str) -> Corrupt:
        """The error for a problem of the file."""
        return Corrupt(f"{self.path} cannot be read as GGUF: {problem}; fetch the file again")


class GgufFile:
    """An open GGUF file: `metadata` by key and `tensors` by name. Its tensors stay on the disk until they are read.

    Of a file that was split into parts, any part opens all, and `path` is the first. Raises NotFound for no file or a
    missing part, Corrupt for a damaged one, Incompatible for a version, an architecture or a block format that this
    version does not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = list[MappedFile]()
        self.metadata, self.tensors = self._read(self.path)
        count = self.metadata.get("split.count", 0)
        if not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
            raise Corrupt(f"{path} says that it is one of {count!r} parts; fetch the file again")
        if count > 1:
            self._read_parts(count)

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

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as PyTorch has it."""
        return self.tensors[name].shape

    def view(self, name: str) -> Tensor | None:
        """Returns a tensor as it lies in the file, None if it lies there in blocks."""
        info = self.tensors[name]
        return info.file.view(info.offset, info.shape, PLAIN[info.kind]) if info.kind in PLAIN else None

    def copy(self, name: str, out: Tensor) -> None:
        """Writes a tensor's numbers into `out`, some blocks at a time."""
        if (view := self.view(name)) is not None:
            out.copy_(view)
            return
        info, numbers_N = self.tensors[name], out.view(-1)
        size, num_bytes = _block(info.kind)
        blocks_NB = info.file.view(info.offset, (info.num_bytes // num_bytes, num_bytes), torch.uint8)
        step = max(1, UNPACKED_AT_ONCE // size)
        for begin in range(0, len(blocks_NB), step):
            some_n = blocks_of(blocks_NB[begin : begin + step].view(1, -1), info.kind).to_dense()[0]
            numbers_N[begin * size : begin * size + len(some_n)] = some_n

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Returns some rows of a matrix, in float32 where they lie in blocks."""
        if (view := self.view(name)) is not None:
            return embedding(ids, view)
        info = self.tensors[name]
        some_NB = embedding(ids.flatten(), self.rows_of_blocks(name))
        return blocks_of(some_NB, info.kind).to_dense().view(*ids.shape, -1)

    def rows_of_blocks(self, name: str) -> Tensor:
        """Returns the bytes of each row of a matrix that lies in blocks."""
        info = self.tensors[name]
        return info.file.view(info.offset, (info.shape[0], info.num_bytes // info.shape[0]), torch.uint8)

    def release(self) -> None:
        """Gives back the RAM of all that was read."""
        for file in self._files:
            file.release()

    def _read_parts(self, count: int) -> None:
        """Reads all parts in place of one. The first has the metadata, and each has its own tensors."""
        paths = part_paths(self.path)
        if len(paths) != count:
            raise NotFound(
                f"{self.path} is one of {count} parts, and its name does not say where the others are; give it the name"
                f" that it came with, as in model-00001-of-{count:05}.gguf",
                kind="model", name=str(self.path),
            )  # fmt: skip
        self._files.clear()
        self.metadata, self.tensors = {}, {}
        for number, path in enumerate(paths):
            if not path.is_file():
                raise NotFound(
                    f"no model at {self.path}: {path.name}, part {number + 1} of {count}, is missing; put it beside the"
                    " others",
                    kind="model", name=str(self.path),
                )  # fmt: skip
            metadata, tensors = self._read(path)
            if (metadata.get("split.no"), metadata.get("split.count")) != (number, count) or (
                tensors.keys() & self.tensors.keys()
            ):
                raise Corrupt(f"{path} is not part {number + 1} of {count} of its model; fetch the file again")
            self.metadata |= metadata if number == 0 else {}
            self.tensors |= tensors
        if (total := self.metadata.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise Corrupt(
                f"the parts of {self.path} have {len(self.tensors)} tensors, not {total}; fetch the files again"
            )
        self.path = paths[0]

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """The metadata and the tensors of one file."""
        try:
            file = MappedFile(path)
        except FileNotFoundError as error:
            raise NotFound(
                f"no model at {path}: there is no such file; check the path", kind="model", name=str(path)
            ) from error
        except OSError as error:
            raise NotFound(f"no model at {path} ({error.strerror})", kind="model", name=str(path)) from error
        except ValueError as error:  # an empty file
            raise Corrupt(f"{path} is empty; fetch the file again") from error
        self._files.append(file)
        header = Header(path, memoryview(file.bytes))
        num_tensors, num_keys = self._begin(header)
        metadata = self._read_metadata(header, num_keys)
        return metadata, self._read_tensors(header, file, metadata, num_tensors)

    def _begin(self, header: Header) -> tuple[int, int]:
        if bytes(header.take(4)) != MAGIC:
            raise header.corrupt("it does not begin with GGUF")
        version = header.number("I")
        if version not in VERSIONS:
            raise Incompatible(f"{header.path} is GGUF of version {version}; this version reads {VERSIONS[0]} and 3")
        return header.count("tensors", MAX_TENSORS), header.count("keys", MAX_KEYS)

    def _read_metadata(self, header: Header, num_keys: int) -> dict[str, Any]:
        metadata = dict[str, Any]()
        for _ in range(num_keys):
            key = header.text()
            if key in metadata:
                raise header.corrupt(f"its header has the key {key!r} twice")
            metadata[key] = header.value(header.number("I"))
        return metadata

    def _read_tensors(
        self, header: Header, file: MappedFile, metadata: Mapping[str, Any], num_tensors: int
    ) -> dict[str, TensorInfo]:
        found = dict[str, tuple[tuple[int, ...], str, int]]()
        for _ in range(num_tensors):
            name = header.text()
            num_dims = header.number("I")
            if name in found or len(name) > MAX_NAME_BYTES or not 1 <= num_dims <= MAX_DIMS:
                raise header.corrupt(f"the tensor {name[:80]!r} is there twice, or has {num_dims} dimensions")
            shape = tuple(header.number("Q") for _ in range(num_dims))[::-1]  # GGUF counts the fastest dimension first
            if not all(shape):
                raise header.corrupt(f"the tensor {name[:80]!r} has the shape {shape}, which holds nothing")
            kind = _type_name(header.number("I"))
            found[name] = shape, kind, header.number("Q")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise header.corrupt(f"general.alignment is {alignment!r}")
        begin = -(-header.position // alignment) * alignment
        return {name: _checked(header, file, name, begin, *fields) for name, fields in found.items()}

    def _text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise Corrupt(f"{self.path} lacks {key}; fetch the file again")
        return value


def _checked(
    header: Header, file: MappedFile, name: str, begin: int, shape: tuple[int, ...], kind: str, offset: int
) -> TensorInfo:
    if kind not in TENSOR_TYPES:
        raise Incompatible(
            f"{header.path}: the tensor {name} is of the type {kind}; this version reads {', '.join(TENSOR_TYPES)}"
        )
    block_size, block_bytes = _block(kind)
    if shape[-1] % block_size:
        raise header.corrupt(f"the rows of {name} are {shape[-1]} long, which {kind} blocks do not divide")
    num_bytes = prod(shape) // block_size * block_bytes
    if begin + offset + num_bytes > len(file.bytes):
        raise header.corrupt(f"the tensor {name} lies past the end of the file")
    return TensorInfo(file, shape, kind, begin + offset, num_bytes)


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


def part_paths(path: Path) -> list[Path]:
    """The files of a model, as its name tells: of a part of a split file, all parts in their order."""
    if (named := PART.fullmatch(path.name)) is None:
        return [path]
    stem, count = named.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}{path.suffix}") for number in range(1, int(count) + 1)]


def files_of(path: Path) -> list[Path]:
    """Those of them that are there. A whole file may have the name of a part too, and has no others."""
    return [part for part in part_paths(path) if part.is_file()] or [path]


def companion(model: Path, name: str) -> Path:
    """The path of a file that belongs to a model: in its folder, or beside a GGUF file and with that file's name."""
    return model.with_name(f"{model.name}.{name}") if is_gguf(model) else model / name
