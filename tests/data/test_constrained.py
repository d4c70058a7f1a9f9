"""Which tokens a text of a given form may go on with: against all continuations, written out."""

import json
import random

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlm.api.constraint import MAX_CHARACTERS, MAX_CHOICES, Constraint
from memlm.data import constrained
from memlm.data.constrained import Matcher, TextForms
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "é/\n"]}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{2}$"}},
            "additionalProperties": False,
        }
    },
}
texts = st.text(alphabet='abc é\n"\\', min_size=1, max_size=5)


@pytest.fixture(scope="module")
def forms(tokenizer: Tokenizer) -> TextForms:
    return TextForms(tokenizer)


def matcher_of(forms: TextForms, tokenizer: Tokenizer, **options: object) -> Matcher:
    return forms.matcher(Constraint.of(**options), tokenizer.end_ids)


def allowed_plainly(choices: list[bytes], text: bytes, tokenizer: Tokenizer) -> set[int]:
    """The tokens behind which one of the choices can still be reached."""
    rests = [each[len(text) :] for each in choices if each.startswith(text)]
    ends = set(tokenizer.end_ids) if b"" in rests else set()
    pieces = enumerate(tokenizer.token_bytes)
    return ends | {number for number, piece in pieces if piece and any(rest.startswith(piece) for rest in rests)}


def is_forced(choices: list[bytes], text: bytes) -> bool:
    """Whether one byte alone can come next. Then the library allows the token that the tokenizer would choose."""
    return len({each[len(text) :][:1] for each in choices if each.startswith(text)}) == 1


@settings(max_examples=60)
@given(choices=st.lists(texts, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_the_allowed_tokens_are_those_that_reach_a_choice(tokenizer: Tokenizer, choices: list[str], seed: int) -> None:
    matcher = TextForms(tokenizer).matcher(Constraint(choices=tuple(choices)), tokenizer.end_ids)
    encoded, text, rng = [each.encode() for each in choices], b"", random.Random(seed)
    size = tokenizer.vocab_size + 3  # rows of a vocabulary beyond its tokens
    while True:
        allowed = set(np.flatnonzero(matcher.mask_V(size) == 0).tolist())
        plain = allowed_plainly(encoded, text, tokenizer)
        assert allowed == plain or (is_forced(encoded, text) and len(allowed) == 1 and allowed < plain)
        drawn = rng.choice(sorted(allowed))
        if drawn in tokenizer.end_ids:
            break
        matcher.accept(drawn)
        text += tokenizer.token_bytes[drawn]
    assert text.decode() in choices


def drawn_text(matcher: Matcher, tokenizer: Tokenizer, rng: random.Random, most: int = 400) -> str:
    """A text of random allowed tokens, the end as soon as it may come."""
    ids: list[int] = []
    for _ in range(most):
        allowed = np.flatnonzero(matcher.mask_V(tokenizer.vocab_size) == 0).tolist()
        if set(allowed) & set(tokenizer.end_ids):
            return tokenizer.decode(ids, whole=True)
        ids.append(rng.choice(allowed))
        matcher.accept(ids[-1])
    raise AssertionError(f"no end: {tokenizer.decode(ids)[:200]!r}")


@pytest.mark.parametrize("seed", range(5))
def test_random_texts_are_json_of_their_schema(forms: TextForms, tokenizer: Tokenizer, seed: int) -> None:
    text = drawn_text(matcher_of(forms, tokenizer, json_schema=PERSON), tokenizer, random.Random(seed))
    jsonschema_rs.validate(PERSON, json.loads(text))


def test_white_space_has_a_bound(forms: TextForms, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(forms, tokenizer, json_schema={"type": "object", "properties": {"a": {}}, "required": ["a"]})
    for token_id in tokenizer.encode("{\n" + 16 * "\t").tolist():
        matcher.accept(token_id)
    allowed = np.flatnonzero(matcher.mask_V(tokenizer.vocab_size) == 0)
    assert len(allowed)
    assert all(tokenizer.token_bytes[each].startswith(b'"') for each in allowed)


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', 'start: "yes" | "no"'])
def test_a_grammar_is_of_either_kind(forms: TextForms, tokenizer: Tokenizer, grammar: str) -> None:
    text = drawn_text(matcher_of(forms, tokenizer, grammar=grammar), tokenizer, random.Random(1))
    assert text in ("yes", "no")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"json_schema": {"properties": {"a": {"items": {"x/y": 1, "not": {}}}}}},
            '"not"]; see /properties/a/items in',
        ),
        ({"json_schema": {"anyOf": [{}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "strin"}}}}, "see /$defs/a in"),
        ({"json_schema": {"properties": {"a~/b": {"uniqueItems": True}}}}, "see /properties/a~0~1b in"),
        ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"json_schema": {"minimum": 5, "maximum": 4, "type": "integer"}}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "https://example.com/a.json"}}, "does not fetch"),
        ({"json_schema": False}, "allows nothing"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "["}, "unclosed"),
        ({"grammar": "start: unknown"}, 'unknown name: "unknown"'),
        ({"grammar": "root ::= [a-z"}, "cannot be read"),
        ({"grammar": 'start: <|no-such-token|> "x"'}, "grammar cannot be used"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_by_its_place(
    forms: TextForms, tokenizer: Tokenizer, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        matcher_of(forms, tokenizer, **options)
    assert words in str(caught.value)
    assert caught.value.field == next(iter(options))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": "[" * 9999 + "]" * 9999}, "nested too deeply"),
        ({"json_schema": "3"}, "expected an object"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "65,537 characters"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar are given"),
        ({"choices": ["a", ""]}, "none empty"),
        ({"choices": ["a"] * (MAX_CHOICES + 1)}, "at most 1024"),
        ({"choices": "abc"}, "in a list"),
    ],
)
def test_what_is_no_form_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        Constraint.of(**options)
    assert caught.value.field in options


def test_a_form_that_takes_too_long_is_refused(
    forms: TextForms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constrained, "FREE_S", 0.0)
    monkeypatch.setattr(constrained, "TOKEN_S", 1e-9)
    matcher = matcher_of(forms, tokenizer, regex="[a-z]{100}")
    with pytest.raises(InvalidInput, match="simpler"):
        matcher.accept(int(tokenizer.encode("a")[0]))


def test_a_class_of_pydantic_is_a_schema() -> None:
    class Person:
        @staticmethod
        def model_json_schema() -> dict[str, object]:
            return {"type": "object"}

    assert json.loads(Constraint.of(json_schema=Person).json_schema) == {"type": "object"}
