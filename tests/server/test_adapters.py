"""A server with adapters: over gRPC and HTTP, in sessions, for restricted callers, from the command line."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from random_adapters import SPECS, save_random_adapter
from running import RunningServer
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.client import Client
from memlm.errors import InvalidInput, NotFound
from memlm.language_model import LanguageModel, load
from memlm.model.files.checkpoint import load_checkpoint
from memlm.server.config import AdapterFolder, ServerConfig

GREEDY = {"temperature": 0, "max_tokens": 10}
PROMPT = "the memory of"
NAMES = {"law": "lora", "style": "bottleneck"}
ANN = "the secret of ann, a long one"


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory) -> dict[str, Path]:
    checkpoint, parent = load_checkpoint(model_folder), tmp_path_factory.mktemp("adapters")
    return {name: save_random_adapter(parent / name, checkpoint, SPECS[kind]) for name, kind in NAMES.items()}


@pytest.fixture(scope="module")
def expected(model_folder, folders) -> Iterator[LanguageModel]:
    with load(model_folder, adapters=folders) as lm:
        yield lm


@pytest.fixture(scope="module")
def adapting(model_folder, store_folder, folders, tmp_path_factory) -> Iterator[RunningServer]:
    given = [word for name, folder in folders.items() for word in ("--adapter", f"{name}={folder}")]
    options = ("--threads", "1", "--http-port", "0", *given)
    with RunningServer(tmp_path_factory.mktemp("log") / "log", model_folder, store_folder, options=options) as server:
        yield server


@pytest.fixture
def client(adapting) -> Iterator[Client]:
    with Client(adapting.address) as client:
        yield client


def text_of(host: LanguageModel | Client, adapter: str | None, **options: object) -> str:
    return host.generate(PROMPT, adapter=adapter, **{**GREEDY, **options}).result().text


def test_requests_side_by_side_have_their_own_adapters(client, expected):
    names = [None, "law", "style"] * 4
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda name: text_of(client, name, use_store=False), names))
    for name, text in zip(names, texts, strict=True):
        assert text == text_of(expected, name)
    assert len(set(texts)) == 3
    assert client.get_model().adapters == ("law", "style")


def test_sessions_and_refusals(client, expected):
    with client.session(adapter="law") as session:
        session.append(PROMPT)
        assert session.info().adapter == "law"
        assert session.generate("", **GREEDY).result().text == text_of(expected, "law")
        with pytest.raises(InvalidInput, match="is read with the adapter 'law'"):
            session.generate("x", adapter="style").result()
    for ask in (lambda: text_of(client, "none"), lambda: client.session(adapter="none")):
        with pytest.raises(NotFound, match="no adapter 'none'; the adapters are law, style"):
            ask()
    with pytest.raises(InvalidInput, match="'store' has the keys of the model without the adapter"):
        text_of(client, "law", store="store")


def test_over_http_an_adapter_is_a_model(adapting, expected):
    with openai.OpenAI(base_url=f"{adapting.http_url}/v1", api_key="none", max_retries=0) as ai:
        models = {model.id: model for model in ai.models.list().data}
        assert list(models)[1:] == ["law", "style"]
        assert models["law"].parent == next(iter(models))
        assert ai.models.retrieve("style").id == "style"
        for name in ("law", "style"):
            answer = ai.completions.create(model=name, prompt=PROMPT, **GREEDY)
            assert (answer.model, answer.choices[0].text) == (name, text_of(expected, name))
            chunks = ai.completions.create(model=name, prompt=PROMPT, stream=True, **GREEDY)
            assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(expected, name)
        with pytest.raises(openai.NotFoundError, match=r"no model 'none'; this server has '.*', 'law', 'style'"):
            ai.completions.create(model="none", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match="echo with logprobs scores the model without an adapter"):
            ai.completions.create(model="law", prompt=PROMPT, echo=True, logprobs=1)
        with pytest.raises(openai.BadRequestError, match="has the keys of the model without the adapter"):
            ai.completions.create(model="law", prompt=PROMPT, extra_body={"memory": {"stores": ["store"]}})
    body = {"model": "law", "prompt": "a"}
    assert httpx.post(f"{adapting.http_url}/tokenize", json=body).json()["count"] == 1


def test_from_the_command_line(adapting, expected, model_folder, folders):
    words = [PROMPT, "--temperature", "0", "--max-tokens", "10", "--json"]
    served = ["generate", *words, "--target", adapting.address, "--adapter", "law"]
    here = ["generate", *words, "--model", str(model_folder), "--adapter", str(folders["law"]), "--device", "cpu"]
    for command in (served, here):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["text"] == text_of(expected, "law")
    created = CliRunner().invoke(
        app, ["session", "create", "--adapter", "style", "--target", adapting.address, "--json"]
    )
    assert json.loads(created.stdout)["adapter"] == "style"


def test_a_caller_of_some_datastores_has_all_adapters(model_folder, store_folder, folders, expected, tmp_path):
    (tmp_path / "tokens.toml").write_text(f"[[token]]\nname = 'ann'\nsecret = {json.dumps(ANN)}\nstores = ['store']\n")
    (tmp_path / "tokens.toml").chmod(0o600)
    options = ("--threads", "1", "--adapter", f"law={folders['law']}", "--auth-file", str(tmp_path / "tokens.toml"))
    with (
        RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server,
        Client(server.address, token=ANN) as ann,
    ):
        assert text_of(ann, "law") == text_of(expected, "law")
        with ann.session(adapter="law") as session:
            assert session.generate(PROMPT, use_store=False, **GREEDY).result().text == text_of(expected, "law")


@pytest.mark.parametrize(("text", "parsed"), [("a=b/c", ("a", "b/c")), ("b/c", ("c", "b/c")), ("a=b=c", ("a", "b=c"))])
def test_an_adapter_is_given_as_a_folder_with_a_name(text, parsed):
    assert AdapterFolder.parse(text) == AdapterFolder(parsed[0], Path(parsed[1]))


def test_names_that_mean_two_things_are_refused():
    with pytest.raises(InvalidInput, match="expected NAME=FOLDER"):
        AdapterFolder.parse("=folder")
    for names in (("a", "a"), ("m", "b")):
        with pytest.raises(InvalidInput, match="beside the model m; give each a name of its own"):
            ServerConfig(Path("m"), adapters=tuple(AdapterFolder(name, Path("f")) for name in names))
