"""What an operator learns of each call: a line under its id, and a span; nothing that people wrote unless asked for."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from running import RunningServer, wait_until

from memlm.api.generation import Accepted, DraftUsage, Finished, FinishReason, Usage
from memlm.client import Client
from memlm.errors import InvalidInput, NotFound
from memlm.server.config import ServerConfig
from memlm.server.telemetry.calls import CallLogger, CallRecord, Tracer
from memlm.server.telemetry.logs import JsonLines
from memlm.server.telemetry.metrics import Metrics

PROMPT = "the memory of nobody"


def lines_of(server: RunningServer) -> list[dict]:
    """The lines that are JSON: only what was said before the log was set up is not."""
    return [json.loads(line) for line in server.output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("prompts", [False, True])
def test_each_call_is_a_line_under_its_id(
    model_folder: Path, store_folder: Path, tmp_path: Path, prompts: bool
) -> None:
    options = ("--threads", "1", "--log-format", "json", *(["+log_prompts=true"] if prompts else []))
    with RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server:
        with Client(server.address) as client:
            with client.generate(PROMPT, max_tokens=3, temperature=0) as stream:
                tokens = list(stream)
            with pytest.raises(NotFound):
                client.search("nowhere", "a secret text")
            with client.generate("given up", temperature=0) as early:
                next(early)
            list(client.chat("a talk", max_tokens=2, temperature=0))
        wait_until(lambda: len([line for line in lines_of(server) if "call" in line]) >= 4)
        lines = [line for line in lines_of(server) if "call" in line]
        fields = {(line["call"], line["code"]): line for line in reversed(lines)}  # the first Generate counts
    generated, failed = fields["Generate", "OK"], fields["Search", "NOT_FOUND"]
    assert generated["id"] == stream.accepted.request_id
    assert (generated["generated_tokens"], generated["reason"]) == (len(tokens), "length")
    assert (generated["searches"], generated["caller"], generated["level"]) == (len(tokens), "", "info")
    assert generated["ms"] >= generated["prefill_ms"] + generated["decode_ms"] > 0
    assert "nowhere" in failed["error"]
    assert generated.get("prompt") == (PROMPT if prompts else None)
    assert (PROMPT in server.output) == prompts
    assert (fields["Chat", "OK"].get("prompt"), fields["Chat", "OK"]["generated_tokens"]) == (
        "user: a talk" if prompts else None,
        2,
    )
    assert "a secret text" not in server.output


def test_a_line_stays_one_line_whatever_is_in_it() -> None:
    record = logging.makeLogRecord(
        {"name": "n", "levelno": 20, "levelname": "INFO", "msg": "a\nb %s", "args": ("c\n",)}
    )
    record.fields = {"x": "y\nz"}
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line) | {"message": "a\nb c\n", "x": "y\nz", "level": "info", "logger": "n"} == json.loads(line)


def test_a_caller_that_left_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC calls it one, with a traceback, and gives no place to catch it; all else that it tells stays as it is."""
    CallLogger(Metrics(), None)
    grpc_logger = logging.getLogger(cygrpc.__name__)
    caplog.set_level(logging.INFO)
    for error in (cygrpc.ExecuteBatchError("SendStatusFromServerOperation"), ValueError("a bug")):
        try:
            raise error
        except (cygrpc.ExecuteBatchError, ValueError):
            grpc_logger.exception("%s raised in Generate", type(error).__name__)
    disconnect, bug = caplog.records
    assert (disconnect.levelname, disconnect.exc_info) == ("INFO", None)
    assert disconnect.getMessage() == "the client had left: ExecuteBatchError raised in Generate"
    assert bug.levelname == "ERROR"
    assert bug.exc_info is not None
    caplog.clear()
    caplog.set_level(logging.WARNING)
    try:
        raise cygrpc.ExecuteBatchError("SendStatusFromServerOperation")
    except cygrpc.ExecuteBatchError:
        grpc_logger.exception("raised in Generate")
    assert not caplog.records


def test_who_leaves_after_the_last_event_had_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """Any client may hang up there, before the status is sent; only one that left earlier was cancelled."""
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    calls = CallLogger(metrics, None)
    for event in (Accepted("id", 1, None, 8, 0.25, 1.0), Finished(FinishReason.LENGTH, None, Usage())):
        with suppress(asyncio.CancelledError), calls.watch("Generate", Nobody()) as call:
            call.record_event(event, metrics)
            raise asyncio.CancelledError
    assert [record.fields["code"] for record in caplog.records] == ["CANCELLED", "OK"]


def test_a_line_has_what_came_of_drafts_where_there_were_any(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    calls = CallLogger(metrics, None)
    for drafts in ((), (DraftUsage("text", 8, 5), DraftUsage("request", 2, 0))):
        with calls.watch("Generate", Nobody()) as call:
            call.record_event(Finished(FinishReason.LENGTH, None, Usage(drafts=drafts)), metrics)
    none, some = (record.fields for record in caplog.records)
    assert not {"drafted", "accepted"} & set(none)
    assert (some["drafted"], some["accepted"]) == (10, 5)


class Nobody:
    """A caller's context that tells nothing."""

    def peer(self) -> str:
        return ""

    def invocation_metadata(self) -> None:
        return None


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans, as a collector does."""

    def __init__(self) -> None:
        self.spans: dict[str, list] = {}
        self.lock = threading.Lock()

    def Export(self, request, context):
        with self.lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.setdefault(span.name, []).append(span)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server, collector = grpc.server(futures.ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_a_call_is_a_span_of_its_callers_trace(collector, model_folder: Path, tmp_path: Path) -> None:
    taken, endpoint = collector
    trace, above = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    options = ("--threads", "1", "--otlp", endpoint)
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, Client(server.address) as client:
        client._transport._metadata = (("traceparent", f"00-{trace}-{above}-01"),)
        with client.generate(PROMPT, max_tokens=3, temperature=0) as stream:
            list(stream)
        with pytest.raises(NotFound):
            client.search("nowhere", "a")
    (span,), (failed,) = taken.spans["Generate"], taken.spans["Search"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, above)
    fields = {each.key: each.value for each in span.attributes}
    assert fields["memlm.request_id"].string_value == stream.accepted.request_id
    assert fields["memlm.generated_tokens"].int_value == 3
    assert "memlm.prompt" not in fields
    assert {each.key: each.value.string_value for each in failed.attributes}["rpc.grpc.status_code"] == "NOT_FOUND"
    for phase in ("queue", "prefill", "decode"):
        (part,) = taken.spans[phase]
        assert (part.trace_id, part.parent_span_id) == (span.trace_id, span.span_id)
        assert span.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidInput, match=r"pip install 'memlm\[otel\]'"):
        Tracer("http://127.0.0.1:1")
    with pytest.raises(InvalidInput, match="http://HOST:PORT"):
        ServerConfig(Path("model"), otlp="127.0.0.1:4317")
    with pytest.raises(InvalidInput, match="text, json"):
        ServerConfig(Path("model"), log_format="xml")
    assert CallRecord("Generate").id != CallRecord("Generate").id
