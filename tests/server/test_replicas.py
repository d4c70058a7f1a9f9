"""Inference on a Ray cluster: the answers of a plain server, whatever replica gives them, dies, or comes."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_S, RunningServer, family_of, figures_of, is_alive, niceness_of, wait_until
from running_replicas import CLUSTER_S, replica_pids, serve
from texts import make_text

from memlm.client import Client
from memlm.data.corpus import Corpus
from memlm.errors import DeadlineExceeded, InvalidInput, MemlmError, NotFound, Overloaded, Unavailable
from memlm.generation.sessions.names import home_of
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.server.cluster_config import ClusterConfig
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import Failed
from memlm.server.ownership import new_name

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")
cloudpickle = pytest.importorskip("ray.cloudpickle")
applications = pytest.importorskip("memlm.server.inference.replicas.applications")
deployment = pytest.importorskip("memlm.server.inference.replicas.deployment")

PROMPTS = [make_text(number, 6) for number in range(8)]
SCALE_SOON = (
    "import memlm.server.inference.replicas.deployment as it\n"
    "it.UPSCALE_DELAY_S = it.METRICS_S = 0.5; it.DOWNSCALE_DELAY_S = 15.0"
)


NODE, LARGE, WITH_GPUS = {"CPU": 2.0}, {"CPU": 16.0}, {"CPU": 8.0, "GPU": 2.0}


def settings(**options: Any) -> ServerConfig:
    cluster = ClusterConfig(
        engine="ray", num_replicas=options.pop("replicas", 2), max_replicas=options.pop("most", None)
    )
    return ServerConfig(Path("model"), cluster=cluster, **options)


@pytest.mark.parametrize(
    ("nodes", "replicas", "most", "threads", "together"),
    [
        ([NODE], 1, None, 2, 1),
        ([NODE], 2, None, 1, 2),
        ([NODE, NODE], 2, None, 2, 1),
        ([NODE], 1, 2, 1, 2),
        ([NODE, LARGE], 3, None, 5, 3),
        ([NODE, {"memory": 1.0}], 4, None, 1, 2),  # more than fit; and a node without processors
        ([WITH_GPUS], 4, None, 2, 4),
    ],
)
def test_replicas_have_the_threads_that_fit(nodes, replicas, most, threads, together) -> None:
    config = deployment.settings_of(settings(replicas=replicas, most=most), nodes)
    assert config.num_threads == threads
    assert deployment.most_on_one_node(config, nodes, needs_gpu=False) == together


def test_replicas_with_gpus_share_a_node_of_as_many() -> None:
    config = deployment.settings_of(settings(replicas=4), [WITH_GPUS])
    assert deployment.most_on_one_node(config, [WITH_GPUS, LARGE], needs_gpu=True) == 2


def test_a_cluster_without_processors_is_refused() -> None:
    with pytest.raises(Unavailable, match="no processors"):
        deployment.settings_of(settings(), [{"memory": 1.0}])


def test_limits_are_divided_among_replicas() -> None:
    """Those of RAM among all that there may be: `most` may be too many for one machine, fewer never exceed it."""
    given = settings(replicas=2, most=4, max_running=8, max_sessions=10, max_session_bytes=8 << 30)
    config = deployment.settings_of(given, [LARGE])
    assert (config.max_running, config.max_sessions) == (4, 5)
    assert config.max_session_bytes == 2 << 30
    assert config.max_cache_bytes == 0  # half of the RAM of the machine that a replica gets
    assert deployment.settings_of(replace(given, max_cache_bytes=4 << 30), [LARGE]).max_cache_bytes == 1 << 30
    alone = deployment.settings_of(settings(replicas=1, most=4, max_session_bytes=8 << 30), [LARGE])
    assert alone.max_session_bytes == 2 << 30


def test_replicas_get_no_secrets(tmp_path: Path) -> None:
    """All processes of a cluster can read their settings."""
    files = {name: tmp_path / name for name in ("auth_file", "tls_cert", "tls_key", "tls_client_ca")}
    config = deployment.settings_of(settings(otlp="http://user:secret@host:1", **files), [NODE])
    assert {getattr(config, name) for name in ("otlp", *files)} == {None}


@pytest.mark.parametrize("error", [
    kind("a problem", **details) for kind, details in [
        (InvalidInput, {"field": "prompt"}), (NotFound, {"kind": "session", "name": "one"}),
        (Overloaded, {"retry_after_s": 7.5}),
        *((each, {}) for each in MemlmError.__subclasses__() if each not in (InvalidInput, NotFound, Overloaded)),
    ]
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_errors_keep_their_class_and_details_on_rays_wire(error: MemlmError) -> None:
    (copy,) = cloudpickle.loads(cloudpickle.dumps([Failed("id", error)]))
    assert type(copy.error) is type(error)
    assert (copy.id, str(copy.error), vars(copy.error)) == ("id", "a problem", vars(error))


def homes(names: list[str]) -> set[str]:
    return {home_of(name) for name in names}


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory, long_model: Path, corpus_folder: Path) -> Path:
    store = tmp_path_factory.mktemp("stores") / "store"
    build_index(load_checkpoint(long_model), Corpus([corpus_folder]), store, check="none")
    return store


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, long_model: Path, long_store: Path) -> Iterator[RunningServer]:
    """Two replicas, with sessions on the disk. One cluster for all tests of this file."""
    folder = tmp_path_factory.mktemp("pair")
    store = Path(shutil.copytree(long_store, folder / "store"))
    options = ("--replicas", "2", "--session-dir", str(folder / "sessions"), "--http-port", "0")
    with serve(folder, long_model, store, options=options) as server:
        yield server
        assert_drains(server)


def assert_drains(server: RunningServer) -> None:
    """SIGTERM lets a generation finish, and then leaves no process of the cluster."""
    with Client(server.address) as client, client.generate("a", temperature=0, max_tokens=40) as stream:
        next(stream)
        family = family_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert len(list(stream)) == 39
    assert server.process.wait(PATIENCE_S) == 0
    wait_until(lambda: not any(map(is_alive, family)))
    assert "SIGTERM received" not in server.output  # of Ray's handler, with a stack


def test_answers_are_those_of_the_library(pair: RunningServer, long_model: Path, long_store: Path) -> None:
    """Greedy and drawn with a seed, one at a time: each replica has its turn, and all give the same bits."""
    with Client(pair.address) as client, LanguageModel(load_checkpoint(long_model), [long_store]) as library:
        assert [niceness_of(pid) for pid in replica_pids(pair)] == 2 * [niceness_of(0)]  # not below other work
        for temperature in (0, 1):
            for seed, prompt in enumerate(PROMPTS):
                request = {"max_tokens": 8, "temperature": temperature, "seed": seed, "neighbors": 2}
                there, here = list(client.generate(prompt, **request)), list(library.generate(prompt, **request))
                assert [(each.id, each.logprob, each.neighbors) for each in there] == [
                    (each.id, each.logprob, each.neighbors) for each in here
                ]
        assert client.score(PROMPTS[0]).bits_per_byte == library.score(PROMPTS[0]).bits_per_byte


def test_a_session_stays_with_its_replica(pair: RunningServer) -> None:
    with Client(pair.address) as client:
        names = [client.session().name for _ in range(16)]
        assert len(homes(names)) == 2
        for name, prompt in zip(names, PROMPTS, strict=False):
            assert client.append_to_session(name, prompt).num_tokens > 0
            fork = client.fork_session(name).name
            assert home_of(fork) == home_of(name)
            assert client.get_session(fork).num_tokens == client.get_session(name).num_tokens
            names.append(fork)
        assert sorted(each.name for each in client.list_sessions()) == sorted(names)
        for name in names:
            client.delete_session(name)
        assert client.list_sessions() == ()


def test_errors_are_those_of_a_plain_server(pair: RunningServer) -> None:
    with Client(pair.address) as client:
        with pytest.raises(NotFound, match="no session 'nowhere'") as error:
            client.generate("a", session="nowhere")
        assert (error.value.kind, error.value.name) == ("session", "nowhere")  # of the status's details
        with pytest.raises(DeadlineExceeded):
            list(client.generate("a", temperature=0, timeout_s=0.3))
        wait_until(lambda: figures_of(pair)["memlm_running"] == 0)  # it ended there, too


def test_a_cancelled_generation_ends_at_its_replica(pair: RunningServer) -> None:
    with Client(pair.address) as client:
        for _ in range(2):
            stream = client.generate("a", temperature=0, max_tokens=30_000)
            next(stream)
            wait_until(lambda: figures_of(pair)["memlm_running"] == 1)
            stream.close()
            wait_until(lambda: figures_of(pair)["memlm_running"] == 0)


def test_a_change_of_a_datastore_reaches_all_replicas(pair: RunningServer) -> None:
    with Client(pair.address) as client:
        client.datastores.remember("store", "The gateway listens on port 7443.", document_id="gateway")
        assert {client.datastores.get("store").num_documents for _ in range(16)} == {9}
        client.datastores.delete_documents("store", ["gateway"])
        for _ in range(16):
            assert all(each.document_id != "gateway" for each in client.search("store", "The gateway", k=400))
        client.datastores.unload("store")
        assert {client.datastores.list() for _ in range(16)} == {()}
        client.datastores.load(str(pair.log.parent / "store"))
        assert {len(client.datastores.list()) for _ in range(16)} == {1}


def test_who_dies_fails_its_own_requests_alone(pair: RunningServer) -> None:
    """A replica is killed under load. Its streams end with a status, its sessions go on at the other one."""
    outcomes = dict[str, list[object]]()

    def ask(name: str) -> None:
        outcomes[name] = [0]
        with suppress(MemlmError), Client(pair.address) as client:
            try:
                with client.generate("", session=name, temperature=0, max_tokens=60) as stream:
                    for _ in stream:
                        outcomes[name][0] += 1  # type: ignore[operator]
            except MemlmError as error:
                outcomes[name].append(error)

    first, second = replica_pids(pair)
    with Client(pair.address) as client:
        names = list[str]()
        while len(homes(names)) < 2 or len(names) < 6:
            names.append(client.session().name)
            client.append_to_session(names[-1], PROMPTS[0])
        before = client.get_session(names[0]).num_tokens
        askers = [threading.Thread(target=ask, args=(name,)) for name in names]
        for asker in askers:
            asker.start()
        wait_until(lambda: len(outcomes) == len(names) and all(each[0] for each in outcomes.values()))
        os.kill(first, signal.SIGKILL)
        for asker in askers:
            asker.join(CLUSTER_S)
        failed = {name for name, outcome in outcomes.items() if len(outcome) > 1}
        assert len(homes(list(failed))) == 1
        assert failed == {name for name in names if home_of(name) == home_of(min(failed))}
        for name, (count, *errors) in outcomes.items():
            assert all(isinstance(error, Unavailable) and "\n" not in str(error) for error in errors), errors
            assert count == 60 or name in failed
        wait_until(lambda: all(is_back(client, name, before) for name in failed), CLUSTER_S)
        wait_until(lambda: len(replica_pids(pair)) == 2, CLUSTER_S)
        assert replica_pids(pair)[0] == second
        wait_until(lambda: num_sessions(client) == len(names), CLUSTER_S)
        for name in names:
            client.delete_session(name)


def is_back(client: Client, name: str, num_tokens: int) -> bool:
    """Whether a session was read from its file, as it was before the request that failed."""
    try:
        return client.get_session(name).num_tokens == num_tokens
    except (Unavailable, NotFound):
        return False


def num_sessions(client: Client) -> int | None:
    """None while sessions are between two replicas."""
    try:
        return len(client.list_sessions())
    except Unavailable:
        return None


@pytest.mark.cluster
def test_a_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(AssertionError, match="has no config") as error, serve(tmp_path, tmp_path / "model"):
        pass
    assert "Traceback" not in str(error.value)


@pytest.mark.cluster
def test_replicas_come_and_go_with_the_load(tmp_path: Path, long_model: Path) -> None:
    """From one to two while requests queue up, and back. The sessions of the one that goes are kept."""
    options = ("--replicas", "1", "--max-replicas", "2", "--max-running", "2", "--session-dir", str(tmp_path / "s"))
    with (
        serve(tmp_path, long_model, options=options, first=SCALE_SOON) as server,
        Client(server.address) as client,
    ):
        idle, names = threading.Event(), list[str]()

        def ask() -> None:
            with Client(server.address) as asker, suppress(Overloaded):
                while not idle.is_set():
                    assert len(list(asker.generate("a", temperature=0, max_tokens=50))) == 50

        askers = [threading.Thread(target=ask) for _ in range(6)]
        for asker in askers:
            asker.start()
        wait_until(lambda: server.output.count(" is ready") == 2, CLUSTER_S)
        idle.set()
        for asker in askers:
            asker.join(CLUSTER_S)
        while len(homes(names)) < 2:
            names.append(client.session().name)
            client.append_to_session(names[-1], PROMPTS[0])
        wait_until(lambda: len(replica_pids(server)) == 1, CLUSTER_S)
        wait_until(lambda: all(is_there(client, name) for name in names), CLUSTER_S)
        wait_until(lambda: num_sessions(client) == len(names), CLUSTER_S)
        assert len(list(client.generate("a", temperature=0, max_tokens=3))) == 3


def is_there(client: Client, name: str) -> bool:
    with suppress(Unavailable, NotFound):
        return client.get_session(name).num_tokens > 0
    return False


@pytest.mark.cluster
def test_a_replica_that_stands_still_is_replaced(tmp_path: Path, long_model: Path) -> None:
    with (
        serve(tmp_path, long_model, options=("--replicas", "2", "+worker_timeout=6")) as server,
        Client(server.address) as client,
    ):
        still = replica_pids(server)[0]
        os.kill(still, signal.SIGSTOP)
        wait_until(lambda: "sent no heartbeat for 6 s" in server.output, CLUSTER_S)
        wait_until(lambda: server.output.count(" is ready") == 3, CLUSTER_S)
        assert still not in replica_pids(server)
        assert len(list(client.generate("a", temperature=0, max_tokens=3))) == 3


@pytest.mark.cluster
def test_two_servers_share_a_cluster_of_two_nodes(tmp_path: Path, long_model: Path, monkeypatch) -> None:
    """And sessions survive a restart of their server. A node that dies costs its replicas alone."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=2)
        options = ("--address", cluster.address, "--replicas", "1")
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        with (
            serve(folders[0], long_model, options=(*options, "--session-dir", str(tmp_path / "s")), fails=True) as one,
            serve(folders[1], long_model, options=options, fails=True) as two,  # Ray logs stacks of lost calls
            Client(one.address) as client,
            Client(two.address) as other,
        ):
            name = client.session().name
            tokens = client.append_to_session(name, PROMPTS[0]).num_tokens
            assert other.list_sessions() == ()
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(num_cpus=2)
            for each in (client, other):
                wait_until(lambda each=each: answers(each), CLUSTER_S)
            wait_until(lambda: is_back(client, name, tokens), CLUSTER_S)
        options = (*options, "--session-dir", str(tmp_path / "s"))
        with serve(folders[0], long_model, options=options) as again, Client(again.address) as client:
            assert client.get_session(name).num_tokens == tokens
            assert [each.name for each in client.list_sessions()] == [name]
    finally:
        cluster.shutdown()


@pytest.mark.cluster
def test_a_server_and_its_replicas_end_with_the_head_of_the_cluster(tmp_path: Path, long_model: Path, monkeypatch):
    """Its service manager may start it again, on another cluster. It has the sessions."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # a minute by default
    folder = ("--session-dir", str(tmp_path / "sessions"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        options = ("--address", cluster.address, "--replicas", "2", *folder)
        with serve(tmp_path, long_model, options=options, fails=True) as server, Client(server.address) as client:
            name = client.session().name
            tokens = client.append_to_session(name, PROMPTS[0]).num_tokens
            pids, stream = replica_pids(server), client.generate("a", temperature=0, max_tokens=30_000)
            next(stream)
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            with pytest.raises(Unavailable):
                list(stream)
            assert server.process.wait(CLUSTER_S) != 0
            wait_until(lambda: not any(map(is_alive, pids)), CLUSTER_S)
    finally:
        cluster.shutdown()
    with RunningServer(tmp_path / "log-2", long_model, options=folder) as server, Client(server.address) as client:
        assert client.get_session(name).num_tokens == tokens


@pytest.mark.cluster
def test_a_server_is_registered_on_its_own_node(monkeypatch) -> None:
    """Others may have no memlm."""
    import ray
    from ray.cluster_utils import Cluster

    def node_of(actor: Any) -> str:
        return str(ray.get_runtime_context().get_node_id())

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=4)
        ray.init(cluster.address, log_to_driver=False)
        actors = [applications.register(new_name()) for _ in range(6)]
        nodes = ray.get([each.__ray_call__.remote(node_of) for each in actors], timeout=CLUSTER_S)
        assert {*nodes} == {ray.get_runtime_context().get_node_id()}
    finally:
        ray.shutdown()
        cluster.shutdown()


def answers(client: Client) -> bool:
    with suppress(Unavailable):
        return len(list(client.generate("a", temperature=0, max_tokens=3))) == 3
    return False
