"""MCP over HTTP, by the SDK's own client: tools and resources, the rights of a caller, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from running import RunningServer, figures_of, wait_until

from memlm.api.documents import ListDocumentsRequest
from memlm.client import Client as MemlmClient
from memlm.data.corpus import Document
from memlm.indexing.build import build_index

ANN, BEN, EVE = "ann's own secret 0", "ben's own secret 0", "eve's own secret 0"
TOKENS = f"""
[[token]]
name = "ann"
secret = "{ANN}"

[[token]]
name = "ben"
secret = "{BEN}"
calls = ["FindPassages", "Trace", "ListDatastores", "ListDocuments", "ReadDocument"]

[[token]]
name = "eve"
secret = "{EVE}"
stores = ["other"]
"""
LEGACY, MODERN = "legacy", "auto"
QUESTION = "Which port does the gateway listen on?"
PASSAGE = {
    "uri": "memlm:notes/ports.md#L1-L4",
    "address": "memlm:notes/ports.md#L1-L4",
    "place": "ports.md:3",
    "store": "notes",
    "document_id": "ports.md",
    "title": "About ports.md",
    "headings": ["Ports"],
    "text": "# Ports\n\nThe gateway listens on port 7443.\nThe database listens on port 5432.",
    "sentence": "The gateway listens on port 7443.",
    "score": 0,
}
# Signs of life come soon, and answers do not end before their last token.
SOON = """
import memlm.server.http.events as events, memlm.server.http.mcp.tools as tools
events.HEARTBEAT_S, tools.TEMPERATURE = 0.005, 0.0
"""
FACT = "The zebra gateway listens on port 7443."
CALLED = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


TEXTS = {
    "ports.md": "# Ports\n\nThe gateway listens on port 7443.\nThe database listens on port 5432.\n",
    "people/ann.md": "Ann keeps the keys of the archive.\n",
    "long.md": "".join(f"Line {number} of a long log.\n" for number in range(1, 2001)),
    "ä b#?.md": "Umlauts stand in the id of this note.\n",
}


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Path:
    documents = [Document(name, text, f"About {name}") for name, text in TEXTS.items()]
    return build_index(long_model, documents, tmp_path_factory.mktemp("mcp") / "notes", keys="none").path


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, long_model: Path, notes: Path) -> Iterator[RunningServer]:
    """For tests that change nothing. An answer may take many seconds."""
    options = ("--threads", "1", "--http-port", "0")
    with RunningServer(
        tmp_path_factory.mktemp("log") / "log", long_model, notes, options=options, first=SOON
    ) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, long_model: Path, notes: Path) -> Iterator[RunningServer]:
    """With tokens, and two datastores of its own."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens.toml").write_text(TOKENS)
    (folder / "tokens.toml").chmod(0o600)
    stores = [Path(shutil.copytree(notes, folder / name)) for name in ("notes", "other")]
    options = ("--threads", "1", "--http-port", "0", "--auth-file", str(folder / "tokens.toml"))
    with RunningServer(folder / "log", long_model, *stores, options=options) as server:
        yield server


@asynccontextmanager
async def agent(server: RunningServer, token: str = "", mode: str = MODERN) -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{server.http_url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def message_of(result: Any) -> str:
    assert result.is_error, result
    (content,) = result.content
    return content.text


@pytest.mark.parametrize("mode", [LEGACY, MODERN])
async def test_the_tools_answer_in_both_ages_of_the_protocol(desk: RunningServer, mode: str) -> None:
    async with agent(desk, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["search", "ask", "trace", "remember", "forget"]
        assert [name for name, tool in tools.items() if not tool.annotations.read_only_hint] == ["remember", "forget"]
        assert [name for name, tool in tools.items() if tool.annotations.destructive_hint] == ["forget"]
        found = await client.call_tool("search", {"question": QUESTION, "k": 3})
        assert json.loads(found.content[0].text) == found.structured_content
        passages = found.structured_content["passages"]
        assert passages[0] | {"score": 0} == PASSAGE
        answer = (await client.call_tool("ask", {"question": QUESTION, "max_tokens": 5})).structured_content
        assert answer["finish_reason"] == "length"
        assert answer["sources"][0] == {"number": 1, "is_cited": False, **passages[0]}
        traced = (await client.call_tool("trace", {"text": passages[0]["text"]})).structured_content
        assert traced["share"] > 0.9
        (place,) = traced["spans"][0]["places"]
        assert (place["uri"], place["line"]) == ("memlm:notes/ports.md#L1-L1", 1)
        assert "memlm" in client.instructions


async def test_what_is_remembered_is_found_read_and_forgotten(guarded: RunningServer) -> None:
    async with agent(guarded, ANN) as client:
        kept = await client.call_tool("remember", {"text": FACT, "id": "zebra.md", "store": "notes", "title": "Zebra"})
        assert kept.structured_content == {
            "store": "notes", "document_ids": ["zebra.md"], "uris": ["memlm:notes/zebra.md"],
        }  # fmt: skip
        found = await client.call_tool("search", {"question": "Which port does the zebra gateway use?", "k": 1})
        (passage,) = found.structured_content["passages"]
        assert (passage["sentence"], passage["uri"]) == (FACT, "memlm:notes/zebra.md#L1-L1")
        for uri in (passage["uri"], "memlm:notes/zebra.md"):
            (read,) = (await client.read_resource(uri)).contents
            assert (read.text, read.uri, read.mime_type) == (FACT, uri, "text/plain")
        again = await client.call_tool("remember", {"text": "other", "id": "zebra.md", "store": "notes"})
        assert "zebra.md" in message_of(again)
        unnamed = await client.call_tool("remember", {"text": "other"})
        assert "notes, other" in message_of(unnamed)
        gone = await client.call_tool("forget", {"document_ids": ["zebra.md"], "store": "notes"})
        assert gone.structured_content == {"store": "notes", "num_documents": 1}
        with pytest.raises(MCPError, match=r"zebra\.md"):
            await client.read_resource("memlm:notes/zebra.md")
        missing = await client.call_tool("forget", {"document_ids": ["zebra.md"], "store": "notes"})
        assert "zebra.md" in message_of(missing)


async def test_resources_are_all_documents_once_a_page_at_a_time(guarded: RunningServer) -> None:
    with MemlmClient(guarded.address, token=ANN) as memlm:
        expected = [
            f"memlm:{store.name}/{quote(document.id)}"
            for store in memlm.datastores.list()
            for document in memlm.ask(ListDocumentsRequest(store.name)).documents
        ]
    async with agent(guarded, ANN) as client:
        found, cursor = list[str](), None
        while True:
            page = await client.list_resources(cursor=cursor)
            assert len(page.resources) <= 100
            found += [resource.uri for resource in page.resources]
            if not (cursor := page.next_cursor):
                break
        assert found == expected
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template.startswith("memlm:")
        with pytest.raises(MCPError, match="cursor is none that this server gave"):
            await client.list_resources(cursor="x")


async def test_a_caller_does_what_its_token_may(guarded: RunningServer) -> None:
    reply = httpx.post(f"{guarded.http_url}/mcp", json=CALLED)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    with pytest.raises(BaseExceptionGroup):
        async with agent(guarded, "a wrong secret 000"):
            pass
    async with agent(guarded, BEN) as ben:
        assert [tool.name for tool in (await ben.list_tools()).tools] == ["search", "trace"]
        assert not (await ben.call_tool("search", {"question": "memory", "store": "notes"})).is_error
        refused = message_of(await ben.call_tool("remember", {"text": FACT, "store": "notes"}))
        assert "may not call Remember; it may call FindPassages" in refused
    async with agent(guarded, EVE) as eve:
        for tool, asked in (
            ("search", {"question": "memory"}),
            ("remember", {"text": FACT}),
            ("trace", {"text": FACT}),
        ):
            assert "may not use the datastore 'notes'" in message_of(
                await eve.call_tool(tool, asked | {"store": "notes"})
            )
        answer = await eve.call_tool("ask", {"question": QUESTION, "max_tokens": 3})
        assert {source["store"] for source in answer.structured_content["sources"]} == {"other"}
        resources = (await eve.list_resources()).resources
        assert {resource.uri.partition("/")[0] for resource in resources} == {"memlm:other"}
        with pytest.raises(MCPError, match="may not use the datastore 'notes'"):
            await eve.read_resource("memlm:notes/ports.md")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "question is missing; give it"),
        ({"question": 3}, "question is 3; expected a string"),
        ({"question": " "}, "question is empty; give some text"),
        ({"question": "a", "limit": 3}, "unknown parameter 'limit'; the parameters are question, k"),
        ({"question": "a", "storee": "x"}, "did you mean store?"),
        ({"question": "a", "k": 21}, "k is 21; expected at least 1 and at most 20"),
        ({"question": "a", "store": "x"}, "no datastore 'x' is loaded"),
        ({"question": "a" * 70_000}, "question is"),
        ({"question": "a", "documents": ["b"] * 101}, "expected at most 100"),
        ({"question": "a", "as_of": "soon"}, "as_of is 'soon'"),
    ],
)
async def test_a_wrong_argument_is_an_answer_that_says_what_to_do(
    desk: RunningServer, arguments: dict[str, Any], words: str
) -> None:
    async with agent(desk) as client:
        text = message_of(await client.call_tool("search", arguments))
        assert words in text
        assert len(text) < 500


async def test_an_unknown_tool_method_or_uri_is_refused_by_name(desk: RunningServer) -> None:
    async with agent(desk) as client:
        with pytest.raises(MCPError, match=r"no tool 'serach'; did you mean search\? the tools are search, ask"):
            await client.call_tool("serach", {})
        for uri in (
            "file:///etc/passwd",
            "memlm:",
            "memlm:store",
            "memlm:store/a#x",
            "memlm:store/%ff",
            "memlm:s/a#L9-L3",
        ):
            with pytest.raises(MCPError, match=r"uri has|uri is"):
                await client.read_resource(uri)
        for uri, words in (
            ("memlm:notes/../../etc/passwd", "etc/passwd"),
            ("memlm:nowhere/a", "no datastore 'nowhere'"),
        ):
            with pytest.raises(MCPError, match=words):
                await client.read_resource(uri)
    reply = httpx.post(f"{desk.http_url}/mcp", json={**CALLED, "method": "prompts/list"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (200, -32601)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, -32700),
        (b"[]", 400, -32700),
        (b'{"a":' * 2000, 400, -32700),
        (b'{"id": 1}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": {}, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "result": {}}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 3}}', 200, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"a": "\\ud800"}}', 400, -32700),
    ],
)
def test_a_malformed_message_has_an_error_of_the_protocol(
    desk: RunningServer, body: bytes, status: int, code: int
) -> None:
    reply = httpx.post(f"{desk.http_url}/mcp", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text


def test_what_is_no_message_is_refused_as_on_other_paths(desk: RunningServer) -> None:
    url = f"{desk.http_url}/mcp"
    for method in ("GET", "DELETE"):
        assert httpx.request(method, url).status_code == 405
    assert httpx.post(url, json=CALLED, headers={"origin": "https://evil.example"}).status_code == 403
    assert httpx.post(url, json=CALLED, headers={"host": "evil.example"}).status_code == 403
    assert httpx.post(url, content=json.dumps(CALLED), headers={"content-type": "text/plain"}).status_code == 400
    large = {**CALLED, "params": {"a": "b" * (4 << 20)}}
    assert httpx.post(url, json=large, timeout=60).status_code == 413
    noted = httpx.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (noted.status_code, noted.content) == (202, b"")
    future = httpx.post(url, json=CALLED, headers={"mcp-protocol-version": "2099-01-01"})
    assert future.status_code == 400


async def test_two_agents_are_answered_at_once(desk: RunningServer) -> None:
    """Both run before one of them ends."""
    asked = {"question": QUESTION, "max_tokens": 600}

    async def ask() -> Any:
        async with agent(desk) as client:
            return await client.call_tool("ask", asked)

    both = asyncio.gather(ask(), ask())
    await asyncio.to_thread(wait_until, lambda: figures_of(desk)["memlm_running"] == 2)
    for answer in await both:  # as streams of events
        assert answer.structured_content["finish_reason"] == "length"


def test_an_answer_that_takes_long_is_a_stream_with_signs_of_life(desk: RunningServer) -> None:
    body = {**CALLED, "method": "tools/call"}
    body["params"] = {"name": "ask", "arguments": {"question": QUESTION, "max_tokens": 300}}
    url, both = f"{desk.http_url}/mcp", {"accept": "application/json, text/event-stream"}
    with httpx.stream("POST", url, json=body, headers=both, timeout=60) as reply:
        lines = list(reply.iter_lines())
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert lines[:2] == [": waiting", ""]
    assert lines[-3] == "event: message"
    assert json.loads(lines[-2].removeprefix("data: "))["result"]["structuredContent"]["sources"]
    whole = httpx.post(url, json=body, timeout=60)  # of a client that takes no events
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["id"] == 1


async def test_the_work_of_a_client_that_leaves_ends(desk: RunningServer) -> None:
    body = {**CALLED, "method": "tools/call"}
    body["params"] = {"name": "ask", "arguments": {"question": QUESTION, "max_tokens": 4096}}
    logged = len(desk.output)
    async with httpx.AsyncClient(timeout=60) as http:
        asking = asyncio.create_task(http.post(f"{desk.http_url}/mcp", json=body))
        await asyncio.to_thread(wait_until, lambda: figures_of(desk)["memlm_running"] == 1)
        asking.cancel()
    await asyncio.to_thread(wait_until, lambda: "call=Answer" in desk.output[logged:])
    assert "code=CANCELLED" in desk.output[logged:]
    await asyncio.to_thread(wait_until, lambda: figures_of(desk)["memlm_requests_open"] == 0)


async def test_a_long_document_is_read_a_part_at_a_time(desk: RunningServer) -> None:
    async with agent(desk) as client:
        for uri, expected in (
            ("memlm:notes/long.md", TEXTS["long.md"]),
            ("memlm:notes/long.md#L7-L9", "Line 7 of a long log.\nLine 8 of a long log.\nLine 9 of a long log.\n"),
            ("memlm:notes/long.md#L2000-L9999", "Line 2000 of a long log.\n"),
            ("memlm:notes/%C3%A4%20b%23%3F.md", TEXTS["ä b#?.md"]),
            ("memlm://notes/people/ann.md#L1", TEXTS["people/ann.md"]),
        ):
            (read,) = (await client.read_resource(uri)).contents
            assert read.text == expected, uri
        with pytest.raises(MCPError, match="uri has the line 9,000; the document has 2,001 lines"):
            await client.read_resource("memlm:notes/long.md#L9000-L9001")


def test_a_server_without_the_sdk_says_how_to_install_it(tmp_path: Path, long_model: Path, notes: Path) -> None:
    options = ("--threads", "1", "--http-port", "0")
    without = "import sys; sys.modules['mcp'] = None"
    with RunningServer(tmp_path / "log", long_model, notes, options=options, first=without) as server:
        reply = httpx.post(f"{server.http_url}/mcp", json=CALLED)
        assert reply.status_code == 404
        assert "pip install 'memlm[mcp]'" in reply.json()["error"]["message"]
        assert httpx.get(f"{server.http_url}/readyz").status_code == 200
