"""The engine of a build, `--engine`: this process, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memlm.distributed.cluster import prepare
from memlm.errors import InvalidInput, check_choice

if TYPE_CHECKING:
    from memlm.indexing.encoding import BlockEncoder
    from memlm.model.files.checkpoint import Checkpoint

ENGINES = ("local", "ray")


def keys_of(engine: str, keys: str) -> str:
    """When keys are made: at once by an engine that is given for them."""
    return "now" if engine != "local" and keys == "auto" else keys


@contextmanager
def reader_of(
    engine: str, model: Path | Checkpoint, *, dtype: str, device: str, keys: str = "now"
) -> Iterator[tuple[Path | Checkpoint, BlockEncoder | None]]:
    """The model of a build, loaded if a cluster is to read with it, and its encoder. A cluster reads with the model of
    a path.

    Raises InvalidInput for options that do not go together.
    """
    check_choice("engine", engine, ENGINES)
    if engine != "local" and keys != "now":
        raise InvalidInput(
            f"engine is {engine}, which makes keys, and keys is {keys}; leave one of them out",
            field="engine",
        )
    if engine == "local":
        yield model, None
        return
    assert isinstance(model, Path)
    prepare(None)
    try:
        from memlm.distributed.encoding import RayEncoder
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"the engine ray needs {error.name}, which is not installed; pip install 'memlm[ray]'", field="engine"
        ) from error
    from memlm.model.files.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    with RayEncoder(model, checkpoint, dtype=dtype, device=device) as encoder:
        yield checkpoint, encoder
