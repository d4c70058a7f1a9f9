"""The gRPC channel of a client: options, credentials, stubs, and the errors of calls.

The functions in pairs (`start`, `aio_start`) do one thing over a channel of either kind, `grpc` or `grpc.aio`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message_factory import GetMessageClass

from memlm.base.addresses import channel_options_of
from memlm.client.resume import Tls
from memlm.errors import InvalidInput, Unavailable, check_kind
from memlm.wire import codec
from memlm.wire.limits import KEEPALIVE_S
from memlm.wire.status import error_of

T = TypeVar("T")

# Streams cannot be retried, as half of one cannot be taken back. A delete is not retried either: if its response got
# lost, the second attempt would raise NotFound.
RETRIED = {
    "memlm.v1.Generation": ("Score", "Trace", "Tokenize", "Detokenize", "GetModel", "GetServerInfo"),
    "memlm.v1.Datastores": ("ListDatastores", "GetDatastore", "Search", "FindPassages"),
    "memlm.v1.Sessions": ("GetSession", "ListSessions"),
    "google.longrunning.Operations": ("GetOperation", "ListOperations", "WaitOperation"),
}


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Message limits, retries of read-only calls, and keepalive pings at the rate that the server permits."""
    retries = {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2}
    names = [{"service": service, "method": method} for service, methods in RETRIED.items() for method in methods]
    config = {"methodConfig": [{"name": names, "retryPolicy": {**retries, "retryableStatusCodes": ["UNAVAILABLE"]}}]}
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.service_config", json.dumps(config)),
        ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_S),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # the limit of an attempt to connect
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]


def channel_to(kind: Any, target: str, max_message_bytes: int, tls: Tls | None) -> Any:
    """Opens a channel of a kind (`grpc`, `grpc.aio`). Raises InvalidInput for a target that is none, and if a file of
    `tls` cannot be read.
    """
    check_kind("target", target, str, "HOST:PORT, as localhost:50051")
    target = address_in(target, has_tls=tls is not None)
    options = [*channel_options(max_message_bytes), *channel_options_of(target)]
    if tls is None:
        return kind.insecure_channel(target, options=options)
    try:
        ca, key, cert = (None if path is None else Path(path).read_bytes() for path in (tls.ca, tls.key, tls.cert))
    except OSError as error:
        raise InvalidInput(f"a certificate cannot be read: {error}", field="tls") from error
    return kind.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def address_in(target: str, *, has_tls: bool) -> str:
    """The target without the scheme of a URL. Raises InvalidInput for a URL with a path, or with other TLS."""
    scheme, is_url, rest = target.partition("://")
    if not is_url or scheme.lower() not in ("http", "https", "grpc", "grpcs"):
        return target
    address = rest.removesuffix("/")
    if not re.fullmatch(r"[^/?#@]+:\d+", address):
        raise InvalidInput(f"target is {target!r}; expected HOST:PORT, the port of gRPC", field="target")
    if scheme.lower() in ("https", "grpcs") and not has_tls:
        raise InvalidInput(f"target is {target!r}, and no TLS is given; give tls (--tls, or --ca FILE)", field="target")
    return address


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call. Without TLS, a token is sent in the clear."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def rpcs_by_request(channel: Any) -> dict[str, Any]:
    """The rpcs of the contract over a channel, by the names of their request types."""
    return {
        f"{method.name}Request": _stub_factory(channel, method)(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        for service in codec.SERVICES
        for method in service.methods
    }


def _stub_factory(channel: Any, method: Any) -> Any:
    if method.client_streaming:
        return channel.stream_unary
    return channel.unary_stream if method.server_streaming else channel.unary_unary


@contextmanager
def translate_rpc_errors(target: str) -> Iterator[None]:
    """Raises the error of a failed call as one of `memlm.errors`."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, target) from None
    except (ValueError, grpc.aio.UsageError) as error:
        raise InvalidInput(f"the client of {target} is closed ({error}); open another one") from None


def run(work: Callable[[], T]) -> T:
    """Does work that reads files."""
    return work()


async def aio_run(work: Callable[[], T]) -> T:
    """Does work that reads files, in a thread."""
    return await asyncio.to_thread(work)


def start(rpc: Any, messages: Iterator[Any], **options: Any) -> Any:
    """Starts an upload."""
    return rpc.future(messages, **options)


def aio_start(rpc: Any, messages: Any, **options: Any) -> Any:
    """Starts an upload."""
    return rpc(messages, **options)


def result(call: Any) -> Any:
    """The response of an upload."""
    return call.result()


async def aio_result(call: Any) -> Any:
    """The response of an upload."""
    return await call


def read(call: Any) -> Any:
    """The next message of a stream, None at its end."""
    return next(call, None)


async def aio_read(call: Any) -> Any:
    """The next message of a stream, None at its end."""
    message = await call.read()
    return None if message is grpc.aio.EOF else message


def stream_broke_off(target: str) -> Unavailable:
    """The error of a stream that ended without its last event."""
    return Unavailable(f"{target} broke the stream off before its end; ask again")


def not_ready(target: str, timeout_s: float) -> Unavailable:
    """The error of a server that did not become ready in time."""
    return Unavailable(f"{target} was not ready within {timeout_s:g} s; check the address, and the server's log")
