"""Datastores that open, change or refresh, and sessions that are read, in threads beside a worker's loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from memlm.api.datastores import DeleteDocumentsRequest, LoadDatastoreRequest
from memlm.generation.engine import Engine
from memlm.generation.loaded_stores import PendingChange, PendingRefresh
from memlm.retrieval.store import ModelStore
from memlm.server.inference.active_request import ActiveRequest
from memlm.server.inference.messages import Adopt, Refresh

BackgroundRequest: TypeAlias = LoadDatastoreRequest | DeleteDocumentsRequest | Refresh | Adopt

log = logging.getLogger("memlm.server.worker")


class BackgroundTasks:
    """Runs the slow part of a request in a thread. Its last part, which changes the served state, is left to the loop,
    so that every step of the batch sees one version of each datastore.
    """

    def __init__(self, engine: Engine) -> None:
        self._checkpoint, self._stores, self._sessions = engine.checkpoint, engine.stores, engine.sessions
        # Opening a large datastore takes long, and a deletion waits for other writers. Neither waits for the other.
        self._opener, self._deleter = ThreadPoolExecutor(1, "opener"), ThreadPoolExecutor(1, "deleter")
        self._tasks: list[tuple[ActiveRequest, Future[Any], Callable[[Any], Any]]] = []
        self._refresh: Future[PendingRefresh] | None = None
        self._merge: Future[None] | None = None
        self._encoder = engine.passage_encoder
        self._embedder = ThreadPoolExecutor(1, "embedder")
        self._vectors: Future[bool] | None = None
        self.misses_vectors = self._encoder is not None  # as far as is known

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, active: ActiveRequest, request: BackgroundRequest) -> None:
        """Starts the slow part of a request."""
        if isinstance(request, LoadDatastoreRequest):
            opening = self._opener.submit(ModelStore.open, request.path, self._checkpoint, request.store or "")
            self._tasks.append((active, opening, partial(self._stores.register_store, replace=request.replace)))
        elif isinstance(request, DeleteDocumentsRequest):
            deleting = self._deleter.submit(self._stores.prepare_delete, request.document_ids, request.store)
            self._tasks.append((active, deleting, PendingChange.apply))
        elif isinstance(request, Adopt):
            reading = self._opener.submit(self._sessions.read_file, request.session_name)
            self._tasks.append((active, reading, self._sessions.adopt))
        else:
            refreshing = self._deleter.submit(self._stores.prepare_refresh, request.store)
            self._tasks.append((active, refreshing, PendingRefresh.apply))

    def take_finished(self) -> Iterator[tuple[ActiveRequest, Callable[[], Any]]]:
        """Yields each request whose slow part has ended, with its last part. That one returns the answer, or raises."""
        for task in [task for task in self._tasks if task[1].done()]:
            self._tasks.remove(task)
            active, future, finish = task
            yield active, partial(_finish, finish, future)

    def start_refresh(self) -> None:
        """Looks for new versions of all datastores, unless a search for them runs."""
        if self._refresh is None:
            self._refresh = self._opener.submit(self._stores.prepare_refresh)

    def start_merge(self) -> None:
        """Merges small segments of datastores that have remembered documents, unless a merge runs. A later refresh
        switches to the merged ones.
        """
        if self._merge is not None and self._merge.done():
            if error := self._merge.exception():
                log.warning("small segments were not merged: %s", error)
            self._merge = None
        if self._merge is None and any(
            store.opened is not None and store.opened.has_remembered for store in self._stores
        ):
            self._merge = self._deleter.submit(self._stores.merge_small)

    def make_vectors(self) -> None:
        """Makes the vectors of some passages that have none, unless some are being made. To be called in an idle
        moment: a request that comes meanwhile shares the processor for a fifth of a second.
        """
        if self._encoder is None or (self._vectors is not None and not self._vectors.done()):
            return
        if self._vectors is not None:
            if error := self._vectors.exception():
                log.warning("the vectors of passages were not made: %s", error)
            self.misses_vectors = error is None and self._vectors.result()
        self._vectors = self._embedder.submit(self._stores.make_vectors, self._encoder)

    def finish_refresh(self) -> None:
        """Switches to the new versions that were found."""
        if self._refresh is None or not self._refresh.done():
            return
        refresh, self._refresh = self._refresh, None
        try:
            refresh.result().apply()
        except Exception:
            log.exception("looking for changes of the datastores failed")


def _finish(finish: Callable[[Any], Any], future: Future[Any]) -> Any:
    return finish(future.result())
