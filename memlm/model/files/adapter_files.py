"""An adapter's folder: adapter_config.json and adapter_model.safetensors, for LoRA in the layout of PEFT.

PEFT (github.com/huggingface/peft) names the matrices after the layers of the model's family, so an adapter that was
trained elsewhere fits the same model here, and one that was trained here fits it there. Models that `memlm train` made
have the names of Llama. A bottleneck, which PEFT does not have, is stored under memlm's own names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memlm.base.files import write_atomic
from memlm.base.lists import items_of
from memlm.base.texts import read_text
from memlm.errors import AlreadyExists, Corrupt, Incompatible, InvalidInput, NotFound
from memlm.model.adapters import Adapter, Bottleneck, BottleneckLayer, LoRA, LoRALayer, Part, merge, new_adapter
from memlm.model.config import ModelConfig
from memlm.model.decoder import Decoder
from memlm.model.files.checkpoint import CONFIG_FILE, MODEL_TYPE, Checkpoint, load_checkpoint, save_checkpoint
from memlm.model.files.family import Family, Source, same
from memlm.model.files.gguf import GgufFile, is_gguf
from memlm.model.files.huggingface import FAMILIES
from memlm.model.files.huggingface_tables import LLAMA
from memlm.model.files.tensor_bytes import safetensors_pieces
from memlm.model.kernels.linear import Linear

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BOTTLENECK = "MEMLM_BOTTLENECK"
PREFIX = "base_model.model."  # of all names in PEFT's files
MATRICES = ("lora_A", "lora_B")
GGUF_FAMILIES = {"gptneox": "gpt_neox", "gemma3": "gemma3_text"}
OWN = Family(lambda _: {}, {**LLAMA, "blocks.{}.ff.up.weight": same("layers.{}.mlp.up_proj.weight")}, "model.")
# Settings of PEFT that change what an adapter computes, with the values that this version reads.
READ: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",), "use_dora": (False, None), "modules_to_save": (None, []), "alpha_pattern": ({}, None),
    "trainable_token_indices": (None, {}, []), "layer_replication": (None, []), "target_parameters": (None, []),
    "megatron_config": (None,), "eva_config": (None,), "corda_config": (None,), "use_qalora": (False, None),
}  # fmt: skip
CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that also change its weights

log = logging.getLogger("memlm.adapters")


class AdapterNames:
    """The parts of each linear layer of a model's blocks under the names of its family."""

    def __init__(self, decoder: Decoder, family: Family = OWN) -> None:
        config = decoder.config
        self.parts: dict[str, tuple[Part, ...]] = {}
        self._orders: dict[str, Tensor] = {}  # of outputs that the family keeps in another order
        for name, linear in decoder.named_modules():
            if not (isinstance(linear, Linear) and name.startswith("blocks.")):
                continue
            if ".experts." in name:  # they read tokens of all rows together, and no row's adapter alone
                continue
            source = family.sources([f"{name}.weight"], set())[f"{name}.weight"]
            sizes = _sizes(name, len(source.names), linear.out_features, config)
            begins = [sum(sizes[:place]) for place in range(len(sizes))]
            stems = (part.removesuffix(".weight") for part in source.names)
            self.parts[name] = tuple(map(Part, stems, begins, sizes))
            if source.rearrange is not None:
                self._orders[name] = _order(source, linear.out_features, config)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> AdapterNames:
        """The names of a loaded model's family."""
        return cls(checkpoint.decoder, _family_of(checkpoint.path))

    def to_family(self, layer: str, up_OR: Tensor) -> Tensor:
        """The rows of a matrix B in the family's order."""
        order_O = self._orders.get(layer)
        return up_OR if order_O is None else torch.empty_like(up_OR).index_copy_(0, order_O, up_OR)

    def from_family(self, layer: str, up_OR: Tensor) -> Tensor:
        """The rows of a matrix B in memlm's order."""
        order_O = self._orders.get(layer)
        return up_OR if order_O is None else up_OR[order_O]


def _family_of(path: Path) -> Family:
    if is_gguf(path):
        kind = GgufFile(path).architecture
        return FAMILIES.get(GGUF_FAMILIES.get(kind, kind), OWN)
    model_type = json.loads(read_text(path / CONFIG_FILE)).get("model_type", MODEL_TYPE)
    return FAMILIES.get(model_type, OWN)


def _sizes(name: str, count: int, out_features: int, config: ModelConfig) -> list[int]:
    """The outputs of each of `count` parts of a layer."""
    if count == 1:
        return [out_features]
    if name.endswith("qkv"):
        return [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    return [out_features // count] * count


def _order(source: Source, out_features: int, config: ModelConfig) -> Tensor:
    """The rows of a family's weight in memlm's order, by their numbers there."""
    return source.make([torch.arange(out_features)[:, None]], config).flatten()


def save_adapter(folder: str | Path, adapter: Adapter, checkpoint: Checkpoint) -> None:
    """Writes an adapter of a model into a folder, creating it if needed. The weights come first, the config last.

    The weights name the files of the model.
    """
    folder, names = Path(folder), AdapterNames.of(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    base = {"memlm_base": checkpoint.fingerprint, "format": "pt"}
    config: dict[str, Any]
    if isinstance(adapter.spec, Bottleneck):
        config = {"peft_type": BOTTLENECK, "width": adapter.spec.width}
        tensors = {
            f"{name}.{field}": tensor
            for name, layer in adapter.by_name.items() for field, tensor in layer.state_dict().items()
        }  # fmt: skip
    else:
        config, tensors = _peft_config(adapter, adapter.spec), {}
        for name, layer in adapter.by_name.items():
            assert isinstance(layer, LoRALayer)
            for part, down_rI, up_or in zip(layer.parts, layer.downs, layer.ups, strict=True):
                scale = layer.scale * len(down_rI) / adapter.spec.alpha  # PEFT multiplies by alpha over the rank
                up_or = names.to_family(name, up_or.detach())
                tensors[f"{PREFIX}{part.name}.lora_A.weight"] = down_rI
                tensors[f"{PREFIX}{part.name}.lora_B.weight"] = up_or if scale == 1 else scale * up_or
    config = {**config, "base_model_name_or_path": str(checkpoint.path), "inference_mode": True}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(folder / ADAPTER_WEIGHTS, *safetensors_pieces(tensors, base))
    write_atomic(folder / ADAPTER_CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _peft_config(adapter: Adapter, spec: LoRA) -> dict[str, Any]:
    ranks = {
        part.name: len(down_rI)
        for layer in adapter.by_name.values() if isinstance(layer, LoRALayer)
        for part, down_rI in zip(layer.parts, layer.downs, strict=True)
    }  # fmt: skip
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": spec.rank, "lora_alpha": spec.alpha, "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in ranks}), "bias": "none",
        "fan_in_fan_out": any(name.endswith(("c_attn", "c_proj", "c_fc")) for name in ranks),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != spec.rank},
    }  # fmt: skip


def load_adapter(folder: str | Path, checkpoint: Checkpoint) -> Adapter:
    """Reads an adapter of a model: one that `save_adapter` or PEFT wrote.

    Raises NotFound if there is none, Incompatible for a kind or a setting that this version does not have and for an
    adapter of a model of another shape, Corrupt for damaged files. An adapter that was trained on other files of a
    model of this shape is read, with a warning: these may be the same weights, rounded.
    """
    folder = Path(folder)
    config = _read_config(folder)
    tensors, base = _read_tensors(folder / ADAPTER_WEIGHTS)
    if base is not None and base != checkpoint.fingerprint:
        log.warning("%s was trained on other files than those of %s", folder, checkpoint.path)
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        digest.update((folder / name).read_bytes())
    fingerprint = digest.hexdigest()[:32]
    if config.get("peft_type") == BOTTLENECK:
        return _bottleneck(folder, config, tensors, checkpoint, fingerprint)
    return _lora(folder, config, tensors, checkpoint, fingerprint)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise NotFound(
            f"no adapter at {folder}: it has no {ADAPTER_CONFIG}; make one with `memlm train --adapter`",
            kind="adapter", name=str(folder),
        )  # fmt: skip
    try:
        config: Any = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not JSON ({error}); restore the file") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in ("LORA", BOTTLENECK):
        raise Incompatible(f"{path} describes an adapter of the kind {kind!r}; this version reads LORA and bottlenecks")
    for name, values in READ.items():
        if config.get(name, values[0]) not in values:
            raise Incompatible(f"{path} has {name}={config[name]!r}; this version reads {name}={values[0]!r} only")
    if kind == "LORA":
        _check_ranks(path, config)
    if str(config.get("init_lora_weights", "")).startswith(CHANGE_THE_MODEL):
        raise Incompatible(
            f"{path} has init_lora_weights={config['init_lora_weights']!r}, which changes the model too; convert it to"
            " a plain LoRA with PEFT"
        )
    return config


def _check_ranks(path: Path, config: Mapping[str, Any]) -> None:
    """Raises Corrupt for a rank or an alpha that is no number."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise Corrupt(f"{path} has r={rank!r}; expected the rank, a whole number from 1 on: restore the file")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise Corrupt(f"{path} has lora_alpha={alpha!r}; expected a number: restore the file")


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Reads the weights in float32, and which model's files they were trained on, if they say."""
    if not path.is_file():
        raise NotFound(
            f"no adapter at {path.parent}: it has no {path.name}; save the adapter with safe_serialization=True",
            kind="adapter", name=str(path.parent),
        )  # fmt: skip
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - no mapping
            base = (file.metadata() or {}).get("memlm_base")
    except (SafetensorError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read ({error}); restore the file") from error
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):  # would reach the other rows of a batch
            raise Corrupt(f"{path}: {name} has numbers that are not finite; restore the file")
    return tensors, base


def _lora(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], checkpoint: Checkpoint, fingerprint: str
) -> Adapter:
    names = AdapterNames.of(checkpoint)
    places = {part.name: (layer, part) for layer, parts in names.parts.items() for part in parts}
    short = {name.partition(".")[2]: name for name in places}  # as a model without a head has it
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, end = name.removeprefix(PREFIX).partition(".lora_")
        matrix = "lora_" + end.partition(".")[0]
        stem = short.get(stem, stem)
        if stem not in places or matrix not in MATRICES:
            raise Incompatible(
                f"{folder} changes {name}, and {checkpoint.path.name} has no such layer in its blocks; load it with the"
                " model that it was trained on, or leave out embeddings and head"
            )
        pairs.setdefault(stem, {})[matrix] = tensor
    chosen: dict[str, list[tuple[Part, Tensor, Tensor, float]]] = {}
    for stem, pair in pairs.items():
        layer, part = places[stem]
        down_rI, up_or = (pair.get(matrix, torch.empty(0)) for matrix in MATRICES)
        in_features = _linear(checkpoint, layer).in_features
        rank = len(down_rI)
        if down_rI.shape != (rank, in_features) or up_or.shape != (part.size, rank) or not rank:
            raise Incompatible(
                f"{folder}: {stem} has {tuple(down_rI.shape)} and {tuple(up_or.shape)}; {checkpoint.path.name} takes"
                f" (r, {in_features}) and ({part.size}, r)"
            )
        chosen.setdefault(layer, []).append((part, down_rI, names.from_family(layer, up_or), _scale(config, rank)))
    layers = {layer: _lora_layer(_linear(checkpoint, layer), chosen[layer]) for layer in names.parts if layer in chosen}
    try:
        ends = tuple(sorted({part.name.rpartition(".")[2] for _, part in places.values() if part.name in pairs}))
        spec = LoRA(int(config["r"]), float(config["lora_alpha"]), ends)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{folder / ADAPTER_CONFIG}: {error}; restore the file") from error
    return Adapter(spec, layers, fingerprint)


def _scale(config: Mapping[str, Any], rank: int) -> float:
    alpha = float(config.get("lora_alpha", 8))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _lora_layer(linear: Linear, pairs: Sequence[tuple[Part, Tensor, Tensor, float]]) -> LoRALayer:
    """A layer with these matrices. Parts may differ in rank, and then in scale, which goes into their B."""
    pairs = sorted(pairs, key=lambda pair: pair[0].begin)
    scale = pairs[0][3]
    layer = LoRALayer([pair[0] for pair in pairs], 1, scale, linear.in_features, linear.out_features)
    for number, (_, down_rI, up_or, own_scale) in enumerate(pairs):
        layer.downs[number] = torch.nn.Parameter(down_rI)
        layer.ups[number] = torch.nn.Parameter(up_or if own_scale == scale else up_or * (own_scale / scale))
    return layer


def _linear(checkpoint: Checkpoint, name: str) -> Linear:
    linear = checkpoint.decoder.get_submodule(name)
    assert isinstance(linear, Linear)
    return linear


def _bottleneck(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], checkpoint: Checkpoint, fingerprint: str
) -> Adapter:
    try:
        spec = Bottleneck(config["width"])
    except (KeyError, InvalidInput) as error:
        raise Corrupt(f"{folder / ADAPTER_CONFIG}: {error}; restore the file") from error
    adapter = new_adapter(spec, checkpoint.decoder, AdapterNames.of(checkpoint).parts)
    expected = {
        f"{name}.{field}": tensor
        for name, layer in adapter.by_name.items() for field, tensor in layer.state_dict().items()
    }  # fmt: skip
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in expected.items()}:
        raise Incompatible(
            f"{folder} is an adapter of a model of another shape than {checkpoint.path.name}; load it with the model"
            " that it was trained on"
        )
    for name, layer in adapter.by_name.items():
        assert isinstance(layer, BottleneckLayer)
        layer.load_state_dict({field: tensors[f"{name}.{field}"] for field in layer.state_dict()})
    return Adapter(spec, adapter.by_name, fingerprint)


def attach_adapters(checkpoint: Checkpoint, adapters: Sequence[str | Path] | Mapping[str, str | Path]) -> None:
    """Makes adapters available to a model: folders, which have their own names, or folders by name.

    Raises InvalidInput if two share a name, and as `load_adapter` does.
    """
    folders = items_of("adapters", adapters, str | Path, expected="folders")
    by_own_name = [(Path(each).resolve().name, each) for each in folders]
    named = adapters.items() if isinstance(adapters, Mapping) else by_own_name
    for name, folder in named:
        checkpoint.decoder.adapters.attach(name, load_adapter(folder, checkpoint).eval(), checkpoint.decoder)


def merge_adapter(model: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Writes a model of its own, in float32: `model` with the LoRA of a folder in its weights.

    Raises AlreadyExists for a folder that is not empty, InvalidInput for a bottleneck, and as `load_checkpoint` and
    `load_adapter` do.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AlreadyExists(f"{out} exists and is not empty; choose another place for the merged model")
    checkpoint = load_checkpoint(model, trainable=True)
    merge(checkpoint.decoder, load_adapter(adapter, checkpoint))
    save_checkpoint(out, checkpoint.decoder, checkpoint.tokenizer)
