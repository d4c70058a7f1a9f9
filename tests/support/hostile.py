"""Bytes that nobody who means well would send."""

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from memlm.wire.codec import SERVICES

METHODS = [method for service in SERVICES for method in service.methods]
TEXTS = ["", "\0", "a" * 5000, "\u202e", "🙂", "\ufeff", "../../etc/passwd", "%s%n", "'; drop table documents"]
FLOATS = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308, -1.0, 0.5, 1.0]
INTS = {
    FieldDescriptor.TYPE_INT32: [0, -1, 1, 2**31 - 1, -(2**31), 100_000],
    FieldDescriptor.TYPE_ENUM: [0, -1, 1, 99],
    FieldDescriptor.TYPE_INT64: [0, -1, 1, 2**63 - 1, -(2**63)],
}


def value_of(field: Any, rng: random.Random, depth: int) -> Any:
    """Anything that a field may hold, the worst first."""
    if field.message_type is not None:
        return filled(GetMessageClass(field.message_type), rng, depth + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    return rng.choice(INTS[field.type])


def filled(kind: type[Message], rng: random.Random, depth: int = 0) -> Message:
    """A valid message of random values; some of its lists are long."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            continue
        if field.is_repeated:
            count = rng.choice([0, 1, 3, 200] if depth == 0 else [0, 1, 3])
            values = [value_of(field, rng, depth) for _ in range(count)]
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value_of(field, rng, depth))
        else:
            setattr(message, field.name, value_of(field, rng, depth))
    return message


def bytes_of(kind: type[Message], rng: random.Random) -> bytes:
    """Random bytes, a valid message, or one that was cut, changed or lengthened."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randint(0, 60))
    data = bytearray(filled(kind, rng).SerializeToString())
    for _ in range(rng.choice([0, 0, 1, 1, 5])):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.2:
        del data[rng.randint(0, len(data)) :]
    if rng.random() < 0.2:
        data += rng.randbytes(rng.randint(1, 20))
    return bytes(data)
