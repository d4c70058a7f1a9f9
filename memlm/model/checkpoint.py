"""A model's folder: config.json, model.safetensors (or shards with an index), tokenizer.json.

Own models are written under temporary names and moved into place, weights first and config.json last, so a folder with
a config is complete. Models of other families are read by the tables of `huggingface`. For prediction, weights are
packed tensor by tensor as they are read, so loading takes about as much RAM as the file has bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import memlm.model.cpu as cpu
from memlm.api.params import SamplingParams
from memlm.base.files import move, sync_file
from memlm.data.chat import ChatTemplate
from memlm.data.gguf_tokenizer import tokenizer_of
from memlm.data.tokenizer import GENERATION_FILE, Tokenizer
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.model.config import ModelConfig
from memlm.model.decoder import Decoder
from memlm.model.gguf import GgufFile, is_gguf
from memlm.model.huggingface import Family, Source, family_of, find_model, read_config
from memlm.model.linear import Linear

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

MODEL_TYPE = "memlm"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

log = logging.getLogger("memlm.checkpoint")


class WeightFiles:
    """The tensors of a model's folder by name. The constructor reads only the headers.

    Raises Corrupt for files that are missing, broken or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _files_of(folder)
        self._home: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  it is no dict
                        self._home[name] = path
                        self._shapes[name] = tuple(file.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise Corrupt(f"{path} cannot be read as safetensors ({error}); restore the file") from error

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._shapes[name]

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Returns tensors as views of the mapped files, which stay mapped while any of these tensors lives."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name in names:
                path = self._home[name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            return [opened[self._home[name]].get_tensor(name) for name in names]


def _files_of(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise Corrupt(f"{folder / WEIGHTS_FILE} is missing; restore the file")
    try:
        files = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{index} is no index of safetensors files ({error}); restore the file") from error
    for path in files:
        if path.parent != folder or not path.is_file():
            raise Corrupt(f"{index} names {path.name}, which is missing; restore the file")
    return files


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer, and the fingerprint that its datastores carry."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer

    @cached_property
    def sampling(self) -> SamplingParams:
        """The sampling defaults of the model's generation_config.json, if it asks for sampling.

        Raises Incompatible for an invalid value.
        """
        path = self.path / GENERATION_FILE
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not settings.get("do_sample"):
            return SamplingParams()
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        if given.get("top_k") == 0:  # means all tokens
            del given["top_k"]
        try:
            return SamplingParams(**given)
        except InvalidInput as error:
            raise Incompatible(f"{path}: {error}; mend the file, or remove it") from error

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises NotFound where it has none. Reads a GGUF file's header anew."""
        if is_gguf(self.path):
            return ChatTemplate.of_gguf(GgufFile(self.path).metadata, self.path.name)
        return ChatTemplate.load(self.path)

    @cached_property
    def chat_end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer in a conversation. Raises as `chat_template`."""
        return tuple(dict.fromkeys((*self.tokenizer.end_ids, *self.chat_template.turn_end_ids(self.tokenizer))))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of configuration and weights, different for two fine-tunes of one architecture."""
        return fingerprint_of(self.path)


def save_checkpoint(folder: str | Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Writes the three files into `folder`, creating it if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    weights = {name: tensor.contiguous() for name, tensor in decoder.weights().items()}
    _write(folder / WEIGHTS_FILE, lambda path: save_file(weights, path))
    config = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, **decoder.config.as_dict()}
    text = json.dumps(config, indent=2) + "\n"
    _write(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def load_checkpoint(
    model: str | Path, *, dtype: torch.dtype | str = torch.float32, trainable: bool = False
) -> Checkpoint:
    """Reads a model: a folder, of memlm or in the Hugging Face layout, a GGUF file, or an id on the hub.

    With `trainable` the weights are plain ones of their own. Otherwise they are packed for prediction where the machine
    can. Raises NotFound if there is no model, Incompatible for an unknown kind, Corrupt for files that do not belong
    together.
    """
    dtype = _dtype(dtype)
    if dtype == torch.bfloat16 and not cpu.multiplies_bfloat16():
        log.warning(
            "dtype is bfloat16, which this processor does not multiply: weights take half the memory of float32,"
            " products longer; auto takes what is faster"
        )
    path = find_model(model)
    files: WeightFiles | GgufFile
    family: Family | None = None
    if is_gguf(path):
        files = GgufFile(path)
        config, family = files.config, files.family
        tokenizer = tokenizer_of(files.metadata, str(path))
    else:
        given = _read_json(path)
        is_ours = given.get("model_type") == MODEL_TYPE
        config = _our_config(path, given) if is_ours else read_config(given)
        family = None if is_ours else family_of(given)
        tokenizer = Tokenizer.load(path)
        files = WeightFiles(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise Corrupt(
            f"{path}: {tokenizer.vocab_size} tokens in the tokenizer, {config.vocab_size} in the model; restore them"
        )
    with torch.device("meta"), _Undrawn():
        decoder = Decoder(config)
    sources = _sources(decoder, files, family)
    _fill(decoder, files, sources, dtype, trainable=trainable)
    return Checkpoint(path, decoder.eval(), tokenizer)


def _dtype(given: torch.dtype | str) -> torch.dtype:
    """Parses a dtype. `auto` is bfloat16 on processors that multiply it in hardware, else float32."""
    if isinstance(given, torch.dtype):
        return given
    if given == "auto":
        return torch.bfloat16 if cpu.has_fast_bfloat16() else torch.float32
    if given not in DTYPES:
        raise InvalidInput(f"dtype is {given!r}; expected auto, {', '.join(DTYPES)}", field="dtype")
    return DTYPES[given]


def fingerprint_of(folder: Path) -> str:
    """Returns a hash of configuration and weights."""
    if is_gguf(folder):
        return GgufFile(folder).fingerprint
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, *WeightFiles(folder).files):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:32]


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise NotFound(
            f"no model at {folder}: it has no {CONFIG_FILE}; make one with `memlm train`",
            kind="model",
            name=str(folder),
        )
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not JSON ({error}); restore the file") from error
    if not isinstance(config, dict):
        raise Incompatible(f"{path} describes no model; restore the file")
    return config


def _our_config(folder: Path, given: dict[str, Any]) -> ModelConfig:
    path = folder / CONFIG_FILE
    fields = {name: value for name, value in given.items() if name not in ("model_type", "format_version")}
    if (version := given.get("format_version")) != FORMAT_VERSION:
        raise Incompatible(f"{path} is of format {version}; this version reads format {FORMAT_VERSION}")
    try:
        return ModelConfig.from_dict(fields)
    except (InvalidInput, TypeError) as error:
        raise Corrupt(f"{path}: {error}; restore the file") from error


def _sources(decoder: Decoder, files: WeightFiles | GgufFile, family: Family | None) -> dict[str, Source]:
    """Returns the source of each tensor. Raises Corrupt, with the names, if tensors are missing, unexpected or
    misshapen.
    """
    present = files.names
    names = [name for name in decoder.state_dict() if not (name == "head.weight" and decoder.config.tied_embeddings)]
    if family is None:
        sources = {name: Source((name,)) for name in names}
        passed_over = set()
    else:
        sources = family.sources(names, present)
        passed_over = {name for name in present if family.is_buffer(name)}
        if decoder.config.tied_embeddings:
            passed_over |= set(family.table["head.weight"].names)
    read = {name for source in sources.values() for name in source.names}
    if missing := sorted(read - present):
        raise Corrupt(f"{files.folder} lacks the tensors {missing[:4]} that its config asks for; restore the files")
    if surplus := sorted(present - read - passed_over):
        raise Corrupt(f"{files.folder} holds the tensors {surplus[:4]} that its config has no place for; restore it")
    for name, parameter in decoder.state_dict().items():
        if name in sources:
            _check_shape(name, parameter.shape, sources[name], files, decoder.config)
    return sources


class _Undrawn(TorchFunctionMode):
    """Skips the random initialization of parameters.

    On the meta device it would import torch's compiler: loading the tiny preset took 2.1 s with it, and takes 0.25 s.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def _check_shape(
    name: str, expected: torch.Size, source: Source, files: WeightFiles | GgufFile, config: ModelConfig
) -> None:
    shapes = [files.shape(part) for part in source.names]
    try:
        with torch.device("meta"):
            shape = source.make([torch.empty(part_shape) for part_shape in shapes], config).shape
    except RuntimeError:
        shape = torch.Size()
    if shape != expected:
        got = " and ".join(f"{part} {shape}" for part, shape in zip(source.names, shapes, strict=True))
        raise Corrupt(f"{files.folder}: {name} should be {tuple(expected)}; got {got}; restore the files")


def _fill(
    decoder: Decoder, files: WeightFiles | GgufFile, sources: dict[str, Source], dtype: torch.dtype, *, trainable: bool
) -> None:
    """Sets the decoder's weights, a module at a time."""
    modules = dict(decoder.named_modules())

    def read(name: str) -> nn.Parameter:
        tensor = sources[name].make(files.read(sources[name].names), decoder.config).to(dtype)
        return nn.Parameter(tensor.clone() if trainable else tensor, requires_grad=trainable)

    for prefix, names in _by_module(sources):
        module = modules[prefix]
        for name in names:
            setattr(module, name, read(f"{prefix}.{name}".lstrip(".")))
        if isinstance(module, Linear) and not trainable:
            module.pack()
    if decoder.config.tied_embeddings:
        decoder.head.weight = decoder.embedding.weight
        if not trainable:
            decoder.head.pack()
            decoder.embedding.weight = read("embedding.weight")  # mapped anew: only the rows in use take memory


def _by_module(sources: dict[str, Source]) -> Iterator[tuple[str, list[str]]]:
    modules: dict[str, list[str]] = {}
    for name in sources:
        prefix, _, field = name.rpartition(".")
        modules.setdefault(prefix, []).append(field)
    yield from modules.items()


def _write(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    sync_file(temporary)
    move(temporary, path)
