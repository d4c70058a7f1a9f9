"""The tier of each test, and tiny real parts made once a session: text, a tokenizer, a model, a datastore."""

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chats import PLAIN, PLAIN_TOKENS, give_template
from hypothesis import settings
from texts import make_text

from memlm.base.machine import raise_file_limit
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.indexing import checks
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig, device
from memlm.model.files import catalog
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

TIERS = ("unit", "server", "crash", "packaging", "exhaustive", "slow", "cluster", "benchmarks")
STARTED_SERVERS = {"server", "narrow_server", "web", "narrow_web", "guarded_web", "growing_web"}  # fixtures
SHAPE = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 48, "context_length": 48}
# What the shell of whoever starts the tests may have set, and memlm, Rich, Typer, torch, Ray or git would heed.
HEEDED = re.compile(
    r"(MEMLM|RAY|OTEL|GIT|XDG|CURL)_\w+|(FORCE|NO)_COLOR|PY_COLORS|TTY_\w+|COLORFGBG|GITHUB_ACTIONS|COLUMNS|LINES"
    r"|all_proxy|(LOCAL_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|OMP_WAIT_POLICY|GOMP_SPINCOUNT",
    re.IGNORECASE,
)


@pytest.hookimpl(trylast=True)  # pytest itself may heed them
def pytest_configure(config: pytest.Config) -> None:
    if sys.getfilesystemencoding() != "utf-8":
        raise pytest.UsageError("the tests write UTF-8, which is not this locale's: set PYTHONUTF8=1, as `make` does")
    settings.register_profile("untimed", settings(deadline=None))  # a machine that does other work is slow at times
    settings.load_profile("untimed")
    raise_file_limit()  # as the command line and the server do: a shell may give 256
    for name in filter(HEEDED.fullmatch, list(os.environ)):
        del os.environ[name]
    for name in ("no_proxy", "NO_PROXY"):  # pip may need the proxy, the tests' own servers do not
        os.environ[name] = f"localhost,127.0.0.1,{os.environ.get(name, '')}"
    if "HF_HOME" not in os.environ:  # lm_eval writes there, and a home may be missing or read only
        hub = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(hub.cleanup)
        os.environ["HF_HOME"] = hub.name
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # more processes than cores: threads that spin for each other would halve the speed
        os.environ["OMP_NUM_THREADS"] = "1"  # the same of processes that tests start
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # by a shell that started the tests in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else the processes of the tests would ignore it too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test that carries no tier's mark the tier of its module: `server` where that starts servers."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent / "benchmarks"):
            item.add_marker(pytest.mark.benchmarks)
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(pytest.mark.server if starts_servers(item) else pytest.mark.unit)


def starts_servers(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    helpers = {"RunningServer", "started_server"} & vars(item.module).keys()
    return bool(helpers) or not STARTED_SERVERS.isdisjoint(item.fixturenames)


@pytest.fixture(scope="session", autouse=True)
def in_float32_on_the_processor() -> Iterator[None]:
    """What `auto` chooses here, whatever this machine is fast at: references are in float32. Servers get it by name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "fastest_device", lambda: torch.device("cpu"))
        patched.setattr(device, "has_fast_bfloat16", lambda _: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_installed_encoder() -> Iterator[None]:
    """Passages are found by words unless a test gives an encoder, whatever is installed. Servers get none by name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(catalog, "MINILM", replace(catalog.MINILM, module="not_installed"))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_checks() -> Iterator[None]:
    """No check of a build is cut short, however busy this machine is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks, "QUICK_S", 600.0)
        yield


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        (folder / f"doc-{number}.txt").write_text(make_text(number, 40 + 37 * number), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(corpus_folder: Path) -> Tokenizer:
    return Tokenizer.train((document.text for document in Corpus([corpus_folder])), vocab_size=300)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A decoder with random parameters, large enough that its predictions differ from place to place."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    decoder = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    save_checkpoint(folder, decoder, tokenizer)
    give_template(folder, PLAIN, PLAIN_TOKENS)
    return folder


@pytest.fixture(scope="session")
def checkpoint(model_folder: Path) -> Checkpoint:
    return load_checkpoint(model_folder)


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path) -> Path:
    """A datastore that tests only read."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    build_index(model_folder, Corpus([corpus_folder]), folder, check="none")
    return folder


@pytest.fixture
def lm(model_folder: Path, store_folder: Path) -> Iterator[LanguageModel]:
    with LanguageModel(load_checkpoint(model_folder), [store_folder]) as lm:
        yield lm
