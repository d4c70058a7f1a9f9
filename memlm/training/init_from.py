"""A model that has learnt already -> the one that training goes on with, with memories that it did not have."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from memlm.errors import Incompatible, InvalidInput
from memlm.model import Decoder, ModelConfig

MAY_CHANGE = ("memorizing", "compression", "xl_length", "context_length")
NEW_KNN_ATTENTION: dict[str, Any] = {"memorizing": {"mixing": "tanh", "normalize": "memory"}}
NEW_PARTS = (".knn.", ".compressor.")


def config_with_memories(config: ModelConfig, model_fields: dict[str, Any]) -> ModelConfig:
    """A model's config with the memories that were asked for.

    A memorizing layer that is added starts shut (`mixing="tanh"`) and leaves local attention as it is
    (`normalize="memory"`), unless it is said otherwise: the model starts exactly where it was. Raises InvalidInput
    for a field that a trained model cannot change.
    """
    learnt: dict[str, Any] = json.loads(json.dumps(config.as_dict()))
    for name, value in json.loads(json.dumps(model_fields, default=asdict)).items():
        if name not in MAY_CHANGE and value != learnt[name]:
            raise InvalidInput(
                f"{name} cannot change in a model that has learnt already; only {', '.join(MAY_CHANGE)} can",
                field=name,
            )
    asked = dict(model_fields)
    for name, given in asked.items():  # what is not said of a memory that is there stays as it is
        if isinstance(given, dict):
            asked[name] = {**(learnt[name] or NEW_KNN_ATTENTION.get(name, {})), **given}
    made = ModelConfig.from_dict({**config.as_dict(), **asked})
    if config.positions == "learned" and made.context_length > config.context_length:
        raise InvalidInput(
            f"the model has learnt {config.context_length} positions; its segments cannot be longer",
            field="context_length",
        )
    return made


def add_memories(decoder: Decoder, config: ModelConfig) -> Decoder:
    """A decoder of another config with all that this one has learnt; only memories are new. Seed torch first.

    Raises Incompatible, naming them, for tensors that are neither.
    """
    grown = Decoder(config)
    if decoder.positions is not None and config.context_length < decoder.config.context_length:
        decoder.positions.weight.data = decoder.positions.weight.data[: config.context_length]
    learnt, wanted = decoder.weights(), grown.weights()
    missing = [name for name in wanted if name not in learnt and not any(part in name for part in NEW_PARTS)]
    if strange := sorted(missing + [name for name in learnt if name not in wanted]):
        raise Incompatible(f"the tensors {strange[:4]} have no counterpart in the model that was asked for")
    for name, tensor in learnt.items():
        if tensor.shape != wanted[name].shape:
            raise Incompatible(
                f"{name} is {tuple(tensor.shape)}; the model that was asked for has {tuple(wanted[name].shape)}"
            )
    grown.load_state_dict(learnt, strict=False)
    return grown
