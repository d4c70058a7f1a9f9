"""Options of a decoder that have fields of their own: stretched positions, and memories of earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass

from memlm.errors import InvalidInput, check_choice, check_range

COMPRESSIONS = ("mean", "max", "conv", "dilated", "most_used", "linear")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length that they were trained on.

    `linear` divides positions by `factor`. `llama3` divides slow frequencies, keeps fast ones and blends in between.
    `yarn` (arXiv 2309.00071) blends by rotations within `original_length`, and scales attention. `longrope`
    (2402.13753) divides each frequency by its own one of `factors`, and scales attention.
    """

    kind: str
    factor: float
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice("rope_scaling.kind", self.kind, ("linear", "llama3", "yarn", "longrope"))
        if (self.kind == "longrope") != bool(self.factors) or any(factor <= 0 for factor in self.factors):
            raise InvalidInput(
                f"rope scaling {self.kind} has {len(self.factors)} factors; longrope needs one above 0 for each pair",
                field="rope_scaling.factors",
            )
        if self.factor <= 0 or (self.kind != "linear" and self.original_length < 1):
            raise InvalidInput(
                f"rope scaling {self.kind} needs a factor above 0 and the original length; got {self.factor} and"
                f" {self.original_length}",
                field="rope_scaling",
            )


@dataclass(frozen=True, slots=True)
class Compression:
    """Compressive memory behind the Transformer-XL one (Compressive Transformer, arXiv 1911.05507).

    `rate` old states become one, and the newest `length` of these are kept. `loss` trains the compression alone:
    `reconstruction` of attention, or `autoencoding` of the states themselves. The kind `linear` makes `states` of each
    `rate * states` old ones (Linformer, arXiv 2006.04768).
    """

    length: int
    rate: int = 4
    kind: str = "conv"
    loss: str = "reconstruction"
    dilation: int = 2
    states: int = 4

    def __post_init__(self) -> None:
        for name in ("length", "rate", "dilation", "states"):
            check_range(f"compression.{name}", getattr(self, name), least=1)
        check_choice("compression.kind", self.kind, COMPRESSIONS)
        check_choice("compression.loss", self.loss, ("reconstruction", "autoencoding"))


@dataclass(frozen=True, slots=True)
class Memorizing:
    """kNN attention over the document's past in some layers (Memorizing Transformers, arXiv 2203.08913).

    Each layer and sequence keeps the latest `capacity` (key, value) pairs, and each query attends to its `top_k`.
    `mixing` is the published `gate` (a sigmoid per head), a `tanh` gate that starts at zero (Flamingo, 2204.14198: for
    models pretrained without), or one `joint` softmax with local attention (FoT, 2307.03170). `normalize` gives queries
    and keys unit length and a learned scale per head: in `both` local and kNN attention, as published, or in kNN
    attention alone (`memory`). `search` is `exact` or `faiss`. `storage` is `float16`, or `model` for the type of the
    model.
    """

    layers: tuple[int, ...]
    top_k: int = 32
    capacity: int = 65_536
    mixing: str = "gate"
    normalize: str = "both"
    search: str = "exact"
    storage: str = "float16"

    def __post_init__(self) -> None:
        check_range("memorizing.top_k", self.top_k, least=1)
        check_range("memorizing.capacity", self.capacity, least=1)
        check_choice("memorizing.mixing", self.mixing, ("gate", "tanh", "joint"))
        check_choice("memorizing.normalize", self.normalize, ("both", "memory"))
        check_choice("memorizing.search", self.search, ("exact", "faiss"))
        check_choice("memorizing.storage", self.storage, ("float16", "model"))
