"""JSON bodies: decoded, and checked against the schemas that the OpenAPI document shows.

The schemas are JSON Schema in the keywords that `check` knows. `x-expected` says in words what a value may be, `x-none`
has the values that count as left out, and `x-unsupported` marks an option of OpenAI's that this server does not have.
Such an option takes the values that ask for nothing, and its text is the advice for others.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from memlm.base.texts import text_of
from memlm.errors import InvalidInput

Schema = Mapping[str, Any]

MAX_DEPTH = 32
INT32 = (1 << 31) - 1

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_WORDS = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}


def parse_json(data: bytes, schema: Schema) -> dict[str, Any]:
    """Decodes an object and checks it. Values of null count as left out. Raises InvalidInput, naming the parameter."""
    try:
        value = json.loads(text_of(data), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidInput("the body is not UTF-8; send JSON") from None
    except RecursionError:
        raise InvalidInput("the body is nested too deeply; send flat JSON") from None
    except ValueError as error:
        raise InvalidInput(f"the body is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"the body is {_show(value)}; expected a JSON object")
    check(value := normalized(value, schema), schema, "")
    return value


def normalized(value: Any, schema: Schema) -> Any:
    """An object without its optional parameters that are null, or another value for none, and with 5 for 5.0 where a
    whole number is meant. Also the objects within.
    """
    if isinstance(value, float):
        kinds = [each.get("type") for each in schema.get("anyOf", [schema])]
        return int(value) if value.is_integer() and "integer" in kinds else value
    if isinstance(value, list) and "items" in schema:
        return [normalized(item, schema["items"]) for item in value] if "properties" in schema["items"] else value
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    properties, required = schema["properties"], schema.get("required", ())
    return {
        name: normalized(each, properties.get(name, {}))
        for name, each in value.items()
        if name in required or not _is_none(each, properties.get(name, {}))
    }


def _is_none(value: Any, schema: Schema) -> bool:
    return value is None or (not isinstance(value, bool) and value in schema.get("x-none", ()))


def check(value: Any, schema: Schema, name: str, depth: int = 0) -> None:
    """Raises InvalidInput, with the name as its field, for a value that a schema does not allow."""
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{name} is nested too deeply", field=name)
    if "anyOf" in schema:
        _check_any(value, schema, name, depth)
        return
    kind = schema.get("type")
    if kind is not None and not _is_of(value, kind):
        _refuse(value, schema, name, _WORDS[kind])
    if "enum" in schema and value not in schema["enum"]:
        _refuse(value, schema, name, f"one of {', '.join(map(json.dumps, schema['enum']))}")
    if isinstance(value, str):
        _check_string(value, schema, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(value, schema, name)
    elif isinstance(value, list):
        _check_list(value, schema, name, depth)
    elif isinstance(value, dict):
        _check_object(value, schema, name, depth)


def _check_any(value: Any, schema: Schema, name: str, depth: int) -> None:
    for choice in schema["anyOf"]:
        try:
            check(value, choice, name, depth + 1)
            return
        except InvalidInput as error:
            if error.field != name:  # of the right kind, with something wrong inside
                raise
    _refuse(value, schema, name, "another type")


def _check_string(value: str, schema: Schema, name: str) -> None:
    if len(value) > schema.get("maxLength", len(value)):
        _refuse(value, schema, name, f"at most {schema['maxLength']} characters")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{name} has half of a surrogate pair; send text", field=name) from None


def _check_number(value: float, schema: Schema, name: str) -> None:
    least, most = schema.get("minimum", value), schema.get("maximum", value)
    if not least <= value <= most:
        bounds = [f"at least {least}"] * ("minimum" in schema) + [f"at most {most}"] * ("maximum" in schema)
        _refuse(value, schema, name, " and ".join(bounds) or "a finite number")


def _check_list(value: list[Any], schema: Schema, name: str, depth: int) -> None:
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        _refuse(value, schema, name, f"at least {least}" if len(value) < least else f"at most {most} items")
    items = schema.get("items", {})
    if items.get("type") == "integer":  # token ids: up to a million
        least, most = items.get("minimum", -INT32), items.get("maximum", INT32)
        for item in value:
            if type(item) is not int or not least <= item <= most:
                _refuse(item, items, name, f"whole numbers, {least} to {most}")
        return
    for place, item in enumerate(value):
        check(item, items, f"{name}[{place}]" if "properties" in items else name, depth + 1)


def _check_object(value: dict[str, Any], schema: Schema, name: str, depth: int) -> None:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    if len(value) > schema.get("maxProperties", len(value)):
        _refuse(value, schema, name, "an empty object")
    # What is not supported first: without it, other parameters of a request may be wrong.
    for key, item in sorted(value.items(), key=lambda pair: _rank(properties.get(pair[0]))):
        _check_string(key, {}, name)
        if key in properties:
            check(item, properties[key], _path(name, key), depth + 1)
        elif others is False:
            refuse_unknown(key, properties, name)
        else:
            check(item, others, _path(name, key), depth + 1)
    for required in schema.get("required", ()):
        if required not in value:
            raise InvalidInput(f"{_path(name, required)} is missing; give it", field=_path(name, required))


def _rank(schema: Schema | None) -> int:
    return 2 if schema is None else "x-unsupported" not in schema


def refuse_unknown(key: str, known: Mapping[str, Any], name: str = "") -> NoReturn:
    """Raises InvalidInput for a parameter that does not exist."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    path = _path(name, key)
    raise InvalidInput(
        f"unknown parameter {path[:200]!r}{hint} the parameters are {', '.join(known) or 'none'}", field=path
    )


def _refuse(value: Any, schema: Schema, name: str, expected: str) -> NoReturn:
    if "x-unsupported" in schema:
        raise InvalidInput(f"{name} is not supported by this server; {schema['x-unsupported']}", field=name)
    raise InvalidInput(f"{name} is {_show(value)}; expected {schema.get('x-expected', expected)}", field=name)


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _show(value: Any) -> str:
    """A value as JSON shows it, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value).encode(errors="replace").decode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
