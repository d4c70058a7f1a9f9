"""Files of a form that are converted: held within bounds, and read beside the server's loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from memlm.data.extract.kinds import MAILBOX
from memlm.data.mailbox import messages_in
from memlm.server.http import held_files
from memlm.server.http.held_files import Converter, HeldFile


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
