"""A trained model -> the same model with memories added, to continue training."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from memlm.errors import Incompatible, InvalidInput
from memlm.model import Decoder, ModelConfig

MAY_CHANGE = ("memorizing", "compression", "xl_length", "context_length", "cross")
NEW_KNN_ATTENTION: dict[str, Any] = {"memorizing": {"mixing": "tanh", "normalize": "memory"}}
NEW_PARTS = (".knn.", ".compressor.", "cross.")


def config_with_memories(config: ModelConfig, model_fields: dict[str, Any]) -> ModelConfig:
    """Returns a model's config with memories added.

    By default, an added memorizing layer starts with its gate at zero (`mixing="tanh"`) and leaves local attention
    unchanged (`normalize="memory"`), so the model starts with equal predictions. Raises InvalidInput for a field that a
    trained model cannot change.
    """
    learned: dict[str, Any] = json.loads(json.dumps(config.as_dict()))
    for name, value in json.loads(json.dumps(model_fields, default=asdict)).items():
        if name not in MAY_CHANGE and value != learned[name]:
            raise InvalidInput(
                f"{name} cannot change in a trained model; only {', '.join(MAY_CHANGE)} can",
                field=name,
            )
    changes = dict(model_fields)
    for name, given in changes.items():  # settings that are not given stay as they are
        if isinstance(given, dict) and name != "cross":
            changes[name] = {**(learned[name] or NEW_KNN_ATTENTION.get(name, {})), **given}
    grown = ModelConfig.from_dict({**config.as_dict(), **changes})
    if config.cross is not None and grown.cross != config.cross:
        raise InvalidInput(
            f"the model has the cross {config.cross.kind} already, which cannot change; leave cross out", field="cross"
        )
    if config.positions == "learned" and grown.context_length > config.context_length:
        raise InvalidInput(
            f"the model has {config.context_length} learned positions; its segments cannot be longer",
            field="context_length",
        )
    return grown


def add_memories(decoder: Decoder, config: ModelConfig) -> Decoder:
    """Returns a decoder of another config with this one's parameters. Only memories are new. Seed torch before.

    Only the new parameters learn where the model gets a cross. Raises Incompatible, with their names, for tensors that
    are neither.
    """
    grown = Decoder(config)
    if decoder.positions is not None and config.context_length < decoder.config.context_length:
        decoder.positions.weight.data = decoder.positions.weight.data[: config.context_length]
    learned, expected = decoder.weights(), grown.weights()
    missing = [name for name in expected if name not in learned and not any(part in name for part in NEW_PARTS)]
    if unmatched := sorted(missing + [name for name in learned if name not in expected]):
        raise Incompatible(f"the tensors {unmatched[:4]} have no counterpart in the requested model")
    for name, tensor in learned.items():
        if tensor.shape != expected[name].shape:
            raise Incompatible(
                f"{name} is {tuple(tensor.shape)}; the requested model has {tuple(expected[name].shape)}"
            )
    grown.load_state_dict(learned, strict=False)
    if decoder.config.cross is None and config.cross is not None:
        for name, parameter in grown.named_parameters():
            parameter.requires_grad_(name not in learned)
    return grown
