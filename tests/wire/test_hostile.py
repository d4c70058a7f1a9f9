"""Hostile bytes: each is refused by name or is a question, and nothing else happens."""

import random

import pytest
from google.protobuf.message_factory import GetMessageClass
from hostile import METHODS, bytes_of

from memlm.errors import InvalidInput
from memlm.wire import codec
from memlm.wire.status import trailer_of


def check(seed: int, count: int) -> None:
    rng, refused, taken = random.Random(seed), 0, 0
    for _ in range(count):
        kind = GetMessageClass(rng.choice(METHODS).input_type)
        data = bytes_of(kind, rng)
        try:
            question = codec.from_wire(codec.read_request(kind, data))
        except InvalidInput as error:
            trailer = trailer_of(error)
            assert trailer.code.name == "INVALID_ARGUMENT"
            assert sum(len(value) for _, value in trailer.trailing_metadata) < 8192
            refused += 1
        else:
            assert codec.from_wire(codec.to_wire(question)) == question
            taken += 1
    assert min(refused, taken) > count / 10


@pytest.mark.parametrize("seed", [0, 1])
def test_hostile_bytes_are_refused_or_understood(seed: int) -> None:
    check(seed, 1000)


@pytest.mark.slow
def test_a_hundred_thousand_hostile_messages_are_refused_or_understood() -> None:
    check(2, 100_000)
