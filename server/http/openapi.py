"""The OpenAPI document and a page that shows it, both made from the table of endpoints."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from memlm.base.version import __version__
from memlm.server.http.bodies import schema_of_document
from memlm.server.http.endpoints import ENDPOINTS, Endpoint
from memlm.server.http.uploads import MULTIPART

ALL_STORES = ("/v1/datastores/search", "/v1/datastores/passages")  # whose handlers also serve one datastore
_PATH_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "description": "The class of the error, as in the details over gRPC."},
            },
        }
    },
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark }
code { font-size: 0.9em } table { border-collapse: collapse; width: 100% } details { margin: 0.5rem 0 }
td { border-top: 1px solid #8884; padding: 0.25rem 0.75rem 0.25rem 0; vertical-align: top }
summary { cursor: pointer; padding: 0.25rem 0 } .method { font-weight: 600 }
"""


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of the port."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        path = _PATH_PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "memlm", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def docs_page() -> str:
    """The document as a page of HTML that fetches nothing."""
    groups = dict.fromkeys(endpoint.group for endpoint in ENDPOINTS)
    parts = [
        f"<h2>{group}</h2>{''.join(_section(each) for each in ENDPOINTS if each.group == group)}" for group in groups
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>memlm: HTTP</title><style>{_STYLE}</style><h1>memlm {__version__}: HTTP</h1>"
        '<p>The same as an <a href="openapi.json">OpenAPI document</a>. Health is at <a href="health">/health</a>,'
        f' metrics are at <a href="metrics">/metrics</a>.</p>{"".join(parts)}</html>'
    )


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    kinds: dict[str, Any] = {"application/json": {}} | ({"text/event-stream": {}} if endpoint.is_stream else {})
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.handler.__name__ + ("_all" if endpoint.path in ALL_STORES else ""),
        "tags": [endpoint.group],
        "parameters": list(_parameters(endpoint)),
        "responses": {
            str(endpoint.status): {"description": "The answer.", "content": kinds},
            "default": {
                "description": "A refusal.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if endpoint.body is not None:
        content = {"application/json": {"schema": schema_of_document(endpoint.body)}}
        if endpoint.is_form:
            files = {"type": "array", "items": {"type": "string", "format": "binary"}}
            content[MULTIPART] = {"schema": {"type": "object", "properties": {"files": files}, "required": ["files"]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name, _ in _PATH_PARAMETER.findall(endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, schema in endpoint.query.items():
        yield {"name": name, "in": "query", "schema": dict(schema)}


def _section(endpoint: Endpoint) -> str:
    path = _PATH_PARAMETER.sub(r"{\1}", endpoint.path)
    rows = [*_rows(endpoint.query)]
    if endpoint.body is not None:
        rows += _rows(endpoint.body["properties"], endpoint.body["required"])
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    return (
        f'<details><summary><span class="method">{endpoint.method}</span> <code>{html.escape(path)}</code>'
        f" {html.escape(endpoint.summary)}</summary>{table}</details>"
    )


def _rows(properties: Mapping[str, Any], required: Any = (), prefix: str = "") -> Iterator[str]:
    for name, schema in properties.items():
        note = " Required." if name in required else ""
        kind = schema.get("type") or "; ".join(dict.fromkeys(each["type"] for each in schema["anyOf"]))
        if "enum" in schema and "x-unsupported" not in schema:
            kind = " or ".join(map(json.dumps, schema["enum"]))
        description = html.escape(schema.get("description", "") + note)
        yield f"<tr><td><code>{prefix}{name}</code><td>{html.escape(kind)}<td>{description}"
        if "properties" in schema:
            yield from _rows(schema["properties"], schema["required"], f"{prefix}{name}.")
