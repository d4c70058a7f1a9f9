"""Files of a form that are converted: held within bounds, and read beside the server's loop."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tempfile
import threading

import pytest

from memlm.data.extract.kinds import MAILBOX
from memlm.data.mailbox import messages_in
from memlm.errors import StorageFull
from memlm.server.http import held_files
from memlm.server.http.held_files import HELD_BYTES, Converter, HeldFile
from memlm.server.http.uploads import documents_in


async def ids_of(file: HeldFile) -> list[str]:
    with Converter() as converter:
        return [document.id async for documents in converter.documents(file) for document in documents]


def test_a_mailbox_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()

    def noted(*given):
        for message in messages_in(*given):
            threads.append(threading.current_thread())
            yield message

    monkeypatch.setattr(held_files, "messages_in", noted)
    file = HeldFile("in.mbox", MAILBOX)
    file.add(b"From a\nSubject: one\n\nfirst\n\nFrom b\nSubject: two\n\nsecond\n")
    assert asyncio.run(ids_of(file)) == ["in.mbox:1", "in.mbox:2"]
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def form_of(num_files: int) -> bytes:
    head = '--b\r\nContent-Disposition: form-data; name="files"; filename="{}.html"\r\n\r\n<p>x\r\n'
    return "".join(head.format(number) for number in range(num_files)).encode() + b"--b--\r\n"


def test_small_files_of_a_form_open_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[int]()

    def noted(self: HeldFile, data: bytes) -> None:
        add(self, data)
        opened.append(len(os.listdir("/dev/fd")))

    async def count(num_files: int) -> int:
        async def chunks():
            yield form_of(num_files)

        return sum([len(documents) async for documents in documents_in(chunks(), "multipart/form-data; boundary=b")])

    add = HeldFile.add
    monkeypatch.setattr(HeldFile, "add", noted)
    assert asyncio.run(count(50)) == 50
    assert len(opened) == 50
    assert opened[-1] == opened[0]


def test_a_large_file_is_held_on_disk_and_read_whole() -> None:
    file, data = HeldFile("a.html", "html"), os.urandom(HELD_BYTES)
    for _ in range(2):
        file.add(data)
    assert file._file._rolled  # else it is in memory
    assert [*file.parts()] == [("a.html", "html", data + data)]


class Full(io.BytesIO):
    """A file whose disk is full."""

    def write(self, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    seek = write  # as that of a file with bytes in its buffer


def test_a_full_disk_of_temporary_files_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is full at a write, or where the last bytes of a file are written."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    file = HeldFile("a.html", "html")
    with file._file, pytest.raises(StorageFull, match="make room"):
        file.add(bytes(2 * HELD_BYTES))
    file._file = Full()
    with pytest.raises(StorageFull, match="make room"):
        next(file.parts())
