"""The shape of a decoder, for models trained here and for those of other families."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from memlm.errors import InvalidInput, check_choice, check_range
from memlm.model.mechanisms import Compression, Memorizing, RopeScaling
from memlm.model.parts import Layer, Part, as_table, part

Positions = Literal[
    "rotary", "alibi", "transformer_xl", "shaw", "t5", "distance", "learned", "sinusoidal", "none"
]  # fmt: skip
POSITIONS = ("rotary", "alibi", "transformer_xl", "shaw", "t5", "distance", "learned", "sinusoidal", "none")
ABSOLUTE = ("learned", "sinusoidal")
TURNING = ("rotary", "none")  # scores do not depend on distance otherwise
ACTIVATIONS = ("swiglu", "geglu", "gelu", "gelu_tanh", "relu")
NORM_ORDERS = ("pre", "post", "output", "sandwich")
LARGEST_SIZE = 1 << 26  # of an axis: the bytes of a matrix of two then have 64 bits
WHOLE_MODEL = ("join", "stack", "border", "cross")  # seams that all layers share


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

    `layers` names the parts of each layer, over and over through the depth, and `join`, `stack`, `border` and `cross`
    those that all layers share (memlm/model/parts.py). Each is given as a part, as its kind, or as a table. None is the
    plain one.
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
    layers: tuple[Layer, ...] = ()
    join: Part | None = None
    stack: Part | None = None
    border: Part | None = None
    cross: Part | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim", "context_length"):
            check_range(name, getattr(self, name), least=1)
        for name in ("vocab_size", "dim", "num_heads", "ff_dim"):
            check_range(name, getattr(self, name), most=LARGEST_SIZE)
        for name in ("xl_length", "num_sinks", "extended_attention", "num_buckets", "max_distance"):
            check_range(name, getattr(self, name), least=0)
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"{self.num_kv_heads} kv heads do not divide {self.num_heads} heads", field="num_kv_heads"
            )
        self._fill_head_dim()
        self._check_choices()
        self._read_parts()
        self._check_layers()

    def _fill_head_dim(self) -> None:
        if not self.head_dim:
            if self.dim % self.num_heads:
                raise InvalidInput(f"dim {self.dim} is not divisible by {self.num_heads} heads", field="num_heads")
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        check_range("head_dim", self.head_dim, least=1, most=LARGEST_SIZE // self.num_heads)
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

    def _read_parts(self) -> None:
        """Reads the parts, and checks them before the rest, which depends on what they say."""
        if not isinstance(self.layers, tuple | list):
            raise InvalidInput(f"layers are {self.layers!r}; expected a list of tables", field="layers")
        layers = tuple(map(Layer.of, self.layers))
        object.__setattr__(self, "layers", layers if any(layer != Layer() for layer in layers) else ())
        for seam in WHOLE_MODEL:
            object.__setattr__(self, seam, part(seam, getattr(self, seam)))
        if self.layers and self.num_blocks % len(layers):
            raise InvalidInput(
                f"{len(layers)} layers do not repeat evenly through a depth of {self.num_blocks}", field="layers"
            )
        for each in self.parts:
            each.check(self)
        if self.cross and (self.norm_order != "pre" or self.parallel_residual):
            raise InvalidInput(
                f"{self.cross.kind} stands between attention and feed-forward with a norm before it; norm_order is"
                f" {self.norm_order}{' and the residual parallel' if self.parallel_residual else ''}",
                field="cross",
            )
        if self.compression and self.border and self.border.num_front:
            raise InvalidInput(f"compression and {self.border.kind} fill the same places", field="border")
        mixers = [self.layer_at(layer).mixer for layer in range(self.num_layers)]
        for layer, mixer in enumerate(mixers):
            if mixer is not None and not mixer.has_scores and self.positions not in (*TURNING, *ABSOLUTE):
                raise InvalidInput(
                    f"{mixer.kind} has no scores that {self.positions} positions could change; choose rotary, learned,"
                    " sinusoidal or none",
                    field="positions",
                )
            if mixer is not None and not mixer.caches:
                self._check_uncached(layer, mixer)

    def _check_uncached(self, layer: int, mixer: Part) -> None:
        """Refuses memories of tokens for a mixer that keeps no token."""
        memories = {
            "windows": layer < len(self.windows) and self.windows[layer],
            "num_sinks": self.num_sinks,
            "memorizing": self.memorizing and layer in self.memorizing.layers,
            "compression": self.compression,
        }
        for name, given in memories.items():
            if given:
                raise InvalidInput(f"layer {layer} is {mixer.kind}, which keeps no tokens for {name}", field=name)

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
        check_range("attention_window", window, whole=True)
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
        owns, caching = self.windows or (0,) * self.num_layers, self.caching_layers
        windows = tuple(min(own or window, window) if n in caching else 0 for n, own in enumerate(owns))
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
        return bool(self.xl_length or self.memorizing or self.border)

    @property
    def is_windowed(self) -> bool:
        """Whether every layer that keeps tokens has a window."""
        return bool(self.windows) and all(self.windows[layer] for layer in self.caching_layers)

    @property
    def is_plain(self) -> bool:
        """Whether all parts are the plain ones."""
        return not (self.layers or self.join or self.stack or self.border or self.cross)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that are not plain, each once."""
        each = [*(part for layer in self.layers for part in (layer.mixer, layer.channel)), *self._shared_parts]
        return tuple(dict.fromkeys(part for part in each if part is not None))

    @property
    def _shared_parts(self) -> tuple[Part | None, ...]:
        return self.join, self.stack, self.border, self.cross

    @property
    def keeps_inputs(self) -> bool:
        """Whether states keep the inputs of the layers until the end of a segment."""
        return self.compression is not None or any(part.keeps_inputs for part in self.parts)

    @property
    def reads_source(self) -> bool:
        """Whether each row of a state reads a source beside its own text, as the decoder of an encoder-decoder does."""
        return self.cross is not None and self.cross.reads_source

    @property
    def num_blocks(self) -> int:
        """Blocks with weights of their own. A stack may read each several times, as another layer of a state."""
        return self.num_layers if self.stack is None else self.stack.num_blocks(self)

    @property
    def num_front(self) -> int:
        """Places in front of the latest tokens: sinks, compressed memories, or those of a border."""
        own = 0 if self.border is None else self.border.num_front
        return self.compression.length if self.compression else self.num_sinks or own

    @property
    def training_length(self) -> int:
        """Tokens of a row in a training step: a segment, or as many as a border learns through."""
        return self.context_length * (1 if self.border is None else self.border.segments_at_once)

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values of tokens in the cache."""
        mixers = ((layer, self.layer_at(layer).mixer) for layer in range(self.num_layers))
        return tuple(layer for layer, mixer in mixers if mixer is None or mixer.caches)

    def layer_at(self, layer: int) -> Layer:
        """The parts of a layer."""
        return self.layers[layer % len(self.layers)] if self.layers else Layer()

    def parts_of(self, layer: int) -> tuple[Part, ...]:
        """The parts of a layer that are not plain, and those that all layers share."""
        own = self.layer_at(layer)
        return tuple(part for part in (own.mixer, own.channel, *self._shared_parts) if part is not None)

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
        """Returns all fields in JSON's types, but for parts that are plain: earlier versions read those models too."""
        plain = {name: value for name, value in asdict(self).items() if name not in ("layers", *WHOLE_MODEL)}
        layers = {"layers": [layer.as_dict() for layer in self.layers]} if self.layers else {}
        shared = {seam: as_table(seam, getattr(self, seam)) for seam in WHOLE_MODEL if getattr(self, seam) is not None}
        return {**plain, **layers, **shared}

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
