"""The tokens that a text of a given form may go on with, by the library llguidance: an Earley parser over bytes, and a
trie of the vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Float32
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from memlm.api.constraint import WHITESPACE, Constraint
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput

# Processor time in which a form has to say which tokens may follow: that of a usual one is 0.02 to 0.1 ms a token, and
# all texts of a batch wait for it.
FREE_S, TOKEN_S = 0.5, 0.002
MAX_LOOKS = 64  # parts of a schema that are compiled by themselves, to say which one is wrong
# For each byte, the masks of its bits: a sum with them takes a fifth of the time of a choice by bits.
_MASKS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_MASKS = _MASKS.astype(np.float32)
_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


class Matcher:
    """Follows a text token by token. `mask_V` says which tokens it may go on with. Those that end a text are among them
    once it has its form.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, name: str) -> None:
        """Raises InvalidInput for a form that cannot be compiled. `name` is the field that asks for it."""
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        self._name, self._size = name, tokenizer.vocab_size
        self._bits = allocate_token_bitmask(1, tokenizer.vocab_size)
        self._spent_s, self._num_tokens = 0.0, 0
        self._check()
        self._look()

    def mask_V(self, size: int) -> Float32[np.ndarray, " V"]:
        """0 for each token of a vocabulary of this size that may come next, else -inf."""
        known_V = np.take(_MASKS, self._bits.view(np.uint8), axis=0).reshape(-1)[: self._size]
        beyond = max(0, size - len(known_V))  # rows of a model that are no tokens
        return np.concatenate((known_V, np.full(beyond, -np.inf, np.float32))) if beyond else known_V[:size]

    def accept(self, token_id: int) -> None:
        """Follows the text by a token. Raises InvalidInput for a form that has become too complex or too slow."""
        if self._matcher.is_stopped():  # where an end alone may come
            return
        begin_s = time.thread_time()
        self._matcher.consume_token(token_id)
        self._check()
        self._look()
        self._spent_s, self._num_tokens = self._spent_s + time.thread_time() - begin_s, self._num_tokens + 1
        if self._spent_s > FREE_S + TOKEN_S * self._num_tokens:
            raise InvalidInput(
                f"{self._name} took {self._spent_s:.1f} s for {self._num_tokens} tokens; give a simpler one, with fewer"
                " repetitions in repetitions", field=self._name,
            )  # fmt: skip

    def _look(self) -> None:
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInput(f"{self._name} cannot be used: {_shown(self._matcher.get_error())}", field=self._name)


class TextForms:
    """Makes matchers for the texts of one tokenizer. The first one takes half a second, others some milliseconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._making = tokenizer, Lock()
        self._vocabularies = dict[tuple[int, ...], LLTokenizer]()

    def matcher(self, constraint: Constraint, end_ids: tuple[int, ...], name: str = "") -> Matcher:
        """Compiles a constraint for a text that one of these tokens ends. Raises InvalidInput, naming the field that
        asks for it, by default that of the constraint, and in a JSON Schema the place.
        """
        vocabulary = self._vocabulary(end_ids)
        try:
            return Matcher(vocabulary, _grammar_of(constraint), name or constraint.name)
        except InvalidInput as error:
            if not constraint.json_schema:
                raise
            place = _place_of_error(json.loads(constraint.json_schema), vocabulary)
            raise InvalidInput(
                f"{error}; see {place} in the schema" if place else str(error), field=error.field
            ) from None

    def _vocabulary(self, end_ids: tuple[int, ...]) -> LLTokenizer:
        with self._making:
            if end_ids not in self._vocabularies:
                wrapper = TokenizerWrapper(_Words(self._tokenizer, end_ids))
                self._vocabularies[end_ids] = LLTokenizer(wrapper, eos_token=[*end_ids])
            return self._vocabularies[end_ids]


class _Words:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer, self.tokens = tokenizer, tokenizer.token_bytes
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        self.special_token_ids = sorted({*tokenizer.special_tokens.values(), *end_ids})

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids


def _grammar_of(constraint: Constraint) -> str:
    if constraint.json_schema:
        return _grammar_of_schema(json.loads(constraint.json_schema))
    if constraint.regex:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.choices:
        return grammar_from("choice", json.dumps(constraint.choices))
    try:
        return grammar_from("grammar", constraint.grammar)
    except ValueError as error:
        raise InvalidInput(f"grammar cannot be read: {_shown(str(error))}", field="grammar") from None


def _grammar_of_schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidInput("json_schema allows nothing; expected an object", field="json_schema")
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"json_schema cannot be read: {_shown(str(error))}", field="json_schema") from None


def _place_of_error(schema: Any, vocabulary: LLTokenizer) -> str:
    """The place of the innermost part of a schema that cannot be compiled by itself, as a JSON pointer. "" where only
    the whole cannot be.
    """
    looks, place, parts = 0, "", _parts_of(schema, "")
    definitions = {
        name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema
    }
    while (part := next(parts, None)) is not None and looks < MAX_LOOKS:
        name, inner = part
        looks += 1
        if isinstance(inner, dict) and not _compiles({**definitions, **inner}, vocabulary):
            place, parts = name, _parts_of(inner, name)
    return place


def _parts_of(schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The schemas that a schema consists of, and their places."""
    if not isinstance(schema, Mapping):
        return
    for keyword in _SUBSCHEMAS:
        if isinstance(named := schema.get(keyword), Mapping):
            for name, each in named.items():
                yield f"{place}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", each
    for keyword in _LISTED:
        if isinstance(listed := schema.get(keyword), list):
            for number, each in enumerate(listed):
                yield f"{place}/{keyword}/{number}", each
    for keyword in _SINGLE:
        if isinstance(schema.get(keyword), Mapping):
            yield f"{place}/{keyword}", schema[keyword]


def _compiles(schema: dict[str, Any], vocabulary: LLTokenizer) -> bool:
    try:
        Matcher(vocabulary, _grammar_of_schema(schema), "json_schema")
    except InvalidInput:
        return False
    return True


def _shown(message: str) -> str:
    """An error of the library in one line, without its stack."""
    words = " ".join(message.partition("<backtrace>")[0].partition("<non-verbose/>")[0].split())
    return words[:300].rstrip(" .;")
