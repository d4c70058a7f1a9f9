"""Hostile bytes, sent to a running server: each gets the status that is right for it, and the server lives."""

import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hostile import METHODS, bytes_of
from running import RunningServer

from memlm.client import Client
from memlm.errors import InvalidInput
from memlm.wire import codec

CALL_S = 2.0  # some are understood, and would take long
THREADS = 4
# What a question that is understood may be told; INTERNAL, UNKNOWN and UNAVAILABLE are none of them.
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_of(channel: grpc.Channel, method: Any, data: bytes) -> grpc.StatusCode:
    """How the server ends a call that brings these bytes."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            channel.stream_unary(path)(iter([data]), timeout=CALL_S)
        elif method.server_streaming:
            list(channel.unary_stream(path)(data, timeout=CALL_S))
        else:
            channel.unary_unary(path)(data, timeout=CALL_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def is_refused(method: Any, data: bytes) -> bool:
    """Whether these bytes are no question at all."""
    try:
        codec.from_wire(codec.read_request(GetMessageClass(method.input_type), data))
    except InvalidInput:
        return True
    return False


def check(folder: Path, model: Path, store: Path, count: int) -> None:
    own, wrong, seen = Path(shutil.copytree(store, folder / "store")), list[tuple[str, bytes, str]](), Counter[str]()
    options = ("--threads", "1", "--store-dir", str(folder / "stores"), "--corpus-root", str(folder / "texts"))
    with RunningServer(folder / "log", model, own, options=options) as server:

        def send(seed: int) -> None:
            rng = random.Random(seed)
            with grpc.insecure_channel(server.address) as channel:
                for _ in range(count // THREADS):
                    method = rng.choice(METHODS)
                    data = bytes_of(GetMessageClass(method.input_type), rng)
                    status = status_of(channel, method, data)
                    seen[status.name] += 1
                    right = {grpc.StatusCode.INVALID_ARGUMENT} if is_refused(method, data) else ANSWERS
                    if status not in right:
                        wrong.append((method.name, data, status.name))

        worker = server.worker_pid
        senders = [threading.Thread(target=send, args=(seed,)) for seed in range(THREADS)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        assert not wrong, wrong[:5]
        assert server.worker_pid == worker
        with Client(server.address) as client:
            assert len(list(client.generate("a", max_tokens=3, temperature=0, use_store=False))) == 3
    assert seen["INVALID_ARGUMENT"] > count / 10
    assert seen["OK"] > count / 20


def test_hostile_messages_get_the_right_status(tmp_path: Path, model_folder: Path, store_folder: Path) -> None:
    check(tmp_path, model_folder, store_folder, 400)


@pytest.mark.slow
def test_a_hundred_thousand_hostile_messages_and_the_server_lives(
    tmp_path: Path, model_folder: Path, store_folder: Path
) -> None:
    check(tmp_path, model_folder, store_folder, 100_000)
