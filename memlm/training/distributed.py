"""The processes of `torchrun` that train one model together, and their devices."""

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
    """Process `rank` of `size`. All take the same steps, and the first one writes files."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> ProcessGroup:
        """Joins the group that `torchrun` describes in the environment. Without one, this process is alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group(BACKENDS[device.type])
        return cls(dist.get_rank(), size)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def shard(self, rows: range) -> range:
        """Returns the rows of this process. Raises InvalidInput if `size` does not divide their number."""
        if len(rows) % self.size:
            raise InvalidInput(
                f"batch_size is {len(rows)}; {self.size} processes share it only if they divide it", field="batch_size"
            )
        share = len(rows) // self.size
        return rows[self.rank * share : (self.rank + 1) * share]

    def barrier(self) -> None:
        """Waits for all processes."""
        if self.size > 1:
            dist.barrier()

    def destroy(self) -> None:
        """Waits for all processes and closes the group. Threads with tensors left would crash the interpreter at its
        exit.
        """
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()

    def broadcast(self, number: float) -> float:
        """Returns the first process' number."""
        if self.size == 1:
            return number
        number_1 = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(number_1, 0)
        return float(number_1)

    def mean(self, number: float) -> float:
        """Returns the mean over all processes."""
        if self.size == 1:
            return number
        number_1 = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(number_1)
        return float(number_1) / self.size

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages gradients over all processes. Parameters without a gradient in any process keep none."""
        if self.size == 1:
            return
        every = list(parameters)
        counts = torch.tensor([float(parameter.grad is not None) for parameter in every])
        dist.all_reduce(counts)
        learning = [parameter for parameter, count in zip(every, counts.tolist(), strict=True) if count]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in learning]
        all_N = torch.cat([part.flatten() for part in parts])  # one message: small ones cost as much
        dist.all_reduce(all_N)
        all_N /= self.size
        for parameter, mean_n in zip(learning, all_N.split([part.numel() for part in parts]), strict=True):
            parameter.grad = mean_n.view_as(parameter)


def device_of(config: TrainConfig) -> torch.device:
    """Returns the device of this process. Raises InvalidInput if there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device is cuda; this machine has none, or torch cannot use it", field="device")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= num_devices:
        raise InvalidInput(
            f"this is process {local + 1} of this machine, which has {num_devices} devices; give torchrun"
            f" --nproc-per-node {num_devices}, or train with device = cpu",
            field="device",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
