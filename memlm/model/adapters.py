"""Adapters: small learned changes of a decoder's linear layers. The decoder's own weights stay as they are.

`LoRA` (arXiv 2106.09685) adds alpha / r B A x to the outputs of a layer. `Bottleneck` (arXiv 1902.00751) adds
U relu(D y + d) + u to the output y of a sub-layer. New adapters have B = 0, or U = 0 and u = 0, and change nothing.

Rows of one batch may have different adapters, or none. A layer computes the hidden numbers of all adapters in use side
by side and clears those of other rows, so a batch costs two products a layer, however many adapters it mixes.

Shapes: B rows, T tokens, I inputs, O outputs, R hidden numbers (the rank, or the width of a bottleneck).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from memlm.errors import InvalidInput, NotFound, check_range
from memlm.model.kernels.linear import Linear

if TYPE_CHECKING:
    from memlm.model.decoder import Decoder
    from memlm.model.state.decoder_state import DecoderState

ALL_LINEAR = "all-linear"  # the word of PEFT for every linear layer of the blocks
SUBLAYERS = ("attention.out", "ff.down")  # whose outputs are those of a block's sub-layers
CACHED_MIXTURES = 4


@dataclass(frozen=True, slots=True)
class LoRA:
    """A LoRA of some `rank` at the linear layers named by `targets`, scaled by `alpha / rank`.

    The names are the last parts of the names in the model's family, as in PEFT: `q_proj`, `k_proj`, `v_proj`,
    `o_proj`, `gate_proj`, `up_proj` and `down_proj` of Llama. `all-linear` is every linear layer of the blocks.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_range("rank", self.rank, least=1, most=1 << 16, whole=True)
        check_range("alpha", self.alpha, above=0)
        if not self.targets or not all(self.targets):
            raise InvalidInput("targets is empty; name linear layers, as q_proj+v_proj", field="targets")


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Two layers around ReLU behind the attention and the feed-forward of each block, with `width` numbers between."""

    width: int = 32

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_range("width", self.width, least=1, most=1 << 16, whole=True)


AdapterSpec: TypeAlias = LoRA | Bottleneck
KINDS: Mapping[str, type[AdapterSpec]] = {"lora": LoRA, "bottleneck": Bottleneck}


def parse_adapter(text: str) -> AdapterSpec:
    """Parses `lora`, `lora:rank=8,alpha=16,targets=q_proj+v_proj` or `bottleneck:width=32`. Raises InvalidInput."""
    kind, _, settings = text.partition(":")
    if kind not in KINDS:
        raise InvalidInput(f"adapter is {text!r}; expected {' or '.join(KINDS)}, as lora:rank=8", field="adapter")
    types = {field.name: str(field.type) for field in fields(KINDS[kind])}
    given: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        name, _, value = setting.partition("=")
        if name not in types:
            raise InvalidInput(f"adapter has {setting!r}; a {kind} has {', '.join(types)}", field="adapter")
        try:
            given[name] = tuple(value.split("+")) if name == "targets" else (float if name == "alpha" else int)(value)
        except ValueError:
            raise InvalidInput(f"adapter has {setting!r}; expected a number", field="adapter") from None
    try:
        return KINDS[kind](**given)
    except InvalidInput as error:
        raise InvalidInput(f"adapter: {error}", field="adapter") from None


class Part(NamedTuple):
    """Neighboring outputs of a linear layer that the model's family keeps under a name of their own."""

    name: str
    begin: int
    size: int


class Change(NamedTuple):
    """What adapters add to a layer's output y: up (down x), or with a `bias_R` up relu(down y + bias).

    `bounds` are where the hidden numbers of each adapter end, one for each of them.
    """

    down_RI: Float[Tensor, "R I"]
    up_OR: Float[Tensor, "O R"]
    bias_R: Float[Tensor, " R"] | None
    bounds: tuple[int, ...]

    def added(self, x: Tensor, y: Tensor, hidden_from: Bool[Tensor, "B 1 R"] | None) -> Tensor:
        """Returns y with the change. `hidden_from` is true where a hidden number is not of the row's adapter."""
        h = F.linear(x, self.down_RI) if self.bias_R is None else F.relu(F.linear(y, self.down_RI, self.bias_R))
        return y + F.linear(h if hidden_from is None else h.masked_fill(hidden_from, 0), self.up_OR)

    def cast(self, dtype: torch.dtype, device: torch.device) -> Change:
        """The change without gradients, in another type, on a device."""
        tensors = (None if tensor is None else tensor.detach().to(device, dtype) for tensor in self[:3])
        down_RI, up_OR, bias_R = tensors
        assert down_RI is not None
        assert up_OR is not None
        return Change(down_RI, up_OR, bias_R, self.bounds)


def _side_by_side(changes: Sequence[Change]) -> Change:
    """The change of several adapters of one kind."""
    if len(changes) == 1:
        return changes[0]
    biases = [change.bias_R for change in changes if change.bias_R is not None]
    ends = torch.tensor([change.bounds[-1] for change in changes]).cumsum(0).tolist()
    return Change(
        torch.cat([change.down_RI for change in changes]),
        torch.cat([change.up_OR for change in changes], dim=1),
        torch.cat(biases) if biases else None,
        tuple(ends),
    )


class LoRALayer(nn.Module):
    """The LoRA of one linear layer: a pair of matrices for each part of its outputs that changes."""

    def __init__(self, parts: Sequence[Part], rank: int, scale: float, in_features: int, out_features: int) -> None:
        super().__init__()
        self.parts, self.scale, self.out_features = tuple(parts), scale, out_features
        self.downs = nn.ParameterList(torch.empty(rank, in_features) for _ in parts)
        self.ups = nn.ParameterList(torch.zeros(part.size, rank) for part in parts)
        for down_rI in self.downs:
            nn.init.kaiming_uniform_(down_rI, a=math.sqrt(5))  # as PEFT does

    def change(self) -> Change:
        """The matrices of all parts as one pair, scaled."""
        ups = [
            F.pad(up_or, (0, 0, part.begin, self.out_features - part.begin - part.size))
            for part, up_or in zip(self.parts, self.ups, strict=True)
        ]
        down_RI = torch.cat(list(self.downs))
        return Change(down_RI, self.scale * torch.cat(ups, dim=1), None, (len(down_RI),))


class BottleneckLayer(nn.Module):
    """The bottleneck behind one linear layer."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, width)
        self.up = nn.Linear(width, features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def change(self) -> Change:
        """The matrices. The last bias is the weight of one more hidden number, which is always 1."""
        down_RI = F.pad(self.down.weight, (0, 0, 0, 1))
        bias_R = F.pad(self.down.bias, (0, 1), value=1.0)
        up_OR = torch.cat([self.up.weight, self.up.bias[:, None]], dim=1)
        return Change(down_RI, up_OR, bias_R, (len(down_RI),))


class Adapter(nn.Module):
    """The weights of one adapter: a `LoRALayer` or a `BottleneckLayer` for each linear layer that it changes."""

    def __init__(
        self, spec: AdapterSpec, layers: Mapping[str, LoRALayer | BottleneckLayer], fingerprint: str = ""
    ) -> None:
        """`layers` are by the names of the linear layers. `fingerprint` is a hash of the files it was read from."""
        super().__init__()
        self.spec, self.fingerprint = spec, fingerprint
        self.names = tuple(layers)
        self.layers: Sequence[LoRALayer | BottleneckLayer] = nn.ModuleList(layers.values())  # type: ignore[assignment]

    @property
    def by_name(self) -> dict[str, LoRALayer | BottleneckLayer]:
        """The layers by the names of the linear layers that they change."""
        return dict(zip(self.names, self.layers, strict=True))

    @property
    def num_parameters(self) -> int:
        """Learned numbers."""
        return sum(parameter.numel() for parameter in self.parameters())


def new_adapter(spec: AdapterSpec, decoder: Decoder, parts: Mapping[str, Sequence[Part]]) -> Adapter:
    """Returns an adapter that changes nothing yet. Seed torch before.

    `parts` are those of each linear layer of the blocks (`AdapterNames.parts`). Raises InvalidInput, with the
    names there are, for a target that the model lacks.
    """
    linears = {name: linear for name, linear in decoder.named_modules() if name in parts}
    layers: dict[str, LoRALayer | BottleneckLayer] = {}
    if isinstance(spec, Bottleneck):
        for name, linear in linears.items():
            if name.endswith(SUBLAYERS):
                layers[name] = BottleneckLayer(spec.width, linear.out_features)
        return Adapter(spec, layers)
    known = {part.name.rpartition(".")[2] for each in parts.values() for part in each}
    if unknown := sorted(set(spec.targets) - known - {ALL_LINEAR}):
        raise InvalidInput(
            f"targets has {', '.join(unknown)}; this model's linear layers are {', '.join(sorted(known))}, or"
            f" {ALL_LINEAR}",
            field="targets",
        )
    for name, linear in linears.items():
        chosen = [
            part for part in parts[name]
            if ALL_LINEAR in spec.targets or part.name.rpartition(".")[2] in spec.targets
        ]  # fmt: skip
        if chosen:
            scale = spec.alpha / spec.rank
            layers[name] = LoRALayer(chosen, spec.rank, scale, linear.in_features, linear.out_features)
    return Adapter(spec, layers)


class Selected:
    """The adapters of one pass. `which_B` has the place of each row's adapter among `names`, or -1, and is None where
    all rows have the only one.
    """

    def __init__(self, names: tuple[str, ...], which_B: list[int] | None) -> None:
        self.names, self.which_B = names, which_B
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    def hidden_from(self, places: Sequence[int], bounds: tuple[int, ...], device: torch.device) -> Tensor | None:
        """Where the hidden numbers of a layer are not those of a row's adapter. They are of the adapters at `places`,
        and end at `bounds`.
        """
        if self.which_B is None:
            return None
        key = (*places, *bounds)
        if key not in self._hidden:
            sizes = torch.tensor([0, *bounds]).diff()
            owner_R = torch.tensor(places).repeat_interleave(sizes)
            self._hidden[key] = (torch.tensor(self.which_B)[:, None, None] != owner_R).to(device)
        return self._hidden[key]


class _Pass(threading.local):
    """The pass that a thread is in. A copy of a decoder is in none."""

    selected: Selected | None = None

    def __reduce__(self) -> tuple[type[_Pass], tuple[()]]:
        return _Pass, ()


class Adapters:
    """The adapters attached to a decoder, by name, and which of them the rows of the current pass have.

    `default` is the name of the adapter of passes without a state, and of new states that are not given one.
    """

    def __init__(self) -> None:
        self.default: str | None = None
        self._by_name: dict[str, Adapter] = {}
        self._changes: dict[str, dict[str, Change]] = {}  # by adapter and layer, of those that do not learn
        self._mixtures: dict[tuple[str, ...], dict[str, list[tuple[list[int], Change]]]] = {}
        self._pass = _Pass()
        self._were_attached = False  # after a detachment, states may still name the adapter

    def __bool__(self) -> bool:
        return bool(self._by_name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all attached adapters, in the order in which they were attached."""
        return tuple(self._by_name)

    def get(self, name: str) -> Adapter:
        """Returns an attached adapter. Raises NotFound, with the names there are."""
        if name not in self._by_name:
            there = f"the adapters are {', '.join(self._by_name)}" if self else "none is loaded"
            raise NotFound(f"no adapter {name!r}; {there}", kind="adapter", name=name)
        return self._by_name[name]

    def find(self, name: str) -> str:
        """Returns the name of an attached adapter. Raises as `get`."""
        self.get(name)
        return name

    def attach(self, name: str, adapter: Adapter, decoder: Decoder, *, trainable: bool = False) -> None:
        """Makes an adapter available to the decoder's passes, under a name. A `trainable` one gets gradients, and is
        then to be the only one of its pass.
        """
        if name in self._by_name:
            raise InvalidInput(f"there is an adapter {name!r} already; choose another name", field="adapter")
        linears = {each: linear for each, linear in decoder.named_modules() if isinstance(linear, Linear)}
        self._by_name[name], self._were_attached = adapter.to(decoder.device), True
        if not trainable:
            self._changes[name] = {
                each: layer.change().cast(decoder.dtype, decoder.device) for each, layer in adapter.by_name.items()
            }
        for each in adapter.names:
            if linears[each].adapters is None:
                linears[each].adapters = _LayerAdapters(self, each)

    def detach(self, name: str, decoder: Decoder) -> None:
        """Removes an adapter. The decoder computes what it did before, to the bit. Raises NotFound."""
        self.get(name)
        del self._by_name[name]
        self._changes.pop(name, None)
        self._mixtures = {names: kept for names, kept in self._mixtures.items() if name not in names}
        self.default = None if self.default == name else self.default
        changed = {each for adapter in self._by_name.values() for each in adapter.names}
        for each, linear in decoder.named_modules():
            if isinstance(linear, Linear) and each not in changed:
                linear.adapters = None

    @property
    def selected(self) -> Selected | None:
        """The adapters of the pass that this thread is in, if any row has one."""
        return self._pass.selected

    def reading(self, state: DecoderState | None) -> AbstractContextManager[None]:
        """A pass over the rows of a state, with the adapters that they have."""
        if not self._were_attached:
            return nullcontext()
        return self._reading([self.default] if state is None else [row.adapter for row in state.rows])

    @contextmanager
    def _reading(self, names_B: Sequence[str | None]) -> Iterator[None]:
        before, self._pass.selected = self.selected, self._select(names_B)
        try:
            yield
        finally:
            self._pass.selected = before

    def _select(self, names_B: Sequence[str | None]) -> Selected | None:
        names = tuple(sorted({name for name in names_B if name is not None}))
        for name in names:
            self.find(name)
        if not names:
            return None
        is_alike = len(names) == 1 and None not in names_B
        return Selected(names, None if is_alike else [-1 if each is None else names.index(each) for each in names_B])

    def changes(self, selected: Selected, layer: str) -> list[tuple[list[int], Change]]:
        """The changes of a layer: one of all LoRAs and one of all bottlenecks in use, each with the places of its
        adapters among the selected ones.
        """
        if selected.names not in self._mixtures or layer not in self._mixtures[selected.names]:
            mixture = self._mixture(selected.names, layer)
            if any(name not in self._changes for name in selected.names):  # it learns
                return mixture
            while len(self._mixtures) > CACHED_MIXTURES:
                del self._mixtures[next(iter(self._mixtures))]
            self._mixtures.setdefault(selected.names, {})[layer] = mixture
        return self._mixtures[selected.names][layer]

    def _mixture(self, names: tuple[str, ...], layer: str) -> list[tuple[list[int], Change]]:
        found: dict[bool, list[tuple[int, Change]]] = {}
        for place, name in enumerate(names):
            if layer in self._by_name[name].names:
                kept = self._changes.get(name)
                change = self._by_name[name].by_name[layer].change() if kept is None else kept[layer]
                found.setdefault(change.bias_R is None, []).append((place, change))
        return [
            ([place for place, _ in each], _side_by_side([change for _, change in each])) for each in found.values()
        ]


class _LayerAdapters:
    """The adapters of one linear layer."""

    def __init__(self, adapters: Adapters, layer: str) -> None:
        self._adapters, self._layer = adapters, layer

    @property
    def are_used(self) -> bool:
        """Whether a row of this thread's pass has an adapter."""
        return self._adapters.selected is not None

    def __call__(self, x: Float[Tensor, "B T I"], y: Float[Tensor, "B T O"]) -> Float[Tensor, "B T O"]:
        selected = self._adapters.selected
        assert selected is not None
        for places, change in self._adapters.changes(selected, self._layer):
            y = change.added(x, y, selected.hidden_from(places, change.bounds, x.device))
        return y


def merge(decoder: Decoder, adapter: Adapter) -> None:
    """Adds a LoRA to the decoder's weights, which then computes what it did with the adapter, up to rounding.

    The sums are taken in float32, and then rounded to the type of the weights. Raises InvalidInput for a bottleneck,
    which is no change of weights, and for packed weights.
    """
    if isinstance(adapter.spec, Bottleneck):
        raise InvalidInput("a bottleneck is no change of weights; attach it instead", field="adapter")
    linears = {name: linear for name, linear in decoder.named_modules() if isinstance(linear, Linear)}
    if any(linears[name].packed is not None for name in adapter.names):
        raise InvalidInput("the weights are packed for prediction; load the model with trainable=True", field="model")
    with torch.no_grad():
        for name, layer in adapter.by_name.items():
            weight, change = linears[name].weight, layer.change()
            weight.copy_(weight.float() + (change.up_OR.float() @ change.down_RI.float()).to(weight.device))
