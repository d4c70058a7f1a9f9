"""A model that learned text -> its loss, and the memory that a step of learning keeps for its backward pass.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memlm.bench.effect import Figures
from memlm.bench.learning import Learned
from memlm.model import Decoder

TEXTS, TURNS = 16, 3


class StepCost(NamedTuple):
    """Bytes kept at the end of the forward pass, the most at any time up to the end of the step, and seconds of the
    processor, the least of some turns.
    """

    kept_bytes: int
    peak_bytes: int
    seconds: float


def bits_and_bytes(learned: Learned) -> Figures:
    """Returns `bits`, and of a step of learning the bytes a token that are kept behind the forward pass, also in a
    model twice as deep, the most bytes a token at any time, and milliseconds of the processor.
    """
    decoder, task = learned.decoder, learned.task
    drawn = task.draw(np.random.default_rng(learned.seed), TEXTS, task.stages[-1])
    inputs_BT, targets_BT = (torch.from_numpy(each) for each in drawn)
    deeper = Decoder(replace(decoder.config, num_layers=2 * decoder.config.num_layers))
    cost, of_deeper = (step_cost(each, inputs_BT, targets_BT) for each in (decoder, deeper))
    return {
        "bits": learned.loss / math.log(2),
        "kept_bytes_a_token": cost.kept_bytes / inputs_BT.numel(),
        "kept_bytes_a_token_at_twice_the_depth": of_deeper.kept_bytes / inputs_BT.numel(),
        "peak_bytes_a_token": cost.peak_bytes / inputs_BT.numel(),
        "step_ms": 1000 * cost.seconds,
    }


def step_cost(decoder: Decoder, inputs_BT: Tensor, targets_BT: Tensor) -> StepCost:
    """Measures one step's passes on a model, whose gradients are left empty. Parameters do not count."""
    seconds = math.inf
    for _ in range(TURNS):
        begin = time.process_time()
        _loss(decoder, inputs_BT, targets_BT).backward()
        seconds = min(seconds, time.process_time() - begin)
    meter = _Meter(decoder)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(tensor, meter), lambda kept: kept.tensor):
        loss = _loss(decoder, inputs_BT, targets_BT)
        kept_bytes = meter.num_bytes
        loss.backward()
    decoder.zero_grad()
    return StepCost(kept_bytes, meter.peak, seconds)


def _loss(decoder: Decoder, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return decoder.loss(decoder(inputs_BT)[0], targets_BT)


class _Meter:
    """Counts the bytes of storages that autograd keeps, each once."""

    def __init__(self, decoder: Decoder) -> None:
        self.num_bytes = self.peak = 0
        self._uses = Counter[int]()
        self._own = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}

    def change(self, tensor: Tensor, uses: int) -> None:
        """Counts a storage when its first use begins, and takes it back when its last one ends."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._own:
            return
        before, self._uses[place] = self._uses[place], self._uses[place] + uses
        self.num_bytes += storage.nbytes() * ((self._uses[place] > 0) - (before > 0))
        self.peak = max(self.peak, self.num_bytes)


class _Kept:
    """A tensor that is kept until autograd drops this object."""

    def __init__(self, tensor: Tensor, meter: _Meter) -> None:
        self.tensor, self._meter = tensor.detach(), meter
        meter.change(tensor, 1)

    def __del__(self) -> None:
        self._meter.change(self.tensor, -1)
