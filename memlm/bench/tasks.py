"""Synthetic tasks on which small models show in minutes what an architecture can do. All texts are drawn from a seed.

| task | text | a model must |
|---|---|---|
| `OffsetCopy` | random tokens, twice | look a fixed number of tokens back |
| `GappedInduction` | names and their values, at random gaps, again and again | find the value that followed a name |
| `Recall` | pairs of key and value, then all keys (MQAR, arXiv 2312.04927) | find by content |
| `FarDictionary` | pairs in the first segment, questions in the last ones | carry pairs through a memory |
| `Assignments` | `x 3 y 5 x 7 ...`, then `? x ? y` (arXiv 2410.02703) | find the latest value, and no older one |
| `RunningParity` | random bits, at each the parity so far | compute in depth, or in rounds |
| `CountsInOrder` | symbols whose frequencies drift, then symbols by count (arXiv 2109.00301) | blur the past |
| `LibraryText` | bytes of the standard library of Python | predict text |

A task has one or several `stages`, from easy to hard (a curriculum). The accuracy of a text is the share of right
answers among the positions that ask for one.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import sysconfig
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int64

from memlm.training.validation import PADDING

Tokens = Int64[np.ndarray, "B T"]


class Drawn(NamedTuple):
    """Texts of a task: the inputs, and at each position its answer, or PADDING where none is asked for."""

    inputs_BT: Tokens
    targets_BT: Tokens


class Task(ABC):
    """A distribution of texts with questions. `stages` are its difficulties, the last of which counts."""

    stages: tuple[Any, ...] = (0,)
    segment: int = 0  # the positions of a segment, for models with memory
    ceiling: ClassVar[float] = 1.0
    passed: ClassVar[float] = 0.9  # accuracy that ends a stage
    learnt: ClassVar[float] = 0.99  # accuracy that ends the last one

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens of inputs and answers."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Positions of the longest text."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Expected accuracy in the last stage without any text before the question."""

    @property
    def held_out(self) -> Task:
        """The task whose texts no training reads: this one, where they are drawn at random."""
        return self

    @abstractmethod
    def draw(self, generator: np.random.Generator, rows: int, stage: Any) -> Drawn:
        """Returns random texts of one of the `stages`. All have equal lengths."""


@dataclass(frozen=True)
class OffsetCopy(Task):
    """`length` random symbols, twice. `unique` symbols occur once in each half, so that content finds them too."""

    symbols: int = 60
    length: int = 32
    unique: bool = False

    @property
    def vocab_size(self) -> int:
        return self.symbols

    @property
    def num_tokens(self) -> int:
        return 2 * self.length - 1

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def draw(self, generator: np.random.Generator, rows: int, stage: Any) -> Drawn:
        if self.unique:
            half_BT = _orders(generator, rows, self.symbols)[:, : self.length]
        else:
            half_BT = generator.integers(self.symbols, size=(rows, self.length))
        text_BT = np.concatenate([half_BT, half_BT], axis=1)
        targets_BT = text_BT[:, 1:].copy()
        targets_BT[:, : self.length - 1] = PADDING
        return Drawn(text_BT[:, :-1], targets_BT)


@dataclass(frozen=True)
class GappedInduction(Task):
    """Names, each followed by its value in this text, between random noise. A name that comes again asks for its value.

    `stages` are numbers of names.
    """

    stages: tuple[int, ...] = (2, 4, 8)
    values: int = 16
    noise: int = 8
    length: int = 64
    density: float = 0.4  # of names, per position

    @property
    def vocab_size(self) -> int:
        return self.stages[-1] + self.values + self.noise

    @property
    def num_tokens(self) -> int:
        return self.length

    @property
    def chance(self) -> float:
        return 1 / self.values

    def draw(self, generator: np.random.Generator, rows: int, stage: int) -> Drawn:
        first_value, first_noise = self.stages[-1], self.stages[-1] + self.values
        value_BN = first_value + generator.integers(self.values, size=(rows, stage))
        inputs_BT = first_noise + generator.integers(self.noise, size=(rows, self.length))
        targets_BT = np.full_like(inputs_BT, PADDING)
        name_BT = generator.integers(stage, size=(rows, self.length))
        begins_BT = generator.random((rows, self.length)) < self.density
        row_B, was_seen_BN = np.arange(rows), np.zeros((rows, stage), dtype=bool)
        is_free_B = np.ones(rows, dtype=bool)  # a value takes the place behind its name
        for place in range(self.length - 1):
            begins_B = begins_BT[:, place] & is_free_B
            name_B = name_BT[:, place]
            value_B, was_seen_B = value_BN[row_B, name_B], was_seen_BN[row_B, name_B]
            inputs_BT[begins_B, place], inputs_BT[begins_B, place + 1] = name_B[begins_B], value_B[begins_B]
            targets_BT[begins_B & was_seen_B, place] = value_B[begins_B & was_seen_B]
            was_seen_BN[row_B[begins_B], name_B[begins_B]] = True
            is_free_B = ~begins_B
        return Drawn(inputs_BT, targets_BT)


@dataclass(frozen=True)
class Recall(Task):
    """Pairs of a key and a value, with noise at random places between them, then some of the keys.

    `stages` are numbers of pairs.
    """

    stages: tuple[int, ...] = (2, 4, 8)
    keys: int = 16
    values: int = 16
    questions: int = 16
    noise_tokens: int = 0
    noise: int = 16

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.noise

    @property
    def num_tokens(self) -> int:
        return 2 * self.stages[-1] + self.noise_tokens + self.questions

    @property
    def chance(self) -> float:
        return 1 / self.values

    def draw(self, generator: np.random.Generator, rows: int, stage: int) -> Drawn:
        key_BN = _orders(generator, rows, self.keys)[:, :stage]
        value_BN = self.keys + generator.integers(self.values, size=(rows, stage))
        told_BT = _hide(generator, key_BN, value_BN, self.noise_tokens, self.keys + self.values, self.noise)
        which_BQ = generator.integers(stage, size=(rows, self.questions))
        asked_BQ, answer_BQ = (np.take_along_axis(each, which_BQ, axis=1) for each in (key_BN, value_BN))
        return Drawn(
            np.concatenate([told_BT, asked_BQ], axis=1),
            np.concatenate([np.full_like(told_BT, PADDING), answer_BQ], axis=1),
        )


@dataclass(frozen=True)
class FarDictionary(Task):
    """Pairs of a key and a value in the first segment, noise in those that follow, and questions in the last one.

    `stages` are numbers of pairs and of segments.
    """

    stages: tuple[tuple[int, int], ...] = ((1, 2), (2, 2), (4, 2), (4, 3))
    segment: int = 16
    keys: int = 16
    values: int = 16
    noise: int = 8
    questions: int = 8

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.noise

    @property
    def num_tokens(self) -> int:
        return self.segment * max(segments for _, segments in self.stages)

    @property
    def chance(self) -> float:
        return 1 / self.values

    def draw(self, generator: np.random.Generator, rows: int, stage: tuple[int, int]) -> Drawn:
        pairs, segments = stage
        key_BN = _orders(generator, rows, self.keys)[:, :pairs]
        value_BN = self.keys + generator.integers(self.values, size=(rows, pairs))
        first_noise, length = self.keys + self.values, self.segment * segments
        inputs_BT = first_noise + generator.integers(self.noise, size=(rows, length))
        noise_tokens = self.segment - 2 * pairs
        inputs_BT[:, : self.segment] = _hide(generator, key_BN, value_BN, noise_tokens, first_noise, self.noise)
        targets_BT = np.full_like(inputs_BT, PADDING)
        place_BQ = length - self.segment + np.sort(_orders(generator, rows, self.segment)[:, : self.questions], axis=1)
        which_BQ = generator.integers(pairs, size=place_BQ.shape)
        np.put_along_axis(inputs_BT, place_BQ, np.take_along_axis(key_BN, which_BQ, axis=1), axis=1)
        np.put_along_axis(targets_BT, place_BQ, np.take_along_axis(value_BN, which_BQ, axis=1), axis=1)
        return Drawn(inputs_BT, targets_BT)


@dataclass(frozen=True)
class Assignments(Task):
    """Variables that get values again and again, then `?` and each variable. The answer is the latest value.

    `stages` are numbers of assignments. Each variable gets one at least.
    """

    stages: tuple[int, ...] = (4, 8, 16)
    variables: int = 4
    values: int = 16

    @property
    def vocab_size(self) -> int:
        return self.variables + self.values + 1

    @property
    def num_tokens(self) -> int:
        return 2 * self.stages[-1] + 1 + self.variables

    @property
    def chance(self) -> float:
        return 1 / self.values

    def draw(self, generator: np.random.Generator, rows: int, stage: int) -> Drawn:
        name_BN = generator.integers(self.variables, size=(rows, stage))
        name_BN[:, : self.variables] = _orders(generator, rows, self.variables)
        name_BN = generator.permuted(name_BN, axis=1)
        value_BN = self.variables + generator.integers(self.values, size=(rows, stage))
        asked_BV = _orders(generator, rows, self.variables)
        is_it_BVN = asked_BV[:, :, None] == name_BN[:, None]
        latest_BV = np.where(is_it_BVN, np.arange(stage), -1).max(axis=2)
        told_BT = np.stack([name_BN, value_BN], axis=2).reshape(rows, 2 * stage)
        ask_B1 = np.full((rows, 1), self.variables + self.values)
        inputs_BT = np.concatenate([told_BT, ask_B1, asked_BV], axis=1)
        targets_BT = np.full_like(inputs_BT, PADDING)
        targets_BT[:, -self.variables :] = np.take_along_axis(value_BN, latest_BV, axis=1)
        return Drawn(inputs_BT, targets_BT)


@dataclass(frozen=True)
class RunningParity(Task):
    """A mark and random bits. Each bit asks for the parity of the bits so far. `stages` are numbers of bits.

    Without the mark, attention by relative positions could not tell one bit from several equal ones. `longest` leaves
    room for more bits than the stages have.
    """

    stages: tuple[int, ...] = (2, 4, 8, 16)
    longest: int = 32

    @property
    def vocab_size(self) -> int:
        return 3

    @property
    def num_tokens(self) -> int:
        return 1 + max(self.longest, self.stages[-1])

    @property
    def chance(self) -> float:
        return 0.5

    def draw(self, generator: np.random.Generator, rows: int, stage: int) -> Drawn:
        bit_BT = generator.integers(2, size=(rows, stage))
        targets_BT = np.pad(bit_BT.cumsum(axis=1) % 2, ((0, 0), (1, 0)), constant_values=PADDING)
        return Drawn(np.pad(bit_BT, ((0, 0), (1, 0)), constant_values=2), targets_BT)


@dataclass(frozen=True)
class CountsInOrder(Task):
    """Symbols whose frequencies drift from one distribution to another, then all symbols, most frequent first.

    Ties are in the order of the symbols. Each answer is read before the next is asked for. `stages` are numbers of
    segments, which the answers are part of.
    """

    passed: ClassVar[float] = 0.5  # neighbors in the order often differ by one or two
    stages: tuple[int, ...] = (1, 2, 8)
    symbols: int = 8
    segment: int = 64

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def num_tokens(self) -> int:
        return self.segment * self.stages[-1]

    @property
    def chance(self) -> float:
        return sum(1 / left for left in range(1, self.symbols + 1)) / self.symbols  # none comes twice

    def draw(self, generator: np.random.Generator, rows: int, stage: int) -> Drawn:
        length = self.segment * stage - self.symbols
        ends_2BS = generator.dirichlet(np.ones(self.symbols), size=(2, rows)).cumsum(axis=2)
        share_T = np.linspace(0, 1, length)[None, :, None]
        limits_BTS = (1 - share_T) * ends_2BS[0][:, None] + share_T * ends_2BS[1][:, None]
        symbol_BT = (generator.random((rows, length, 1)) > limits_BTS[:, :, :-1]).sum(axis=2)
        count_BS = (symbol_BT[:, :, None] == np.arange(self.symbols)).sum(axis=1)
        answer_BS = np.argsort(-count_BS, axis=1, kind="stable")
        ask_B1 = np.full((rows, 1), self.symbols)
        inputs_BT = np.concatenate([symbol_BT, ask_B1, answer_BS[:, :-1]], axis=1)
        targets_BT = np.full_like(inputs_BT, PADDING)
        targets_BT[:, -self.symbols :] = answer_BS
        return Drawn(inputs_BT, targets_BT)


@dataclass(frozen=True)
class LibraryText(Task):
    """Windows of modules of the running Python's standard library, byte by byte. Every position asks for the next byte.

    The last tenth is held out. The figure of this task is the loss, and its ceiling is unknown.
    """

    ceiling: ClassVar[float] = float("nan")
    passed: ClassVar[float] = 0.4
    learnt: ClassVar[float] = 1.0
    length: int = 128
    is_held_out: bool = False

    @property
    def source(self) -> np.ndarray:
        """All bytes."""
        return _library_bytes()

    @property
    def held_out(self) -> LibraryText:
        return replace(self, is_held_out=True)

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def num_tokens(self) -> int:
        return self.length

    @property
    def chance(self) -> float:
        return 1 / 256

    def draw(self, generator: np.random.Generator, rows: int, stage: Any) -> Drawn:
        text_N = self.source
        cut = len(text_N) * 9 // 10
        text_N = text_N[cut:] if self.is_held_out else text_N[:cut]
        begin_B = generator.integers(len(text_N) - self.length, size=rows)
        text_BT = text_N[begin_B[:, None] + np.arange(self.length + 1)].astype(np.int64)
        return Drawn(text_BT[:, :-1], text_BT[:, 1:])


@cache
def _library_bytes() -> np.ndarray:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(module.read_bytes() for module in modules), dtype=np.uint8)


def _orders(generator: np.random.Generator, rows: int, count: int) -> Int64[np.ndarray, "B N"]:
    """Returns 0 to count - 1 in another random order for each row."""
    return generator.random((rows, count)).argsort(axis=1)


def _hide(
    generator: np.random.Generator,
    key_BN: Tokens,
    value_BN: Tokens,
    noise_tokens: int,
    first_noise: int,
    noise: int,
) -> Tokens:
    """Returns pairs, which stay together and in order, at random places between `noise_tokens` tokens of noise."""
    rows, pairs = key_BN.shape
    units = pairs + noise_tokens
    pair_BN = np.sort(_orders(generator, rows, units)[:, :pairs], axis=1)  # which of the units are pairs
    place_BN = pair_BN + np.arange(pairs)  # each earlier pair takes one place more
    text_BT = first_noise + generator.integers(noise, size=(rows, units + pairs))
    np.put_along_axis(text_BT, place_BN, key_BN, axis=1)
    np.put_along_axis(text_BT, place_BN + 1, value_BN, axis=1)
    return text_BT
