"""The form that a text must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from memlm.api.prompts import check_text
from memlm.base.lists import items_of
from memlm.base.options import option
from memlm.base.texts import read_text
from memlm.errors import InvalidInput

MAX_CHARACTERS = 1 << 16  # of a schema or a grammar
MAX_CHOICES = 1024
# Between the parts of JSON: a space, or a new line and its indentation. Some models would write spaces to the end.
WHITESPACE = r" |\n[ \t]{0,16}"


def parse_schema(text: str) -> str:
    """A schema as JSON, or the name of a file that has it. Raises InvalidInput for a file that cannot be read."""
    if text.lstrip().startswith("{"):
        return text
    try:
        return read_text(Path(text))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{text!r} is neither a JSON object nor a file that can be read ({error})") from None


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that a text must have. At most one of these is given: a JSON Schema, as JSON (2020-12, of which
    `docs/generate.md` lists the keywords), a regular expression (of Rust's `regex`) that the whole text matches, a
    grammar (Lark's, as llguidance reads it, or llama.cpp's GBNF), or texts to choose from.

    Tokens that lead out of the form get no probability, after the mixture and before the temperature. A text that
    `max_tokens` ends may be cut off within the form.
    """

    json_schema: str = field(
        default="",
        metadata=option(
            "Write JSON of this JSON Schema.", metavar="JSON|FILE", panel="Output form", parse=parse_schema
        ),
    )
    regex: str = field(
        default="",
        metadata=option("Write a text that this regular expression matches.", metavar="REGEX", panel="Output form"),
    )
    grammar: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        given = [each.name for each in fields(self) if getattr(self, each.name)]
        if len(given) > 1:
            words = f"{' and '.join(given)} are given"
            raise InvalidInput(f"{words}; a text has one form: leave out all but one", field=given[1])
        for name in ("json_schema", "regex", "grammar"):
            _check_size(name, getattr(self, name))
        if len(self.choices) > MAX_CHOICES or not all(each and isinstance(each, str) for each in self.choices):
            raise InvalidInput(
                f"choices has {len(self.choices)} items; expected at most {MAX_CHOICES} texts, none empty",
                field="choices",
            )
        _check_size("choices", "".join(self.choices))
        if self.json_schema:
            _check_json(self.json_schema)

    @property
    def name(self) -> str:
        """The field that is given, "" where none is."""
        return next((each.name for each in fields(self) if getattr(self, each.name)), "")

    @classmethod
    def of(cls, **options: Any) -> Constraint:
        """Makes one of keyword arguments. `json_schema` may also be an object, or a class of pydantic's."""
        given = {name: value for name, value in options.items() if value is not None}
        schema = given.get("json_schema")
        if schema is not None and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, Mapping | bool):
            given["json_schema"] = json.dumps(schema, ensure_ascii=False)
        if "choices" in given:
            given["choices"] = items_of("choices", given["choices"], expected="texts")
        return cls(**given)


def _check_size(name: str, text: str) -> None:
    check_text(name, text, field=name)
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(f"{name} has {len(text):,} characters; expected at most {MAX_CHARACTERS:,}", field=name)


def _check_json(text: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise InvalidInput("json_schema is nested too deeply; name its parts in $defs", field="json_schema") from None
    except ValueError as error:
        raise InvalidInput(f"json_schema is no JSON ({error}); expected an object", field="json_schema") from None
    if not isinstance(schema, dict | bool):
        raise InvalidInput(f"json_schema is {text[:50]!r}; expected an object", field="json_schema")
