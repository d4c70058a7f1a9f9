"""The processes of `torchrun` that train one model together, and the device of each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from memlm.errors import InvalidInput
from memlm.training.config import TrainConfig

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # counts and losses lie on the processor everywhere


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Who takes part: `rank` of `size` processes. The first one writes; all take the same steps."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> ProcessGroup:
        """Takes the place that `torchrun` gave this process; alone where it gave none."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group(BACKENDS[device.type])
        return cls(dist.get_rank(), size)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def shard(self, rows: range) -> range:
        """The rows that this process reads. Raises InvalidInput where they cannot be shared evenly."""
        if len(rows) % self.size:
            raise InvalidInput(
                f"batch_size is {len(rows)}; {self.size} processes share it only if they divide it", field="batch_size"
            )
        each = len(rows) // self.size
        return rows[self.rank * each : (self.rank + 1) * each]

    def barrier(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()

    def destroy(self) -> None:
        """Parts, once all are here: threads that still held tensors would bring the interpreter down at its end."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()

    def broadcast(self, number: float) -> float:
        """The first process' number, for all."""
        if self.size == 1:
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told)

    def mean(self, number: float) -> float:
        """The mean over all processes."""
        if self.size == 1:
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(told)
        return float(told) / self.size

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Means over all processes. A parameter that nobody has a gradient for keeps none, as it would alone."""
        if self.size == 1:
            return
        every = list(parameters)
        there = torch.tensor([float(parameter.grad is not None) for parameter in every])
        dist.all_reduce(there)
        learning = [parameter for parameter, count in zip(every, there.tolist(), strict=True) if count]
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in learning]
        all_N = torch.cat([part.flatten() for part in parts])  # one message: small ones cost as much
        dist.all_reduce(all_N)
        all_N /= self.size
        for parameter, mean_n in zip(learning, all_N.split([part.numel() for part in parts]), strict=True):
            parameter.grad = mean_n.view_as(parameter)


def device_of(config: TrainConfig) -> torch.device:
    """Where to train: of several devices, the one of this process. Raises InvalidInput where there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device is cuda; this machine has none, or torch cannot use it", field="device")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise InvalidInput(
            f"this is process {local + 1} of this machine, which has {there} devices; give torchrun"
            f" --nproc-per-node {there}, or train with device = cpu",
            field="device",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
