"""Prompts as callers give them: a text, token ids, or a list of these."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Sequence

from memlm.errors import InvalidInput

MAX_TOKEN_IDS = 1 << 20  # in one request


def is_batch(prompt: object) -> bool:
    """Whether a prompt is a list of prompts."""
    return isinstance(prompt, list | tuple) and any(isinstance(each, str | list | tuple) for each in prompt)


def split_prompt(prompt: object, ids: object = None, *, name: str = "prompt") -> tuple[str, tuple[int, ...]]:
    """The text and the token ids of a prompt that is one of the two; `ids` is the keyword for the latter.

    Raises InvalidInput for anything else.
    """
    if ids is None:
        return (prompt, ()) if isinstance(prompt, str) else ("", token_ids_of(name, prompt))
    if not (isinstance(prompt, str) and prompt == ""):
        raise InvalidInput("give either a prompt or prompt_token_ids, not both", field="prompt_token_ids")
    return "", token_ids_of("prompt_token_ids", ids)


def token_ids_of(name: str, given: object, *, least: int = 1) -> tuple[int, ...]:
    """Token ids from a list, a tuple or an array of whole numbers. Raises InvalidInput, naming the argument."""
    try:
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise TypeError
        ids = tuple(map(operator.index, given))
    except TypeError:
        raise InvalidInput(
            f"{name} is {reprlib.repr(given)}; expected a text, or token ids in a list", field=name
        ) from None
    if len(ids) < least:
        raise InvalidInput(f"{name} holds no token ids; give at least one, or a text", field=name)
    return ids


def check_num_ids(name: str, token_ids: Sequence[int]) -> None:
    """Raises InvalidInput for more than MAX_TOKEN_IDS."""
    if len(token_ids) > MAX_TOKEN_IDS:
        raise InvalidInput(f"{name} has {len(token_ids):,} ids; at most {MAX_TOKEN_IDS:,} in one call", field=name)


def check_text(what: str, text: object, *, field: str) -> None:
    """Raises InvalidInput for what is no text, and for a text with a NUL."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} is of the type {type(text).__name__}; expected a text", field=field)
    if (place := text.find("\0")) >= 0:
        raise InvalidInput(f"{what} has a NUL at character {place}; send text", field=field)


def approximate_tokens(text: str) -> int:
    """About how many tokens a text has: at most one a byte, and mostly one for three bytes."""
    return len(text.encode(errors="replace")) // 3
