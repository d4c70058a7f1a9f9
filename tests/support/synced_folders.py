"""Folders that are synchronized with a datastore, and what others do to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from texts import make_text

from memlm.data.corpus import Corpus, Document
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import add_to_index
from memlm.indexing.sync import SyncPlan, sync_index
from memlm.model.files.checkpoint import Checkpoint


def make_docs(folder: Path) -> Path:
    docs = folder / "docs"
    docs.mkdir()
    for number, name in enumerate(("a.txt", "b.txt", "c.html")):
        (docs / name).write_text(make_text(number, 20))
    return docs


def synced(checkpoint: Checkpoint, store: Path, *paths: Path) -> SyncPlan:
    return sync_index(checkpoint, Corpus(paths), store, check="none").plan


def texts_in(checkpoint: Checkpoint, store: Path) -> dict[str, str]:
    with Datastore.open(store) as datastore:
        return {
            row.id: checkpoint.tokenizer.decode(segment.text_of(row.row).tolist())
            for segment in datastore.snapshot.segments
            for row in segment.live_documents()
        }


def put(checkpoint: Checkpoint, store: Path, *documents: Document) -> None:
    """What somebody else does."""
    add_to_index(checkpoint, documents, store, replace=True, keys="none", check="none")


@contextmanager
def killed_at(place: object, name: str) -> Iterator[None]:
    """A call that ends where something is called."""

    def kill(*arguments, **options):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, kill)
        with pytest.raises(KeyboardInterrupt):
            yield
