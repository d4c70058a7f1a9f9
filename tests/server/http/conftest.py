"""Servers with an HTTP port, and the client that people have."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from running import RunningServer

WEB = ("--threads", "1", "--http-port", "0")


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path) -> Iterator[RunningServer]:
    """The tiny model with its store, for tests that change nothing."""
    with RunningServer(tmp_path_factory.mktemp("log") / "log", model_folder, store_folder, options=WEB) as server:
        yield server


@pytest.fixture(scope="session")
def random_web(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path
) -> Iterator[RunningServer]:
    """The same with a store of its own, for random requests, of which some write to it."""
    folder = tmp_path_factory.mktemp("random")
    store = Path(shutil.copytree(store_folder, folder / "store"))
    with RunningServer(folder / "log", model_folder, store, options=WEB) as server:
        yield server


@pytest.fixture(scope="session")
def narrow_web(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[RunningServer]:
    """Runs four long generations at a time and lets four wait."""
    options = (*WEB, "--max-running", "4", "--max-queued", "4")
    with RunningServer(tmp_path_factory.mktemp("log") / "log", long_model, options=options) as server:
        yield server


@pytest.fixture
def ai(web: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{web.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client
