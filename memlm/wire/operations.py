"""Operations <-> google.longrunning: records whose messages are Google's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from memlm.api.operations import (
    CancelOperationRequest,
    DeleteOperationRequest,
    GetOperationRequest,
    JobReport,
    JobState,
    ListOperationsRequest,
    OperationInfo,
    OperationPage,
    WaitOperationRequest,
)
from memlm.errors import InternalError, InvalidInput
from memlm.v1 import datastores_pb2
from memlm.wire.status import sent_error, status_of

PROGRESS = tuple(field.name for field in fields(OperationInfo) if field.name not in ("name", "report", "error"))


def _operation_to_wire(info: OperationInfo) -> Message:
    operation = operations_pb2.Operation(name=info.name, done=info.has_ended)
    told = {name: value for name in PROGRESS if (value := getattr(info, name)) is not None}
    told["state"] = datastores_pb2.JobState.Value(f"JOB_STATE_{info.state.name}")
    operation.metadata.Pack(datastores_pb2.JobMetadata(**told))
    if info.error is not None:
        operation.error.CopyFrom(status_of(info.error))
    elif info.report is not None:
        said = {field.name: getattr(info.report, field.name) for field in fields(JobReport)}
        operation.response.Pack(datastores_pb2.JobReport(**said))
    return operation


def _operation_from_wire(message: Any) -> OperationInfo:
    metadata, report = datastores_pb2.JobMetadata(), datastores_pb2.JobReport()
    if not message.metadata.Unpack(metadata):
        raise InternalError(f"{message.name} does not tell what a memlm server's operations tell")
    told = {
        field.name: getattr(metadata, field.name)
        for field in metadata.DESCRIPTOR.fields
        if not field.has_presence or metadata.HasField(field.name)
    }
    told["state"] = JobState(datastores_pb2.JobState.Name(metadata.state).removeprefix("JOB_STATE_").lower())
    error = None
    if message.HasField("error"):
        error = sent_error(message.error) or InternalError(message.error.message)
    elif message.HasField("response") and message.response.Unpack(report):
        told["report"] = JobReport(**{field.name: getattr(report, field.name) for field in fields(JobReport)})
    return OperationInfo(name=message.name, error=error, **told)


def _page_to_wire(page: OperationPage) -> Message:
    told = [_operation_to_wire(info) for info in page.operations]
    return operations_pb2.ListOperationsResponse(operations=told, next_page_token=page.next_page_token)


def _page_from_wire(message: Any) -> OperationPage:
    return OperationPage(tuple(map(_operation_from_wire, message.operations)), message.next_page_token)


def _wait_to_wire(request: WaitOperationRequest) -> Message:
    timeout = Duration()
    timeout.FromMilliseconds(round(1000 * request.timeout_s))
    return operations_pb2.WaitOperationRequest(name=request.name, timeout=timeout)


def _list_request_from_wire(message: Any) -> ListOperationsRequest:
    for name, taken in (("filter", ("",)), ("name", ("", "operations"))):
        if (said := getattr(message, name)) not in taken:
            raise InvalidInput(f"{name} is {said!r}; this server tells all operations of its caller", field=name)
    if message.page_size < 0:
        raise InvalidInput(f"page_size is {message.page_size}; expected 0 or more", field="page_size")
    return ListOperationsRequest(message.page_size, message.page_token)


TO_WIRE: dict[type, Callable[[Any], Message]] = {
    OperationInfo: _operation_to_wire,
    GetOperationRequest: lambda request: operations_pb2.GetOperationRequest(name=request.name),
    ListOperationsRequest: lambda request: operations_pb2.ListOperationsRequest(
        page_size=request.page_size, page_token=request.page_token
    ),
    WaitOperationRequest: _wait_to_wire,
    CancelOperationRequest: lambda request: operations_pb2.CancelOperationRequest(name=request.name),
    DeleteOperationRequest: lambda request: operations_pb2.DeleteOperationRequest(name=request.name),
    OperationPage: _page_to_wire,
}
FROM_WIRE: dict[type[Message], Callable[[Any], Any]] = {
    operations_pb2.Operation: _operation_from_wire,
    operations_pb2.ListOperationsResponse: _page_from_wire,
    operations_pb2.GetOperationRequest: lambda message: GetOperationRequest(message.name),
    operations_pb2.ListOperationsRequest: _list_request_from_wire,
    operations_pb2.WaitOperationRequest: lambda message: WaitOperationRequest(
        message.name, message.timeout.ToMilliseconds() / 1000
    ),
    operations_pb2.CancelOperationRequest: lambda message: CancelOperationRequest(message.name),
    operations_pb2.DeleteOperationRequest: lambda message: DeleteOperationRequest(message.name),
}
