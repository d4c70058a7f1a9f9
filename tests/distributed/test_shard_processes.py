"""`memlm shard` and `memlm serve --shard`: processes that are killed and restarted while others ask the server."""

import shutil
import signal
import time
from pathlib import Path

import pytest
from running import RunningServer, wait_until
from running_shards import STREAMS, TOKENS, Load, ask, shard_processes
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.client.client import Client
from memlm.distributed.shards import TIMEOUT_S
from memlm.errors import InvalidInput, Unavailable
from memlm.index.store.datastore import Datastore


@pytest.fixture
def cut_store(tmp_path: Path, store_folder: Path) -> Path:
    """A store in as many segments as two shards need, cut by the command."""
    store = Path(shutil.copytree(store_folder, tmp_path / "store"))
    result = CliRunner().invoke(app, ["index", "shard", str(store), "--shards", "2"])
    assert result.exit_code == 0, result.output
    assert "1 segment was cut" in result.output
    assert "--shard 1/2" in result.output
    with Datastore.open(store) as opened:
        assert len(opened.snapshot.segments) == 2
    return store


def test_a_killed_shard_is_reported_and_comes_back(tmp_path, model_folder, cut_store):
    with RunningServer(tmp_path / "alone.log", model_folder, cut_store) as server, Client(server.address) as client:
        expected = ask(client)
        plain = client.generate("the quick", max_tokens=TOKENS, temperature=0, use_store=False).result().text
    assert plain != expected  # or the store would not be seen
    with shard_processes(cut_store, tmp_path, "1/2", "2/2") as shards:
        options = tuple(word for each in shards for word in ("--shard", each.address))
        with RunningServer(tmp_path / "server.log", model_folder, cut_store, options=options) as server:
            with Load(server, expected) as load:
                load.wait_for(2 * STREAMS)
                assert not load.failures
                shards[0].end(signal.SIGKILL)
                wait_until(lambda: len(load.failures) >= STREAMS)
                shards[0].start()
                load.wait_for(2 * STREAMS)
            assert {type(error) for error in load.failures} == {Unavailable}
            assert "shard 1 at" in str(load.failures[-1])
            assert load.wrong == []


def test_a_shard_that_hangs_is_given_up_in_time(tmp_path, model_folder, cut_store):
    with shard_processes(cut_store, tmp_path, "1/2", "2/2") as shards:
        options = tuple(word for each in shards for word in ("--shard", each.address))
        with (
            RunningServer(tmp_path / "server.log", model_folder, cut_store, options=options) as server,
            Client(server.address) as client,
        ):
            expected = ask(client)
            shards[1].process.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable, match="shard 2"):
                ask(client)
            begin_s = time.monotonic()
            with pytest.raises(Unavailable, match="shard 2"):
                ask(client)  # which does not wait again
            assert time.monotonic() - begin_s < TIMEOUT_S
            shards[1].process.send_signal(signal.SIGCONT)
            with Load(server, expected) as load:
                load.wait_for(STREAMS)
            assert load.wrong == []


@pytest.mark.cluster
def test_a_rolling_restart_of_replicas_fails_no_request(tmp_path, model_folder, cut_store):
    with RunningServer(tmp_path / "alone.log", model_folder, cut_store) as server, Client(server.address) as client:
        expected = ask(client)
    with shard_processes(cut_store, tmp_path, "1/2", "1/2", "2/2", "2/2") as shards:
        options = tuple(word for each in shards for word in ("--shard", each.address))
        with RunningServer(tmp_path / "server.log", model_folder, cut_store, options=options) as server:
            with Load(server, expected) as load:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    for shard in shards:
                        load.wait_for(2 * STREAMS)
                        shard.end(number)
                        load.wait_for(2 * STREAMS)
                        shard.start()
                        time.sleep(5)  # some times as long as until it is known to be back
            assert load.failures == []
            assert load.wrong == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shard", "STORE", "--shard", "3/2"], "1/4 for the first of four"),
        (["shard", "STORE", "--shard", "1/2", "--listen", "nowhere"], "HOST:PORT"),
        (["index", "shard", "STORE", "--shards", "1000"], "documents, each of which stays whole"),
        (["serve", "--model", "MODEL", "--shard", "ray"], "HOST:PORT"),
    ],
)
def test_options_that_make_no_sense_are_refused(store_folder, model_folder, arguments, message):
    words = {"STORE": str(store_folder), "MODEL": str(model_folder)}
    result = CliRunner().invoke(app, [words.get(word, word) for word in arguments])
    assert isinstance(result.exception, InvalidInput) or result.exit_code == 2
    assert message in f"{result.exception} {result.output}"
