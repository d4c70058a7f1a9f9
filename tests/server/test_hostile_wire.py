"""Hand-written HTTP/2 frames from a connection without a token: others are answered, and memory stays bounded."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from running import PATIENCE_S, RunningServer, anonymous_bytes, wait_until

from memlm.client import Client

SECRET = "a token for the others"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
CANCEL = 8
FRAME_BYTES = 16_384  # the most that a peer must take
SENDING_S = 60.0
ANSWER_S = 20.0  # of a call that takes milliseconds, on a machine that is busy


def literal(name: bytes, value: bytes) -> bytes:
    """A header field of HPACK (RFC 7541, 6.2.2), without indexing and without Huffman."""
    assert max(len(name), len(value)) < 127
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


HEAD = b"".join(
    literal(*field)
    for field in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/memlm.v1.Generation/Generate"),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)


class Peer:
    """A connection that speaks HTTP/2 by hand, and counts the frames that come back."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.seen, self.is_closed = Counter[int](), False
        self._socket = socket.create_connection((host, int(port)), timeout=SENDING_S)
        self._stream, self._deadline_s = -1, time.monotonic() + SENDING_S
        self.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(SETTINGS, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @staticmethod
    def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
        return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content

    def send(self, data: bytes) -> bool:
        """Tells whether the other side still takes anything."""
        if self.is_closed or time.monotonic() > self._deadline_s:
            return False
        try:
            self._socket.sendall(data)
        except OSError:
            self.is_closed = True
        return not self.is_closed

    def new_stream(self) -> int:
        self._stream += 2
        return self._stream

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        try:
            while True:
                head = self._exactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                content = self._exactly(size)
                self.seen[kind] += 1
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self._socket.sendall(self.frame(kind, ACK, 0, content if kind == PING else b""))
        except (OSError, EOFError):
            self.is_closed = True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (more := self._socket.recv(count - len(data))):
                raise EOFError
            data += more
        return data


def open_streams(peer: Peer, count: int) -> None:
    """Streams that begin and say nothing more."""
    for _ in range(count):
        if not peer.send(peer.frame(HEADERS, END_HEADERS, peer.new_stream(), HEAD)):
            return


def headers_without_end(peer: Peer, count: int) -> None:
    """One block of headers that goes on and on."""
    stream, field = peer.new_stream(), literal(b"x" * 120, b"y" * 120)
    peer.send(peer.frame(HEADERS, 0, stream, HEAD))
    block = field * (FRAME_BYTES // len(field))
    for _ in range(count):
        if not peer.send(peer.frame(CONTINUATION, 0, stream, block)):
            return


def rapid_resets(peer: Peer, count: int) -> None:
    """Streams that are given up as soon as they begin (CVE-2023-44487)."""
    for _ in range(count):
        stream = peer.new_stream()
        begun = peer.frame(HEADERS, END_HEADERS | END_STREAM, stream, HEAD)
        if not peer.send(begun + peer.frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))):
            return


def half_messages(peer: Peer, count: int) -> None:
    """Streams whose message announces a megabyte and stops after its first bytes."""
    for _ in range(count):
        stream = peer.new_stream()
        begun = peer.frame(DATA, 0, stream, b"\0" + struct.pack(">I", 1 << 20) + b"a" * 100)
        if not peer.send(peer.frame(HEADERS, END_HEADERS, stream, HEAD) + begun):
            return


def nonsense(peer: Peer, count: int) -> None:
    """Frames of no kind, on streams that are none, and settings again and again."""
    for number in range(count):
        kind, flags = (number * 7) % 256, (number * 31) % 256
        if not peer.send(peer.frame(SETTINGS, 0, 0) + peer.frame(max(10, kind), flags, number & 0x7FFFFFFF, b"z" * 50)):
            return


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("wire")
    (folder / "tokens.toml").write_text(f'[[token]]\nname = "others"\nsecret = "{SECRET}"\n')
    options = ("--threads", "1", "--auth-file", str(folder / "tokens.toml"))
    with RunningServer(folder / "log", model_folder, options=options) as server:
        yield server


@contextmanager
def another(address: str) -> Iterator[list[float]]:
    """A caller with a token that asks again and again; how long each answer took."""
    took_s, stop = list[float](), threading.Event()
    failures = list[BaseException]()

    def ask() -> None:
        with Client(address, token=SECRET, timeout_s=ANSWER_S) as client:
            while not stop.is_set():
                begin_s = time.monotonic()
                try:
                    assert list(client.generate("a", max_tokens=2, temperature=0))
                except BaseException as error:
                    failures.append(error)
                    return
                took_s.append(time.monotonic() - begin_s)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        wait_until(lambda: took_s or failures)
        yield took_s
        seen = len(took_s)
        wait_until(lambda: len(took_s) > seen + 1 or failures)
    finally:
        stop.set()
        asking.join(PATIENCE_S)
    assert not failures, failures


def check(server: RunningServer, attack: Callable[[Peer, int], None], count: int, most_bytes: int) -> None:
    pid = server.process.pid
    before, peak = anonymous_bytes(pid), 0
    with another(server.address) as took_s:
        peer = Peer(server.address)
        try:
            attack(peer, count)
            for _ in range(5):  # while the connection stands
                num_before = len(took_s)
                wait_until(lambda num_before=num_before: len(took_s) > num_before)  # type: ignore[misc]
                peak = max(peak, anonymous_bytes(pid))
        finally:
            peer.close()
    assert max(took_s) < ANSWER_S
    assert peak - before < most_bytes, f"{before} -> {peak} bytes; frames back: {peer.seen}"
    assert server.process.poll() is None
    assert server.worker_pid


ATTACKS = [
    (open_streams, 2_000, 20_000),
    (headers_without_end, 1_000, 12_000),
    (rapid_resets, 2_000, 20_000),
    (half_messages, 500, 5_000),
    (nonsense, 2_000, 20_000),
]


@pytest.mark.parametrize(("attack", "count"), [(attack, few) for attack, few, _ in ATTACKS])
def test_frames_without_a_token_hold_up_nobody(guarded: RunningServer, attack: Callable, count: int) -> None:
    check(guarded, attack, count, 100 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "count"), [(attack, many) for attack, _, many in ATTACKS])
def test_many_frames_without_a_token_hold_up_nobody(guarded: RunningServer, attack: Callable, count: int) -> None:
    check(guarded, attack, count, 100 << 20)


@pytest.mark.parametrize("size", [20_000, 100_000, 1_000_000])
def test_metadata_beyond_its_bound_is_refused(guarded: RunningServer, size: int) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        call = channel.unary_unary("/memlm.v1.Generation/GetModel")
        for _ in range(3):
            metadata = (("authorization", f"Bearer {SECRET}"), ("x-large", "m" * size))
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=ANSWER_S, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(b"", timeout=ANSWER_S, metadata=(("authorization", f"Bearer {SECRET}"),))
