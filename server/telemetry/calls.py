"""Records of calls: each is counted, logged in one line under its id, and optionally traced with OpenTelemetry."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

from memlm.api.generation import Finished
from memlm.api.params import StreamRequest
from memlm.errors import InvalidInput, MemlmError
from memlm.server.telemetry.metrics import GenerationTimes, Metrics
from memlm.wire.codec import WireEvent
from memlm.wire.status import CODES, kind_of

PHASES = ("queue", "prefill", "decode")
GRPC_LOGGER = "grpc._cython.cygrpc"  # where grpc.aio logs errors of its own

log = logging.getLogger("memlm.server.calls")


class Transport(Protocol):
    """The connection of one call, as `grpc.aio.ServicerContext` has it."""

    def peer(self) -> str:
        """The client's address."""

    def invocation_metadata(self) -> Any:
        """Pairs of lower-case names and values: `authorization`, `traceparent`."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline, None without one."""

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`."""


class Tracer:
    """Sends a span for each call, with spans for its phases, to a collector."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is a collector with OTLP over gRPC, as http://HOST:PORT or https://HOST:PORT. Raises InvalidInput
        if the extra is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise InvalidInput(
                f"tracing needs OpenTelemetry, which is not installed ({error.name}); pip install 'memlm[otel]'",
                field="otlp",
            ) from error
        self._provider: Any = TracerProvider(resource=Resource.create({"service.name": "memlm"}))
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Any = self._provider.get_tracer("memlm.server")
        self._propagator: Any = TraceContextTextMapPropagator()
        self._server = SpanKind.SERVER

    @contextmanager
    def span(self, call: CallRecord, metadata: Any) -> Iterator[None]:
        """A span for a call, with the fields that the call has at its end."""
        parent = self._propagator.extract({key: value for key, value in metadata or () if isinstance(value, str)})
        fields = {"rpc.system": "grpc", "rpc.method": call.name, "memlm.request_id": call.id}
        begin_ns = round(1e9 * call.started_s)
        span = self._tracer.start_span(
            call.name, context=parent, kind=self._server, attributes=fields, start_time=begin_ns
        )
        try:
            yield
        finally:
            span.set_attribute("rpc.grpc.status_code", call.code)
            for name, value in call.fields.items():
                if name != "prompt":
                    span.set_attribute(f"memlm.{name}", value)
            self._add_phases(call, span)
            span.end()

    def close(self) -> None:
        """Sends pending spans."""
        self._provider.shutdown()

    def _add_phases(self, call: CallRecord, span: Any) -> None:
        """Adds the phases of a generation, one after the other."""
        from opentelemetry.trace import set_span_in_context

        begin_ns = round(1e9 * call.started_s)
        for phase in PHASES:
            if (ms := call.fields.get(f"{phase}_ms")) is None:
                return
            end_ns = begin_ns + round(1e6 * ms)
            child = self._tracer.start_span(phase, context=set_span_in_context(span), start_time=begin_ns)
            child.end(end_time=end_ns)
            begin_ns = end_ns


@dataclass(slots=True)
class CallRecord:
    """One call, under the id that the worker's log, an internal error and `Accepted` use too."""

    name: str
    id: str = field(default_factory=lambda: token_hex(8))
    caller: str = ""
    stores: frozenset[str] | None = frozenset()  # that the caller may know of; None: all
    peer: str = ""
    code: str = "OK"
    started_s: float = field(default_factory=time.time)
    fields: dict[str, Any] = field(default_factory=dict)
    has_finished: bool = False
    _times: GenerationTimes | None = None

    def record_request(self, request: Any, *, prompts: bool) -> None:
        """Records a request, without texts that people wrote, unless `prompts` is set."""
        if isinstance(request, StreamRequest):
            self.fields |= {"session": request.session} if request.session else {}
            if prompts:
                self.fields["prompt"] = request.shown_prompt

    def record_event(self, event: WireEvent, metrics: Metrics) -> None:
        """Records an event of a generation."""
        self._times = self._times or metrics.generation_times()
        self._times.event(event)
        if isinstance(event, Finished):
            self.has_finished, usage = True, event.usage
            self.fields |= {"reason": event.reason.value}
            self.fields |= {name: getattr(usage, name) for name in ("prompt_tokens", "generated_tokens", "searches")}
            if usage.searched_share is not None and usage.searched_share < 1:
                self.fields["searched_share"] = usage.searched_share
            if usage.drafts:
                self.fields |= {
                    name: sum(getattr(each, name) for each in usage.drafts) for name in ("drafted", "accepted")
                }
            for name in ("queue_ms", "prefill_ms", "decode_ms", "retrieval_ms"):
                self.fields[name] = round(getattr(usage, name), 3)


class CallLogger:
    """Counts, logs and traces the calls of a server."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None) -> None:
        self._metrics, self._tracer = metrics, tracer
        logging.getLogger(GRPC_LOGGER).addFilter(downgrade_disconnects)

    @contextmanager
    def watch(self, name: str, transport: Transport) -> Iterator[CallRecord]:
        """Yields the record of a call. When the block ends, the call is logged."""
        call, begin_s = CallRecord(name, peer=transport.peer()), time.monotonic()
        span = self._tracer.span(call, transport.invocation_metadata()) if self._tracer else nullcontext()
        with span, self._metrics.call(name) as record_end:
            try:
                yield call
            except MemlmError as error:
                call.code = CODES[kind_of(error)].name
                call.fields["error"] = str(error)
                raise
            except Exception:
                call.code = "INTERNAL"
                raise
            except BaseException:  # a client with the last event may leave before the status, and misses nothing
                call.code = "OK" if call.has_finished else "CANCELLED"
                raise
            finally:
                record_end(call.code)
                self._log(call, 1000 * (time.monotonic() - begin_s))

    def _log(self, call: CallRecord, ms: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {"call": call.name, "id": call.id, "caller": call.caller, "peer": call.peer}
        fields |= {"code": call.code, "ms": round(ms, 3), **call.fields}
        log.info(" ".join(f"{name}={_plain(value)}" for name, value in fields.items()), extra={"fields": fields})


def downgrade_disconnects(record: logging.LogRecord) -> bool:
    """Filter for gRPC's log: a client that leaves as its answer goes out is no error, and takes one line."""
    if record.exc_info and type(record.exc_info[1]).__name__ == "ExecuteBatchError":  # a private class of gRPC
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        record.msg, record.args = f"the client had left: {record.getMessage()}", ()
        record.exc_info = record.exc_text = None
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


def _plain(value: Any) -> str:
    """A value as one printable word, since callers choose some values."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)
