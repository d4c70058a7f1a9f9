"""Control tokens stand for no text: a model's roles, ends, tools and thoughts. A text that spells one is plain text.

A tokenizer says of some of its tokens that they are special. Many say it of too few: the roles of a chat template would
be read from any document. So a template names more of them (`memlm.data.chat`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import tokenizers
from tokenizers import AddedToken

from memlm.errors import InvalidInput

Part: TypeAlias = "str | int"  # of a rendering: a text, or the id of a control token
# Tokens that no ordinary text means. `<table>` is not of them: some vocabularies have tokens of HTML.
RESERVED = re.compile(r"<[|｜].+[|｜]>|[<\[](?:unused|reserved|extra_id|fim)[^<>\[\]\s]*[>\]]", re.DOTALL)
MARK = re.compile(r"[^\w\s]")
# No text means them.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
MARKUP = re.compile(r"\W.*\w.*\W", re.DOTALL)  # "User:" is none, nor is a line end


def looks_like_markup(token: str) -> bool:
    """Whether a token is written like `<|user|>` or `[INST]`, and is no word, number or white space."""
    return bool(MARKUP.fullmatch(token.replace("\u2581", " ").strip()))


class TextEncoder:
    """Encodes texts, in which nothing is a control token, and renderings, in which some parts are."""

    def __init__(self, backend: tokenizers.Tokenizer, control: Mapping[str, int]) -> None:
        self._added, self._secret = backend.get_added_tokens_decoder(), secrets.token_hex(8)
        unmarked = [i for i in control.values() if i in self._added and not self._added[i].special]
        if unmarked:  # the library looks for such tokens in a text, and not for special ones
            backend = tokenizers.Tokenizer.from_str(backend.to_str())
            backend.add_special_tokens([_like(self._added[i], self._added[i].content, special=True) for i in unmarked])
        backend.encode_special_tokens = True
        self._backend, self._names = backend, {token_id: name for name, token_id in control.items()}
        # Those that the vocabulary itself holds come out of plain text too: of a Unigram model, and of some merges.
        self._formed = {i for i in self._names if backend.model.id_to_token(i) is not None}
        if (unknown := control.get("<unk>")) is not None and not _has_all_bytes(backend):
            self._formed.discard(unknown)  # comes out of characters that the vocabulary lacks

    def encode(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding]:
        """Texts as the library encodes them. `ids_of` takes the control tokens out."""
        return self._backend.encode_batch_fast(list(texts), add_special_tokens=False)

    def ids_of(self, encoding: tokenizers.Encoding) -> list[int]:
        """The ids of an encoded text. In place of a control token are tokens that spell it."""
        return self._spelled(encoding.ids)

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of a rendering. It is encoded in one piece, since spaces and words at the seams depend on it."""
        backend, ids = self._for_parts
        text = "".join(part if isinstance(part, str) else self._unspeakable(part) for part in parts)
        return [ids.get(each, each) for each in self._spelled(backend.encode(text, add_special_tokens=False).ids)]

    @cached_property
    def _for_parts(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A backend in which control tokens have names that no text spells, and their ids by those that it gives."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        plain = AddedToken(normalized=False)
        backend.add_tokens([_like(self._added.get(i, plain), self._unspeakable(i), special=False) for i in self._names])
        ids = {i: backend.token_to_id(self._unspeakable(i)) for i in self._names}
        return backend, {new: i for i, new in ids.items() if new is not None}

    def _unspeakable(self, token_id: int) -> str:
        return f"\ufdd0{self._secret}{self._names[token_id]}\ufdd0"

    def _spelled(self, ids: list[int]) -> list[int]:
        if self._formed.isdisjoint(ids):
            return ids
        return [piece for each in ids for piece in (self._pieces_of(each) if each in self._formed else [each])]

    def _pieces_of(self, token_id: int) -> list[int]:
        model = self._backend.model
        word = model.id_to_token(token_id)
        return self._spelled([piece.id for part in (word[:1], word[1:]) if part for piece in model.tokenize(part)])


def _like(token: AddedToken, content: str, *, special: bool) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(content, special=special, **flags)


def _has_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    return all(backend.model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))


@dataclass(frozen=True)
class Spelling:
    """How control tokens are spelled."""

    names: frozenset[str]

    @classmethod
    @lru_cache(8)
    def of(cls, names: tuple[str, ...]) -> Spelling:
        """The same for the same names, as there may be thousands."""
        return cls(frozenset(name for name in names if name))

    @cached_property
    def _beginnings(self) -> re.Pattern[str]:
        return _any_of(sorted({name[0] for name in self.names}))

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(name) for name in self.names}, reverse=True)

    @cached_property
    def brackets(self) -> list[str]:
        """The characters that they begin with, without those of words."""
        return sorted({name[0] for name in self.names if MARK.match(name)})

    @cached_property
    def _together(self) -> str:
        return "\n\n".join(self.names)

    @cached_property
    def _rests(self) -> frozenset[str]:
        return frozenset(name[begin:] for name in self.names for begin in range(1, len(name)))

    def within(self, text: str) -> bool:
        """Whether a text is a piece of a control token."""
        return text in self._together

    def ends_with_beginning(self, text: str) -> bool:
        """Whether a text ends as a control token begins."""
        ends = {text[-length:] for length in range(1, len(text) + 1)}
        return any(name.startswith(end) for end in ends for name in self.names)

    def continues(self, text: str) -> bool:
        """Whether a text may become part of a control token by the text before it."""
        longest = self._lengths[0] if self._lengths else 0
        return self.within(text) or any(text[:length] in self._rests for length in range(1, longest))

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """The control tokens in a text, the first and longest ones, and where they begin."""
        after = 0
        for found in self._beginnings.finditer(text) if self.names else ():
            begin = found.start()
            if begin >= after:
                name = next(
                    (text[begin : begin + n] for n in self._lengths if text[begin : begin + n] in self.names), ""
                )
                if name:
                    yield begin, name
                    after = begin + len(name)


class Shield:
    """Keeps the contents of messages apart from the text that a template writes around them.

    A content gets noncharacters where a control token could begin, so that none can come out of it, whatever the
    template makes of it. A template that looks for a text in the contents, such as the end of a thought, still finds
    it: there the noncharacters stand around the text. They are taken out before anything is encoded.
    """

    def __init__(self, control: Mapping[str, int], searched: Iterable[str], contents: Sequence[str]) -> None:
        """Raises InvalidInput where the contents hold too many noncharacters."""
        self._control, self._spelling = control, Spelling.of(tuple(control))
        absent = _absent("".join(contents))
        self.answer, self._breaker = absent[:2]
        wanted = [text for text in sorted(searched) if any(bracket in text for bracket in self._spelling.brackets)]
        self._marks = dict(zip([text for text in wanted if text in self._spelling.names], absent[2:], strict=False))
        harmless = [text for text in wanted if text not in self._spelling.names and self._is_harmless(text)]
        self._places = _any_of([*self._marks, *harmless, *self._spelling.brackets])
        self._inserted = _any_of([each for char in absent for each in (char, _escaped(char))])

    def _is_harmless(self, text: str) -> bool:
        return not (self._spelling.within(text) or self._spelling.ends_with_beginning(text))

    def content(self, text: str) -> str:
        """A content to render."""
        core = text.strip()
        begin = len(text) - len(text.lstrip())
        end = begin + len(core)

        def shielded(found: re.Match[str]) -> str:
            spelled = found[0]
            if len(spelled) == 1:
                return spelled + self._breaker
            if (mark := self._marks.get(spelled)) is None:
                return spelled
            before, after = mark * (found.start() > begin), mark * (found.end() < end)  # `startswith` and its like
            return before + spelled + after if before or after else self._broken(spelled)

        shown = self._places.sub(shielded, text)
        for place, name in reversed([*self._spelling.find(shown)]):  # those that begin as a word does
            if name not in self._marks:
                shown = shown[:place] + self._broken(name) + shown[place + len(name) :]
        return shown[:begin] + self._breaker + shown[begin:] if core and self._spelling.continues(core) else shown

    def role(self, role: str, known: Container[str]) -> str:
        """A role to render: one that the template does not know by name makes no token either."""
        return self._broken(role) if role not in known and self._spelling.within(role) else role

    def _broken(self, text: str) -> str:
        return text[:1] + self._breaker + text[1:]

    def parts(self, rendered: str) -> Iterator[Part]:
        """The control tokens of a rendering, and the texts between them as the messages have them."""
        after = 0
        for begin, name in self._spelling.find(rendered):
            end = begin + len(name)
            mark = self._marks.get(name)
            if mark is None or mark not in (rendered[begin - 1 : begin], rendered[end : end + 1]):
                yield self._inserted.sub("", rendered[after:begin])
                yield self._control[name]
                after = end
        yield self._inserted.sub("", rendered[after:])


def _absent(text: str) -> list[str]:
    """Noncharacters that are not in a text, at least two. Raises InvalidInput where there are fewer."""
    absent = [each for each in NONCHARACTERS if each not in text and _escaped(each) not in text]
    if len(absent) < 2:
        raise InvalidInput("the messages contain the noncharacters of Unicode; leave them out", field="messages")
    return absent


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}"  # as JSON may write it


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of some texts, nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
