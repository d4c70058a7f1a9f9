"""A job -> the task of an index worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memlm.server.config import ServerConfig
from memlm.server.jobs.job import Job
from memlm.server.jobs.worker import ADD, COMPACT, KEYS, SYNC, Task


def task_of(job: Job, config: ServerConfig) -> Task:
    """The task of a job's next attempt."""
    request = job.request
    common: dict[str, Any] = {
        "kind": job.kind,
        "store": job.store,
        "path": Path(job.path),
        "model": config.model,
        "dtype": config.dtype,
        "device": config.device,
        "num_threads": config.index_threads,
        "is_resumed": job.attempts > 1,
        "is_published": job.is_published,
        "check": request.get("check", "quick"),
        "keys": request.get("keys", "auto"),
    }
    if job.kind == ADD:
        return Task(**common, corpus=(Path(job.documents),), replace=request["replace"], since=job.since)
    if job.kind == SYNC:
        given = {name: request[name] for name in ("replace", "origin", "dry_run")} | {"creates": job.creates}
        return Task(**common, corpus=(Path(job.documents),), **given)
    if job.kind == COMPACT:
        return Task(**common, purge=request.get("purge", False))
    if job.kind == KEYS:
        return Task(**common)
    options = {
        name: request[name]
        for name in ("index", "target", "max_ram_bytes", "prune", "window", "stride", "seed")
        if request.get(name) is not None
    }
    return Task(
        **common,
        corpus=tuple(Path(path).absolute() for path in request["corpus"]),  # a "-" is a file of that name here
        glob=request["glob"],
        hidden=request.get("hidden", False),
        roots=config.corpus_roots,
        options={**options, "keep_keys": not request["drop_keys"]},
    )
