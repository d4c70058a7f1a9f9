"""Targets of a client: URLs, proxies and TLS, and what its errors say of them."""

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2_grpc

from memlm.base.addresses import host_in, is_local, proxy_advice
from memlm.client import Client, Tls
from memlm.client.channel import address_in
from memlm.errors import Incompatible, InvalidInput, Unavailable

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An authority, and a certificate and key of localhost."""
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    paths = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    pems = authority.cert_pem, issued.cert_chain_pems[0], issued.private_key_pem
    for path, pem in zip(paths, pems, strict=True):
        pem.write_to_path(path)
    return paths


@pytest.fixture(scope="module")
def ports(certificates: tuple[Path, Path, Path]) -> Iterator[tuple[int, int]]:
    """Ports of another service than memlm's, without TLS and with it."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    key, cert = certificates[2].read_bytes(), certificates[1].read_bytes()
    secure = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
    plain = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield plain, secure
    stopped: threading.Event = server.stop(0)
    stopped.wait()


def ask(target: str, tls: Tls | None = None) -> None:
    with Client(target, timeout_s=30, tls=tls) as client:
        client.get_server_info()


@pytest.mark.parametrize("name", PROXIES)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "http://127.0.0.1", "ipv4:127.0.0.1", "dns:///localhost"])
def test_a_server_of_this_machine_is_reached_past_a_proxy(
    ports: tuple[int, int], no_proxies: None, monkeypatch: pytest.MonkeyPatch, name: str, host: str
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(Incompatible, match="does not have this call"):  # it has answered
        ask(f"{host}:{ports[0]}")


def test_an_error_names_the_proxy_without_its_password(no_proxies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://ann:secret@127.0.0.1:9")
    with pytest.raises(Unavailable) as caught:
        ask("memlm.example:50051")
    assert "through the proxy 127.0.0.1:9 of the variable http_proxy, which no_proxy=memlm.example" in str(caught.value)
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("no_proxy", "other.example, memlm.example")
    assert proxy_advice("memlm.example:50051") == ""


def test_a_client_without_tls_is_told_of_it(
    ports: tuple[int, int], no_proxies: None, certificates: tuple[Path, Path, Path]
) -> None:
    plain, secure = ports
    with pytest.raises(Unavailable, match="whether it wants TLS"):
        ask(f"127.0.0.1:{secure}")
    with pytest.raises(Unavailable, match="whether it wants TLS"):
        ask(f"127.0.0.1:{plain}", Tls(certificates[0]))
    with pytest.raises(Incompatible, match="does not have this call"):
        ask(f"https://127.0.0.1:{secure}/", Tls(certificates[0]))


@pytest.mark.parametrize(
    ("target", "host", "is_here"),
    [
        ("localhost:1", "localhost", True),
        ("LOCALHOST.:1", "localhost", True),
        ("memlm.localhost:1", "memlm.localhost", True),
        ("127.8.9.1:1", "127.8.9.1", True),
        ("[::1]:1", "::1", True),
        ("ipv6:[::1]:1", "::1", True),
        ("0.0.0.0:1", "0.0.0.0", True),
        ("dns://8.8.8.8/a.example:1", "a.example", False),
        ("dns:localhost:1", "localhost", True),
        ("localhost.example:1", "localhost.example", False),
        ("10.0.0.1:1", "10.0.0.1", False),
        ("[2001:db8::1]:1", "2001:db8::1", False),
    ],
)
def test_the_host_of_a_target_tells_whether_it_is_here(target: str, host: str, is_here: bool) -> None:
    assert (host_in(target), is_local(target)) == (host, is_here)


def test_a_socket_of_the_file_system_is_here() -> None:
    assert is_local("unix:/run/memlm")
    assert is_local("unix-abstract:memlm")


def test_a_url_is_a_target_where_it_says_no_more_than_one() -> None:
    for target in ("localhost:1", "unix:///run/memlm", "dns:///localhost:1"):
        assert address_in(target, has_tls=False) == target
    for target in ("http://localhost:1", "HTTP://localhost:1/", "grpc://localhost:1"):
        assert address_in(target, has_tls=False) == "localhost:1"
    assert address_in("https://[::1]:1", has_tls=True) == "[::1]:1"
    for target in ("http://localhost:1/v1", "http://localhost", "http://ann@localhost:1", "http://"):
        with pytest.raises(InvalidInput, match="expected HOST:PORT, the port of gRPC"):
            address_in(target, has_tls=False)
    with pytest.raises(InvalidInput, match="no TLS is given"):
        Client("https://localhost:1")
