"""What Prometheus is told, after calls that went well and calls that did not."""

import os
import shutil
import signal
import socket
import time
import urllib.request
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from ops_files import alert_expressions, dashboard_expressions, documented_metrics, metrics_in
from prometheus_client.parser import text_string_to_metric_families
from running import RunningServer, figures_at, free_port, wait_until

import memlm
from memlm.api.generation import DraftSource, DraftUsage, Finished, FinishReason, Usage
from memlm.api.handles import TokenStream
from memlm.client import Client
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.server.telemetry.metrics import Metrics


def test_calls_tokens_sessions_and_the_heartbeat_are_counted(
    model_folder: Path, store_folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port))
    with RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server:
        with Client(server.address) as client:
            client.wait_until_ready()
            stream = client.generate("the memory", seed=1, max_tokens=7)
            count = len(list(stream))
            with pytest.raises(InvalidInput):
                client.score("")
            session = client.session()
            session.append("the memory of a model")
            wait_until(lambda: (at := figures_at(port))["memlm_sessions"] == 1 and not at["memlm_running"])
            figures = figures_at(port)
        assert stream.finished is not None
        assert figures['memlm_requests_total{call="Generate",code="OK"}'] == 1
        assert figures['memlm_requests_total{call="Score",code="INVALID_ARGUMENT"}'] == 1
        assert figures['memlm_tokens_total{kind="generated"}'] == count
        assert figures['memlm_tokens_total{kind="prompt"}'] == stream.finished.usage.prompt_tokens
        assert figures["memlm_searches_total"] == stream.finished.usage.searches > 0
        assert figures["memlm_retrieval_seconds_count"] == figures["memlm_lam_count"] == 1
        usage = stream.finished.usage
        assert 0 < figures["memlm_retrieval_seconds_sum"] == pytest.approx(usage.retrieval_ms / usage.searches / 1000)
        assert figures["memlm_lam_sum"] == pytest.approx(usage.lam) == pytest.approx(0.25)
        assert figures["memlm_time_to_first_token_seconds_count"] == 1
        assert figures["memlm_session_bytes"] > 0
        assert figures["memlm_requests_open"] == 0
        assert 0 <= figures["memlm_heartbeat_age_seconds"] < 5
        assert (figures["memlm_running"], figures["memlm_waiting"], figures["memlm_cache_bytes"]) == (0, 0, 0)


def test_what_another_process_deletes_is_silent_here_too(model_folder: Path, own_store: Path, tmp_path: Path) -> None:
    log, options = tmp_path / "log", ("--threads", "1")
    with RunningServer(log, model_folder, own_store, options=options) as server, Client(server.address) as client:
        client.wait_until_ready()
        loud = client.search(None, "the memory", k=1)[0].document_id
        with Datastore.open(own_store) as store:
            store.delete([loud])
        wait_until(lambda: loud not in {n.document_id for n in client.search(None, "the memory", k=50)})
        assert client.datastores.list()[0].num_deleted_documents == 1


def status_at(port: int, path: str, method: str = "GET") -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    with closing(connection):
        connection.request(method, path)
        return connection.getresponse().status


def test_the_metrics_port_tells_readiness_and_knows_no_other_path(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port), "--worker-timeout", "3")
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        assert [status_at(port, path) for path in ("/metrics", "/metrics?name[]=a", "/health", "/livez")] == [200] * 4
        assert [status_at(port, path) for path in ("/", "/healthz", "/metrics/", "/../metrics", "/v1")] == [404] * 5
        assert status_at(port, "/metrics", "POST") == 405
        os.kill(server.worker_pid, signal.SIGSTOP)
        wait_until(lambda: status_at(port, "/health") == status_at(port, "/readyz") == 503)
        assert status_at(port, "/livez") == 200
        wait_until(lambda: status_at(port, "/health") == 200)  # another worker has taken its place


def test_connections_to_the_metrics_port_are_bounded_in_number_and_time(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, ExitStack() as stack:
        threads = len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
        begin_s = time.monotonic()
        half = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        for each in half:
            each.sendall(b"GET /metrics HTTP/1.1\r\n")
            each.settimeout(15)
        assert "memlm_running" in figures_at(port)
        assert len(list(Path(f"/proc/{server.process.pid}/task").iterdir())) < threads + 10
        assert half[0].recv(1) == b""  # the oldest gave way
        assert time.monotonic() - begin_s < 4
        assert half[-1].recv(1) == b""  # the latest had its time


def of_store(figures: dict[str, float], store: str) -> dict[str, float]:
    """The figures with this label alone, by what stands behind memlm_datastore_."""
    end = f'{{store="{store}"}}'
    return {
        name.removeprefix("memlm_datastore_").removesuffix(end): value
        for name, value in figures.items()
        if name.endswith(end)
    }


def searches_of(stream: TokenStream) -> int:
    """Reads a generation to its end."""
    for _ in stream:
        pass
    assert stream.finished is not None
    return stream.finished.usage.searches


def test_each_loaded_datastore_has_metrics_and_an_unloaded_one_none(
    model_folder: Path, own_store: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port), "--workers", "2")
    other = Path(shutil.copytree(own_store, tmp_path / "other"))
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(tmp_path / "log", model_folder, own_store, other, options=options))
        client = stack.enter_context(Client(server.address))
        client.wait_until_ready()
        own = own_store.name
        alone = {"max_tokens": 9, "k": 4, "drafts": 0}  # contexts of drafts that are rejected count, too
        searches = sum(searches_of(client.generate("the memory", store=own, **alone)) for _ in range(2))
        shared = searches_of(client.generate("the memory", seed=1, **alone))
        wait_until(lambda: of_store(figures_at(port), own).get("contexts_total") == searches + shared)
        wait_until(lambda: of_store(figures_at(port), "other").get("contexts_total") == shared)
        figures = figures_at(port)
        mine, others = of_store(figures, own), of_store(figures, "other")
        with Datastore.open(own_store) as store:
            snapshot = store.snapshot
            document = next(snapshot.documents())
            size = len(snapshot.tokens(document.id))
            assert mine["entries"] == others["entries"] == snapshot.num_entries
            assert mine["documents"] == snapshot.num_documents
            assert mine["bytes"] == snapshot.bytes_on_disk
        assert (mine["usable"], mine["deleted_share"]) == (1, 0)
        assert mine["weight_total"] == pytest.approx(0.25 * (searches + shared / 2))
        assert others["weight_total"] == pytest.approx(0.25 * shared / 2)
        bucket = f'memlm_datastore_search_seconds_bucket{{le="+Inf",store="{own}"}}'
        assert 0 < mine["search_seconds_count"] == figures[bucket] <= mine["contexts_total"]
        assert mine["search_seconds_sum"] > 0

        client.datastores.delete_documents(own, [document.id])
        wait_until(lambda: of_store(figures_at(port), own)["entries"] == mine["entries"] - size)
        assert of_store(figures_at(port), own)["deleted_share"] == pytest.approx(size / mine["entries"])

        client.datastores.unload("other")
        assert of_store(figures_at(port), "other") == {}
        client.datastores.load("other")
        wait_until(lambda: of_store(figures_at(port), "other").get("entries"))
        assert of_store(figures_at(port), "other")["contexts_total"] == 0

        (own_store / "CURRENT").write_text("nothing")
        wait_until(lambda: of_store(figures_at(port), own)["usable"] == 0)


def test_the_info_metric_names_version_model_dtype_and_device(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port), "--dtype", "bfloat16")
    with RunningServer(tmp_path / "log", model_folder, options=options):
        labels = f'device="cpu",dtype="bfloat16",model="{model_folder.name}",version="{memlm.__version__}"'
        assert figures_at(port)[f"memlm_info{{{labels}}}"] == 1


def test_the_drafts_of_calls_are_counted(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port))
    with (
        RunningServer(tmp_path / "log", model_folder, options=options) as server,
        Client(server.address) as client,
    ):
        plain = client.generate("the memory", temperature=0, max_tokens=12, drafts=0).result()
        figures = figures_at(port)
        assert figures["memlm_steps_total"] == plain.finished.usage.steps == 12
        drafted = client.generate("the memory", temperature=0, max_tokens=12, drafts=4, draft=plain.text).result()
        assert drafted.text == plain.text
        usage, figures = drafted.finished.usage, figures_at(port)
        assert figures["memlm_steps_total"] == 12 + usage.steps < 24
        for each in usage.drafts:
            label = f'{{source="{each.source}"}}'
            assert figures[f"memlm_spec_decode_num_draft_tokens_total{label}"] == each.drafted > 0
            assert figures[f"memlm_spec_decode_num_accepted_tokens_total{label}"] == each.accepted
            assert figures[f"memlm_spec_decode_num_drafts_total{label}"] == each.drafts > 0
        assert sum(each.accepted for each in usage.drafts) > 0


def test_drafts_are_counted_by_their_source() -> None:
    metrics = Metrics()
    usage = Usage(generated_tokens=9, steps=4, drafts=(DraftUsage("text", 8, 5, 3), DraftUsage("request", 2, 0, 1)))
    for _ in range(2):
        metrics.generation_times().event(Finished(FinishReason.LENGTH, None, usage))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("memlm_steps_total") == 8
    drafted, accepted = (f"memlm_spec_decode_num_{name}_tokens_total" for name in ("draft", "accepted"))
    assert {source: value(drafted, source=source) for source in DraftSource} == {
        "request": 4, "text": 16, "neighbors": 0, "datastore": 0, "nearby": 0,
    }  # fmt: skip
    assert {source: value(accepted, source=source) for source in DraftSource} == {
        "request": 0, "text": 10, "neighbors": 0, "datastore": 0, "nearby": 0,
    }  # fmt: skip
    assert {source: value("memlm_spec_decode_num_drafts_total", source=source) for source in DraftSource} == {
        "request": 2, "text": 6, "neighbors": 0, "datastore": 0, "nearby": 0,
    }  # fmt: skip


ADDED_BY_PROMETHEUS = {"instance", "job"}


def test_alerts_dashboard_and_documents_name_the_metrics_and_labels_that_the_server_exports(
    model_folder: Path, store_folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port), "--store-dir", str(tmp_path / "stores"))
    with (
        RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server,
        Client(server.address) as client,
    ):
        searches_of(client.generate("the memory", max_tokens=5))
        wait_until(lambda: of_store(figures_at(port), store_folder.name).get("contexts_total"))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
    exported = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    names = {family.name + "_total" * (family.type == "counter") for family in families}
    assert documented_metrics() == {
        name for name in names if name.startswith("memlm") and not name.endswith("_created")
    }
    for title, expression in (alert_expressions() | dashboard_expressions()).items():
        wanted = metrics_in(expression)
        assert wanted, title
        for name, labels in wanted.items():
            assert name in exported, (title, name)
            assert labels - ADDED_BY_PROMETHEUS <= exported[name], (title, name)
