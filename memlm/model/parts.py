"""Parts, which may stand in the place of the decoder's own attention, feed-forward, sums, loop and segment end, or
between attention and feed-forward.

| seam | replaces | module of a part |
|---|---|---|
| mixer | the attention of a layer | `forward(hidden_BTD, context) -> BTD` and `keep(...)`, as `Attention` |
| channel | the feed-forward of a layer | `forward(key_BTD, context) -> BTD` |
| join | the sum of a residual | `forward(stream_BTD, change_BTD) -> BTD` |
| stack | the loop over the layers | `read(blocks, hidden_BTD, context, *, finishes) -> (stream_BTD, key_BTD)` |
| border | the end of a segment | `begin(decoder, state)` before a piece, `end(decoder, state)` after it |
| cross | nothing: it stands between attention and feed-forward | `forward(stream_BTD, context) -> change_BTD` |

A `Part` describes such a module, checks itself, and builds it. The plain parts have no description: None stands for
them, so that a plain decoder computes nothing more. docs/zoo.md says how to add a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from memlm.base.plugins import load, registered
from memlm.errors import Incompatible, InvalidInput

if TYPE_CHECKING:
    from torch import nn

    from memlm.model.config import ModelConfig
    from memlm.model.state.fields import Field

PLAIN = {
    "mixer": "attention",
    "channel": "feed_forward",
    "join": "add",
    "stack": "plain",
    "border": "plain",
    "cross": "none",
}
# The classes of the decoder's own kinds. Any is loaded when a config names it first.
KNOWN: dict[str, dict[str, str]] = {
    "mixer": {"pattern": "memlm.model.attention.patterns:Pattern"},
    "channel": {
        "experts": "memlm.model.experts:Experts",
        "switch": "memlm.model.experts:Switch",
        "hash": "memlm.model.experts:HashExperts",
    },
    "join": {},
    "stack": {"exits": "memlm.model.exits:Exits"},
    "border": {},
    "cross": {},
}
PARTS = "memlm.parts"  # entry points of all others, named `seam.kind`


@dataclass(frozen=True, slots=True)
class Part:
    """A frozen description of one part. Its fields are the keys of its table in a config, and have defaults."""

    seam: ClassVar[str]
    kind: ClassVar[str]
    # Of its numbers. Models and states that were saved with another one are refused.
    version: ClassVar[int] = 1
    # Whether a mixer keeps keys and values of each token in the cache. Others keep their `fields`.
    caches: ClassVar[bool] = True
    # Whether a mixer has scores, which positions other than rotary ones change.
    has_scores: ClassVar[bool] = True
    # Whether states keep the inputs of the layers until the end of a segment.
    keeps_inputs: ClassVar[bool] = False
    # Whether a token's numbers have the same bits in any company, or are equal up to rounding.
    is_exact: ClassVar[bool] = True
    # Whether it chooses by tokens, so that vectors cannot be read in their place.
    needs_tokens: ClassVar[bool] = False
    # Whether each row of a state has a source that it reads (memlm/model/state/source.py).
    reads_source: ClassVar[bool] = False
    # How a model with it learns, as `module:class` (memlm/training/recipe.py). Empty: as any model does.
    recipe: ClassVar[str] = ""
    # Why a server serves no model with it, behind the model's name, and what to do. Empty: it does.
    unserved: ClassVar[str] = ""

    @property
    def num_front(self) -> int:
        """Places in front of each segment, which a border fills."""
        return 0

    @property
    def num_behind(self) -> int:
        """Places behind each segment, in which a border reads vectors of its own before the segment ends."""
        return 0

    @property
    def segments_at_once(self) -> int:
        """Segments of a training step. Gradients reach back through a border within a step alone."""
        return 1

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> nn.Module | None:
        """Returns the module of a layer. A join is built for the `sublayer` attention and for ff, and None is a sum. A
        cross of None leaves the layer as it is.

        Modules with an `initialize` draw their parameters by it, after the decoder has drawn all as usual.
        """
        raise NotImplementedError

    def build_shared(self, config: ModelConfig) -> nn.Module | None:
        """Returns the module that all layers with a cross share, or None. The decoder has it as `cross`, and calls its
        `begin(decoder, context)` before each step, which may set `context.cross`. Its `neighbors`, where it has any, is
        the function that finds what it reads, None while it reads nothing.
        """
        return None

    def fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The fields of a state for each layer with this part."""
        return ()

    def model_fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The fields of a state for the whole model."""
        return ()

    def num_blocks(self, config: ModelConfig) -> int:
        """How many blocks a stack has for `num_layers` layers of states."""
        return config.num_layers

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput if the part does not go with the rest of a config."""

    def refuse(self, config: ModelConfig, *names: str) -> None:
        """Raises InvalidInput if a config has one of some memories, in a layer of this mixer where layers have it."""
        own = [layer for layer in range(config.num_layers) if config.layer_at(layer).mixer == self]
        in_layers = {
            "memorizing": any(map(config.memorizes, own)),
            "windows": any(config.windows[layer] for layer in own if layer < len(config.windows)),
        }
        for name in names:
            if in_layers.get(name, getattr(config, name)):
                raise InvalidInput(f"{self.kind} does not go with {name}; leave it out of its layers", field=name)


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of one layer. None is the plain one."""

    mixer: Part | None = None
    channel: Part | None = None

    @classmethod
    def of(cls, given: Any) -> Layer:
        """Reads `{mixer = {kind = "pattern", ...}, channel = ...}`. In the short form, the mixer's keys stand beside
        `mixer = "pattern"`.

        Raises InvalidInput for anything else.
        """
        if isinstance(given, Layer):
            return given
        if not isinstance(given, Mapping):
            raise InvalidInput(f"a layer is {given!r}; expected a table with mixer or channel", field="layers")
        own = dict(given)
        mixer, channel = own.pop("mixer", None), own.pop("channel", None)
        if own:
            if not isinstance(mixer, str):
                raise InvalidInput(f"a layer has the keys {sorted(own)} and names no mixer for them", field="layers")
            mixer = {"kind": mixer, **own}
        return cls(part("mixer", mixer), part("channel", channel))

    def as_dict(self) -> dict[str, Any]:
        """Returns the long form."""
        return {"mixer": as_table("mixer", self.mixer), "channel": as_table("channel", self.channel)}


def part(seam: str, given: str | Mapping[str, Any] | Part | None) -> Part | None:
    """Returns the part of a seam that a kind, a table with a kind, or a part names. None is the plain one.

    Raises InvalidInput for an unknown kind or key, with the known ones, and Incompatible for another version.
    """
    if given is None:
        return None
    if isinstance(given, Part):
        if given.seam != seam:
            raise InvalidInput(f"{given.kind} is a {given.seam}, and stands as a {seam}", field=seam)
        return given
    given_table: Any = {"kind": given} if isinstance(given, str) else given
    table = dict(given_table) if isinstance(given_table, Mapping) else {}
    kind = table.pop("kind", None)
    if not isinstance(kind, str):
        raise InvalidInput(f"{seam} is {given!r}; expected a kind, or a table with one", field=seam)
    if kind == PLAIN[seam]:
        if table:
            raise InvalidInput(f"the {seam} {kind} takes no keys; got {sorted(table)}", field=seam)
        return None
    known = _load(seam, kind)
    if (version := table.pop("version", 1)) != known.version:
        raise Incompatible(f"the {seam} {kind} is of version {version}; this memlm computes version {known.version}")
    names = [each.name for each in fields(known)]
    if surplus := sorted(table.keys() - set(names)):
        raise InvalidInput(f"the {seam} {kind} has no {', '.join(surplus)}; its keys are {names}", field=seam)
    return known(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})


def as_table(seam: str, given: Part | None) -> str | dict[str, Any]:
    """Returns the table that `part` reads, in JSON's types. The plain part is its name."""
    if given is None:
        return PLAIN[seam]
    version = {} if given.version == 1 else {"version": given.version}
    values = {each.name: getattr(given, each.name) for each in fields(given)}
    return {"kind": given.kind, **version, **{n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}}


def _load(seam: str, kind: str) -> type[Part]:
    prefix = f"{seam}."
    others = {name.removeprefix(prefix): path for name, path in registered(PARTS).items() if name.startswith(prefix)}
    known = others | KNOWN[seam]
    if kind not in known:
        names = ", ".join([PLAIN[seam], *sorted(known)])
        raise InvalidInput(f"the {seam} is {kind!r}; this version has {names}", field=seam)
    loaded: type[Part] = load(known[kind])
    return loaded
