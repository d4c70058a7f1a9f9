"""Models of one shape -> one model, the weighted mean of their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from memlm.errors import AlreadyExists, Incompatible, InvalidInput
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint


def average_models(models: Sequence[str | Path], out: str | Path, weights: Sequence[float] = ()) -> None:
    """Writes the model whose parameters are the weighted mean of others, in float32. `weights` are equal by default,
    and are divided by their sum.

    Means of models with a common ancestor predict well, others do not. The first model, one of the others and the sum
    in float64 are held at once.
    Raises AlreadyExists for a folder that is not empty, Incompatible for models of other shapes or tokenizers,
    InvalidInput for weights that fit no models, and as `load_checkpoint` does.
    """
    out, weights = Path(out), tuple(weights) or (1.0,) * len(models)
    if len(weights) != len(models) or not models or not all(0 <= w < math.inf for w in weights) or not sum(weights):
        raise InvalidInput(
            f"there are {len(models)} models and the weights {list(weights)}; give each a weight, and one above 0",
            field="weights",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AlreadyExists(f"{out} exists and is not empty; choose another place for the averaged model")
    sums, first = dict[str, Tensor](), load_checkpoint(models[0], trainable=True)
    for number, (model, weight) in enumerate(zip(models, weights, strict=True)):
        checkpoint = load_checkpoint(model, trainable=True) if number else first
        is_alike = checkpoint.decoder.config == first.decoder.config
        if not is_alike or checkpoint.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise Incompatible(
                f"{model} has another shape or tokenizer than {models[0]}; average models of one ancestor"
            )
        for name, tensor in checkpoint.decoder.state_dict().items():
            part = tensor.double() * (weight / sum(weights))
            sums[name] = part if number == 0 else sums[name] + part
    first.decoder.load_state_dict({name: total.float() for name, total in sums.items()})
    save_checkpoint(out, first.decoder, first.tokenizer)
