"""One record a call: it is counted, logged in one line under its id, and traced with OpenTelemetry where that is
wanted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import grpc
from grpc._cython import cygrpc

from memlm.api.generation import Finished
from memlm.api.params import GenerateRequest
from memlm.errors import InvalidInput, MemlmError
from memlm.server.telemetry.metrics import GenerationTimes, Metrics
from memlm.wire.codec import WireEvent
from memlm.wire.status import CODES, kind_of

PHASES = ("queue", "prefill", "decode")

log = logging.getLogger("memlm.server.calls")


class Tracer:
    """Makes a span of each call, with its phases below it, and sends them to a collector."""

    def __init__(self, endpoint: str) -> None:
        """Takes the address of a collector that speaks OTLP over gRPC, as http://HOST:PORT or https://HOST:PORT.

        Raises InvalidInput where the extra is not installed.
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
        """A call's span; what the call has told by its end stands in it."""
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
        """Sends what has not been sent."""
        self._provider.shutdown()

    def _add_phases(self, call: CallRecord, span: Any) -> None:
        """What a generation's time went into, one after the other."""
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
    """One call, under the id that the worker's log, an internal error and `Accepted` know it by, too."""

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
        """Takes in what is asked; of what people wrote nothing, unless `prompts` are wanted."""
        if isinstance(request, GenerateRequest):
            self.fields |= {"session": request.session} if request.session else {}
            if prompts:
                self.fields["prompt"] = request.prompt

    def record_event(self, event: WireEvent, metrics: Metrics) -> None:
        """Takes in what a generation tells."""
        self._times = self._times or metrics.generation_times()
        self._times.event(event)
        if isinstance(event, Finished):
            self.has_finished, usage = True, event.usage
            self.fields |= {"reason": event.reason.value}
            self.fields |= {name: getattr(usage, name) for name in ("prompt_tokens", "generated_tokens", "searches")}
            for name in ("queue_ms", "prefill_ms", "decode_ms", "retrieval_ms"):
                self.fields[name] = round(getattr(usage, name), 3)


class CallLogger:
    """Watches all calls of a server."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None) -> None:
        """Takes what counts, and what traces."""
        self._metrics, self._tracer = metrics, tracer
        logging.getLogger(cygrpc.__name__).addFilter(downgrade_disconnects)

    @contextmanager
    def watch(self, name: str, context: grpc.aio.ServicerContext) -> Iterator[CallRecord]:
        """Watches a call to its end, however it ends."""
        call, begin_s = CallRecord(name, peer=context.peer()), time.monotonic()
        span = self._tracer.span(call, context.invocation_metadata()) if self._tracer else nullcontext()
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
            except BaseException:  # a caller that heard the last event may leave before the status: it had all it asked
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
    """Filter of gRPC's own log: that a caller left just as its answer went out is no error; one line says it."""
    if record.exc_info and isinstance(record.exc_info[1], cygrpc.ExecuteBatchError):
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        record.msg, record.args = f"nobody was left to answer: {record.getMessage()}", ()
        record.exc_info = record.exc_text = None
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


def _plain(value: Any) -> str:
    """A value that stays one word in its line, whoever made it up."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)
