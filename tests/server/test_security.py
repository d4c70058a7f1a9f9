"""Who may call: tokens, what they are for, how often; TLS, and certificates that change while the server runs."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from running import RunningServer, wait_until
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.client import Client, Tls
from memlm.errors import InvalidInput, MemlmError, NotFound, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from memlm.server.config import ServerConfig
from memlm.server.frontend.auth import Authenticator, Principal
from memlm.server.main import exposure_warning

ANN, BEN, EVE = "ann's own secret 0", "ben's own secret 0", "nobody's secret 00"
TOKENS = f"""
[[token]]
name = "ann"
secret = "{ANN}"
stores = ["store"]

[[token]]
name = "ben"
sha256 = "{__import__("hashlib").sha256(BEN.encode()).hexdigest()}"
calls = ["Tokenize", "Generate", "CreateSession", "GetSession", "ListSessions", "ListDatastores", "GetServerInfo"]
stores = []
requests_per_minute = 600
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, model_folder: Path, store_folder: Path) -> Iterator[tuple[RunningServer, Path]]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens.toml").write_text(TOKENS)
    options = ("--threads", "1", "--auth-file", str(folder / "tokens.toml"))
    with RunningServer(folder / "log", model_folder, store_folder, options=options) as server:
        yield server, folder / "tokens.toml"


def test_without_a_token_nothing_but_health_is_told(guarded: tuple[RunningServer, Path]) -> None:
    server, _ = guarded
    for token in (None, EVE, "", ANN.upper()):
        with Client(server.address, token=token) as client:
            client.wait_until_ready()
            for ask in (client.get_model, client.get_server_info, client.datastores.list, client.list_sessions):
                with pytest.raises(Unauthenticated, match="token that it knows"):
                    ask()
            with pytest.raises(Unauthenticated):
                client.generate("a")
            with pytest.raises(Unauthenticated):
                client.append_to_session("x", "text")
    with grpc.insecure_channel(server.address) as channel:
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError) as raised:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests))
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_may_do_what_it_is_for(guarded: tuple[RunningServer, Path]) -> None:
    server, _ = guarded
    with Client(server.address, token=ANN) as ann, Client(server.address, token=BEN) as ben:
        assert ann.get_server_info().needs_token
        assert [store.name for store in ann.datastores.list()] == ["store"]
        assert ben.datastores.list() == ()
        assert ann.search(None, "the memory", k=1)
        assert next(ann.generate("the", seed=1)).knn_logprob is not None
        assert next(ben.generate("the", seed=1)).knn_logprob is None
        with pytest.raises(PermissionDenied, match="'ben' may not call Score"):
            ben.score("a")
        with pytest.raises(PermissionDenied, match="'ben' may not use the datastore 'store'"):
            ben.generate("a", store="store")
        with pytest.raises(PermissionDenied, match="'ann' may not use the datastore 'other'"):
            ann.search("other", "a")


def test_nobody_sees_or_uses_anothers_sessions(guarded: tuple[RunningServer, Path]) -> None:
    server, _ = guarded
    with Client(server.address, token=ANN) as ann, Client(server.address, token=BEN) as ben:
        session = ann.session()
        assert session.name in [info.name for info in ann.list_sessions()]
        assert ben.list_sessions() == ()
        for ask in (lambda: ben.get_session(session.name), lambda: ben.generate("a", session=session.name)):
            with pytest.raises(NotFound, match="no session"):
                ask()
        session.delete()


def test_no_usage_shows_what_anothers_prompt_was(guarded: tuple[RunningServer, Path]) -> None:
    server, _ = guarded
    prompt, cached = [*range(20, 60)], list[int]()
    with Client(server.address, token=ANN) as ann, Client(server.address, token=BEN) as ben:
        for client in (ann, ben, ann):
            answer = client.generate(prompt, use_store=False, max_tokens=2).result()
            cached.append(answer.finished.usage.cached_tokens)
    assert cached == [0, 0, len(prompt) - 1]


def test_a_file_that_changes_is_read_again_and_a_bad_one_is_not(guarded: tuple[RunningServer, Path]) -> None:
    server, path = guarded
    with Client(server.address, token=EVE) as eve, Client(server.address, token=ANN) as ann:
        rewrite(path, TOKENS.replace(ANN, EVE))
        assert eve.tokenize("a")
        with pytest.raises(Unauthenticated):
            ann.tokenize("a")
        rewrite(path, "not = [toml")
        assert eve.tokenize("a")
        rewrite(path, TOKENS)
        assert ann.tokenize("a")
        with pytest.raises(Unauthenticated):
            eve.tokenize("a")
    assert "was not read again" in server.log.read_text()
    for secret in (ANN, BEN, EVE):
        assert secret not in server.log.read_text()


def rewrite(path: Path, text: str) -> None:
    before = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_a_rate_is_kept_and_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("memlm.server.frontend.auth.time.monotonic", lambda: now_s[0])
    caller = Principal("ann", requests_per_minute=60.0)
    for _ in range(10):
        caller.check("Generate")
    with pytest.raises(Overloaded, match="60 times a minute") as raised:
        caller.check("Generate")
    assert raised.value.retry_after_s == pytest.approx(1.0)
    now_s[0] += 0.5
    with pytest.raises(Overloaded):
        caller.check("Generate")
    now_s[0] += 0.5
    caller.check("Generate")
    now_s[0] += 3600
    for _ in range(10):
        caller.check("Generate")
    with pytest.raises(Overloaded):
        caller.check("Generate")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no tokens"),
        ("token = 3", "no tokens"),
        ("[[token]]\nname = 'a'", "either a secret or a sha256"),
        ("[[token]]\nsecret = '0123456789abcdef'", "has no name"),
        ("[[token]]\nname = 'a'\nsecret = 'short'", "under 16 characters"),
        ("[[token]]\nname = 'a'\nsha256 = 'xyz'", "64 hexadecimal digits"),
        ("[[token]]\nname = 'a'\nsecret = '0123456789abcdef'\nrights = 3", "rights"),
        ("[[token]]\nname = 'a'\nsecret = '0123456789abcdef'\nstores = 'x'", "list of names"),
        ("[[token]]\nname = 'a'\nsecret = '0123456789abcdef'\nrequests_per_minute = 0", "above 0"),
        ("[[token]]\nname = 'a'\nsecret = '0123456789abcdef'\n" * 2, "same name"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_used_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(InvalidInput, match=says):
        Authenticator(tmp_path / "t.toml")


@pytest.mark.parametrize(
    ("host", "more", "warned"),
    [
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"auth_file": Path("t")}, True),
        ("0.0.0.0", {"tls_cert": Path("c"), "tls_key": Path("k")}, True),
        ("0.0.0.0", {"tls_cert": Path("c"), "tls_key": Path("k"), "auth_file": Path("t")}, False),
    ],
)
def test_who_can_be_reached_and_has_no_guard_is_warned(host: str, more: dict, warned: bool) -> None:
    assert (exposure_warning(ServerConfig(model=Path("m"), host=host, **more)) is not None) == warned


@pytest.fixture
def authority(tmp_path: Path) -> tuple[Callable[[str], tuple[Path, Path]], Path]:
    """Makes certificates by name, and the file of whoever signed them."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    def issue(name: str) -> tuple[Path, Path]:
        issued = ca.issue_cert("localhost", "127.0.0.1", common_name=name)
        issued.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        (tmp_path / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return tmp_path / f"{name}.pem", tmp_path / f"{name}.key"

    return issue, tmp_path / "ca.pem"


def test_tls_both_ways_and_a_certificate_that_changes(model_folder: Path, tmp_path: Path, authority) -> None:
    issue, ca = authority
    (cert, key), (own_cert, own_key) = issue("server"), issue("client")
    options = ("--threads", "1", "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        port = server.address.rpartition(":")[2]
        target, tls = f"localhost:{port}", Tls(ca, own_cert, own_key)
        with Client(target, tls=tls) as client:
            client.wait_until_ready()
            assert client.tokenize("a")
        for wrong in (None, Tls(ca)):
            with Client(target, tls=wrong, timeout_s=3) as client, pytest.raises((Unavailable, MemlmError)):
                client.tokenize("a")
        again = trustme.CA()
        renewed = again.issue_cert("localhost", "127.0.0.1")
        again.cert_pem.write_to_path(str(tmp_path / "new-ca.pem"))
        time.sleep(0.02)
        cert.write_bytes(b"".join(blob.bytes() for blob in renewed.cert_chain_pems))
        renewed.private_key_pem.write_to_path(str(key))

        def is_renewed() -> bool:
            with Client(target, tls=Tls(tmp_path / "new-ca.pem", own_cert, own_key), timeout_s=3) as client:
                try:
                    return bool(client.tokenize("a"))
                except MemlmError:
                    return False

        wait_until(is_renewed)
        words = ["--ca", str(tmp_path / "new-ca.pem"), "--cert", str(own_cert), "--key", str(own_key)]
        done = CliRunner().invoke(app, [*words, "info", "--target", target, "--json"])
        assert done.exit_code == 0, done.output
        assert '"needs_token": false' in done.stdout.replace('":', '": ').replace("  ", " ")


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(InvalidInput, match="tls_cert and tls_key"):
        ServerConfig(model=Path("m"), tls_cert=Path("c"))
    for one in ({"cert": "c"}, {"key": "k"}):
        with pytest.raises(InvalidInput, match="both cert and key"):
            Tls(**one)
