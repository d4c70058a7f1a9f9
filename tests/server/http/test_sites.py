"""Pages of other sites: what a browser may be made to ask of a server, by a name that leads to it or across sites."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running import RunningServer

from memlm.errors import InvalidInput
from memlm.server.config import ServerConfig
from memlm.server.sites import Sites, check_site

EVIL = "evil.test"
SECRET = "a long secret of ann"
ALLOWED = ("chat.example.org", "http://localhost:3000", "chrome-extension://abc", "app://obsidian.md", "file://")


@pytest.fixture(scope="module")
def listing_web(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path
) -> Iterator[RunningServer]:
    """A server without tokens that is told of names and of pages."""
    listed = [word for site in ALLOWED for word in ("--allowed-hosts", site)]
    options = ("--threads", "1", "--http-port", "0", *listed)
    folder = tmp_path_factory.mktemp("listing")
    with RunningServer(folder / "log", model_folder, store_folder, options=options) as server:
        yield server


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(f'[[token]]\nname = "ann"\nsecret = "{SECRET}"\n')
    return path


@pytest.fixture(scope="module")
def token_web(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path, token_file: Path
) -> Iterator[RunningServer]:
    listed = ("--allowed-hosts", "https://chat.example.org", "--allowed-hosts", "null")
    options = ("--threads", "1", "--http-port", "0", "--auth-file", str(token_file), *listed)
    with RunningServer(tmp_path_factory.mktemp("log") / "log", model_folder, store_folder, options=options) as server:
        yield server


def status_of(url: str, head: str, method: str = "GET", target: str = "/v1/datastores", version: str = "1.1") -> int:
    """The status of the answer to a request with some lines as its whole head."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        lines = f"{head}\r\n" if head else ""
        client.sendall(f"{method} {target} HTTP/{version}\r\n{lines}Connection: close\r\n\r\n".encode())
        return int(b"".join(iter(lambda: client.recv(1 << 16), b"")).split()[1])


def test_a_page_cannot_use_a_server_by_a_name_of_its_own(web: RunningServer) -> None:
    port = web.http_url.rpartition(":")[2]
    attack = {"host": f"{EVIL}:{port}", "origin": f"http://{EVIL}:{port}"}
    with httpx.Client(base_url=web.http_url, headers=attack, timeout=60) as http:
        replies = [
            *(http.get(path) for path in ("/", "/v1/datastores", "/v1/models", "/metrics", "/health", "/docs", "/no")),
            http.head("/v1/datastores"),
            http.options("/v1/datastores"),
            http.post("/v1/datastores/store/search", json={"text": "the", "k": 1}),
            http.post("/v1/datastores/store/remember", json={"text": "planted", "id": "planted"}),
            http.post("/v1/datastores/store/documents", files={"files": ("planted.txt", b"planted")}),
            http.post("/v1/completions", json={"model": "tiny", "prompt": "the"}),
            http.delete("/v1/datastores/store/documents/doc-1.txt"),
        ]
    assert {reply.status_code for reply in replies} == {403}
    assert "--allowed-hosts evil.test" in replies[1].json()["error"]["message"]
    with httpx.Client(base_url=web.http_url, timeout=60) as http:
        planted = http.post("/v1/datastores/store/search", json={"text": "planted", "by": "words"}).json()["data"]
        assert planted == []


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"Host: {EVIL}", 403),
        ("Host: EVIL.test:80", 403),
        ("Host: evil.test.", 403),
        ("Host: 127.0.0.1.evil.test", 403),
        ("Host: localhost.evil.test", 403),
        ("Host: evil-localhost", 403),
        ("Host: notlocalhost:8080", 403),
        ("Host: xn--lcalhost-54a", 403),
        ("Host: 127.0.0.1@evil.test", 400),
        ("Host: user@127.0.0.1", 400),
        ("Host: localhost, evil.test", 400),
        ("Host: localhost evil.test", 400),
        ("Host: localhost/evil.test", 400),
        ("Host: [::1].evil.test", 400),
        ("Host: [evil.test]", 400),
        ("Host: localhost:port", 400),
        ("Host: \u0141ocalhost", 400),
        ("Host:", 400),
        ("", 400),
        (f"Host: localhost\r\nHost: {EVIL}", 400),
        (f"Host: {EVIL}\r\nHost: localhost", 400),
        ("Host: localhost\r\nhost: localhost", 400),
        (f"X-Forwarded-Host: localhost\r\nForwarded: host=localhost\r\nHost: {EVIL}", 403),
        ("Host: 127.0.0.1", 200),
        ("Host: 127.0.0.1:8080", 200),
        ("Host: 192.168.1.7:8080", 200),
        ("Host: 10.1.2.3.", 200),
        ("Host: [::1]", 200),
        ("Host: [::1]:8080", 200),
        ("Host: [2001:DB8::1]:8080", 200),
        ("Host: localhost", 200),
        ("HOST: LocalHost.:65535", 200),
        ("Host: memlm.localhost:8080", 200),
    ],
)
def test_a_server_without_tokens_answers_to_addresses_and_localhost_only(
    web: RunningServer, head: str, status: int
) -> None:
    assert status_of(web.http_url, head) == status


def test_a_target_with_a_host_counts_in_place_of_the_header(web: RunningServer) -> None:
    target = f"http://{EVIL}/v1/datastores"
    assert status_of(web.http_url, "Host: localhost", target=target) == 403
    assert status_of(web.http_url, "", target=target) == 403
    assert status_of(web.http_url, "Host: localhost", target=f"HTTP://{EVIL}/") == 403
    assert status_of(web.http_url, "Host: localhost", target="http://localhost@evil.test/health") == 400
    assert status_of(web.http_url, f"Host: {EVIL}", target="http://localhost:80/v1/datastores") == 200
    assert status_of(web.http_url, f"Host: {EVIL}", target="/v1/datastores?a=http://localhost/") == 403
    assert status_of(web.http_url, f"Host: {EVIL}", target="//localhost/v1/datastores") == 403


def test_a_request_of_http_1_0_needs_no_host(web: RunningServer) -> None:
    assert status_of(web.http_url, "", version="1.0") == 200
    assert status_of(web.http_url, f"Host: {EVIL}", version="1.0") == 403


@pytest.mark.parametrize(
    "origin",
    ["https://elsewhere.example", "http://localhost:3001", "http://127.0.0.1", "http://10.0.0.1", "null", "file://",
     "https://localhost:3000", "chrome-extension://abc", "moz-extension://127.0.0.1", "http://127.0.0.1@evil.test"],
)  # fmt: skip
def test_a_page_of_another_site_cannot_use_the_server(web: RunningServer, origin: str) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with httpx.Client(base_url=web.http_url, headers={"origin": origin}, timeout=60) as http:
        replies = [
            http.post("/tokenize", json={"prompt": "a"}),
            http.get("/v1/datastores"),
            http.options("/tokenize", headers=asked),
        ]
    for reply in replies:
        assert reply.status_code == 403
        assert f"--allowed-hosts {origin}" in reply.json()["error"]["message"]
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_the_servers_own_page_may_use_it(web: RunningServer) -> None:
    with httpx.Client(base_url=web.http_url, timeout=60) as http:
        for own in (web.http_url, web.http_url.upper()):
            assert http.post("/tokenize", json={"prompt": "a"}, headers={"origin": own}).status_code == 200
        two = [("origin", web.http_url), ("origin", "https://elsewhere.example")]
        assert http.post("/tokenize", json={"prompt": "a"}, headers=two).status_code == 403


def test_a_name_in_the_list_is_one_of_the_server(listing_web: RunningServer) -> None:
    """A proxy passes the name that it was called by (Host), or its own, while the page has that name (Origin)."""
    with httpx.Client(base_url=listing_web.http_url, timeout=60) as http:
        for headers in (
            {"host": "chat.example.org"},
            {"host": "Chat.Example.Org:443", "origin": "https://chat.example.org:443"},
            {"origin": "https://chat.example.org"},
            {"origin": "http://chat.example.org:8080"},
        ):
            assert http.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200, headers
        for headers in ({"host": "example.org"}, {"host": "evil.chat.example.org"}, {"host": "localhost.evil"}):
            assert http.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 403, headers


@pytest.mark.parametrize("origin", ALLOWED[1:])
def test_pages_of_an_origin_in_the_list_may_use_the_server(listing_web: RunningServer, origin: str) -> None:
    asked = {"access-control-request-method": "DELETE",
             "access-control-request-headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    with httpx.Client(base_url=listing_web.http_url, headers={"origin": origin}, timeout=60) as http:
        allowed = http.options("/v1/datastores/store/documents/a", headers=asked)
        assert (allowed.status_code, allowed.content) == (204, b"")
        assert "DELETE" in allowed.headers["access-control-allow-methods"]
        assert allowed.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        answers = [
            allowed,
            http.get("/"),
            http.get("/v1/models"),
            http.post("/tokenize", json={"prompt": "a"}),
            http.post("/tokenize", json={}),
            http.get("/nowhere"),
        ]
        assert [answer.status_code for answer in answers] == [204, 200, 200, 200, 400, 404]
        for answer in answers:  # refusals too, which the page would else not see
            assert answer.headers["access-control-allow-origin"] == origin
            assert "origin" in answer.headers["vary"].lower()


def test_with_tokens_the_token_decides_and_not_the_name(token_web: RunningServer) -> None:
    bearer = {"authorization": f"Bearer {SECRET}"}
    attack = {"host": EVIL, "origin": f"http://{EVIL}"}
    with httpx.Client(base_url=token_web.http_url, timeout=60) as http:
        assert http.get("/v1/datastores", headers=attack).status_code == 401
        for headers in (attack, {"origin": "https://other.example"}):
            reply = http.post("/tokenize", json={"prompt": "a"}, headers={**bearer, **headers})
            assert reply.status_code == 200
            assert "access-control-allow-origin" not in reply.headers
        asked = {"access-control-request-method": "POST"}
        refusal = http.options("/tokenize", headers={"origin": "https://other.example", **asked})
        assert refusal.status_code == 403
        for origin in ("https://chat.example.org", "null"):
            reply = http.options("/tokenize", headers={"origin": origin, **asked})
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (204, origin)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("Chat.Example.org.", "chat.example.org"),
        ("memlm", "memlm"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("https://Chat.example.org/", "https://chat.example.org"),
        ("https://chat.example.org:443", "https://chat.example.org"),
        ("https://chat.example.org:80", "https://chat.example.org:80"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("file://", "file://"),
        ("NULL", "null"),
    ],
)
def test_sites_are_kept_as_browsers_write_them(given: str, kept: str) -> None:
    assert check_site(given) == check_site(kept) == kept


@pytest.mark.parametrize(
    "given", ["", "*", "*.example.org", "a,b", "a:80", "a b", "http://a/b", "http://u@a", "/a", "."]
)
def test_what_is_no_site_is_refused(given: str) -> None:
    with pytest.raises(InvalidInput, match="expected a name as"):
        check_site(given)


def test_the_origin_that_any_page_can_have_needs_tokens(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="any page can make its origin"):
        ServerConfig(tmp_path, allowed_hosts=("null",))
    ServerConfig(tmp_path, allowed_hosts=("null",), auth_file=tmp_path / "tokens.toml")


def test_the_given_host_is_a_name_of_the_server_but_not_of_pages() -> None:
    sites = Sites((), "Box.Example", is_open=True)
    sites.check_host(["box.example:8080"])
    assert (
        sites.admit_origin(["https://box.example"], "Box.example:443", is_preflight=False) is None
    )  # as nginx may say
    assert sites.admit_origin(["http://box.example:8080"], "box.example:8080", is_preflight=False) is None
    for host, origin in (("box.example:8080", "http://box.example:3000"), ("10.0.0.1", "http://10.0.0.1:81")):
        with pytest.raises(Exception, match="another site"):
            sites.admit_origin([origin], host, is_preflight=False)
