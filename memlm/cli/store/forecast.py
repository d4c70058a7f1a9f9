"""What keys will take: said before they are made where that is more than a minute, and asked about where it is long."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from memlm.base.figures import duration
from memlm.base.progress import LOADING
from memlm.cli.store.render import print_estimate
from memlm.cli.terminal.console import ConsoleProgress, err
from memlm.index.factory import FLAT
from memlm.index.store.manifest import CURRENT, JOURNAL, read_manifest

if TYPE_CHECKING:
    from memlm.data.corpus import Corpus
    from memlm.indexing.estimate import Estimate
    from memlm.model.files.checkpoint import Checkpoint

SAID_S, ASKED_S = 60.0, 600.0  # an estimate above the first is said, above the second it is asked about


@dataclass(frozen=True, slots=True)
class PlannedBuild:
    """The keys of a build or an addition, as its command line describes it."""

    model: Path
    corpus: Corpus
    store: Path
    index: str
    window: int | None
    stride: int | None
    dtype: str
    device: str

    def print(self, *, json: bool) -> None:
        """Prints the files and the estimate. Raises StorageFull where the disk will not hold the datastore."""
        estimate = self._estimate(self.load())
        print_estimate(estimate, [name for name, _ in self.corpus.files()], self.store, json=json)
        estimate.check(self.store)

    def foretell(self, checkpoint: Checkpoint, *, asks: bool) -> None:
        """Says how long the work takes, and with `asks` asks before long work on a terminal. Raises typer.Exit for an
        answer of no.
        """
        estimate = self._estimate(checkpoint)
        if estimate.seconds is not None and estimate.seconds > SAID_S:
            err.print(f"The keys of {estimate.entries:,} tokens take about {duration(estimate.seconds)}.", markup=False)
        is_long = estimate.seconds is not None and estimate.seconds > ASKED_S
        is_typed = sys.stdin is not None and sys.stdin.isatty() and err.is_terminal
        if is_long and asks and is_typed and not typer.confirm("Go on?", err=True):
            raise typer.Exit(1)

    def load(self) -> Checkpoint:
        """Loads the model, with progress."""
        with ConsoleProgress() as progress:
            progress(LOADING, 0, 1)
            from memlm.model.files.checkpoint import load_checkpoint

            checkpoint = load_checkpoint(self.model, dtype=self.dtype, device=self.device)
            progress(LOADING, 1, 1)
        return checkpoint

    def _estimate(self, checkpoint: Checkpoint) -> Estimate:
        from memlm.indexing.estimate import estimate_build
        from memlm.retrieval.encoder import window_size

        size = window_size(checkpoint.decoder, self.window, self.stride)
        return estimate_build(checkpoint, self.corpus, self.store, index=self.index, size=size)


def foretell_build(planned: PlannedBuild, *, asks: bool) -> Path | Checkpoint:
    """Foretells the keys of a new datastore, and returns the loaded model. Where there is nothing to foretell, because
    a build resumes or is refused, returns the model's path.
    """
    is_there = any((planned.store / name).exists() for name in (JOURNAL, CURRENT))
    if planned.corpus.has_pipes or is_there:
        return planned.model
    checkpoint = planned.load()
    planned.foretell(checkpoint, asks=asks)
    return checkpoint


def foretell_addition(
    model: Path, corpus: Corpus, store: Path, *, dtype: str, device: str, asks: bool
) -> Path | Checkpoint:
    """As `foretell_build`, for documents that are added to a datastore. Raises Incompatible for another model's."""
    if corpus.has_pipes or (store / JOURNAL).exists() or not (store / CURRENT).exists():
        return model
    manifest = read_manifest(store)
    spec = manifest.spec
    from memlm.retrieval.store import check_fingerprints

    # An addition fills the lists that are there, in a small part of its time.
    planned = PlannedBuild(model, corpus, store, FLAT, spec.context, spec.stride, dtype, device)
    checkpoint = planned.load()
    check_fingerprints(manifest, path=store, checkpoint=checkpoint)
    planned.foretell(checkpoint, asks=asks)
    return checkpoint
