"""A client of HTTP/2 that keeps no manners: what it sends of a call, and when, is the test's to say."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MAX_STREAMS, INITIAL_WINDOW = 3, 4  # settings
FRAME = 16_384


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def header(name: str, value: str) -> bytes:
    """One header in HPACK, literal and without an index."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(size: int) -> bytes:
    if size < 127:
        return bytes([size])
    rest, encoded = size - 127, bytearray([127])
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes([*encoded, rest])


class RawConnection:
    """One connection. A thread of its own reads what the server sends, and keeps the windows up to date."""

    def __init__(self, address: str, *, greets: bool = True) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._news, self._sending = threading.Condition(), threading.Lock()
        self._next = 1
        self._windows: dict[int, int] = {0: 65_535}
        self.initial_window, self.max_streams = 65_535, None
        self.headers: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.is_closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        if greets:
            self._send(PREFACE + frame(SETTINGS, 0, 0))
        self._reader.start()
        if greets:
            self.wait_for(lambda: self.max_streams is not None or self.is_closed, 10)

    def call(self, path: str, *, token: str = "", ends: bool = False) -> int:
        """Begins a call; gives the number of its stream."""
        names = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        names |= {"content-type": "application/grpc", "te": "trailers"}
        if token:
            names["authorization"] = f"Bearer {token}"
        with self._news:
            number, self._next = self._next, self._next + 2
            self._windows[number] = self.initial_window
        block = b"".join(header(name, value) for name, value in names.items())
        self._send(frame(HEADERS, END_HEADERS | (END_STREAM if ends else 0), number, block))
        return number

    def send(self, stream: int, data: bytes, *, ends: bool = False, wait_s: float = 2.0) -> int:
        """Sends data as far as the windows allow within the time; gives the number of bytes that went."""
        sent = 0
        while sent < len(data):
            with self._news:
                if not self._news.wait_for(lambda: self._room(stream) > 0 or self._is_over(stream), wait_s):
                    return sent
                if self._is_over(stream):
                    return sent
                size = min(FRAME, len(data) - sent, self._room(stream))
                self._windows[0] -= size
                self._windows[stream] -= size
            is_last = sent + size == len(data)
            self._send(frame(DATA, END_STREAM if ends and is_last else 0, stream, data[sent : sent + size]))
            sent += size
        return sent

    def wait_for(self, holds, timeout_s: float) -> bool:
        with self._news:
            return bool(self._news.wait_for(holds, timeout_s))

    def wait_for_end(self, stream: int, timeout_s: float) -> bool:
        """Whether the server ends a stream in time."""
        return self.wait_for(lambda: self._is_over(stream), timeout_s)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _room(self, stream: int) -> int:
        return min(self._windows[0], self._windows[stream])

    def _is_over(self, stream: int) -> bool:
        return self.is_closed or stream in self.ended

    def _send(self, data: bytes) -> None:
        with suppress(OSError), self._sending:
            self._socket.sendall(data)

    def _read(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as file:
            while len(head := file.read(9)) == 9:
                size = int.from_bytes(head[:3], "big")
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF
                self._take(kind, flags, stream, file.read(size))
        with self._news:
            self.is_closed = True
            self._news.notify_all()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self._send(frame(SETTINGS, ACK, 0))
        if kind == PING and not flags & ACK:
            self._send(frame(PING, ACK, 0, body))
        with self._news:
            if kind == SETTINGS and not flags & ACK:
                settings = {
                    int.from_bytes(body[i : i + 2], "big"): int.from_bytes(body[i + 2 : i + 6], "big")
                    for i in range(0, len(body), 6)
                }
                self.max_streams = settings.get(MAX_STREAMS, self.max_streams or 0)
                window = settings.get(INITIAL_WINDOW, self.initial_window)
                for number in self._windows.keys() - {0}:
                    self._windows[number] += window - self.initial_window
                self.initial_window = window
            elif kind == WINDOW_UPDATE:
                self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(body, "big")
            elif kind == HEADERS:
                self.headers[stream] = self.headers.get(stream, b"") + body
            if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
                self.ended.add(stream)
            self._news.notify_all()
