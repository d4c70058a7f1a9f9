"""Bounds on the number of fields in a message, checked before it is parsed.

Two bytes can be a field, and parsing makes an object of each: 10 MB of empty documents took 10 s, 15 MB of ids half a
gigabyte. The walk over the bytes ends at the bound, so a message far beyond it costs no more than one at it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from memlm.api.prompts import MAX_TOKEN_IDS
from memlm.errors import InvalidInput

MAX_FIELDS = 1 << 16  # in one message, those of the messages in it included; packed numbers count as one field
VARINT, EIGHT_BYTES, SIZED, FOUR_BYTES = 0, 1, 2, 5
_CONTINUED = bytes(range(128, 256))  # bytes of a number that are not its last


def check_fields(descriptor: Any, data: bytes) -> None:
    """Raises InvalidInput, naming the field, for a message of more than MAX_FIELDS fields or MAX_TOKEN_IDS numbers in
    one of them. Invalid bytes are left to the parser.
    """
    if len(data) > 2 * MAX_FIELDS:
        with suppress(IndexError):  # the bytes end too early
            _count(descriptor, data, 0, len(data), MAX_FIELDS)


def _count(descriptor: Any, data: bytes, at: int, end: int, left: int) -> int:
    """Walks over the fields between two places. Returns how many more are allowed."""
    while at < end:
        tag, at = _varint(data, at)
        field = descriptor.fields_by_number.get(tag >> 3) if descriptor is not None else None
        if not left:
            raise _too_many(field.name if field else "", MAX_FIELDS)
        left -= 1
        kind = tag & 7
        if kind == VARINT:
            _, at = _varint(data, at)
        elif kind == SIZED:
            size, at = _varint(data, at)
            if field is not None and field.message_type is not None:
                left = _count(field.message_type, data, at, min(at + size, end), left)
            elif (
                field is not None
                and _is_packed(field)
                and len(data[at : at + size].translate(None, _CONTINUED)) > MAX_TOKEN_IDS
            ):
                raise _too_many(field.name, MAX_TOKEN_IDS)
            at += size
        else:
            at += {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(kind, 0)
    return left


def _is_packed(field: Any) -> bool:
    return field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        if (shift := shift + 7) > 63:  # no number: the parser says so
            raise IndexError


def _too_many(name: str, most: int) -> InvalidInput:
    return InvalidInput(f"{name or 'the message'} has more than {most:,} entries; send fewer in one", field=name)
