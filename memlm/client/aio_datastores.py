"""The same as `memlm.client.datastores`, awaited: what `AsyncClient.datastores` and `AsyncClient.operations` are."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterable, Sequence
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
    JobReport,
    ListOperationsRequest,
    OperationInfo,
    OperationPage,
    WaitOperationRequest,
    check_deadline,
    wait_slice,
)
from memlm.client.datastores import WAIT_SPARE_S, build_request

if TYPE_CHECKING:
    from memlm.client.aio_transport import AsyncTransport
    from memlm.data.corpus import Document


class AsyncDatastores:
    """The same as `Datastores`, awaited."""

    def __init__(self, transport: AsyncTransport, operations: AsyncOperations) -> None:
        """`AsyncClient.datastores` is one."""
        self._transport, self._operations = transport, operations

    async def list(self, *, timeout_s: float | None = None) -> tuple[StoreInfo, ...]:
        """See `Datastores.list`."""
        return tuple(await self._transport.ask(ListDatastoresRequest(), timeout_s))

    async def get(self, store: str | None = None, *, timeout_s: float | None = None) -> StoreInfo:
        """See `Datastores.get`."""
        return cast(StoreInfo, await self._transport.ask(GetDatastoreRequest(store), timeout_s))

    async def build(
        self,
        store: str,
        corpus: str | Sequence[str],
        *,
        replace: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> AsyncOperation:
        """See `Datastores.build`."""
        return await self._begin(build_request(store, corpus, replace, request_id, options), timeout_s)

    async def add(
        self,
        store: str | None,
        documents: Iterable[NewDocument | Document],
        *,
        replace: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncOperation:
        """See `Datastores.add`."""
        request = AddDocumentsRequest(store, replace, request_id or urandom(16).hex())
        return AsyncOperation(self._operations, (await self._transport.add(request, documents, timeout_s)).name)

    async def compact(
        self,
        store: str | None = None,
        *,
        purge: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncOperation:
        """See `Datastores.compact`."""
        return await self._begin(CompactDatastoreRequest(store, request_id or urandom(16).hex(), purge), timeout_s)

    async def load(
        self, path: str, store: str | None = None, *, replace: bool = False, timeout_s: float | None = None
    ) -> StoreInfo:
        """See `Datastores.load`."""
        return cast(StoreInfo, await self._transport.ask(LoadDatastoreRequest(path, store, replace), timeout_s))

    async def unload(self, store: str, *, timeout_s: float | None = None) -> StoreInfo:
        """See `Datastores.unload`."""
        return cast(StoreInfo, await self._transport.ask(UnloadDatastoreRequest(store), timeout_s))

    async def delete_documents(
        self, store: str | None, document_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> DeleteReport:
        """See `Datastores.delete_documents`."""
        question = DeleteDocumentsRequest.of(document_ids, store)
        return cast(DeleteReport, await self._transport.ask(question, timeout_s))

    async def _begin(
        self, request: BuildDatastoreRequest | CompactDatastoreRequest, timeout_s: float | None
    ) -> AsyncOperation:
        return AsyncOperation(self._operations, (await self._transport.ask(request, timeout_s)).name)


class AsyncOperations:
    """The same as `Operations`, awaited."""

    def __init__(self, transport: AsyncTransport) -> None:
        """`AsyncClient.operations` is one."""
        self._transport = transport

    async def list(self, *, timeout_s: float | None = None) -> tuple[OperationInfo, ...]:
        """See `Operations.list`."""
        found, token = builtins.list[OperationInfo](), ""
        while True:
            page: OperationPage = await self._transport.ask(ListOperationsRequest(page_token=token), timeout_s)
            found += page.operations
            if not (token := page.next_page_token):
                return tuple(found)

    def open(self, name: str) -> AsyncOperation:
        """See `Operations.open`."""
        return AsyncOperation(self, name)

    async def get(self, name: str, *, timeout_s: float | None = None) -> OperationInfo:
        """See `Operations.get`."""
        return cast(OperationInfo, await self._transport.ask(GetOperationRequest(name), timeout_s))

    async def wait(self, name: str, timeout_s: float) -> OperationInfo:
        """See `Operations.wait`."""
        question = WaitOperationRequest(name, timeout_s)
        return cast(OperationInfo, await self._transport.ask(question, timeout_s + WAIT_SPARE_S))

    async def cancel(self, name: str, *, timeout_s: float | None = None) -> None:
        """See `Operations.cancel`."""
        await self._transport.ask(CancelOperationRequest(name), timeout_s)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """See `Operations.delete`."""
        await self._transport.ask(DeleteOperationRequest(name), timeout_s)


class AsyncOperation:
    """The same as `memlm.api.operations.Operation`, awaited."""

    def __init__(self, host: AsyncOperations, name: str) -> None:
        """What begins an operation makes one; an old one is taken up by its name."""
        self._host, self.name = host, name

    async def progress(self) -> OperationInfo:
        """See `Operation.progress`."""
        return await self._host.get(self.name)

    async def wait(self, timeout_s: float | None = None) -> OperationInfo:
        """See `Operation.wait`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            info = await self._host.wait(self.name, wait_slice(deadline_s))
            if info.has_ended:
                return info
            check_deadline(deadline_s, info)

    async def result(self, timeout_s: float | None = None) -> JobReport:
        """See `Operation.result`."""
        return (await self.wait(timeout_s)).outcome()

    async def cancel(self) -> None:
        """See `Operation.cancel`."""
        await self._host.cancel(self.name)
