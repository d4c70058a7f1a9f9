"""`memlm mcp`: an agent starts it, and calls its tools over standard input and output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from chats import save_chat_model
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError
from running import PATIENCE_S, RunningServer

from memlm.data.corpus import Document
from memlm.data.tokenizer import Tokenizer
from memlm.indexing.build import build_index

QUESTION = "Which port does the gateway listen on?"
TEXT = "The gateway listens on port 7443."
READER = "the reader's secret 0"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chat", tokenizer)


@pytest.fixture
def notes(tmp_path: Path, model_folder: Path) -> Path:
    return build_index(model_folder, [Document("ports.md", TEXT)], tmp_path / "notes").path


@asynccontextmanager
async def agent(*options: str | Path, mode: str = "auto", **environment: str) -> AsyncIterator[Client]:
    command = ["-m", "memlm", "mcp", *map(str, options)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    started = StdioServerParameters(command=sys.executable, args=command, env=variables)
    async with Client(started, mode=mode, read_timeout_seconds=PATIENCE_S) as client:
        yield client


def message_of(result: Any) -> str:
    assert result.is_error, result
    return result.content[0].text


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_model_in_the_process_answers(model_folder: Path, notes: Path, mode: str) -> None:
    async with agent("--model", model_folder, "--store", notes, "--encoder", "none", mode=mode) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["search", "ask", "trace", "remember", "forget"]
        found = (await client.call_tool("search", {"question": QUESTION})).structured_content
        assert [passage["text"] for passage in found["passages"]] == [TEXT]
        assert (await client.call_tool("ask", {"question": QUESTION, "max_tokens": 4})).structured_content["answer"]
        kept = await client.call_tool("remember", {"text": "The second port is 7444.", "id": "second.md"})
        assert kept.structured_content["uris"] == ["memlm:notes/second.md"]
        assert [each.uri for each in (await client.list_resources()).resources] == [
            "memlm:notes/ports.md",
            "memlm:notes/second.md",
        ]
        (read,) = (await client.read_resource("memlm:notes/second.md")).contents
        assert read.text == "The second port is 7444."
        await client.call_tool("forget", {"document_ids": ["second.md"]})
        assert [each.uri for each in (await client.list_resources()).resources] == ["memlm:notes/ports.md"]
        traced = (await client.call_tool("trace", {"text": f"As is written: {TEXT}"})).structured_content
        assert traced["spans"][0]["places"][0]["document_id"] == "ports.md"
        assert "unknown parameter 'limit'" in message_of(
            await client.call_tool("search", {"question": "a", "limit": 1})
        )
        assert "question is" in message_of(await client.call_tool("search", {"question": "a" * 10_000_000}))
        with pytest.raises(MCPError, match="no tool 'remove'"):
            await client.call_tool("remove", {})


async def test_what_another_command_has_changed_is_seen(model_folder: Path, notes: Path, tmp_path: Path) -> None:
    (tmp_path / "third.md").write_text("The third port is 7445.")
    async with agent("--model", model_folder, "--store", notes, "--encoder", "none") as client:
        await client.call_tool("search", {"question": QUESTION})
        command = [sys.executable, "-m", "memlm", "index", "add", str(notes), str(tmp_path / "third.md")]
        await anyio.run_process([*command, "--model", str(model_folder)])
        found = (await client.call_tool("search", {"question": "the third port", "k": 1})).structured_content
        assert found["passages"][0]["text"] == "The third port is 7445."


async def test_calls_go_to_a_server_with_the_rights_of_the_token(
    tmp_path: Path, model_folder: Path, notes: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\nname = "reader"\nsecret = "{READER}"\ncalls = ["FindPassages", "Answer"]\n')
    tokens.chmod(0o600)
    options = ("--threads", "1", "--auth-file", str(tokens))
    with RunningServer(tmp_path / "log", model_folder, notes, options=options) as server:
        async with agent("--target", server.address, MEMLM_TOKEN=READER) as client:
            results: dict[int, Any] = {}

            async def search(k: int) -> None:
                results[k] = await client.call_tool("search", {"question": QUESTION, "k": k})

            async with anyio.create_task_group() as calls:
                for k in range(1, 20):
                    calls.start_soon(search, k)
            assert {result.structured_content["passages"][0]["text"] for result in results.values()} == {TEXT}
            refused = message_of(await client.call_tool("remember", {"text": "new"}))
            assert "may not call Remember; it may call Answer, FindPassages" in refused
        async with agent("--target", server.address) as client:
            assert "wants a token" in message_of(await client.call_tool("search", {"question": QUESTION}))


def test_it_ends_with_its_client(model_folder: Path, notes: Path) -> None:
    command = [sys.executable, "-m", "memlm", "mcp", "--model", model_folder, "--store", notes, "--encoder", "none"]
    done = subprocess.run(command, input="not JSON\n", capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_model_or_a_server_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memlm", "mcp"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "give --model MODEL, or --target HOST:PORT" in " ".join(done.stderr.split())


def test_without_the_sdk_it_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['mcp'] = None; sys.argv[1:] = ['mcp', '--model', 'm']"
    code += "; from memlm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'memlm[mcp]'" in done.stderr
