"""A model's folder: config.json, model.safetensors (or shards with an index), tokenizer.json.

Own models are written under temporary names and moved into place, weights first and config.json last, so a folder with
a config is complete. Models of other families are read by the tables of `huggingface`. For prediction, weights are
packed as they are read, so loading takes about as much RAM as the weights in use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

import memlm.model.kernels.native as native
from memlm.api.params import SamplingParams
from memlm.base.compute import AUTO, BITS, GGUF
from memlm.base.files import move, sync_file
from memlm.base.texts import read_text
from memlm.data.chat import ChatTemplate
from memlm.data.gguf_tokenizer import tokenizer_of
from memlm.data.tokenizer import GENERATION_FILE, Tokenizer, json_of
from memlm.errors import Corrupt, Incompatible, InvalidInput, MemlmError, NotFound
from memlm.model.config import ModelConfig
from memlm.model.decoder import Decoder
from memlm.model.device import device_of, dtype_of, has_fast_bfloat16
from memlm.model.files.catalog import find_model
from memlm.model.files.family import Family, Source
from memlm.model.files.gguf import SUFFIX, GgufFile, files_of, is_gguf
from memlm.model.files.gguf_architectures import architecture_of, config_of
from memlm.model.files.huggingface import family_of, read_config
from memlm.model.files.loader import Form, Model, fill
from memlm.model.files.weight_files import WEIGHTS_FILE, WeightFiles, Weights, weight_paths
from memlm.model.kernels.cpu import is_emulated

MODEL_TYPE = "memlm"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"

_READING = threading.Lock()  # of weights, for which a second thread waits

log = logging.getLogger("memlm.checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer, and the fingerprint that its datastores carry."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    marks: tuple[tuple[int, ...], ...] = ()  # of the files as they were loaded; none: they are not compared
    unread: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def read_weights(self) -> None:
        """Reads the weights that `load_checkpoint` left. Has no effect where it left none. Raises as it does, and again
        when it is called again.
        """
        with _READING:
            while self.unread:
                self.unread[-1]()
                self.unread.pop()

    @property
    def is_current(self) -> bool:
        """Whether the model's files are those that were loaded."""
        try:
            return not self.marks or self.marks == marks_of(self.path)
        except OSError:
            return False

    @cached_property
    def sampling(self) -> SamplingParams:
        """The sampling defaults of the model's generation_config.json, if it asks for sampling.

        Raises Incompatible for an invalid value, Corrupt for a file that is not JSON.
        """
        path = self.path / GENERATION_FILE
        settings = json_of(path)
        if not settings.get("do_sample"):
            return SamplingParams()
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        if given.get("top_k") in (0, -1):  # mean all tokens: to transformers and llama.cpp, and to vLLM
            del given["top_k"]
        try:
            return SamplingParams(**given)
        except InvalidInput as error:
            raise Incompatible(f"{path}: {error}; mend the file, or remove it") from error

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises NotFound where it has none. Reads a GGUF file's header anew."""
        return _template_of(self.path, GgufFile(self.path) if is_gguf(self.path) else None)

    @cached_property
    def chat_end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer in a conversation. Raises as `chat_template`."""
        return tuple(dict.fromkeys((*self.tokenizer.end_ids, *self.chat_template.turn_end_ids(self.tokenizer))))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of configuration and weights, different for two fine-tunes of one architecture.

        Raises Incompatible if the files have changed since the model was loaded.
        """
        if not self.is_current:
            raise Incompatible(f"the files of {self.path} changed after the model was loaded; load it again")
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
    model: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    attention_window: int | None = None,
    extended_attention: int | None = None,
    trainable: bool = False,
    weights: bool = True,
) -> Checkpoint:
    """Reads a model: a folder, of memlm or in the Hugging Face layout, a GGUF file, or an id on the hub.

    With an `attention_window`, a token sees so many of the latest tokens and the first few, and texts have any length.
    With `extended_attention` each head also sees so many of the tokens before.

    Without `weights`, these are left until `read_weights`: for text, which needs the configuration and the tokenizer.

    With `trainable` the weights are plain ones of their own, in float32 and on the processor where nothing else is
    asked. Otherwise they are packed for prediction where the machine can. `auto` chooses what is fast
    (`memlm.model.device`), and keeps the blocks of a GGUF file where this processor has native kernels. Raises NotFound
    if there is no model, Incompatible for an unknown kind, Corrupt for files that do not belong together, InvalidInput
    for a device that is not there or a type that the model cannot have.
    """
    if trainable:
        dtype, device = "float32" if dtype == "auto" else dtype, "cpu" if device == "auto" else device
    device = device_of(device)
    path = find_model(model)
    form = form_of(dtype, device, trainable=trainable, is_gguf=is_gguf(path))
    path, files, marks, config, family, tokenizer = _read_gguf(path) if is_gguf(path) else _read_folder(path)
    if (surplus := tokenizer.vocab_size - config.vocab_size) > 0:
        log.warning("%s: the tokenizer has %d tokens more than the model, which cannot read them", path, surplus)
        tokenizer.fit(config.vocab_size, str(path))
    with suppress(MemlmError, OSError, ValueError):  # without a template that can be read, there is none to guard
        tokenizer = _template_of(path, files if isinstance(files, GgufFile) else None).guard(tokenizer)
    if attention_window is not None:
        config = config.with_attention_window(attention_window)
    if extended_attention is not None:
        config = config.with_extended_attention(extended_attention)
    with torch.device("meta"), Undrawn():
        decoder = Decoder(config)
    sources = sources_of(decoder, files, family)

    def read() -> None:
        fill(decoder, files, sources, form)
        decoder.eval()  # also the modules that came with the weights
        if marks != marks_of(path):
            raise Incompatible(f"the files of {path} changed while the model was loaded; load it again")

    checkpoint = Checkpoint(path, decoder, tokenizer, marks, [read])
    if weights:
        checkpoint.read_weights()
    return checkpoint


class _Described(NamedTuple):
    """A model but for its weights. Without a `family`, it is of memlm."""

    path: Path
    files: WeightFiles | GgufFile
    marks: tuple[tuple[int, ...], ...]
    config: ModelConfig
    family: Family | None
    tokenizer: Tokenizer


def _read_gguf(path: Path) -> _Described:
    files = GgufFile(path)
    path = files.path  # of the first part, whichever was given
    marks = marks_of(path)
    config, family = config_of(files), architecture_of(files)
    return _Described(path, files, marks, config, family, tokenizer_of(files.metadata, str(path)))


def _read_folder(path: Path) -> _Described:
    given = read_config_file(path)
    marks = marks_of(path)
    is_ours = given.get("model_type") == MODEL_TYPE
    config = _our_config(path, given) if is_ours else read_config(given)
    family = None if is_ours else family_of(given)
    tokenizer = Tokenizer.load(path)
    return _Described(path, WeightFiles(path), marks, config, family, tokenizer)


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Reads the tokenizer of a model without the model, as `load_checkpoint` finds it, to decode its tokens."""
    path = find_model(model)
    return tokenizer_of(GgufFile(path).metadata, str(path)) if is_gguf(path) else Tokenizer.load(path)


def _template_of(path: Path, file: GgufFile | None) -> ChatTemplate:
    return ChatTemplate.load(path) if file is None else ChatTemplate.of_gguf(file.metadata, path.name)


def form_of(dtype: torch.dtype | str, device: torch.device, *, trainable: bool, is_gguf: bool) -> Form:
    if dtype in (*BITS, GGUF) and (trainable or device.type != "cpu"):
        raise InvalidInput(
            f"dtype is {dtype}, which predicts on the processor; got device {device}"
            f"{' and weights to train' if trainable else ''}: choose another dtype, or device cpu",
            field="dtype",
        )
    if dtype == GGUF and not is_gguf:
        raise InvalidInput("dtype is gguf, and the model is no GGUF file: choose another dtype", field="dtype")
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    is_native = dtype == AUTO and not trainable and device.type == "cpu" and native.is_fast()
    keeps_blocks = dtype == GGUF or (is_native and (is_gguf or not has_fast_bfloat16(device)))
    number_type = torch.float32 if keeps_blocks else dtype_of(dtype, device)
    if device.type == "cpu" and (number_type == torch.float16 or is_emulated(torch.empty(0, dtype=number_type))):
        log.warning(
            "dtype is %s, which this processor does not multiply: weights take half the memory of float32,"
            " products longer; auto takes what is faster",
            str(number_type).removeprefix("torch."),
        )
    return Form(number_type, device, trainable, bits, keeps_blocks)


def fingerprint_of(folder: Path) -> str:
    """Returns a hash of configuration and weights, of a GGUF file that of all its parts."""
    digest = hashlib.sha256()
    for path in files_of(folder) if is_gguf(folder) else [folder / CONFIG_FILE, *weight_paths(folder)]:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:32]


def marks_of(path: Path) -> tuple[tuple[int, ...], ...]:
    """Marks of a model's files that change when they are replaced or written."""
    files = files_of(path) if is_gguf(path) else [path / CONFIG_FILE, *weight_paths(path)]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, files))


def read_config_file(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        problem = f"no model at {folder}: it has no {CONFIG_FILE}; make one with `memlm train`"
        if folder.is_file():
            problem = f"no model at {folder}: it is a file, and no {SUFFIX} file; give one, or a model's folder"
        elif not folder.exists():
            problem = (
                f"no model at {folder}: there is no such folder; check the path, or take a name that `memlm models"
                " list` shows"
            )
        raise NotFound(problem, kind="model", name=str(folder))
    try:
        config: Any = json.loads(read_text(path))
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
        config = ModelConfig.from_dict(fields)
    except (InvalidInput, TypeError) as error:
        raise Corrupt(f"{path}: {error}; restore the file") from error
    if config.reads_source:
        raise Incompatible(f"{path}: the decoder reads a source beside its text, and continues no text without one")
    return config


def sources_of(model: Model, files: Weights, family: Family | None) -> dict[str, Source]:
    """Returns the source of each tensor. Raises Corrupt, with the names, if tensors are missing, unexpected or
    misshapen.
    """
    present = files.names
    names = [name for name in model.state_dict() if not (name == "head.weight" and model.config.tied_embeddings)]
    if family is None:
        sources = {name: Source((name,)) for name in names}
        passed_over = set()
    else:
        sources = family.sources(names, present)
        passed_over = {name for name in present if family.is_buffer(name)}
        if model.config.tied_embeddings:
            passed_over |= set(family.table["head.weight"].names)
    read = {name for source in sources.values() for name in source.names}
    if missing := sorted(read - present):
        raise Corrupt(f"{files.folder} lacks the tensors {missing[:4]} that its config asks for; restore the files")
    if surplus := sorted(present - read - passed_over):
        raise Corrupt(f"{files.folder} holds the tensors {surplus[:4]} that its config has no place for; restore it")
    for name, parameter in model.state_dict().items():
        if name in sources:
            _check_shape(name, parameter.shape, sources[name], files, model.config)
    return sources


class Undrawn(TorchFunctionMode):
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


def _check_shape(name: str, expected: torch.Size, source: Source, files: Weights, config: ModelConfig) -> None:
    shapes = [files.shape(part) for part in source.names]
    try:
        # One number, expanded. On the meta device torch.cat would import torch's compiler, in half the time of a load.
        stacked = torch.zeros((), dtype=torch.float16).expand(_stacked(shapes))
        shape = replace(source, names=source.names[:1]).make([stacked], config).shape
    except (RuntimeError, TypeError):  # TypeError: of sizes above 63 bits
        shape = torch.Size()
    if shape != expected:
        got = " and ".join(f"{part} {shape}" for part, shape in zip(source.names, shapes, strict=True))
        raise Corrupt(f"{files.folder}: {name} should be {tuple(expected)}; got {got}; restore the files")


def _stacked(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of tensors that are stacked. Raises RuntimeError for tensors that do not fit together."""
    first, *rest = shapes
    if rest and not (all(shapes) and all(shape[1:] == first[1:] for shape in rest)):
        raise RuntimeError("the tensors do not fit together")
    return (sum(shape[0] for shape in shapes), *first[1:]) if rest else first


def _write(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    sync_file(temporary)
    move(temporary, path)
