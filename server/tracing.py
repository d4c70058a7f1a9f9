"""Spans of OpenTelemetry, an extra: `pip install 'memlm[otel]'`. A call continues the trace that its caller began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memlm.errors import InvalidInput
from memlm.server.calls import Call

PHASES = ("queue", "prefill", "decode")


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
    def span(self, call: Call, metadata: Any) -> Iterator[None]:
        """A call's span; what the call has told by its end stands in it."""
        above = self._propagator.extract({key: value for key, value in metadata or () if isinstance(value, str)})
        told = {"rpc.system": "grpc", "rpc.method": call.name, "memlm.request_id": call.id}
        begin_ns = round(1e9 * call.begun_s)
        span = self._tracer.start_span(
            call.name, context=above, kind=self._server, attributes=told, start_time=begin_ns
        )
        try:
            yield
        finally:
            span.set_attribute("rpc.grpc.status_code", call.code)
            for name, value in call.told.items():
                if name != "prompt":
                    span.set_attribute(f"memlm.{name}", value)
            self._phases(call, span)
            span.end()

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()

    def _phases(self, call: Call, span: Any) -> None:
        """What a generation's time went into, one after the other."""
        from opentelemetry.trace import set_span_in_context

        begin_ns = round(1e9 * call.begun_s)
        for phase in PHASES:
            if (ms := call.told.get(f"{phase}_ms")) is None:
                return
            end_ns = begin_ns + round(1e6 * ms)
            below = self._tracer.start_span(phase, context=set_span_in_context(span), start_time=begin_ns)
            below.end(end_time=end_ns)
            begin_ns = end_ns
