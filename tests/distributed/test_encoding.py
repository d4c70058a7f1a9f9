"""Builds whose model runs on a Ray cluster: the same entries as a build in one process, whatever dies meanwhile."""

import os
import random
import sys
import time

import numpy as np
import pytest
from conftest import SHAPE
from texts import make_text
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, InvalidInput, NotFound, Unavailable
from memlm.index.store.datastore import Datastore
from memlm.indexing import keys as indexing_keys
from memlm.indexing.build import add_to_index, build_index, index_keys
from memlm.model import Decoder, Memorizing, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.retrieval.encoder import Encoder, document_windows

ray = pytest.importorskip("ray")
distributed = pytest.importorskip("memlm.distributed.encoding")


class Stopped(Exception):
    """Stands for Ctrl-C in the middle of a build."""


@pytest.fixture(scope="module")
def cluster():
    """One node of two cores in this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        yield
        ray.shutdown()


@pytest.fixture
def two_workers(cluster, monkeypatch):
    """Two workers of a core each, on the one node."""
    monkeypatch.setattr(distributed.Share, "of", lambda nodes, device: distributed.Share(2, 1, 0))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(indexing_keys, "CHECKPOINT_WINDOWS", 4)


@pytest.fixture(scope="module")
def checkpoint(model_folder):
    return load_checkpoint(model_folder)


@pytest.fixture(scope="module")
def local(tmp_path_factory, checkpoint, corpus_folder):
    """What a build in this process makes of the corpus."""
    store = tmp_path_factory.mktemp("local") / "store"
    build_index(checkpoint, Corpus([corpus_folder]), store, check="none")
    return entries_of(store)


def entries_of(store):
    """Keys, values and documents of a datastore."""
    with Datastore.open(store) as datastore:
        snapshot = datastore.snapshot
        keys = [np.load(file) for file in sorted(store.glob("segments/*/keys.npy"))]
        documents = [(document.id, snapshot.tokens(document.id).tolist()) for document in snapshot.documents()]
        return np.concatenate(keys), documents


def assert_same(store, expected):
    keys, documents = entries_of(store)
    assert documents == expected[1]
    assert np.array_equal(keys, expected[0])


def test_a_build_on_a_cluster_has_the_entries_of_one_in_this_process(
    two_workers, tmp_path, model_folder, checkpoint, corpus_folder, local
):
    notes, store = [], tmp_path / "store"
    with distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder:
        report = build_index(
            checkpoint, Corpus([corpus_folder]), store, encoder=encoder, check="none",
            progress=lambda phase, done, total, note="": notes.append((phase, note)),
        )  # fmt: skip
        assert encoder.note.endswith("on 1 node")  # of one or two workers: the second may load until the end
    assert report.entries == len(local[0])
    assert_same(store, local)
    assert any("on 1 node" in note for phase, note in notes if phase == "make keys")


@pytest.mark.cluster
def test_pruned_entries_are_the_same(two_workers, tmp_path, model_folder, checkpoint, corpus_folder):
    corpus = Corpus([corpus_folder])
    here = build_index(checkpoint, corpus, tmp_path / "here", prune=0.02, check="none")
    with distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder:
        there = build_index(checkpoint, corpus, tmp_path / "there", prune=0.02, check="none", encoder=encoder)
    assert 0 < here.pruned == there.pruned < 1
    assert_same(tmp_path / "there", entries_of(tmp_path / "here"))


@pytest.mark.cluster
@pytest.mark.parametrize("on_cluster_first", [True, False])
def test_a_stopped_build_resumes_with_either_engine(
    two_workers, tmp_path, model_folder, checkpoint, corpus_folder, local, on_cluster_first
):
    store, corpus = tmp_path / "store", Corpus([corpus_folder])

    def stop(phase, done, total, note=""):
        if phase == "make keys" and done > total // 2:
            raise Stopped

    for is_first in (True, False):
        encoder = (
            distributed.RayEncoder(model_folder, checkpoint, dtype="float32") if is_first is on_cluster_first else None
        )
        try:
            if is_first:
                with pytest.raises(Stopped):
                    build_index(checkpoint, corpus, store, encoder=encoder, check="none", progress=stop)
            else:
                report = index_keys(store, checkpoint, encoder=encoder, check="none")
                assert 0 < report.resumed_entries < report.entries
        finally:
            if encoder is not None:
                encoder.close()
    assert_same(store, local)


@pytest.mark.cluster
def test_documents_are_added_on_a_cluster(two_workers, tmp_path, model_folder, checkpoint, corpus_folder):
    (tmp_path / "new.txt").write_text(make_text(99, 200))
    stores = []
    for name, is_cluster in (("here", False), ("there", True)):
        store = tmp_path / name
        build_index(checkpoint, Corpus([corpus_folder]), store, check="none")
        encoder = distributed.RayEncoder(model_folder, checkpoint, dtype="float32") if is_cluster else None
        add_to_index(checkpoint, Corpus([tmp_path / "new.txt"]), store, encoder=encoder, check="none")
        if encoder:
            encoder.close()
        stores.append(entries_of(store))
    assert_same(tmp_path / "there", stores[0])


def test_a_killed_worker_costs_its_blocks_alone(two_workers, tmp_path, model_folder, checkpoint, corpus_folder, local):
    draw, killed = random.Random(0), 0
    with distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder:

        def kill(phase, done, total, note=""):
            nonlocal killed
            if phase == "make keys" and killed < 3:
                ready = list(encoder._nodes)
                if ready:
                    ray.kill(draw.choice(ready), no_restart=False)
                    killed += 1

        build_index(
            checkpoint, Corpus([corpus_folder]), tmp_path / "store", encoder=encoder, check="none", progress=kill
        )
    assert killed == 3
    assert_same(tmp_path / "store", local)


class Unable:
    """A worker that cannot start, as on a node without memlm."""

    def __init__(self, *options):
        raise ImportError("no memlm here")

    def greet(self):
        raise NotImplementedError


class Deadly(distributed.Worker):
    """A worker that each block kills."""

    def encode(self, windows, prune):
        os._exit(1)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("worker", "message"), [(Unable, "install memlm"), (Deadly, "one after another of the same block")]
)
def test_a_cluster_that_cannot_work_is_given_up(
    cluster, tmp_path, model_folder, checkpoint, corpus_folder, monkeypatch, worker, message
):
    monkeypatch.setattr(distributed, "Worker", worker)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import this file
    monkeypatch.setattr(distributed.Share, "of", lambda nodes, device: distributed.Share(1, 1, 0))
    with (
        distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder,
        pytest.raises(Unavailable, match=message),
    ):
        build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "store", encoder=encoder)


@pytest.mark.cluster
def test_a_worker_that_died_unnoticed_loads_the_model_again(
    two_workers, model_folder, checkpoint, corpus_folder, local
):
    with distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder:
        while not encoder._nodes:
            for ref in encoder._done(list(encoder._greetings)):
                encoder._welcome(ref)
        for worker in encoder._nodes:
            ray.kill(worker, no_restart=False)
        time.sleep(3)  # started anew by Ray
        window = next(document_windows(checkpoint.decoder, np.arange(5, 40), checkpoint.tokenizer.start_id))
        (encoded,) = next(encoder.encode([[window]], None, lambda place: None))
    (expected,) = Encoder(checkpoint.decoder).keys([window])
    assert np.array_equal(encoded.keys_ND, expected)


@pytest.mark.cluster
def test_workers_with_another_model_are_refused(two_workers, tmp_path, tokenizer, checkpoint, corpus_folder):
    save_checkpoint(tmp_path / "other", Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE)), tokenizer)
    with (
        distributed.RayEncoder(tmp_path / "other", checkpoint, dtype="float32") as encoder,
        pytest.raises(Incompatible, match="same files"),
    ):
        build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "store", encoder=encoder)


@pytest.mark.cluster
def test_a_model_that_no_worker_finds_is_named(two_workers, tmp_path, checkpoint, corpus_folder):
    with (
        distributed.RayEncoder(tmp_path / "nowhere", checkpoint, dtype="float32") as encoder,
        pytest.raises(NotFound, match="nowhere"),
    ):
        build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "store", encoder=encoder)


@pytest.mark.cluster
def test_a_cluster_without_a_worker_is_given_up(
    cluster, tmp_path, model_folder, checkpoint, corpus_folder, monkeypatch
):
    monkeypatch.setattr(distributed.Share, "of", lambda nodes, device: distributed.Share(1, 64, 0))
    monkeypatch.setattr(distributed, "PATIENCE_S", 0.1)
    with (
        distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder,
        pytest.raises(Unavailable, match="ray status"),
    ):
        build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "store", encoder=encoder)


@pytest.mark.cluster
def test_a_model_with_another_window_is_refused(two_workers, tmp_path, model_folder, corpus_folder):
    checkpoint = load_checkpoint(model_folder, attention_window=16)
    with (
        distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder,
        pytest.raises(Incompatible, match="config"),
    ):
        build_index(checkpoint, Corpus([corpus_folder]), tmp_path / "store", encoder=encoder)


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1:1"])
def test_no_cluster_is_at_an_address(model_folder, checkpoint, address):
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises((InvalidInput, Unavailable), match=r"node of the cluster|no Ray cluster"):
        distributed.RayEncoder(model_folder, checkpoint, dtype="float32", address=address)
    assert not ray.is_initialized()


def test_a_model_with_memory_is_refused(tmp_path, tokenizer):
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE, memorizing=Memorizing(layers=(1,), top_k=4))
    save_checkpoint(tmp_path / "model", Decoder(config), tokenizer)
    with pytest.raises(InvalidInput, match="one after another"):
        distributed.RayEncoder(tmp_path / "model", load_checkpoint(tmp_path / "model"))


@pytest.mark.parametrize(
    ("resources", "device", "expected"),
    [
        ([{"CPU": 8.0}], "auto", (1, 8, 0)),
        ([{"CPU": 8.0}, {"CPU": 2.0}, {"CPU": 5.0}], "auto", (7, 2, 0)),
        ([{"CPU": 16.0, "GPU": 2.0}, {"CPU": 4.0}], "cuda", (2, 1, 1)),
        ([{"CPU": 16.0, "GPU": 2.0}, {"CPU": 4.0}], "cpu", (5, 4, 0)),
        ([{"CPU": 4.0}, {"CPU": 0.0, "GPU": 2.0}], "auto", (1, 4, 0)),
        ([{"CPU": 4.0}, {"memory": 1.0}], "auto", (1, 4, 0)),
    ],
)
def test_workers_share_a_cluster(resources, device, expected):
    nodes = [{"Alive": True, "Resources": each} for each in resources]
    assert distributed.Share.of([*nodes, {"Alive": False, "Resources": {"CPU": 1.0}}], device) == expected
    with pytest.raises(Unavailable, match="no processors"):
        distributed.Share.of([{"Alive": True, "Resources": {"CPU": 0.0}}], device)


def test_the_command_builds_on_a_cluster_of_its_own(tmp_path, model_folder, corpus_folder, local):
    command = [
        "index",
        "build",
        str(corpus_folder),
        "--model",
        str(model_folder),
        "--check",
        "none",
        "--dtype",
        "float32",
    ]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "store"), "--engine", "ray"])
    assert result.exit_code == 0, result.output
    assert not ray.is_initialized()
    assert_same(tmp_path / "store", local)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "spark"], "engine"),
        (["--engine", "ray", "--keys", "none"], "makes keys"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, model_folder, corpus_folder, options, message):
    command = [
        "index",
        "build",
        str(corpus_folder),
        "--model",
        str(model_folder),
        "--out",
        str(tmp_path / "store"),
        "--dtype",
        "float32",
    ]
    result = CliRunner().invoke(app, [*command, *options])
    assert isinstance(result.exception, InvalidInput)
    assert message in str(result.exception)
    assert not (tmp_path / "store").exists()


@pytest.mark.cluster
def test_a_node_may_die_at_any_moment(tmp_path, model_folder, checkpoint, corpus_folder, local):
    """Twenty builds on two nodes of a core each. One is killed at a random moment of each, and comes back later."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    corpus, draw, nodes = Corpus([corpus_folder]), random.Random(0), []
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})

    def killer(at):
        ticks = 0

        def kill(phase, done, total, note=""):
            nonlocal ticks
            ticks += phase == "make keys"
            if ticks == at:
                cluster.remove_node(nodes.pop(draw.randrange(2)), allow_graceful=False)
            elif ticks == at + 8 and len(nodes) < 2:
                nodes.append(cluster.add_node(num_cpus=1))

        return kill

    try:
        ray.init(cluster.address, log_to_driver=False)
        for trial in range(20):
            nodes += [cluster.add_node(num_cpus=1) for _ in range(2 - len(nodes))]
            with distributed.RayEncoder(model_folder, checkpoint, dtype="float32") as encoder:
                store, kill = tmp_path / str(trial), killer(draw.randrange(1, 30))
                build_index(checkpoint, corpus, store, encoder=encoder, check="none", progress=kill)
            assert_same(store, local)
    finally:
        ray.shutdown()
        cluster.shutdown()
