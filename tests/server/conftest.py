"""Running servers: one that only answers, and one whose texts are long enough to be interrupted."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chats import PLAIN, PLAIN_TOKENS, give_template
from running import RunningServer

from memlm.client import Client
from memlm.data.tokenizer import Tokenizer
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import save_checkpoint


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the servers here run: the last bits of a sum depend on how many threads shared it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path) -> Iterator[RunningServer]:
    """The tiny model with its store, for tests that change nothing, started as people start it."""
    log = tmp_path_factory.mktemp("log") / "log"
    with RunningServer(log, model_folder, store_folder, options=("--threads", "1"), forked=False) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A tiny model whose context takes many seconds to fill."""
    folder = tmp_path_factory.mktemp("models") / "long"
    torch.manual_seed(0)
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 48, "context_length": 40_000}
    save_checkpoint(folder, Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **shape)), tokenizer)
    give_template(folder, PLAIN, PLAIN_TOKENS)
    return folder


@pytest.fixture(scope="session")
def narrow_server(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[RunningServer]:
    """Runs one request at a time and lets one wait."""
    options = ("--max-running", "1", "--max-queued", "1", "--threads", "1")
    with RunningServer(tmp_path_factory.mktemp("log") / "log", long_model, options=options) as server:
        yield server


@pytest.fixture
def own_store(store_folder: Path, tmp_path: Path) -> Path:
    """A copy of the store, to be changed."""
    return Path(shutil.copytree(store_folder, tmp_path / "store"))
