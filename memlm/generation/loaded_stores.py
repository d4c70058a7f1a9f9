"""The loaded datastores by name: opened, refreshed, replaced, and reported if they cannot be used.

The folder of a loaded datastore may come to hold anything: another store, an earlier state, a store of another model,
an unfinished copy. A datastore follows its folder as long as that holds a sound store of this model. Otherwise the
datastore is unavailable: calls that use it fail with its name and the reason, and it is retried until its folder is
sound.
"""

from __future__ import annotations

import errno
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from memlm.api.datastores import DeleteReport, RememberReport, StoreInfo
from memlm.api.params import RetrievalParams
from memlm.base.lists import items_of
from memlm.base.steps import run_steps
from memlm.errors import (
    AlreadyExists,
    Corrupt,
    Incompatible,
    InternalError,
    InvalidInput,
    MemlmError,
    NotFound,
    Unavailable,
    check_kind,
)
from memlm.index.store.derived.passage_vectors import PassageEncoder
from memlm.index.store.exclusion import search_views
from memlm.index.store.manifest import Pointer, StoreSpec, read_pointer
from memlm.index.store.small_segments import NewEntries
from memlm.index.store.snapshot import Snapshot
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore, OnLost, ViewSearch

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 8.0  # of a folder whose `CURRENT` stays as it is; another one is tried at once
# In a row until an open store is given up: a folder that is being swapped is missing for a moment.
FAILURES = 2
OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # no problem of the folder

log = logging.getLogger("memlm.stores")

Move = Callable[[], bool]
Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class PendingChange(Generic[Report]):
    """A committed change of a datastore that the open ones have not switched to yet."""

    report: Report
    moves: tuple[Move, ...]

    def apply(self) -> Report:
        """Switches all that is open of the folder to the commit. From then on every answer follows it."""
        for move in self.moves:
            move()
        return self.report


@dataclass(frozen=True, slots=True)
class PendingRefresh:
    """Snapshots that were opened, and that the open datastores have not switched to yet."""

    moves: tuple[Move, ...]

    def apply(self) -> bool:
        """Switches to them, and records folders that cannot be read. Returns whether any is another snapshot."""
        return sum([move() for move in self.moves]) > 0


@dataclass(eq=False, slots=True)
class LoadedStore:
    """A loaded name. `problem` is the reason if its folder cannot be used. `opened` is None if it never could.

    `failures` counts the failed attempts in a row. The next one is due at `retry_s`, or once `CURRENT` differs from
    `seen`.
    """

    name: str
    path: Path
    opened: ModelStore | None = None
    problem: MemlmError | None = None
    failures: int = 0
    retry_s: float = 0.0
    seen: Pointer | None = None

    @property
    def usable(self) -> ModelStore:
        """The open datastore. Raises Incompatible, Corrupt or Unavailable if there is a problem."""
        if self.opened is not None and self.problem is None:
            return self.opened
        kind = type(self.problem) if isinstance(self.problem, Incompatible | Corrupt) else Unavailable
        raise kind(f"the datastore {self.name!r} cannot be used until its folder is sound again: {self.problem}")

    @property
    def info(self) -> StoreInfo:
        """Size, defaults and problem."""
        if self.opened is None:
            return StoreInfo.unusable(self.name, str(self.path), str(self.problem))
        return self.opened.info(problem="" if self.problem is None else str(self.problem))


class LoadedStores:
    """The datastores of one model. `prepare_refresh` and `prepare_delete` may run in other threads, the rest in one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stores: Sequence[str | Path] | Mapping[str, str | Path] = (),
        *,
        may_fail: Collection[str] = (),
        on_lost: OnLost = lambda store, document_ids: None,
        search: ViewSearch = search_views,
    ) -> None:
        """Opens datastores, under their folders' names or under given ones. Those named in `may_fail` need not be
        usable. `on_lost` is called at each switch to a snapshot that lacks documents. `search` searches all of them.
        Raises InvalidInput if two share a name, and for one folder in place of a list.
        """
        self._on_lost, self._search = on_lost, search
        self.on_retired: Callable[[], None] = lambda: None  # is called where one is unloaded or replaced
        self._checkpoint = checkpoint
        self._stores: dict[str, LoadedStore] = {}
        self._retired: list[weakref.ref[ModelStore]] = []
        self._retrievers: weakref.WeakValueDictionary[tuple[Any, ...], Retriever] = weakref.WeakValueDictionary()
        folders = items_of("stores", stores, str | Path, expected="folders")
        named = stores.items() if isinstance(stores, Mapping) else (("", path) for path in folders)
        for given, path in named:
            store = LoadedStore(given or Path(path).name, Path(path))
            if store.name in self._stores:
                raise InvalidInput(
                    f"two datastores are called {store.name!r}; rename the folder of one", field="stores"
                )
            try:
                store.opened = self._watched(ModelStore.open(store.path, checkpoint, store.name))
            except (MemlmError, OSError) as error:
                if store.name not in may_fail:
                    raise
                self._failed(store, error, None)
            self._stores[store.name] = store

    @property
    def infos(self) -> tuple[StoreInfo, ...]:
        """Descriptions of all, of those that cannot be used with their problem."""
        return tuple(store.info for store in self._stores.values())

    def __iter__(self) -> Iterator[LoadedStore]:
        return iter(self._stores.values())

    def info(self, name: str | None) -> StoreInfo:
        """Describes one of them. Without a name, the only one."""
        return self._find(name).info

    def model_store(self, name: str | None = None) -> ModelStore:
        """Returns a datastore that can be used. Without a name, the only one.

        Raises NotFound for a name that is not loaded, InvalidInput without a name if not exactly one is loaded, and
        Incompatible, Corrupt or Unavailable if its folder cannot be used.
        """
        return self._find(name).usable

    def model_stores(self, names: Sequence[str]) -> list[ModelStore]:
        """Returns the datastores of these names, or all if there is no name. Raises as `model_store`, also without
        names: leaving out a datastore that cannot be used would silently change the answer.
        """
        if names:
            return [self.model_store(name) for name in names]
        try:
            return [store.usable for store in self._stores.values()]
        except (Incompatible, Corrupt, Unavailable) as error:
            raise type(error)(f"{error}; name the datastores to use (store, stores), or none (use_store)") from None

    def __len__(self) -> int:
        return len(self._stores)

    def register_store(self, opened: ModelStore, *, replace: bool = False) -> StoreInfo:
        """Registers a datastore that was opened elsewhere, and refreshes it. With `replace`, it replaces the one of its
        name. Running generations keep theirs.

        Raises AlreadyExists for a name in use.
        """
        before = self._stores.get(opened.name)
        if before is not None and not replace:
            opened.datastore.close()
            raise AlreadyExists(f"a datastore {opened.name!r} is loaded already; ask for its replacement (replace)")
        opened.refresh()
        if before is not None:
            self._retire(before)
        store = LoadedStore(opened.name, opened.datastore.path, self._watched(opened))
        self._stores[opened.name] = store
        return store.info

    def unload(self, name: str) -> StoreInfo:
        """Unloads a datastore. It is closed once no generation uses it. Its files stay."""
        store = self._find(name)
        self._retire(store)
        del self._stores[name]
        return store.info

    def prepare_delete(self, document_ids: Sequence[str], name: str | None = None) -> PendingChange[DeleteReport]:
        """Commits a deletion in the store that is in the folder now. Thread-safe.

        Raises NotFound with the ids that the datastore does not have, and then deletes none.
        """
        store = self._find(name)
        opened = store.usable if store.opened is None else store.opened
        try:
            pending = opened.datastore.prepare_delete(document_ids)
        except NotFound as error:  # a caller knows the name, and a path may be the server's
            message = str(error).replace(f" in {opened.datastore.path};", f" in the datastore {opened.name!r};")
            raise NotFound(message, kind=error.kind, name=error.name) from None
        newer, deletion = pending.snapshot, pending.deletion
        report = DeleteReport(opened.name, newer.manifest.number, deletion.num_documents, deletion.num_entries)
        return PendingChange(report, self._moves_to(newer, store, opened))

    def prepare_remember(
        self, opened: ModelStore, spec: StoreSpec, documents: Sequence[NewEntries], *, replace: bool
    ) -> PendingChange[RememberReport]:
        """Commits documents whose entries were made for a store of `spec`. Thread-safe. Raises as
        `Datastore.prepare_remember` does.
        """
        pending = opened.datastore.prepare_remember(documents, spec, replace=replace)
        opened.has_remembered = True
        ids = tuple(document.id for document in documents)
        report = RememberReport(opened.name, pending.snapshot.manifest.number, pending.record.entries, ids)
        return PendingChange(report, self._moves_to(pending.snapshot, self._stores.get(opened.name), opened))

    def merge_small(self) -> None:
        """Merges small segments of the datastores that have remembered documents, once for each. Thread-safe."""
        for store in tuple(self._stores.values()):
            if (opened := store.opened) is not None and opened.has_remembered:
                opened.has_remembered = False  # first: documents may be remembered meanwhile
                if opened.datastore.merge_small():
                    opened.has_remembered = True

    def make_vectors(self, encoder: PassageEncoder) -> bool:
        """Makes the vectors of some passages that have none. Returns False if there are none that this process may
        make. Thread-safe.
        """
        for store in tuple(self._stores.values()):
            if (opened := store.opened) is not None:
                for segment in opened.snapshot.segments:
                    if run_steps(opened.vectors_of(segment, encoder)).build():
                        return True
        return False

    def _moves_to(self, newer: Snapshot, store: LoadedStore | None, opened: ModelStore) -> tuple[Move, ...]:
        """The steps that switch all that is open of a folder to a commit that one datastore made."""

        def refresh_others() -> bool:  # under another name, or opened anew meanwhile
            return sum([other.refresh() for other in self._open_at(opened.datastore.path)]) > 0

        recovered = () if store is None else (partial(self._recovered, store),)
        return partial(opened.switch_to, newer), *recovered, refresh_others

    def prepare_refresh(self, name: str | None = None) -> PendingRefresh:
        """Opens the snapshots that are in the folders now, or in that of one datastore, under all its names.
        Thread-safe.

        Raises if the folder of the named datastore cannot be read. Without a name, such a folder is recorded instead.
        """
        if name is None:
            moves = [move for store in tuple(self._stores.values()) if (move := self._look(store))]
            for opened in self._retired_stores():
                with suppress(MemlmError, OSError):
                    if newer := opened.datastore.open_latest():
                        moves.append(partial(opened.switch_to, newer))
            return PendingRefresh(tuple(moves))
        store = self._find(name)
        opened = store.usable if store.opened is None else store.opened
        found = [(each, each.datastore.open_latest()) for each in {opened, *self._open_at(opened.datastore.path)}]
        switches = [partial(each.switch_to, newer) for each, newer in found if newer is not None]
        return PendingRefresh((*switches, partial(self._recovered, store)))

    def retriever(self, params: RetrievalParams) -> Retriever | None:
        """Returns the retriever of a request, or None if it searches no datastore.

        Raises as `model_stores`, and NotFound for a name in `exclude_documents` that stands for no document.
        """
        retriever = self.shared_retriever(params)
        if retriever is None or not retriever.stores:
            return None
        return retriever.excluding(params.exclude_documents, params.as_of)

    def shared_retriever(self, params: RetrievalParams) -> Retriever | None:
        """Returns the retriever of a request that excludes no documents yet, or None if it uses no datastore or none is
        loaded. One with datastores without keys searches nothing.

        Requests with the same settings get the same object while one of them runs, so that a batch searches for all of
        them at once.
        """
        names = [each.name for each in params.stores] or ([] if params.store is None else [params.store])
        if not params.use_store or not (names or len(self)):
            check_unused(params)
            return None
        retriever = Retriever.of(self.model_stores(names), params)
        if not retriever.stores:
            check_unused(replace(params, exclude_documents=(), as_of=None))
        return self._retrievers.setdefault(retriever.settings, retriever)

    def close(self) -> None:
        """Closes the datastores."""
        for store in self._stores.values():
            if store.opened is not None:
                store.opened.close()

    def _look(self, store: LoadedStore) -> Move | None:
        """Looks at a folder. Returns the step to apply in the loop, or None if nothing changes."""
        seen = _pointer_at(store.path)
        if store.problem is not None and seen == store.seen and time.monotonic() < store.retry_s:
            return None
        try:
            if store.opened is None:
                return partial(self._opened, store, ModelStore.open(store.path, self._checkpoint, store.name))
            if newer := store.opened.datastore.open_latest():
                return partial(self._moved, store, store.opened, newer)
            return partial(self._recovered, store) if store.failures else None
        except OSError as error:
            return None if error.errno in OUT_OF_FILES else partial(self._failed, store, error, seen)
        except MemlmError as error:
            return partial(self._failed, store, error, seen)
        except Exception as error:
            log.exception("looking at the datastore %r failed", store.name)
            return partial(self._failed, store, error, seen)

    def _watched(self, opened: ModelStore) -> ModelStore:
        opened.on_lost, opened.search_views = self._on_lost, self._search
        return opened

    def _opened(self, store: LoadedStore, opened: ModelStore) -> bool:
        if store.opened is None:
            store.opened = self._watched(opened)
        self._recovered(store)
        return True

    def _moved(self, store: LoadedStore, opened: ModelStore, newer: Snapshot) -> bool:
        self._recovered(store)
        return opened.switch_to(newer)

    def _recovered(self, store: LoadedStore) -> bool:
        if store.problem is not None:
            log.warning("the datastore %r can be used again", store.name)
        store.problem, store.failures, store.seen = None, 0, None
        return False

    def _failed(self, store: LoadedStore, error: Exception, seen: Pointer | None) -> bool:
        """Records that a folder cannot be used. A first failure may be a moment between two states of the folder."""
        store.failures, store.seen = store.failures + 1, seen
        store.retry_s = time.monotonic() + min(FIRST_RETRY_S * 2 ** max(0, store.failures - FAILURES), LONGEST_RETRY_S)
        if store.opened is not None and store.failures < FAILURES and not isinstance(error, Incompatible):
            return False
        problem = _as_problem(error)
        if str(problem) != str(store.problem):
            log.error("the datastore %r cannot be used: %s", store.name, problem)
        store.problem = problem
        return False

    def _find(self, name: str | None) -> LoadedStore:
        names = ", ".join(self._stores) or "none"
        check_kind("store", name, (str, type(None)), f"the name of a datastore; loaded: {names}")
        if name is not None and name not in self._stores:
            raise NotFound(f"no datastore {name!r} is loaded; loaded: {names}", kind="datastore", name=name)
        if name is None and len(self._stores) != 1:
            raise InvalidInput(
                f"store was left out, but not just one datastore is loaded; loaded: {names}", field="store"
            )
        return self._stores[name] if name is not None else next(iter(self._stores.values()))

    def _retire(self, store: LoadedStore) -> None:
        """Hides it from new requests. Running generations may use it, so it is refreshed as long as they hold it."""
        self.on_retired()
        if store.opened is not None:
            held = [retired for retired in self._retired if retired() is not None]
            self._retired = [*held, weakref.ref(store.opened)]

    def _retired_stores(self) -> list[ModelStore]:
        return [opened for retired in tuple(self._retired) if (opened := retired()) is not None]

    def _open_at(self, path: Path) -> list[ModelStore]:
        """Returns all open datastores of a folder, loaded or held by a running generation."""
        loaded = [store.opened for store in tuple(self._stores.values()) if store.opened is not None]
        home = path.resolve()
        return [each for each in (*loaded, *self._retired_stores()) if each.datastore.path.resolve() == home]


def check_unused(params: RetrievalParams) -> None:
    """Raises InvalidInput for an option of retrieval that has no effect without a datastore."""
    for name in ("k", "lam", "knn_temperature", "nprobe", "spalm", "exclude_documents", "as_of"):
        if getattr(params, name) not in (None, False, ()):
            raise InvalidInput(
                f"{name} is set, but no datastore is searched; give one with keys, or leave it out", field=name
            )


def _pointer_at(path: Path) -> Pointer | None:
    try:
        return read_pointer(path)
    except (MemlmError, OSError):
        return None


def _as_problem(error: Exception) -> MemlmError:
    if isinstance(error, MemlmError):
        return error
    if isinstance(error, OSError):
        return Unavailable(f"its files cannot be read ({error})")
    return InternalError(f"it could not be opened ({type(error).__name__})")
