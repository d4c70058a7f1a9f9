"""The demo does the whole job, and leaves nothing behind when it is stopped."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chats import PLAIN, PLAIN_TOKENS, give_template
from running import wait_until

from memlm.cli.demo_pretrained import ENDING, FACT_ID
from memlm.client import Client
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Unavailable
from memlm.model import Decoder, ModelConfig
from memlm.model.files.catalog import MODELS
from memlm.model.files.checkpoint import save_checkpoint
from memlm.server.local import started_server

SHAPE = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 48, "context_length": 1024}
PIPE_BYTES = 65_536
COMMAND = [sys.executable, "-m", "memlm", "demo", "--out", "demo"]
needs_smollm2 = pytest.mark.skipif(
    MODELS["smollm2"].path is None, reason="not installed; `memlm models pull smollm2` installs it"
)


def children_of(pid: int) -> list[int]:
    """The processes that a process started, and theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random model whose context holds the demo's prompts."""
    folder = tmp_path_factory.mktemp("models") / "reader"
    torch.manual_seed(0)
    save_checkpoint(folder, Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE)), tokenizer)
    give_template(folder, PLAIN, PLAIN_TOKENS)
    return folder


def stop_when(words: str, number: signal.Signals, folder: Path, *options: str) -> tuple[int, str]:
    """Runs the demo until it prints some words, and sends it a signal; exit code, and what it printed afterwards."""
    command = [*COMMAND, *options]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            break
    started = children_of(process.pid)
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))  # they end with their parent, or soon
    return process.returncode, rest


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see what is left behind")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_early_leaves_no_file_and_no_process(reader, tmp_path, number):
    code, rest = stop_when("1. Build a datastore", number, tmp_path, "--model", str(reader))
    assert code == 130
    assert "Traceback" not in rest
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see what is left behind")
@pytest.mark.parametrize("words", ["entries of", "2. Tune it", "3. Serve it", "4. Teach it"])
def test_stopping_it_at_any_step_leaves_no_file_and_no_process(reader, tmp_path, words):
    code, rest = stop_when(words, signal.SIGINT, tmp_path, "--model", str(reader))
    assert code == 130
    assert "Traceback" not in rest
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.real_model
@needs_smollm2
def test_a_fact_is_learned_cited_and_forgotten(tmp_path):
    done = subprocess.run([*COMMAND, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["score"]["knn"]["nll"] < report["score"]["base"]["nll"]
    before, taught, forgotten = report["before"], report["taught"], report["forgotten"]
    assert ENDING in taught["text"]
    assert ENDING not in before["text"]
    assert taught["sources"] == [FACT_ID]
    assert FACT_ID not in forgotten["sources"]
    assert forgotten == before


def test_a_folder_that_is_no_demos_is_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes").write_text("precious")
    done = subprocess.run([*COMMAND, "--overwrite"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--out" in done.stderr
    assert (tmp_path / "demo" / "notes").read_text() == "precious"


def test_a_server_may_warn_before_it_serves_and_is_heard(model_folder, capfd):
    with started_server(model_folder, options=("--host", "0.0.0.0")) as target, Client(target) as client:
        client.wait_until_ready()
        assert client.get_model().name == model_folder.name
    assert "can be reached from other machines" in capfd.readouterr().err


def test_a_server_that_says_much_does_not_stand_still(model_folder, capfd):
    with started_server(model_folder, options=("--log-level", "info")) as target, Client(target) as client:
        for _ in range(1200):  # more than a pipe holds
            client.tokenize("once upon a time", timeout_s=20)
    assert len(capfd.readouterr().err) > 2 * PIPE_BYTES


def test_a_server_that_does_not_start_says_why(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(Unavailable, match=r"config\.json"), started_server(tmp_path / "model"):
        pass
