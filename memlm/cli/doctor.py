"""`memlm doctor`: the machine as memlm sees it, and what makes it slow."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

from memlm.base.figures import file_size
from memlm.base.machine import ram_bytes
from memlm.cli.store.render import print_lines
from memlm.cli.terminal import options
from memlm.cli.terminal.console import emit_json, out

EXTRAS = {"http": "uvicorn", "documents": "pypdfium2", "ray": "ray", "replicas": "fastapi", "parquet": "pyarrow",
          "lm-eval": "lm_eval", "tensorboard": "tensorboard", "otel": "opentelemetry.sdk"}  # fmt: skip
SLOW_BANDWIDTH = 15.0  # gigabytes a second: of one channel of DDR4
BUSY = 0.5  # of the cores, by other processes
SMALL_RAM = 4 << 30
MANY_BYTES = 100_000_000  # of packages that are of no use
SMOLLM2_BYTES = {"its 4-bit blocks": 96_576_768, "float32": 538_060_032}  # of the weights


def doctor(json: options.Json = False) -> None:
    """Show the processor, libraries and choices of this machine, and slow parts with their reasons (10 seconds)."""
    facts, advice = examined()
    if json:
        emit_json({**facts, "advice": advice})
        return
    print_lines("This machine", list(facts.items()))
    for line in advice:
        out.print(f"• {line}", markup=False, highlight=False)
    if not advice:
        out.print("Nothing here slows memlm down.")


def examined() -> tuple[dict[str, Any], list[str]]:
    """Facts about the machine, and advice on slow or missing parts."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before the measurements add to it
    import faiss
    import torch

    from memlm.bench.machine import machine, versions
    from memlm.model.device import device_of, dtype_of
    from memlm.model.files.catalog import MODELS
    from memlm.model.kernels import native

    measured, device = machine(), device_of("auto")
    has_bfloat16 = "gigaflops_bfloat16" in measured
    missing = [name for name, module in EXTRAS.items() if not _is_installed(module)]
    models = [name for name, model in MODELS.items() if model.path is not None]
    cores, bandwidth = measured["cores"], measured["gigabytes_per_s"]
    keeps_blocks = device.type == "cpu" and native.is_fast()
    kept = "its 4-bit blocks" if keeps_blocks else "float32"
    most = bandwidth * 1e9 / SMOLLM2_BYTES[kept]
    facts = {
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "processor": measured["processor"],
        "instruction sets": ", ".join(measured["instruction_sets"]) or "none of those that matter here",
        "native kernels": ", ".join(native.instruction_sets()) or "not built",
        "cores": f"{cores}, of which torch uses {torch.get_num_threads()}; load {load:.1f}",
        "RAM": file_size(ram_bytes()),
        "bandwidth": f"{bandwidth} GB/s: at most {most:.0f} tokens/s of smollm2 in {kept}",
        "products": ", ".join(
            f"{measured[f'gigaflops_{name}']:.0f} GFLOP/s in {name}"
            for name in ("float32", "bfloat16")
            if f"gigaflops_{name}" in measured
        ),
        "device": f"--device auto is {device}",
        "dtype": f"--dtype auto is {str(dtype_of('auto', device)).removeprefix('torch.')}"
        + (", and for GGUF files their own blocks" if keeps_blocks else ""),
        "faiss": faiss.get_compile_options().strip(),
        "models": ", ".join(models) or "none installed",
        "extras": ", ".join(name for name in EXTRAS if name not in missing) or "none installed",
    }
    advice = []
    if device.type == "cpu":
        advice.append("No GPU: models above a billion parameters will be slow.")
        advice += _advice_on_cuda()
    if device.type == "cpu" and not has_bfloat16:
        advice.append("The processor does not multiply bfloat16 in hardware, so models compute in float32.")
    if native.library() is None:
        advice.append(
            "The native kernels are not built, so GGUF files compute in float32. Install a C++20 compiler, then memlm."
        )
    if load > BUSY * cores:
        advice.append(f"Other processes keep {min(load, cores):.1f} of {cores} cores busy, and slow generation down.")
    if bandwidth < SLOW_BANDWIDTH:
        advice.append(
            f"RAM gives {bandwidth} GB/s, and one stream reads every weight for each token. A batch shares it."
        )
    if "avx2" not in measured["instruction_sets"] and "asimd" not in measured["instruction_sets"]:
        advice.append("The processor has neither AVX2 nor NEON: Faiss and torch fall back to slow code.")
    if ram_bytes() < SMALL_RAM:
        advice.append("Less than 4 GiB of RAM: give `index build --max-ram`, and small models.")
    if not models:
        advice.append("No model with a name is installed: `memlm models pull smollm2` installs one of 98 MB.")
    if missing:
        advice.append(f"Not installed: {', '.join(missing)}. `pip install 'memlm[NAME]'` adds one.")
    return facts, advice


def _advice_on_cuda() -> list[str]:
    """What to do about the packages of CUDA that torch brings, where it finds no GPU."""
    packages = [each for each in distributions() if each.name.lower().startswith(("nvidia-", "triton"))]
    num_bytes = sum(file.size or 0 for each in packages for file in each.files or ())
    if num_bytes < MANY_BYTES:
        return []
    return [
        f"{len(packages)} packages for CUDA ({file_size(num_bytes)}) are installed, and torch finds no GPU. In a new"
        " environment, `pip install torch --index-url https://download.pytorch.org/whl/cpu` before memlm installs torch"
        " for processors alone."
    ]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
