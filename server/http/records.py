"""Dataclasses as JSON objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from memlm.errors import MemlmError
from memlm.server.http.errors import body_of


def object_of(record: Any) -> dict[str, Any]:
    """A dataclass as an object. Numbers that are not finite are null."""
    return {field.name: _value(getattr(record, field.name)) for field in fields(record)}


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, MemlmError):
        return body_of(value)["error"]
    if isinstance(value, tuple | list):
        return [_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _value(each) for name, each in value.items()}
    return object_of(value) if is_dataclass(value) else value
