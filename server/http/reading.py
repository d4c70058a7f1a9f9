"""Reads a JSON body through the service, which bounds the bodies that are read at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from memlm.server.frontend.service import AdmittedCall, Service
from memlm.server.http.exchange import JSON, Exchange
from memlm.server.http.schema import Schema, parse_json

LARGE_BYTES = 1 << 14  # bodies from there on are checked in a thread


async def read_body(service: Service, call: AdmittedCall, exchange: Exchange, schema: Schema) -> dict[str, Any]:
    """The body, as its schema has it. Raises InvalidInput, naming the parameter."""
    exchange.check_content_type(JSON)
    data = await service.read_message(call)
    if len(data) <= LARGE_BYTES:
        return parse_json(data, schema)
    return await asyncio.to_thread(parse_json, data, schema)
