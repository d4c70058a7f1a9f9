"""/v1/datastores and /v1/operations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from memlm.api.datastores import (
    AddDocumentsRequest,
    DeleteDocumentsRequest,
    GetDatastoreRequest,
    ListDatastoresRequest,
    NewDocument,
    RememberRequest,
    SearchRequest,
)
from memlm.api.operations import (
    CancelOperationRequest,
    DeleteOperationRequest,
    GetOperationRequest,
    ListOperationsRequest,
    OperationInfo,
    WaitOperationRequest,
)
from memlm.api.tracing import TraceRequest
from memlm.data.synced_folder import hash_of
from memlm.errors import InvalidInput
from memlm.server.frontend.service import AdmittedCall, Service
from memlm.server.http.bodies import (
    ADD,
    ADD_QUERY,
    DELETE,
    GET_OPERATION_QUERY,
    PAGE_QUERY,
    REMEMBER,
    SEARCH,
    TRACE,
)
from memlm.server.http.exchange import Exchange
from memlm.server.http.reading import read_body
from memlm.server.http.records import object_of
from memlm.server.http.uploads import MULTIPART, documents_in

ACCEPTED = 202


async def list_datastores(service: Service, exchange: Exchange) -> None:
    async with service.admit("ListDatastores", exchange) as call:
        page = await service.ask(call, ListDatastoresRequest(**exchange.query(PAGE_QUERY)))
        data = [_datastore(store) for store in page.datastores]
        await exchange.reply_json({"object": "list", "data": data, "next_page_token": page.next_page_token})


async def get_datastore(service: Service, exchange: Exchange) -> None:
    async with service.admit("GetDatastore", exchange) as call:
        await exchange.reply_json(_datastore(await service.ask(call, GetDatastoreRequest(_store(exchange)))))


async def search(service: Service, exchange: Exchange) -> None:
    """Searches one datastore, or without a name all."""
    async with service.admit("Search", exchange) as call:
        body = await read_body(service, call, exchange, SEARCH)
        request = SearchRequest.of(body.pop("text"), exchange.path_params.get("store"), **body)
        found = await service.ask(call, request)
        await exchange.reply_json({"object": "list", "data": [object_of(neighbor) for neighbor in found]})


async def trace(service: Service, exchange: Exchange) -> None:
    """Traces a text to the documents of one datastore, or without a name of all."""
    async with service.admit("Trace", exchange) as call:
        body = await read_body(service, call, exchange, TRACE)
        request = TraceRequest.of(body.pop("text"), body.pop("store", None), **body)
        await exchange.reply_json({"object": "trace", **object_of(await service.ask(call, request))})


async def add_documents(service: Service, exchange: Exchange) -> None:
    """Adds documents from JSON, or files as they are sent by a form."""
    async with service.admit("AddDocuments", exchange) as call:
        is_form = exchange.headers.get("content-type", "").startswith(MULTIPART)
        query = exchange.query(ADD_QUERY)
        if is_form:
            requests = _uploaded(exchange, query, service.config.max_upload_bytes)
        else:
            body = await read_body(service, call, exchange, ADD)
            documents = tuple(NewDocument(**each) for each in body.pop("documents"))
            keep = tuple(_hash_of(name, place) for place, name in enumerate(body.pop("keep", ())))
            requests = _given(documents, keep, exchange, {**query, **body})
        await _reply_accepted(exchange, await service.add_documents(call, requests))


async def remember(service: Service, exchange: Exchange) -> None:
    """Adds one text at once."""
    async with service.admit("Remember", exchange) as call:
        body = await read_body(service, call, exchange, REMEMBER)
        body["document_id"] = body.pop("id", None)
        request = RememberRequest.of(body.pop("text"), _store(exchange), **body)
        await exchange.reply_json(object_of(await service.ask(call, request)))


async def delete_documents(service: Service, exchange: Exchange) -> None:
    """Deletes the documents of a list."""
    async with service.admit("DeleteDocuments", exchange) as call:
        body = await read_body(service, call, exchange, DELETE)
        await _delete(service, call, exchange, tuple(body["document_ids"]))


async def delete_document(service: Service, exchange: Exchange) -> None:
    """Deletes the document that the path names."""
    async with service.admit("DeleteDocuments", exchange) as call:
        await _delete(service, call, exchange, (exchange.path_params["document"],))


async def list_operations(service: Service, exchange: Exchange) -> None:
    async with service.admit("ListOperations", exchange) as call:
        page = await service.ask(call, ListOperationsRequest(**exchange.query(PAGE_QUERY)))
        data = [_operation(each) for each in page.operations]
        await exchange.reply_json({"object": "list", "data": data, "next_page_token": page.next_page_token})


async def get_operation(service: Service, exchange: Exchange) -> None:
    """Describes an operation, given `wait_s` once it has ended."""
    wait_s = exchange.query(GET_OPERATION_QUERY).get("wait_s", 0)
    async with service.admit("WaitOperation" if wait_s else "GetOperation", exchange) as call:
        name = _operation_name(exchange)
        request = WaitOperationRequest(name, wait_s) if wait_s else GetOperationRequest(name)
        await exchange.reply_json(_operation(await service.ask(call, request)))


async def cancel_operation(service: Service, exchange: Exchange) -> None:
    async with service.admit("CancelOperation", exchange) as call:
        await service.ask(call, CancelOperationRequest(_operation_name(exchange)))
        await exchange.reply_json({})


async def delete_operation(service: Service, exchange: Exchange) -> None:
    async with service.admit("DeleteOperation", exchange) as call:
        await service.ask(call, DeleteOperationRequest(_operation_name(exchange)))
        await exchange.reply_json({})


def _hash_of(name: str, place: int) -> str:
    """The hash of a document or a folder to keep. Raises InvalidInput for what would keep nothing."""
    path = name.rstrip("/")
    if not path or "*" in path:  # ids often have a ? or a [
        raise InvalidInput(
            f"keep[{place}] is {name[:80]!r}; expected the id of a document, or a folder of ids, as docs/old: no glob",
            field=f"keep[{place}]",
        )
    return hash_of(path)


async def _delete(service: Service, call: AdmittedCall, exchange: Exchange, document_ids: tuple[str, ...]) -> None:
    report = await service.ask(call, DeleteDocumentsRequest(document_ids, _store(exchange)))
    await exchange.reply_json(object_of(report))


async def _given(
    documents: tuple[NewDocument, ...], keep: tuple[str, ...], exchange: Exchange, options: Mapping[str, Any]
) -> AsyncIterator[AddDocumentsRequest]:
    yield AddDocumentsRequest(_store(exchange), documents=documents, keep=keep, num_documents=len(documents), **options)


async def _uploaded(exchange: Exchange, options: Mapping[str, Any], limit: int) -> AsyncIterator[AddDocumentsRequest]:
    yield AddDocumentsRequest(_store(exchange), **options)
    count = 0
    async for documents in documents_in(exchange.chunks(limit), exchange.headers["content-type"]):
        count += sum(not document.continues for document in documents)
        yield AddDocumentsRequest(documents=documents)
    yield AddDocumentsRequest(num_documents=count)  # the form is complete


async def _reply_accepted(exchange: Exchange, operation: OperationInfo) -> None:
    await exchange.reply_json(_operation(operation), ACCEPTED)


def _store(exchange: Exchange) -> str:
    return exchange.path_params["store"]


def _operation_name(exchange: Exchange) -> str:
    return exchange.path_params["operation"]


def _datastore(store: Any) -> dict[str, Any]:
    return {"id": store.name, "object": "datastore", **object_of(store)}


def _operation(info: OperationInfo) -> dict[str, Any]:
    """An operation, whose id stands in its path."""
    return {"id": info.name.rpartition("/")[2], "object": "operation", **object_of(info), "has_ended": info.has_ended}
