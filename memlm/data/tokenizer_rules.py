"""The rules of a tokenizer of the `tokenizers` library, as its description has them, and the bytes of its words."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Any

import tokenizers
from tokenizers.models import BPE

COMPOSED_BYTES = 4  # that one byte of a composed character may have been; Hangul's syllables have three
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"  # what stands for a space in SentencePiece's vocabularies


def byte_level_bytes(word: str) -> bytes:
    """The bytes of a word of byte-level BPE. One with a character that stands for no byte, as raw spaces, is its own
    text.
    """
    numbers = [_byte_of_character().get(character) for character in word]
    return word.encode() if None in numbers else bytes(number for number in numbers if number is not None)


def sentencepiece_bytes(word: str) -> bytes:
    """The bytes of a word of SentencePiece. `<0x0A>` is a byte. In any other, a lower one eighth block is a space."""
    if BYTE_TOKEN.fullmatch(word):
        return bytes([int(word[3:5], 16)])
    return word.replace(SPACE, " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes map to themselves, all others to characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def description_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The fields of `tokenizer.json` but for a BPE model's vocabulary and merges, whose text takes 0.3 s to parse."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    described = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    model = backend.model
    if isinstance(model, BPE):
        return {**described, "model": {"type": "BPE", "byte_fallback": model.byte_fallback}}
    return {**described, "model": json.loads(model.__getstate__())}


def mentions(described: Any, kind: str) -> bool:
    """Whether a pre-tokenizer or decoder of that type is part of the tokenizer."""
    parts = [described.get("pre_tokenizer"), described.get("decoder")]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == kind:
                return True
            parts += [*part.get("pretokenizers", []), *part.get("decoders", [])]
    return False


def shrinking(normalizer: Any) -> int | None:
    """Returns by which factor normalizing may shrink a text in bytes, or None if nothing bounds it."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        factors = [shrinking(part) for part in normalizer["normalizers"]]
        return None if None in factors else math.prod(factors)  # type: ignore[arg-type]
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode()) else None
    return {"Prepend": 1, "NFC": COMPOSED_BYTES, "NFKC": COMPOSED_BYTES}.get(kind)


def falls_back(described: Any) -> bool:
    """Whether a character that the vocabulary lacks is given by its bytes."""
    return bool(described["model"].get("byte_fallback"))


def prepends(described: Any) -> bool:
    """Whether encoding puts a space before the text, which decoding a whole text takes away."""
    stages = json.dumps([described.get("normalizer"), described.get("pre_tokenizer")])
    return '"Prepend"' in stages or ('"Metaspace"' in stages and '"prepend_scheme": "never"' not in stages)
