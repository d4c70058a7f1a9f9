"""One secret for all callers, over gRPC and HTTP, which nobody else sees. And one line for each call."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running import RunningServer, family_of, refusal_of

from memlm.client import Client
from memlm.errors import InvalidInput, Unauthenticated
from memlm.server.config import ServerConfig

KEY = "a-secret-of-the-tests-0123"
OPTIONS = ("--threads", "1", "--http-port", "0", "--log-level", "warning", "--access-log")
MINE = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("keyed") / "log"
    options = (*OPTIONS, "--api-key", KEY)
    with RunningServer(log, model_folder, store_folder, options=options, forked=False) as server:
        yield server


def test_both_ports_want_the_secret(keyed: RunningServer) -> None:
    for token in (None, KEY[:-1], f"{KEY}x", KEY.upper()):
        with Client(keyed.address, token=token) as client, pytest.raises(Unauthenticated):
            client.get_model()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        for path in ("/v1/models", "/metrics"):
            assert httpx.get(keyed.http_url + path, headers=headers, timeout=60).status_code == 401
    with Client(keyed.address, token=KEY) as client:
        assert client.get_model().name
    assert httpx.get(f"{keyed.http_url}/v1/models", headers=MINE, timeout=60).status_code == 200
    assert httpx.get(f"{keyed.http_url}/health", timeout=60).status_code == 200


def test_nobody_else_sees_the_secret(keyed: RunningServer) -> None:
    for path in ("/docs", "/openapi.json", "/metrics", "/", "/health"):
        assert KEY not in httpx.get(keyed.http_url + path, headers=MINE, timeout=60).text
    pids = [keyed.process.pid, *family_of(keyed.process.pid)]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    assert len(commands) > 1
    assert not [command for command in commands if KEY in command]
    assert KEY not in keyed.output
    assert KEY not in repr(ServerConfig(Path("m"), api_key=KEY))


def test_a_page_of_another_site_needs_the_secret_too(keyed: RunningServer) -> None:
    """As with a file of tokens, a page has none unless its reader gives it one."""
    attack = {"host": "evil.test", "origin": "http://evil.test"}
    assert httpx.get(f"{keyed.http_url}/v1/models", headers=attack, timeout=60).status_code == 401


def test_a_call_is_a_line_of_the_log_under_the_id_of_its_caller(keyed: RunningServer) -> None:
    mine = {**MINE, "X-Request-Id": "mine-7"}
    url = f"{keyed.http_url}/v1/datastores"
    answer = httpx.get(url, headers=mine, timeout=60)
    assert answer.headers.get_list("x-request-id") == ["mine-7"]
    line = next(line for line in keyed.output.splitlines() if "request_id=mine-7" in line)
    assert "call=ListDatastores" in line
    assert "code=OK" in line
    error = httpx.get(f"{url}/none", headers={**mine, "X-Request-Id": "mine-8"}, timeout=60)
    assert error.headers["x-request-id"] == error.json()["error"]["request_id"] == "mine-8"
    assert "request_id=mine-8" in keyed.output
    refused = httpx.get(f"{keyed.http_url}/nothing", headers={"X-Request-Id": "mine-9"}, timeout=60)
    assert refused.headers["x-request-id"] == refused.json()["error"]["request_id"] == "mine-9"


@pytest.mark.parametrize("given", [[], ["two words"], ["a" * 129], ["a", "b"], ["é"], [""], ["a\tb"]])
def test_an_id_that_is_no_word_is_replaced(keyed: RunningServer, given: list[str]) -> None:
    headers = [*MINE.items(), *(("X-Request-Id", each.encode()) for each in given)]
    ids = {httpx.get(f"{keyed.http_url}/v1/models", headers=headers, timeout=60).headers["x-request-id"] for _ in "ab"}
    assert len(ids) == 2
    assert not ids & set(given)
    assert all(len(each) == 16 for each in ids)


def test_a_stream_that_fails_names_its_request(keyed: RunningServer) -> None:
    body = {"model": "none", "prompt": "a", "stream": True}
    answer = httpx.post(f"{keyed.http_url}/v1/completions", json=body, headers=MINE, timeout=60)
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


def test_the_environment_has_the_secret_for_servers_and_clients(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from memlm.cli.app import app

    first = f"import os; os.environ['MEMLM_API_KEY'] = {KEY!r}"
    with RunningServer(tmp_path / "log", model_folder, options=("--threads", "1"), first=first) as server:
        asked = ["info", "--target", server.address]
        assert CliRunner().invoke(app, asked, env={"MEMLM_API_KEY": None, "MEMLM_TOKEN": None}).exit_code == 1
        assert CliRunner().invoke(app, asked, env={"MEMLM_API_KEY": KEY}).exit_code == 0


def test_a_secret_that_is_none_is_refused_without_it(tmp_path: Path, model_folder: Path) -> None:
    said = refusal_of(tmp_path / "log", "--model", str(model_folder), "--api-key", "short-secret")
    assert "--api-key has 12 characters; expected 16 or more" in said
    assert "short-secret" not in said
    with pytest.raises(InvalidInput, match="give one secret"):
        ServerConfig(Path("m"), api_key=KEY, auth_file=tmp_path / "tokens.toml")
    for wrong in ("a secret with spaces in it", "a-secret-with-an-é-in-it"):
        with pytest.raises(InvalidInput, match="ASCII without spaces"):
            ServerConfig(Path("m"), api_key=wrong)


def test_the_shown_settings_hide_the_secret(model_folder: Path) -> None:
    from typer.testing import CliRunner

    from memlm.cli.app import app

    shown = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--api-key", KEY, "--print-config"])
    assert shown.exit_code == 0, shown.output
    assert '"api_key": "****************"' in shown.output
    assert KEY not in shown.output
