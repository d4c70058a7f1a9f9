"""A store's history that anyone can work out: what a store must hold after its n-th commit.

    python store_history.py write STORE     commits one step after another, until it is killed
    python store_history.py read STORE      reads again and again, and says what is not as it must be

Each step is one commit, so that the number of a store's manifest tells how far its history has come.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np
from random_stores import DEFAULTS, DIM, spec

from memlm.errors import NotFound
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.writer import StoreWriter

INDEX = "IVF4,SQfp16"
Content = dict[str, int]  # the version of each document


def entries_of(name: str, version: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a version of a document."""
    rng = np.random.default_rng([*name.encode(), version])
    size = int(rng.integers(2, 40))
    return rng.normal(size=(size, DIM)).astype(np.float32), rng.integers(0, 500, size)


@cache
def step(number: int) -> tuple[str, tuple[str, ...]]:
    """What the commit of a number does, and to which documents."""
    if number == 1:
        return "build", tuple(f"first-{each}" for each in range(6))
    names, rng = sorted(content(number - 1)), np.random.default_rng(number)
    what = ("delete", "compact", "add", "replace")[number % 4]
    if what == "add":
        return what, tuple(f"{number:05}-{each}" for each in range(3))
    if what == "compact":
        return what, ()
    return what, tuple(names[place] for place in sorted(rng.choice(len(names), 3, replace=False)))


@cache
def _content(number: int) -> tuple[tuple[str, int], ...]:
    if number == 0:
        return ()
    before = dict(_content(number - 1))
    what, names = step(number)
    if what == "delete":
        return tuple((name, version) for name, version in before.items() if name not in names)
    return tuple((before | dict.fromkeys(names, number)).items())


def content(number: int) -> Content:
    """The documents after the commit of a number."""
    for earlier in range(number):  # from the first on: the recursion stays as shallow as one step
        _content(earlier)
    return dict(_content(number))


def take(path: Path, number: int) -> None:
    """Commits one step."""
    what, names = step(number)
    if what == "delete":
        with Datastore.open(path) as store:
            store.delete(names)
    elif what == "compact":
        compact(path)
    else:
        make = StoreWriter.create if what == "build" else StoreWriter.extend
        with make(path, spec(INDEX)) as writer:
            for name in names:
                keys_ND, values_N = entries_of(name, number)
                writer.begin_document(name, replace=what == "replace")
                if writer.is_resumed(len(values_N)):
                    writer.verify_resumed(values_N)
                else:
                    writer.append(keys_ND, values_N)
                    writer.checkpoint()
            writer.commit(defaults=DEFAULTS).close()


def write(path: Path) -> None:
    """Goes on with the history, from wherever it stands."""
    try:
        with Datastore.open(path) as store:
            number = store.manifest.number
    except NotFound:
        number = 0
    while True:
        number += 1
        take(path, number)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


def check(store: Datastore) -> None:
    """Raises AssertionError unless a store holds what its manifest's number says, and finds it."""
    check_holds(store, content(store.manifest.number))


def check_holds(store: Datastore, expected: Content) -> None:
    """Raises AssertionError unless a store holds these versions of documents and no others, and finds them."""
    at = store.manifest.number
    names = [document.id for document in store.snapshot.documents()]
    assert sorted(names) == sorted(expected), f"documents at {at}: {names}"
    for name, version in expected.items():
        keys_ND, values_N = entries_of(name, version)
        assert store.snapshot.tokens(name).tolist() == values_N.tolist(), f"{name} at {at}"
        found = store.search(keys_ND[:2], 1, nprobe=4)
        assert found.values_QK[:, 0].tolist() == values_N[:2].tolist(), f"{name} at {at}"
        assert {place.document_id for place in store.snapshot.locate(found.ids_QK[:, 0])} == {name}


def read(path: Path) -> None:
    """Opens and refreshes in turn; what is read must be of one commit, and never of an older one than before."""
    last = 0
    while True:
        try:
            with Datastore.open(path) as store:
                for _ in range(5):
                    assert store.manifest.number >= last, f"{store.manifest.number} after {last}"
                    last = store.manifest.number
                    check(store)
                    store.refresh()
        except NotFound:
            assert last == 0
        sys.stdout.write(f"{last}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
