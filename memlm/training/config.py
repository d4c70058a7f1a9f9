"""Presets and settings of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from memlm.api.params import MAX_SEED
from memlm.base.options import option
from memlm.errors import InvalidInput, check_choice, check_range

if TYPE_CHECKING:
    from memlm.model import ModelConfig

OPTIMIZATION, LENGTH = "Optimization", "Length of the training"  # panels of the command-line options
SHAPE = ("dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim", "context_length")
CHOICES = {
    "schedule": ("cosine", "constant"),
    "optimizer": ("muon", "adamw"),
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
}


@dataclass(frozen=True)
class TrainConfig:
    """The shape of a model and its training. At most one of `steps`, `epochs` and `minutes` sets the length.

    `memlm train` has options for what a run changes, and reads every field from a TOML file (`--config`). With
    `tensorboard`, metrics go to the folder `tensorboard` of the model too. A model is compiled first with `compile`.

    `minutes` fixes the number of steps from the speed of the first ones, so only the other two are reproducible.
    `model_fields` are fields of `ModelConfig` (memories, positions, ...) that override the shape here. In a TOML file
    they are the table `[model]`. A step reads `batch_size` x `accumulate` rows of `context_length` tokens, or of
    several segments with a recurrent memory, over all processes together. The rate falls to `min_rate` of itself: a
    fall to almost nothing hurts models with memory (arXiv 1911.05507). Every `valid_every` steps the held-out text is
    scored. After `patience` scores without a new best, training ends with the best weights.

    A `chunk_store` is a datastore for a model with a part that reads its texts, of the model's own tokenizer.

    With an `adapter`, as `lora:rank=8,alpha=16` or `bottleneck:width=32` (`memlm.model.adapters`), only its weights
    learn.
    """

    dim: int = 192
    num_layers: int = 4
    num_heads: int = 3
    num_kv_heads: int = 1
    ff_dim: int = 512
    context_length: int = 256
    vocab_size: int = 2048
    batch_size: int = field(default=4, metadata=option("Rows of a batch.", panel=OPTIMIZATION))
    learning_rate: float = field(default=4e-3, metadata=option("Peak learning rate.", panel=OPTIMIZATION))
    weight_decay: float = 0.1
    warmup: float = 0.05
    grad_clip: float = 1.0
    steps: int | None = field(default=None, metadata=option("Train for this many steps.", panel=LENGTH))
    epochs: float | None = field(
        default=None, metadata=option("Train for this many passes over the corpus.", default="1", panel=LENGTH)
    )
    minutes: float | None = field(default=None, metadata=option("Train for about this long.", panel=LENGTH))
    checkpoint_every: int = 200
    seed: int = field(default=0, metadata=option("Equal seeds give equal models.", panel=OPTIMIZATION))
    accumulate: int = 1
    schedule: str = "cosine"
    min_rate: float = 0.1
    optimizer: str = "muon"
    dtype: str = "auto"
    device: str = "auto"
    compile: bool = False
    valid_every: int | None = None
    patience: int | None = None
    compression_loss_weight: float = 1.0
    tensorboard: bool = False
    adapter: str = field(
        default="",
        metadata=option(
            "Learn this adapter for --init-from, and leave the model as it is.",
            metavar="lora|bottleneck[:NAME=VALUE,...]",
            panel=OPTIMIZATION,
        ),
    )
    chunk_store: str = ""
    model_fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("batch_size", "checkpoint_every", "learning_rate", "accumulate"):
            check_range(name, getattr(self, name), above=0)
        if not self.grad_clip > 0:  # infinity is valid, and clips nothing
            raise InvalidInput(f"grad_clip is {self.grad_clip}; expected above 0", field="grad_clip")
        for name in ("warmup", "min_rate"):
            check_range(name, getattr(self, name), least=0, most=1)
        lengths = [value for value in (self.steps, self.epochs, self.minutes) if value is not None]
        if len(lengths) > 1 or any(not value > 0 for value in lengths):
            raise InvalidInput("give one of steps, epochs and minutes, more than 0", field="steps")
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_range("seed", self.seed, least=0, most=MAX_SEED)
        for name in ("valid_every", "patience"):
            check_range(name, getattr(self, name), least=1)
        if self.patience and not self.valid_every:
            raise InvalidInput("patience counts scores of held-out text; give valid_every too", field="patience")
        if self.adapter:
            from memlm.model.adapters import parse_adapter  # loads torch, which the command line does without

            parse_adapter(self.adapter)
            if self.compile:
                raise InvalidInput(
                    "compile is given with an adapter, which it does not see; leave out one", field="compile"
                )
        if self.model_fields:
            from memlm.model import ModelConfig  # loads torch, which the command line does without

            if unknown := sorted(self.model_fields.keys() - {known.name for known in fields(ModelConfig)}):
                raise InvalidInput(f"model_fields has {unknown}; a model has no such fields", field=unknown[0])

    def model(self, vocab_size: int) -> ModelConfig:
        """The shape of the decoder for a tokenizer's vocabulary."""
        from memlm.model import ModelConfig

        shape = {name: getattr(self, name) for name in SHAPE}
        return ModelConfig.from_dict({**shape, **self.model_fields, "vocab_size": vocab_size})

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> TrainConfig:
        """Returns the config of a TOML file or of a run's record. Raises InvalidInput, with its name, for an unknown
        field.
        """
        known = {f.name for f in fields(cls)}
        if surplus := sorted(given.keys() - known):
            raise InvalidInput(
                f"unknown fields {surplus}; the fields are {sorted(known)}, and those of the model stand under [model]",
                field=surplus[0],
            )
        return cls(**given)


PRESETS = {
    "tiny": TrainConfig(),
    "small": TrainConfig(
        dim=512, num_layers=8, num_heads=8, num_kv_heads=4, ff_dim=1408, context_length=512, vocab_size=16_384,
        learning_rate=1e-3, batch_size=32,
    ),
    "base": TrainConfig(
        dim=768, num_layers=12, num_heads=12, num_kv_heads=4, ff_dim=2048, context_length=1024, vocab_size=32_768,
        learning_rate=6e-4, batch_size=64,
    ),
}  # fmt: skip


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """Returns the rate of a step: linear warm-up, then constant or half a cosine down to `min_rate` of the rate."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    fraction = (step - warmup) / max(1, steps - warmup)
    falling = 0.5 * (1 + math.cos(math.pi * fraction))
    return config.learning_rate * (config.min_rate + (1 - config.min_rate) * falling)
