# Generated from aio_datastores.py by tools/generate_sync.py (`make client`); edit that file instead.
"""The datastores and operations of a server.

job = client.datastores.build("docs", corpus="docs/")
job.progress()
job.result()
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from os import urandom
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlm.api.datastores import (
    PATHS,
    AddDocumentsRequest,
    BuildDatastoreRequest,
    CompactDatastoreRequest,
    DeleteDocumentsRequest,
    DeleteReport,
    GetDatastoreRequest,
    ListDatastoresRequest,
    LoadDatastoreRequest,
    NewDocument,
    RememberReport,
    RememberRequest,
    StoreInfo,
    UnloadDatastoreRequest,
)
from memlm.api.handles import Operation
from memlm.api.operations import (
    CancelOperationRequest,
    DeleteOperationRequest,
    GetOperationRequest,
    ListOperationsRequest,
    OperationInfo,
    WaitOperationRequest,
)
from memlm.api.paging import MAX_PAGE
from memlm.base.lists import check_list, items_of
from memlm.client.resume import DEFAULT_TIMEOUT_S
from memlm.errors import InvalidInput

if TYPE_CHECKING:
    from memlm.client.transport import Transport
    from memlm.data.corpus import Document, Texts
    from memlm.data.synced_folder import SyncedFolder

# Added to the wait for an operation's end, before the server counts as unreachable: as much as any other call gets.
WAIT_SPARE_S = DEFAULT_TIMEOUT_S
_OPTIONS = {field.name for field in fields(BuildDatastoreRequest)} - {"store", "corpus", "replace", "request_id"}


class Datastores:
    """The datastores of a server, `client.datastores`. `store=None` means the only loaded one."""

    def __init__(self, transport: Transport, operations: Operations) -> None:
        self._transport, self._operations = transport, operations

    def list(self, *, timeout_s: float | None = None) -> tuple[StoreInfo, ...]:
        """All loaded datastores, with their defaults."""
        found, token = builtins.list[StoreInfo](), ""
        while True:
            page = self._transport.ask(ListDatastoresRequest(MAX_PAGE, token), timeout_s)
            found += page.datastores
            if not (token := page.next_page_token):
                return tuple(found)

    def get(self, store: str | None = None, *, timeout_s: float | None = None) -> StoreInfo:
        """Describes a datastore. Raises NotFound if it is not loaded."""
        return self._transport.ask(GetDatastoreRequest(store), timeout_s)

    def build(
        self,
        store: str,
        corpus: str | Path | Sequence[str | Path],
        *,
        replace: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Operation:
        """Starts to build a datastore from files and folders on the server, below its corpus roots.

        The options are `glob`, `hidden`, `keys`, `index`, `target`, `max_ram_bytes`, `drop_keys`, `prune`, `window`,
        `stride`, `seed` and `check` of `memlm.build_index`. The text of a new datastore is in service before its keys.
        `replace` replaces one of this name once the new one is complete. Repeating the call with its `request_id`
        returns the first call's operation.
        """
        if unknown := sorted(set(options) - _OPTIONS):
            raise InvalidInput(
                f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(_OPTIONS))}", field=unknown[0]
            )
        paths = tuple(map(str, items_of("corpus", corpus, str | Path, expected=PATHS, one=True)))
        request_id = request_id or urandom(16).hex()
        request = BuildDatastoreRequest(store, paths, replace=replace, request_id=request_id, **options)
        return Operation(self._operations, (self._transport.ask(request, timeout_s)).name)

    def add(
        self,
        store: str | None,
        documents: Iterable[NewDocument | Document],
        *,
        replace: bool = False,
        keys: str = "auto",
        check: str = "quick",
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Operation:
        """Uploads documents, then starts to add them to a datastore.

        `replace` replaces existing documents. Without it, the operation fails on an existing id. `keys` is "auto",
        "now" or "none", as of a build, and `check` "quick", "full" or "none".
        """
        check_list("documents", documents, expected="documents")
        request = AddDocumentsRequest(store, replace, request_id or urandom(16).hex(), check=check, keys=keys)
        return Operation(self._operations, (self._transport.add(request, documents, timeout_s)).name)

    def sync(
        self,
        store: str | None,
        corpus: Texts,
        *,
        name: str | None = None,
        replace: bool = False,
        dry_run: bool = False,
        keys: str = "auto",
        check: str = "quick",
        timeout_s: float | None = None,
    ) -> Operation:
        """Uploads the documents of files and folders on this machine, then starts to make a datastore the same: new
        documents are added, changed ones replaced, and those of an earlier call that are gone, deleted. All others
        stay, as do those of files that cannot be read, and of folders without a file. One that is not there is built.
        The report has the number of each kind, and the first ids.

        Raises InvalidInput where there is no document, and then deletes nothing. The server knows the files and folders
        by their places on this machine, or by a `name`. A document that others brought is refused, or with `replace`
        replaced, and is these files' then. With `dry_run`, nothing changes. `keys` and `check` are as of `add`.
        """
        folder = self._transport.run(partial(_folder_of, corpus, name))
        request = AddDocumentsRequest(
            store, replace, urandom(16).hex(), check=check, keys=keys, sync=folder.name, dry_run=dry_run
        )
        return Operation(self._operations, (self._transport.add(request, folder, timeout_s)).name)

    def compact(
        self,
        store: str | None = None,
        *,
        purge: bool = False,
        check: str = "quick",
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Operation:
        """Starts to merge the segments of a datastore without its deleted documents.

        Documents deleted during the compaction may be copied, and are removed by the next one. With `purge`, no file
        of the datastore holds a deleted document afterwards, even if all are deleted. An interrupted addition is
        then abandoned.
        """
        request = CompactDatastoreRequest(store, request_id or urandom(16).hex(), purge, check)
        return Operation(self._operations, (self._transport.ask(request, timeout_s)).name)

    def load(
        self, path: str, store: str | None = None, *, replace: bool = False, timeout_s: float | None = None
    ) -> StoreInfo:
        """Loads a datastore that the server built or was started with.

        `path` is absolute, or as in `StoreInfo.path`.
        """
        return self._transport.ask(LoadDatastoreRequest(path, store, replace), timeout_s)

    def unload(self, store: str, *, timeout_s: float | None = None) -> StoreInfo:
        """Unloads a datastore. Its files stay."""
        return self._transport.ask(UnloadDatastoreRequest(store), timeout_s)

    def remember(
        self,
        store: str | None,
        text: str | Sequence[NewDocument],
        *,
        document_id: str | None = None,
        title: str = "",
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> RememberReport:
        """Adds a text, or up to 1,000 short documents, at once. When this returns, every answer can use them, and they
        are on the server's disk.

        The default id of a text is a hash of it. `replace` replaces documents of these ids. Raises AlreadyExists for an
        id that is taken, also by an earlier try of this very call, and then adds nothing. Never retried automatically.
        """
        request = RememberRequest.of(
            text, store, document_id=document_id, title=title, metadata=metadata, replace=replace
        )
        return self._transport.ask(request, timeout_s)

    def delete_documents(
        self, store: str | None, document_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> DeleteReport:
        """Deletes documents. When this returns, they no longer influence any answer.

        If any id is missing, raises NotFound with the missing ids and deletes nothing. Never retried automatically.
        """
        return self._transport.ask(DeleteDocumentsRequest.of(document_ids, store), timeout_s)


def _folder_of(corpus: Texts, name: str | None) -> SyncedFolder:
    """Raises as `SyncedFolder`, and NoText for one without a document."""
    from memlm.data.corpus import corpus_of
    from memlm.data.synced_folder import SyncedFolder

    given = corpus_of(corpus)
    folder = SyncedFolder(given, name)
    given.require_text()
    return folder


class Operations:
    """The jobs of a server by their operations' names, `client.operations`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, *, timeout_s: float | None = None) -> tuple[OperationInfo, ...]:
        """All operations of the caller, latest first."""
        found, token = builtins.list[OperationInfo](), ""
        while True:
            page = self._transport.ask(ListOperationsRequest(MAX_PAGE, token), timeout_s)
            found += page.operations
            if not (token := page.next_page_token):
                return tuple(found)

    def open(self, name: str) -> Operation:
        """Opens an existing operation."""
        return Operation(self, name)

    def get(self, name: str, *, timeout_s: float | None = None) -> OperationInfo:
        """Progress of an operation. Raises NotFound if it is not the caller's."""
        return self._transport.ask(GetOperationRequest(name), timeout_s)

    def wait(self, name: str, timeout_s: float) -> OperationInfo:
        """Progress of an operation when it has ended, or after `timeout_s`."""
        return self._transport.ask(WaitOperationRequest(name, timeout_s), timeout_s + WAIT_SPARE_S)

    def cancel(self, name: str, *, timeout_s: float | None = None) -> None:
        """Cancels an operation and removes its unfinished work. One that has ended stays as it is."""
        self._transport.ask(CancelOperationRequest(name), timeout_s)

    def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Deletes the record of an operation. Raises Incompatible if it has not ended."""
        self._transport.ask(DeleteOperationRequest(name), timeout_s)
