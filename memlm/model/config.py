"""The shape of a decoder, for models trained here and for those of other families."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from memlm.errors import InvalidInput, check_choice, check_range

Positions = Literal[
    "rotary", "alibi", "transformer_xl", "shaw", "t5", "distance", "learned", "sinusoidal", "none"
]  # fmt: skip
POSITIONS = ("rotary", "alibi", "transformer_xl", "shaw", "t5", "distance", "learned", "sinusoidal", "none")
ABSOLUTE = ("learned", "sinusoidal")
TURNING = ("rotary", "none")  # scores do not depend on distance otherwise
ACTIVATIONS = ("swiglu", "geglu", "gelu", "gelu_tanh", "relu")
NORM_ORDERS = ("pre", "post", "output", "sandwich")
COMPRESSIONS = ("mean", "max", "conv", "dilated", "most_used")


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
    `reconstruction` of attention, or `autoencoding` of the states themselves.
    """

    length: int
    rate: int = 4
    kind: str = "conv"
    loss: str = "reconstruction"
    dilation: int = 2

    def __post_init__(self) -> None:
        for name in ("length", "rate", "dilation"):
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


NUM_SINKS = 4  # first tokens of a text that stay visible beside a window that moves (arXiv 2309.17453, table 2)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Raises InvalidInput for fields that do not fit together.

    `context_length` is the longest text of a model without memory. It is the segment length of a model with one, which
    reads texts of any length. `windows` gives each layer the number of latest tokens that it sees, itself included (0:
    all). The first `num_sinks` tokens stay visible beyond the window (StreamingLLM, arXiv 2309.17453). Each head also
    attends to `extended_attention` of the tokens that have left the window (Extended Mind, arXiv 2406.02332).

    Norms stand before a sub-layer (`pre`), behind the sum (`post`), behind the sub-layer (`output`, OLMo 2) or on both
    of its sides (`sandwich`, Gemma). `rms_offset` multiplies by 1 + weight. Layers with a window turn by
    `local_rope_theta`, unscaled, where it is given. Those in `no_rope_layers` do not turn.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ff_dim: int
    context_length: int
    head_dim: int = 0  # 0: dim / num_heads
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    rotary_dim: int = 0  # how much of a head turns; 0: all of it
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float = 0.0
    no_rope_layers: tuple[int, ...] = ()
    num_buckets: int = 32  # of T5's bias
    max_distance: int = 128  # the last distance that T5's bias and Shaw's tables tell apart
    norm: str = "rms"
    norm_order: str = "pre"
    norm_eps: float = 1e-5
    activation: str = "swiglu"
    parallel_residual: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ff_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: str = "head"  # or "projection": all heads together
    query_scale: float = 1.0  # beside 1 / sqrt(head_dim)
    embedding_scale: float = 1.0
    tied_embeddings: bool = True
    windows: tuple[int, ...] = ()
    num_sinks: int = 0
    extended_attention: int = 0
    xl_length: int = 0
    compression: Compression | None = None
    memorizing: Memorizing | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim", "context_length"):
            check_range(name, getattr(self, name), least=1)
        for name in ("xl_length", "num_sinks", "extended_attention", "num_buckets", "max_distance"):
            check_range(name, getattr(self, name), least=0)
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"{self.num_kv_heads} kv heads do not divide {self.num_heads} heads", field="num_kv_heads"
            )
        self._fill_head_dim()
        self._check_choices()
        self._check_layers()

    def _fill_head_dim(self) -> None:
        if not self.head_dim:
            if self.dim % self.num_heads:
                raise InvalidInput(f"dim {self.dim} is not divisible by {self.num_heads} heads", field="num_heads")
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.positions == "rotary" and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise InvalidInput(
                f"{self.rotary_dim} of {self.head_dim} numbers a head cannot turn in pairs", field="rotary_dim"
            )

    def _check_choices(self) -> None:
        check_choice("positions", self.positions, POSITIONS)
        check_choice("norm", self.norm, ("rms", "rms_offset", "layer"))
        check_choice("norm_order", self.norm_order, NORM_ORDERS)
        check_choice("qk_norm_over", self.qk_norm_over, ("head", "projection"))
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.parallel_residual and self.norm_order != "pre":
            raise InvalidInput(
                f"a parallel residual has its norms before; norm_order is {self.norm_order}", field="norm_order"
            )
        for name in ("query_scale", "embedding_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInput(f"{name} is {getattr(self, name)}; expected a number above 0", field=name)
        if self.local_rope_theta < 0:
            raise InvalidInput(f"local_rope_theta is {self.local_rope_theta}", field="local_rope_theta")
        if (scaling := self.rope_scaling) and scaling.factors and len(scaling.factors) != self.rotary_dim // 2:
            raise InvalidInput(
                f"rope scaling has {len(scaling.factors)} factors for {self.rotary_dim // 2} pairs",
                field="rope_scaling.factors",
            )

    def _check_layers(self) -> None:
        windows = self.windows
        object.__setattr__(self, "windows", windows if any(windows) else ())
        if self.windows and (len(windows) != self.num_layers or min(windows) < 0):
            raise InvalidInput(
                f"windows are {windows}; expected one for each of {self.num_layers} layers, 0 for none", field="windows"
            )
        if self.num_sinks and not self.is_windowed:
            raise InvalidInput("num_sinks keeps tokens beyond a window; give every layer a window", field="num_sinks")
        if self.num_sinks and self.is_segmented:
            raise InvalidInput("num_sinks does not go with a memory", field="num_sinks")
        if self.num_sinks and self.positions == "learned":
            raise InvalidInput("num_sinks needs positions that go on; learned ones end", field="num_sinks")
        if self.extended_attention and not (self.num_sinks and self.positions in TURNING):
            raise InvalidInput(
                "extended_attention reads what has left a moving window, at a distance that heads turn by; it needs"
                f" num_sinks, and positions {' or '.join(TURNING)}; got {self.num_sinks} sinks and {self.positions}",
                field="extended_attention",
            )
        if self.xl_length and self.positions == "learned":
            raise InvalidInput(
                "learned positions start anew in each segment, so that those of a Transformer-XL memory would clash;"
                " choose relative ones",
                field="positions",
            )
        if self.compression and not self.xl_length:
            raise InvalidInput(
                "compression takes what leaves the Transformer-XL memory; give xl_length", field="xl_length"
            )
        if not all(0 <= layer < self.num_layers for layer in self.no_rope_layers):
            raise InvalidInput(f"no_rope_layers are {self.no_rope_layers}", field="no_rope_layers")
        if self.memorizing and not all(0 <= layer < self.num_layers for layer in self.memorizing.layers):
            raise InvalidInput(
                f"memorizing.layers are {self.memorizing.layers}; the model has the layers 0 to {self.num_layers - 1}",
                field="memorizing.layers",
            )

    def with_attention_window(self, window: int, num_sinks: int = NUM_SINKS) -> ModelConfig:
        """The same decoder with a window that moves in every layer, so that it reads texts of any length (StreamingLLM,
        arXiv 2309.17453). Layers with a smaller window keep it.

        Raises InvalidInput for a model with memory, for positions that end, and for a window beyond the context.
        """
        most = self.context_length - num_sinks
        if self.is_segmented:
            raise InvalidInput(
                "the model has a memory, which reads texts of any length; leave attention_window out",
                field="attention_window",
            )
        if not 1 <= window <= most:
            raise InvalidInput(
                f"attention_window is {window}; expected 1 to {most:,}: the model's context of {self.context_length:,},"
                f" less {num_sinks} sinks",
                field="attention_window",
            )
        if self.local_rope_theta and not self.is_windowed:
            raise InvalidInput(
                "layers with a window turn otherwise in this model, so that its other layers can have none; leave"
                " attention_window out",
                field="attention_window",
            )
        windows = tuple(min(own or window, window) for own in self.windows or (0,) * self.num_layers)
        return replace(self, windows=windows, num_sinks=num_sinks)

    def with_extended_attention(self, top_k: int) -> ModelConfig:
        """The same decoder, in which each head also attends to its `top_k` best keys among those that have left the
        window of its layer (Extended Mind Transformers, arXiv 2406.02332).

        Raises InvalidInput for fewer than one, without a window that moves, and for positions other than rotary ones.
        """
        check_range("extended_attention", top_k, least=1, whole=True)
        if not self.num_sinks:
            raise InvalidInput(
                "extended_attention reads what has left a moving window; give attention_window too",
                field="extended_attention",
            )
        return replace(self, extended_attention=top_k)

    @property
    def is_segmented(self) -> bool:
        """Whether text is read in segments of `context_length`, with a memory of earlier ones."""
        return bool(self.xl_length or self.memorizing)

    @property
    def is_windowed(self) -> bool:
        """Whether every layer has a window."""
        return bool(self.windows) and all(self.windows)

    @property
    def max_length(self) -> int | None:
        """The longest text that the model reads, or None for no limit."""
        return None if self.is_segmented or self.num_sinks else self.context_length

    def window_of(self, layer: int) -> int:
        """How many latest tokens a layer sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

    def memorizes(self, layer: int) -> bool:
        return self.memorizing is not None and layer in self.memorizing.layers

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> ModelConfig:
        """Returns the config of `as_dict`. Raises InvalidInput for an unknown or a missing field."""
        known = {field.name for field in fields(cls)}
        if surplus := sorted(given.keys() - known):
            raise InvalidInput(f"unknown fields {surplus}; the fields are {sorted(known)}", field=surplus[0])
        parts = {"rope_scaling": RopeScaling, "compression": Compression, "memorizing": Memorizing}
        values: dict[str, Any] = dict(given)
        try:
            for name, part in parts.items():
                if isinstance(values.get(name), dict):
                    values[name] = part(**{field: _frozen(value) for field, value in values[name].items()})
            for name in ("windows", "no_rope_layers"):
                values[name] = _frozen(values.get(name, ()))
            return cls(**values)
        except TypeError as error:
            raise InvalidInput(f"the fields do not make a model ({error})", field="config") from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
