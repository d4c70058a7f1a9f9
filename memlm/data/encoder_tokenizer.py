"""Text -> token ids for an encoder: with the special tokens of its template, cut to a length.

Unlike a decoder's tokenizer, it may lose letters: BERT's WordPiece gives lower case back, and one token for all words
that it does not know. Special tokens that are written out in a text are ordinary text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from memlm.base.texts import read_text
from memlm.data.tokenizer import FILE_NAME
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound

PAD, UNKNOWN, BEGIN, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class EncoderTokenizer:
    """A tokenizer of the `tokenizers` library with a template, as BERT's `[CLS] text [SEP]`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.encode_special_tokens = True
        backend.no_padding()  # some files pad each text to a fixed length
        backend.no_truncation()
        self._backend = backend

    @classmethod
    def load(cls, folder: str | Path) -> EncoderTokenizer:
        """Reads `tokenizer.json` of an encoder's folder. Raises NotFound, or Corrupt for a file that is none."""
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise NotFound(
                f"no tokenizer at {path}; where the folder has a vocab.txt or spiece.model, transformers writes one:"
                " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
                kind="tokenizer",
                name=str(path),
            )
        try:
            return cls(tokenizers.Tokenizer.from_str(read_text(path)))
        except Exception as error:  # the library raises bare Exception
            raise Corrupt(f"{path} cannot be read as a tokenizer ({error}); restore the file") from error

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> EncoderTokenizer:
        """Learns a byte-level vocabulary of at most `vocab_size` tokens with BERT's special tokens and template."""
        least = 256 + len(SPECIAL)
        if vocab_size < least:
            raise InvalidInput(f"vocab_size is {vocab_size}; expected at least {least}", field="vocab_size")
        backend = tokenizers.Tokenizer(BPE())
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        )  # fmt: skip
        backend.train_from_iterator(texts, trainer)
        ends = [(token, backend.token_to_id(token)) for token in (BEGIN, END)]
        backend.post_processor = TemplateProcessing(
            single=f"{BEGIN} $A {END}", pair=f"{BEGIN} $A {END} $B:1 {END}:1", special_tokens=ends
        )
        return cls(backend)

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` into `folder`."""
        (Path(folder) / FILE_NAME).write_text(self._backend.to_str(), encoding="utf-8")

    def encode(self, texts: Sequence[str], *, most: int | None = None) -> list[list[int]]:
        """Returns the ids of each text in its template. Of a long text, the tokens that make `most` with the template
        count (None: all).
        """
        template = self._backend.num_special_tokens_to_add(is_pair=False)
        ids = []
        for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False):
            if most is not None:
                encoding.truncate(most - template)
            ids.append(self._backend.post_process(encoding).ids)
        return ids

    def id_of(self, token: str) -> int:
        """Returns a token's id. Raises InvalidInput for one that the tokenizer does not have."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise InvalidInput(f"the tokenizer has no token {token!r}; choose one of its vocabulary", field="token")
        return int(found)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def mask_id(self) -> int:
        """The token that hides another. Raises Incompatible where there is none."""
        found = self._backend.token_to_id(MASK)
        if found is None:
            raise Incompatible(f"the tokenizer has no {MASK}; give one of a masked language model")
        return int(found)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are no text."""
        return frozenset(n for n, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the whole tokenizer."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:32]
