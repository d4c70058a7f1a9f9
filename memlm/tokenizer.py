"""Text <-> token ids: byte-level BPE from the `tokenizers` library.

Lossless: every token stands for fixed bytes, and the bytes of a text's tokens are the text. A document is framed by one
special token, `<|endoftext|>`, which both starts a context and ends a text; written out in a corpus or a prompt it is
ordinary text, never the special token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int64
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tokenizer.json"


class Tokenizer:
    """A byte-level BPE vocabulary. Raises Incompatible for one of another kind."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Takes a tokenizer of the `tokenizers` library whose pre-tokenizer is byte-level."""
        if not isinstance(backend.model, BPE) or not isinstance(backend.pre_tokenizer, ByteLevel):
            raise Incompatible("the tokenizer is not byte-level BPE; give one that is, or let `memlm train` make one")
        if backend.token_to_id(END_OF_TEXT) is None:
            raise Incompatible(
                f"the tokenizer has no {END_OF_TEXT} token; give one that has, or let `memlm train` make one"
            )
        backend.encode_special_tokens = True
        self._backend = backend

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Learns a vocabulary of at most `vocab_size` tokens: 256 bytes, the special token, and merges."""
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
        """Reads `tokenizer.json` from a model's folder, or a file given by name."""
        path = Path(folder)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise NotFound(
                f"no tokenizer at {path}; a model's folder holds a {FILE_NAME}", kind="tokenizer", name=str(path)
            )
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, Exception) as error:  # the library raises bare Exception
            if isinstance(error, Incompatible):
                raise
            raise Corrupt(f"{path} cannot be read as a tokenizer ({error}); restore the file") from error

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` into `folder`."""
        (Path(folder) / FILE_NAME).write_text(self._backend.to_str(), encoding="utf-8")

    def encode(self, text: str) -> Int64[np.ndarray, " N"]:
        """Token ids of a text. Raises InvalidInput for half a surrogate pair, which no UTF-8 text holds."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"the text has half a surrogate pair at character {error.start}; it is not Unicode"
            ) from error
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> Iterator[Int64[np.ndarray, " N"]]:
        """Token ids of several texts, on all cores."""
        for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.asarray(encoding.ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; an incomplete character at either end becomes U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of some tokens. Raises InvalidInput for an id outside the vocabulary."""
        pieces = []
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InvalidInput(f"token id {i} is outside the vocabulary of {self.vocab_size}", field="token_ids")
            pieces.append(self.token_bytes[i])
        return b"".join(pieces)

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return int(self._backend.get_vocab_size())

    @cached_property
    def end_id(self) -> int:
        """The token that starts every context and ends every text."""
        end_id = self._backend.token_to_id(END_OF_TEXT)
        assert end_id is not None  # checked when this was made
        return end_id

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of each token id; the special token has none."""
        bytes_of = _byte_of_character()
        words = (self._backend.id_to_token(i) or "" for i in range(self.vocab_size))
        return tuple(b"" if word == END_OF_TEXT else bytes(bytes_of[c] for c in word) for word in words)

    @cached_property
    def newlines(self) -> Int64[np.ndarray, " V"]:
        """How many line ends each token holds: what line numbers are counted with."""
        return np.array([piece.count(b"\n") for piece in self.token_bytes], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of vocabulary and merges: two tokenizers with the same one encode alike."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:32]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
