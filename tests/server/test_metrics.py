"""What Prometheus is told, after calls that went well and calls that did not."""

import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ops_files import alert_expressions, dashboard_expressions, documented_metrics, metrics_in
from prometheus_client.parser import text_string_to_metric_families
from running import RunningServer, figures_of, wait_until

import memlm
from memlm.api.generation import DraftSource, DraftUsage, Finished, FinishReason, Usage
from memlm.api.handles import TokenStream
from memlm.client import Client
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.server.telemetry.metrics import Metrics


@pytest.fixture(scope="module")
def watched(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path
) -> Iterator[RunningServer]:
    """A server for tests that look at how its metrics grow."""
    folder = tmp_path_factory.mktemp("watched")
    options = ("--threads", "1", "--http-port", "0", "--store-dir", str(folder / "stores"))
    with RunningServer(folder / "log", model_folder, store_folder, options=options) as server:
        yield server


@pytest.fixture
def client(watched: RunningServer) -> Iterator[Client]:
    with Client(watched.address) as client:
        client.wait_until_ready()
        yield client


def growth_of(server: RunningServer) -> Callable[[str], float]:
    """By how much a metric has grown since now."""
    before = figures_of(server)
    return lambda name: figures_of(server)[name] - before.get(name, 0)


def test_a_call_is_counted_by_its_status(watched: RunningServer, client: Client) -> None:
    growth = growth_of(watched)
    searches_of(client.generate("the memory", seed=1, max_tokens=2))
    with pytest.raises(InvalidInput):
        client.score("")
    wait_until(lambda: growth('memlm_requests_total{call="Generate",code="OK"}') == 1)
    assert growth('memlm_requests_total{call="Score",code="INVALID_ARGUMENT"}') == 1
    assert figures_of(watched)["memlm_requests_open"] == 0


def test_a_generation_counts_its_tokens_searches_and_weights(watched: RunningServer, client: Client) -> None:
    growth = growth_of(watched)
    stream = client.generate("the memory", seed=1, max_tokens=7)
    count = len(list(stream))
    assert stream.finished is not None
    usage = stream.finished.usage
    wait_until(lambda: growth('memlm_tokens_total{kind="generated"}') == count)
    assert growth('memlm_tokens_total{kind="prompt"}') == usage.prompt_tokens
    assert growth("memlm_searches_total") == usage.searches > 0
    assert growth("memlm_retrieval_seconds_count") == growth("memlm_lam_count") == 1
    assert 0 < growth("memlm_retrieval_seconds_sum") == pytest.approx(usage.retrieval_ms / usage.searches / 1000)
    assert growth("memlm_lam_sum") == pytest.approx(usage.lam) == pytest.approx(0.25)
    assert growth("memlm_time_to_first_token_seconds_count") == 1


def test_a_session_counts_until_it_is_deleted(watched: RunningServer, client: Client) -> None:
    with client.session() as session:
        session.append("the memory of a model")
        wait_until(lambda: (at := figures_of(watched))["memlm_sessions"] == 1 and not at["memlm_running"])
        assert figures_of(watched)["memlm_session_bytes"] > 0
    wait_until(lambda: figures_of(watched)["memlm_sessions"] == figures_of(watched)["memlm_session_bytes"] == 0)


def test_an_idle_worker_beats_and_holds_nothing(watched: RunningServer, client: Client) -> None:
    wait_until(lambda: not figures_of(watched)["memlm_running"])
    figures = figures_of(watched)
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
    options = ("--threads", "1", "--http-port", "0", "--workers", "2")
    other = Path(shutil.copytree(own_store, tmp_path / "other"))
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(tmp_path / "log", model_folder, own_store, other, options=options))
        client = stack.enter_context(Client(server.address))
        client.wait_until_ready()
        own = own_store.name
        alone = {"max_tokens": 9, "k": 4, "drafts": 0}  # contexts of drafts that are rejected count, too
        searches = sum(searches_of(client.generate("the memory", store=own, **alone)) for _ in range(2))
        shared = searches_of(client.generate("the memory", seed=1, **alone))
        wait_until(lambda: of_store(figures_of(server), own).get("contexts_total") == searches + shared)
        wait_until(lambda: of_store(figures_of(server), "other").get("contexts_total") == shared)
        figures = figures_of(server)
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
        wait_until(lambda: of_store(figures_of(server), own)["entries"] == mine["entries"] - size)
        assert of_store(figures_of(server), own)["deleted_share"] == pytest.approx(size / mine["entries"])

        client.datastores.unload("other")
        assert of_store(figures_of(server), "other") == {}
        client.datastores.load("other")
        wait_until(lambda: of_store(figures_of(server), "other").get("entries"))
        assert of_store(figures_of(server), "other")["contexts_total"] == 0

        (own_store / "CURRENT").write_text("nothing")
        wait_until(lambda: of_store(figures_of(server), own)["usable"] == 0)


def test_the_info_metric_names_version_model_dtype_and_device(watched: RunningServer, model_folder: Path) -> None:
    labels = f'device="cpu",dtype="float32",model="{model_folder.name}",version="{memlm.__version__}"'
    assert figures_of(watched)[f"memlm_info{{{labels}}}"] == 1


def test_the_drafts_of_calls_are_counted(watched: RunningServer, client: Client) -> None:
    growth = growth_of(watched)
    greedy = {"temperature": 0, "max_tokens": 12}
    plain = client.generate("the memory", drafts=0, **greedy).result()
    wait_until(lambda: growth("memlm_steps_total") == plain.finished.usage.steps == 12)
    growth = growth_of(watched)
    drafted = client.generate("the memory", drafts=4, draft=plain.text, **greedy).result()
    assert drafted.text == plain.text
    usage = drafted.finished.usage
    wait_until(lambda: growth("memlm_steps_total") == usage.steps < 12)
    for each in usage.drafts:
        label = f'{{source="{each.source}"}}'
        assert growth(f"memlm_spec_decode_num_draft_tokens_total{label}") == each.drafted > 0
        assert growth(f"memlm_spec_decode_num_accepted_tokens_total{label}") == each.accepted
        assert growth(f"memlm_spec_decode_num_drafts_total{label}") == each.drafts > 0
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
        "request": 4, "text": 16, "neighbors": 0, "datastore": 0,
    }  # fmt: skip
    assert {source: value(accepted, source=source) for source in DraftSource} == {
        "request": 0, "text": 10, "neighbors": 0, "datastore": 0,
    }  # fmt: skip
    assert {source: value("memlm_spec_decode_num_drafts_total", source=source) for source in DraftSource} == {
        "request": 2, "text": 6, "neighbors": 0, "datastore": 0,
    }  # fmt: skip


ADDED_BY_PROMETHEUS = {"instance", "job"}


def test_alerts_dashboard_and_documents_name_the_metrics_and_labels_that_the_server_exports(
    watched: RunningServer, client: Client, store_folder: Path
) -> None:
    searches_of(client.generate("the memory", max_tokens=5))
    wait_until(lambda: of_store(figures_of(watched), store_folder.name).get("contexts_total"))
    with urllib.request.urlopen(f"{watched.http_url}/metrics") as reply:
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
