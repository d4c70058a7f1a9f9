from collections.abc import Callable
from pathlib import Path

import pytest
from random_stores import Corpus, build

from memlm.index.store.datastore import Datastore


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(seed=1)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Datastore]:
    """Builds a store in the test's own folder."""
    return lambda corpus, index="auto", name="store": build(tmp_path / name, corpus, index)
