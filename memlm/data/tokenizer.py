"""Text <-> token ids: byte-level BPE from the `tokenizers` library.

Lossless: every token stands for fixed bytes, and the bytes of a text's tokens are the text. A document is framed by one
special token, `<|endoftext|>`, which both starts a context and ends a text; written out in a corpus or a prompt it is
ordinary text, never the special token.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tokenizers
from jaxtyping import Int64
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from memlm.api.prompts import MAX_TOKEN_IDS
from memlm.base.lists import check_list
from memlm.base.steps import Offload, Outcome, Steps
from memlm.base.texts import read_text
from memlm.data.control_tokens import Part, TextEncoder
from memlm.data.long_texts import PIECE_CHARACTERS, encode_in_pieces
from memlm.data.tokenizer_rules import (
    byte_level_bytes,
    description_of,
    falls_back,
    mentions,
    prepends,
    sentencepiece_bytes,
    shrinking,
)
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tokenizer.json"
GENERATION_FILE, CONFIG_FILE, SETTINGS_FILE = "generation_config.json", "config.json", "tokenizer_config.json"
if TYPE_CHECKING:
    TokenArray: TypeAlias = array[int]
else:
    TokenArray = array  # cannot be subscripted before Python 3.12

SHORT_CHARACTERS = 1 << 13  # are encoded in a few milliseconds
LONG_CHARACTERS = 1 << 20  # take about a second
DECODED_TOKENS = CHECKED_IDS = 1 << 16  # in one step
PACKED = "i"  # 32 bits: as both numpy and the standard library call them
_TWO_WORDS = re.compile(rb"\S\s+\S")


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The tokens that are no text: that before every document, those that end a text, and those before a prompt."""

    start_id: int
    end_ids: tuple[int, ...]
    prefix: tuple[int, ...]

    @classmethod
    def default(cls, end_id: int | None) -> SpecialIds:
        """One token for all three. Raises Incompatible where there is none."""
        if end_id is None:
            raise Incompatible(
                f"the tokenizer has no {END_OF_TEXT} token, and no config names another; give one that has, or let"
                " `memlm train` make one"
            )
        return cls(end_id, (end_id,), (end_id,))


class Tokenizer:
    """A BPE vocabulary of byte strings: byte-level, as ours and GPT-2's are, or SentencePiece's with a fallback
    to bytes, as Llama's is. Raises Incompatible for one of another kind.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialIds | None = None) -> None:
        """Takes a tokenizer of the `tokenizers` library. `special` defaults to memlm's own special token."""
        described = description_of(backend)
        self._is_byte_level = mentions(described, "ByteLevel")
        kind = described["model"]["type"]
        if not (kind == "BPE" and self._is_byte_level) and not (kind in ("BPE", "Unigram") and falls_back(described)):
            raise Incompatible(
                f"the tokenizer is {kind} without a token for every byte; give one of byte-level BPE, or BPE or Unigram"
                " with byte fallback, or let `memlm train` make one"
            )
        self.special = special or SpecialIds.default(backend.token_to_id(END_OF_TEXT))
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._has_more = False
        self.control_tokens: Mapping[str, int] = self.special_tokens
        self._encoder = TextEncoder(backend, self.control_tokens)
        self.prepends_space = not self._is_byte_level and prepends(described)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Learns a vocabulary of at most `vocab_size` tokens: 256 bytes, the special token, and merges."""
        check_list("texts", texts)
        if vocab_size < 257:
            raise InvalidInput(
                f"vocab_size is {vocab_size}; expected at least 257, one for each byte", field="vocab_size"
            )
        backend = tokenizers.Tokenizer(BPE())
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads `tokenizer.json` and the ids of special tokens from a model's folder, or a file by name."""
        path = Path(folder)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise NotFound(
                f"no tokenizer at {path}; a model's folder holds a {FILE_NAME}", kind="tokenizer", name=str(path)
            )
        try:
            backend = tokenizers.Tokenizer.from_str(read_text(path))
        except Exception as error:  # the library raises bare Exception
            raise Corrupt(f"{path} cannot be read as a tokenizer ({error}); restore the file") from error
        return cls(backend, _special_ids(path.parent, backend))

    def fit(self, num_rows: int, name: str) -> None:
        """Refuses the tokens for which the model `name`, of fewer tokens, has no row, as of a fine-tune that never
        reads the one for padding. A text that spells an added one is plain text. Raises Corrupt where one of them
        starts or ends texts.
        """
        self.vocab_size, self._has_more = num_rows, True
        described = json.loads(self._special_backend.to_str())  # which knows them all still, to name them
        described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < num_rows]
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(described))
        for cached in ("special_tokens", "other_added_tokens"):
            self.__dict__.pop(cached, None)  # found anew, without those
        self.control_tokens = self.special_tokens
        self._encoder = TextEncoder(self._backend, self.control_tokens)
        used = (self.start_id, *self.end_ids, *self.special.prefix)
        if max(used) >= num_rows:
            raise Corrupt(
                f"{name}: the token {max(used)} starts or ends texts, and the model has {num_rows:,} tokens; restore"
                " its files"
            )

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` into `folder`, and, where its special tokens are not ours, which they are."""
        (Path(folder) / FILE_NAME).write_text(self._backend.to_str(), encoding="utf-8")
        if self.special.end_ids != (self._backend.token_to_id(END_OF_TEXT),) or not self._is_byte_level:
            generation_config = {"bos_token_id": self.start_id, "eos_token_id": list(self.end_ids)}
            (Path(folder) / GENERATION_FILE).write_text(json.dumps(generation_config) + "\n", encoding="utf-8")

    def with_control_tokens(self, tokens: Mapping[str, int]) -> Tokenizer:
        """The tokenizer with more control tokens than those that it calls special. It decodes them as before."""
        more = copy(self)
        more.control_tokens = {**self.control_tokens, **tokens}
        more._encoder = TextEncoder(self._backend, more.control_tokens)
        return more

    def encode(self, text: str) -> Int64[np.ndarray, " N"]:
        """Token ids of a text. Raises InvalidInput for half a surrogate pair, which no UTF-8 text holds, and for a
        token that the model does not have.
        """
        return next(self.encode_batch([text]))

    def encode_batch(self, texts: Sequence[str]) -> Iterator[Int64[np.ndarray, " N"]]:
        """Token ids of several texts, on all cores. Raises as `encode`."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidInput(
                    f"the text has half a surrogate pair at character {error.start}; it is not Unicode"
                ) from error
        for is_long, some in groupby(texts, lambda text: len(text) > PIECE_CHARACTERS):
            if is_long and not self._joins_words:
                yield from (encode_in_pieces(each, self._encoded, drops_space=self.prepends_space) for each in some)
            else:
                yield from self._encoded(list(some))

    @cached_property
    def _joins_words(self) -> bool:
        """Whether some token holds the end of a word and the begin of the next: what stands before decides which."""
        return any(_TWO_WORDS.search(piece) for piece in self.token_bytes)

    def _encoded(self, texts: Sequence[str]) -> list[Int64[np.ndarray, " N"]]:
        return [np.asarray(self._ids_of(each), dtype=np.int64) for each in self._encoder.encode(texts)]

    def _ids_of(self, encoding: tokenizers.Encoding) -> list[int]:
        ids = self._encoder.ids_of(encoding)
        if self._has_more:
            self._check_rows(ids)
        return ids

    def _check_rows(self, ids: Sequence[int]) -> None:
        if (token_id := max(ids, default=0)) >= self.vocab_size:
            raise InvalidInput(
                f"the text has the token {self._special_backend.id_to_token(token_id)!r} ({token_id}) of the tokenizer,"
                f" and the model has {self.vocab_size:,} tokens; write it in another way"
            )

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of a rendering: of texts, in which nothing is a control token, and of control tokens by id. Raises
        InvalidInput for a token that the model does not have.
        """
        ids = self._encoder.encode_parts(parts)
        self._check_rows(ids)
        return ids

    def encode_special(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are spelled out, as a chat template writes it. Raises
        InvalidInput for one that the model does not have.
        """
        ids = self._special_backend.encode(text, add_special_tokens=False).ids
        self._check_rows(ids)
        return ids

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def other_added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the vocabulary and are not called special, by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if not token.special}

    def text_of(self, token_id: int) -> str:
        """The spelling of a token, also of a special one, which `decode` leaves out."""
        added = self._backend.get_added_tokens_decoder().get(token_id)
        word = self._backend.id_to_token(token_id) or ""
        return self._bytes_of(word).decode(errors="replace") if added is None else added.content

    @cached_property
    def _special_backend(self) -> tokenizers.Tokenizer:
        """A second one, since the first finds no special tokens in a text, and may be in use by other threads."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = False
        return backend

    def encode_steps(self, text: str) -> Steps[list[int]]:
        """Returns the token ids of a text. A long one is encoded outside the loop. Raises as `encode`."""
        return (yield from _aside(text, lambda: self.encode(text).tolist()))

    def pack_steps(self, text: str) -> Steps[TokenArray]:
        """Does the work of `encode_steps` for an answer: as an array, which goes through a pipe at the speed of its
        bytes. Raises InvalidInput for more than MAX_TOKEN_IDS.
        """
        return (yield from _aside(text, lambda: self._packed(text)))

    def _packed(self, text: str) -> TokenArray:
        ids_N = self.encode(text)
        if len(ids_N) > MAX_TOKEN_IDS:
            raise InvalidInput(
                f"the text has {len(ids_N):,} tokens; at most {MAX_TOKEN_IDS:,} in one call", field="text"
            )
        return array(PACKED, ids_N.astype(PACKED).tobytes())

    def check_ids(self, ids: Sequence[int], name: str) -> Steps[None]:
        """Raises InvalidInput, naming the argument, for an id outside the vocabulary. Many are checked in several
        steps.
        """
        for begin in range(0, len(ids), CHECKED_IDS):
            piece = ids[begin : begin + CHECKED_IDS]
            if min(piece) < 0 or max(piece) >= self.vocab_size:
                unknown = next(each for each in piece if not 0 <= each < self.vocab_size)
                raise InvalidInput(
                    f"{name} has the id {unknown}, outside the vocabulary of {self.vocab_size}", field=name
                )
            if begin + CHECKED_IDS < len(ids):
                yield None

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without encoding it."""
        return -(-len(text.encode(errors="replace")) // self._most_bytes) if self._most_bytes else 0

    def prompt(self, text: str) -> list[int]:
        """Returns the token ids that a model reads before it continues a text, at least one."""
        return self.framed(self.encode(text).tolist())

    def framed(self, ids: Sequence[int], *, as_document: bool = False) -> list[int]:
        """The tokens of a text behind those that a model reads before any text: never nothing.

        A text that is read `as_document` begins with the start token, as every document of a datastore does, also where
        the model's tokenizer adds none.
        """
        prefix = self.special.prefix or (self.start_id,) * as_document
        return [*prefix, *ids] or [self.start_id]

    def decode(self, ids: Iterable[int], *, whole: bool = False) -> str:
        """Returns the text of tokens. An incomplete character at either end becomes U+FFFD. A `whole` text loses the
        space that some vocabularies put first.
        """
        return self._text_of(self.decode_bytes(ids), whole=whole)

    def decode_steps(self, ids: Sequence[int], *, whole: bool = False) -> Steps[str]:
        """Does the work of `decode` for a bounded number of tokens a step."""
        pieces = list[bytes]()
        for begin in range(0, len(ids), DECODED_TOKENS):
            pieces.append(self.decode_bytes(ids[begin : begin + DECODED_TOKENS]))
            if begin + DECODED_TOKENS < len(ids):
                yield None
        return self._text_of(b"".join(pieces), whole=whole)

    def _text_of(self, content: bytes, *, whole: bool) -> str:
        text = content.decode(errors="replace")
        return text.removeprefix(" ") if whole and self.prepends_space else text

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of some tokens. Raises InvalidInput for an id outside the vocabulary."""
        ids = list(ids)
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            unknown = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise InvalidInput(f"token id {unknown} is outside the vocabulary of {self.vocab_size}", field="token_ids")
        token_bytes = self.token_bytes
        return b"".join([token_bytes[i] for i in ids])

    @property
    def start_id(self) -> int:
        """The token that every document is read after."""
        return self.special.start_id

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.special.end_ids

    @property
    def end_id(self) -> int:
        """The first of them, which separates documents."""
        return self.special.end_ids[0]

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of each token id, none for special tokens."""
        added = self._backend.get_added_tokens_decoder()
        return tuple(
            (b"" if added[i].special or added[i].content == END_OF_TEXT else added[i].content.encode())
            if i in added
            else self._bytes_of(self._backend.id_to_token(i) or "")
            for i in range(self.vocab_size)
        )

    def _bytes_of(self, word: str) -> bytes:
        return byte_level_bytes(word) if self._is_byte_level else sentencepiece_bytes(word)

    @cached_property
    def _most_bytes(self) -> int:
        """The most bytes of a text that one token can encode, or 0 if nothing bounds them."""
        shrinks = shrinking(description_of(self._backend)["normalizer"])
        strips = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        return 0 if shrinks is None or strips else shrinks * max(map(len, self.token_bytes))

    @cached_property
    def newlines(self) -> Int64[np.ndarray, " V"]:
        """Line ends in each token, for line numbers."""
        return np.array([piece.count(b"\n") for piece in self.token_bytes], dtype=np.int64)

    @cached_property
    def characters(self) -> Int64[np.ndarray, " V"]:
        """Characters that begin in each token, for offsets in a text."""
        return np.array([sum(byte & 0xC0 != 0x80 for byte in piece) for piece in self.token_bytes], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of vocabulary and merges: two tokenizers with the same one encode alike."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:32]


def _aside(text: str, encode: Callable[[], Outcome]) -> Steps[Outcome]:
    """Encodes a text: outside the loop where it is not short."""
    if len(text) <= SHORT_CHARACTERS:
        return encode()
    encoded: Outcome = yield Offload(encode, is_long=len(text) > LONG_CHARACTERS)
    return encoded


def _special_ids(folder: Path, backend: tokenizers.Tokenizer) -> SpecialIds | None:
    """Reads the special ids from the files beside a tokenizer. Returns None if there are none."""
    config: dict[str, Any] = {}
    for name in (CONFIG_FILE, GENERATION_FILE):
        config |= {key: value for key, value in json_of(folder / name).items() if value is not None}
    ends = config.get("eos_token_id")
    if ends is None:
        return None
    end_ids = tuple(ends) if isinstance(ends, list) else (ends,)
    start_id = config.get("bos_token_id", end_ids[0])
    prefix = tuple(backend.encode("", add_special_tokens=True).ids)
    if not prefix and json_of(folder / SETTINGS_FILE).get("add_bos_token"):
        prefix = (start_id,)
    return SpecialIds(start_id, end_ids, prefix)


def json_of(path: Path) -> dict[str, Any]:
    """Reads the object of a JSON file, {} if there is no file. Raises Corrupt for a file that is not JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise Corrupt(f"{path} is not JSON ({error}); restore the file") from error
    return content if isinstance(content, dict) else {}
