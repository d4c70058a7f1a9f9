"""A server answers as of a time, over gRPC and HTTP and from the command line, as the library does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import PATIENCE_S, RunningServer
from typer.testing import CliRunner

from memlm.api.datastores import NewDocument
from memlm.cli.app import app
from memlm.client import Client
from memlm.errors import InvalidInput
from memlm.indexing.build import build_index
from memlm.integrations.langchain import MemlmRetriever

RULES = [
    {"id": "a", "text": "the memory of a page is read", "valid_from": "2020-01-01"},
    {"id": "b", "text": "the memory of a page is edited", "valid_from": "2024-05-01", "supersedes": "a"},
    {"id": "c", "text": "the memory of a page is deleted", "supersedes": ["b"], "valid_from": "2999-01-01"},
]
BEFORE, MALFORMED = "2024-04-30", "1.5.2024"
TEXT = "the memory of a page is"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("rules")
    (folder / "rules.jsonl").write_text("\n".join(map(json.dumps, RULES)))
    build_index(model_folder, folder / "rules.jsonl", folder / "store", check="none")
    options = ("--threads", "1", "--http-port", "0", "--attention-window", "44")
    with RunningServer(folder / "log", model_folder, folder / "store", options=options) as server:
        yield server


def posted(server: RunningServer, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{server.http_url}/v1/{path}", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


def by_every_call(server: RunningServer, as_of: str | None) -> list[set[str]]:
    """The documents that each call shows."""
    given: dict[str, Any] = {} if as_of is None else {"as_of": as_of}
    with Client(server.address) as client:
        traced = client.trace(TEXT, min_tokens=2, **given)
        tokens = list(client.generate(TEXT, temperature=0, lam=0.9, neighbors=64, max_tokens=1, **given))
        grpc = [
            client.find_passages(TEXT, **given),
            client.search(None, TEXT, by="words", **given),
            client.search(None, TEXT, k=100, **given),
            [place for span in traced.spans for place in span.places],
            client.answer(TEXT, num_passages=9, max_tokens=2, **given).passages,
            [near for token in tokens for near in token.neighbors],
        ]
        langchain = [each.metadata["document_id"] for each in MemlmRetriever(client, **given).invoke(TEXT)]
    memory = {"neighbors": 64, "lam": 0.9, **given}
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 1, "temperature": 0, "memory": memory}
    told = posted(server, "completions", **asked)["choices"][0]["memory"]
    spans = posted(server, "trace", text=TEXT, min_tokens=2, **given)["spans"]
    http = [
        posted(server, "datastores/passages", question=TEXT, **given)["data"],
        posted(server, "datastores/search", text=TEXT, by="words", **given)["data"],
        [place for span in spans for place in span["places"]],
        [near for token in told["tokens"] for near in token["neighbors"]],
    ]
    options = ["--target", server.address, "--json", *(() if as_of is None else ("--as-of", as_of))]
    commands = (
        "index passages store",
        "index search store --by words",
        "trace --min-tokens 2",
        "answer -n 2 --passages 9",
    )
    shell = [
        CliRunner().invoke(app, [*command.split(), TEXT, *options], catch_exceptions=False).stdout
        for command in commands
    ]
    return [
        *({each.document_id for each in found} for found in grpc),
        {*langchain},
        *({each["document_id"] for each in found} for found in http),
        *({id_ for id_ in "abc" if f'"document_id": "{id_}"' in said} for said in shell),
    ]


@pytest.mark.parametrize(
    ("as_of", "expected"),
    [(None, "abc"), (BEFORE, "a"), ("today", "b"), ("2999-01-01T00:00Z", "c"), ("2019-01-01", "")],
)
def test_every_call_shows_the_documents_that_held(rules: RunningServer, as_of: str | None, expected: str) -> None:
    found = by_every_call(rules, as_of)
    assert found == [{*expected}] * len(found)


def test_a_malformed_time_is_refused_everywhere(rules: RunningServer) -> None:
    with Client(rules.address) as client, pytest.raises(InvalidInput, match=f"as_of is '{MALFORMED}'; expected a date"):
        client.find_passages(TEXT, as_of=MALFORMED)
    for path, body in (
        ("datastores/passages", {"question": TEXT, "as_of": MALFORMED}),
        ("trace", {"text": TEXT, "as_of": MALFORMED}),
        ("completions", {"model": "tiny", "prompt": TEXT, "memory": {"as_of": MALFORMED}}),
    ):
        reply = httpx.post(f"{rules.http_url}/v1/{path}", json=body, timeout=PATIENCE_S)
        assert (reply.status_code, "as_of is '1.5.2024'" in reply.text) == (400, True), reply.text
    said = CliRunner().invoke(
        app, ["index", "passages", "store", TEXT, "--as-of", MALFORMED, "--target", rules.address]
    )
    assert str(said.exception).startswith(f"--as-of is '{MALFORMED}'; expected a date")


def test_a_malformed_time_of_a_new_document_is_refused(rules: RunningServer) -> None:
    with pytest.raises(InvalidInput, match="document 'd': valid_from is 'soon'; expected a date") as refused:
        NewDocument("d", "a text", metadata={"valid_from": "soon"})
    assert refused.value.field == "documents.metadata.valid_from"
    document = {"text": "a text", "id": "d", "metadata": {"supersedes": {"id": "a"}}}
    reply = httpx.post(f"{rules.http_url}/v1/datastores/store/remember", json=document, timeout=PATIENCE_S)
    assert (reply.status_code, "expected the id of a document" in reply.text) == (400, True), reply.text
