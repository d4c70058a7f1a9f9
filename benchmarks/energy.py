"""Energy and RAM that are in use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

try:
    import pynvml
except ImportError:  # it is of use beside an NVIDIA GPU alone
    pynvml = None


class EnergyMeter:
    """Counters of the energy of the processor's packages, which the kernel offers as RAPL zones."""

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if _is_package(zone)]
        self._counters = [zone / "energy_uj" for zone in zones]
        self._ranges = [_number(zone / "max_energy_range_uj") for zone in zones]

    def read(self) -> list[int] | None:
        """Microjoules of each package since some time. None without such counters, and without the right to read."""
        counts = [_number(counter) for counter in self._counters]
        known = [count for count in counts if count is not None]
        return known if known and len(known) == len(counts) else None

    def joules(self, before: Sequence[int] | None, after: Sequence[int] | None) -> float | None:
        """Joules between two readings. A counter that began again at 0 has counted up to its range once."""
        if before is None or after is None:
            return None
        used = 0
        for first, last, most in zip(before, after, self._ranges, strict=True):
            used += last - first if last >= first else last - first + (most or 0)
        return used / 1e6


def gpu_joules(device: torch.device) -> float | None:
    """Joules that an NVIDIA GPU has used since its driver was loaded. None for another device, without `pynvml` (the
    package nvidia-ml-py), and for a card that does not count them.
    """
    if device.type != "cuda" or pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000
    except pynvml.NVMLError:
        return None


def _is_package(zone: Path) -> bool:
    """Whether a zone is a whole processor. Its parts are zones too, and the platform's zone contains it."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def resident_bytes() -> int | None:
    """RAM of this process, with the files that it has mapped and read. None where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
