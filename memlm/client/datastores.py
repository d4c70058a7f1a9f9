"""A server's datastores and the long work on them, as clients hold them: `client.datastores`, `client.operations`.

job = client.datastores.build("docs", corpus="docs/")
job.progress(); job.result()
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from os import urandom
from typing import TYPE_CHECKING, Any, cast

from memlm.api.datastores import (
    AddDocumentsRequest,
    BuildDatastoreRequest,
    CompactDatastoreRequest,
    DeleteDocumentsRequest,
    DeleteReport,
    GetDatastoreRequest,
    ListDatastoresRequest,
    LoadDatastoreRequest,
    NewDocument,
    StoreInfo,
    UnloadDatastoreRequest,
)
from memlm.api.operations import (
    CancelOperationRequest,
    DeleteOperationRequest,
    GetOperationRequest,
    ListOperationsRequest,
    Operation,
    OperationInfo,
    OperationPage,
    WaitOperationRequest,
)
from memlm.errors import InvalidInput

if TYPE_CHECKING:
    from memlm.client.transport import Transport
    from memlm.data.corpus import Document

WAIT_SPARE_S = 10.0  # beyond what a call waits for an operation's end, before the server is given up
_OPTIONS = {field.name for field in fields(BuildDatastoreRequest)} - {"store", "corpus", "replace", "request_id"}


class Datastores:
    """The datastores of a server."""

    def __init__(self, transport: Transport, operations: Operations) -> None:
        """`Client.datastores` is one."""
        self._transport, self._operations = transport, operations

    def list(self, *, timeout_s: float | None = None) -> tuple[StoreInfo, ...]:
        """All that are loaded, with their defaults."""
        return tuple(self._transport.ask(ListDatastoresRequest(), timeout_s))

    def get(self, store: str | None = None, *, timeout_s: float | None = None) -> StoreInfo:
        """One of them (None: the only one). Raises NotFound where it is not loaded."""
        return cast(StoreInfo, self._transport.ask(GetDatastoreRequest(store), timeout_s))

    def build(
        self,
        store: str,
        corpus: str | Sequence[str],
        *,
        replace: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Operation:
        """Begins to build a datastore of files and folders on the server, under the folders that it may read from.

        The options are `glob`, `index`, `target`, `max_ram_bytes`, `drop_keys`, `prune`, `stride` and `seed`; see
        `memlm.build_index`. With `replace` it takes the place of one of that name, once it is complete. Asked again
        with the same `request_id`, it is the same operation.
        """
        return self._begin(build_request(store, corpus, replace, request_id, options), timeout_s)

    def add(
        self,
        store: str | None,
        documents: Iterable[NewDocument | Document],
        *,
        replace: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Operation:
        """Sends documents, then begins to add them to a datastore (None: the only one).

        With `replace`, a document whose id is there takes the old one's place; the operation fails otherwise.
        """
        request = AddDocumentsRequest(store, replace, request_id or urandom(16).hex())
        return Operation(self._operations, self._transport.add(request, documents, timeout_s).name)

    def compact(
        self,
        store: str | None = None,
        *,
        purge: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Operation:
        """Begins to merge the segments of a datastore (None: the only one), without the documents that are deleted.

        A document that is deleted meanwhile may be copied, and is then left out by the next compaction. With `purge`,
        no file of the datastore holds a deleted document once the operation is done, also where all are deleted;
        an addition that was interrupted is given up.
        """
        return self._begin(CompactDatastoreRequest(store, request_id or urandom(16).hex(), purge), timeout_s)

    def load(
        self, path: str, store: str | None = None, *, replace: bool = False, timeout_s: float | None = None
    ) -> StoreInfo:
        """Takes a datastore on the server's disk into service: one that it built, or was started with. `path` is
        absolute, or as `StoreInfo.path` shows it.
        """
        return cast(StoreInfo, self._transport.ask(LoadDatastoreRequest(path, store, replace), timeout_s))

    def unload(self, store: str, *, timeout_s: float | None = None) -> StoreInfo:
        """Takes one out of service; its files stay."""
        return cast(StoreInfo, self._transport.ask(UnloadDatastoreRequest(store), timeout_s))

    def delete_documents(
        self, store: str | None, document_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> DeleteReport:
        """Deletes documents of a datastore (None: the only one); once this returns, they contribute to no answer.

        Raises NotFound, naming them, where some are not there: then none is deleted. Never tried twice by itself.
        """
        question = DeleteDocumentsRequest.of(document_ids, store)
        return cast(DeleteReport, self._transport.ask(question, timeout_s))

    def _begin(self, request: BuildDatastoreRequest | CompactDatastoreRequest, timeout_s: float | None) -> Operation:
        return Operation(self._operations, self._transport.ask(request, timeout_s).name)


class Operations:
    """Long work on a server, by the names of its operations."""

    def __init__(self, transport: Transport) -> None:
        """`Client.operations` is one."""
        self._transport = transport

    def list(self, *, timeout_s: float | None = None) -> tuple[OperationInfo, ...]:
        """All of the caller's, the latest first."""
        found, token = list[OperationInfo](), ""
        while True:
            page: OperationPage = self._transport.ask(ListOperationsRequest(page_token=token), timeout_s)
            found += page.operations
            if not (token := page.next_page_token):
                return tuple(found)

    def open(self, name: str) -> Operation:
        """One that was begun before, to be followed."""
        return Operation(self, name)

    def get(self, name: str, *, timeout_s: float | None = None) -> OperationInfo:
        """How far one is. Raises NotFound where it is not the caller's."""
        return cast(OperationInfo, self._transport.ask(GetOperationRequest(name), timeout_s))

    def wait(self, name: str, timeout_s: float) -> OperationInfo:
        """The same, once it has ended or the time is over."""
        return cast(OperationInfo, self._transport.ask(WaitOperationRequest(name, timeout_s), timeout_s + WAIT_SPARE_S))

    def cancel(self, name: str, *, timeout_s: float | None = None) -> None:
        """Stops one and removes what it had done; one that has ended stays as it is."""
        self._transport.ask(CancelOperationRequest(name), timeout_s)

    def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Forgets one that has ended. Raises Incompatible for one that has not."""
        self._transport.ask(DeleteOperationRequest(name), timeout_s)


def build_request(
    store: str, corpus: str | Sequence[str], replace: bool, request_id: str | None, options: dict[str, Any]
) -> BuildDatastoreRequest:
    """What `build` asks for. Raises InvalidInput for an option that there is not."""
    if unknown := sorted(set(options) - _OPTIONS):
        raise InvalidInput(
            f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(_OPTIONS))}", field=unknown[0]
        )
    paths = (corpus,) if isinstance(corpus, str) else tuple(map(str, corpus))
    return BuildDatastoreRequest(store, paths, replace=replace, request_id=request_id or urandom(16).hex(), **options)
