"""The texts of `python -m benchmarks evidence`: documents that a datastore holds, and held-out ones of one domain.

Both are drawn by a seed, named by a hash, and checked for n-grams that occur in both.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np

from memlm.base.printable import one_line
from memlm.bench.texts import LEFT_OUT
from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput

LIBRARY = "library"  # the domain that every machine has
TESTS = {"test", "tests", "idle_test"}
HELD_OUT_SHARE = 5  # one in so many modules of the library is held out
NGRAM = 13  # words, as GPT-3's check of contamination has (arXiv 2005.14165, appendix C)
STORED_DOCUMENTS = 12  # a datastore holds parts of at least so many
SHORTEST = 4  # a held-out document has at least one in so many of the tokens that are read
NAME = re.compile(r"[a-z0-9-]{1,40}")
ARTICLE = re.compile(r"^ = [^=\n].* = $", flags=re.MULTILINE)  # a heading of the first level in WikiText


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read of a domain: tokens of the datastore, held-out documents, of which every other one tunes, tokens
    of each, and questions that are asked about the stored documents. `minutes` is the time for which the smallest model
    of the table `training` learns. `document_start` is the first token of each document, stored or held out.
    """

    entries: int = 100_000
    documents: int = 32
    document_tokens: int = 1024
    questions: int = 100
    minutes: float = 1.0
    document_start: int = 0


@dataclass(frozen=True, slots=True)
class Domain:
    """Texts of one kind. No file is in both lists."""

    name: str
    stored: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def tuning(self) -> tuple[Document, ...]:
        """Every other held-out document."""
        return self.held_out[::2]

    @property
    def test(self) -> tuple[Document, ...]:
        """The held-out documents that tune nothing."""
        return self.held_out[1::2]


def domain_of(given: str, tokenizer: Tokenizer, sizes: Sizes, seed: int) -> Domain:
    """Draws the texts of a domain, which is `library` or NAME=STORED,HELD_OUT with two paths.

    Raises InvalidInput for another form, and where there are fewer than eight held-out documents.
    """
    name, is_named, paths = given.partition("=")
    stored, _, held_out = paths.partition(",")
    if not NAME.fullmatch(name) or ((name != LIBRARY or is_named) and not (stored and held_out)):
        raise InvalidInput(
            f"the domain is {one_line(given)!r}; expected {LIBRARY!r} or NAME=STORED,HELD_OUT with a name of a-z, 0-9"
            " and -, as isabelle=train.jsonl.gz,test.jsonl.gz",
            field="domains",
        )
    pools = _library() if not is_named else [list(_split(Corpus([path]))) for path in (stored, held_out)]
    generator = np.random.default_rng([seed, crc32(name.encode())])
    for pool in pools:
        generator.shuffle(pool)
    kept = parts_to_store(pools[0], tokenizer, sizes)
    least = sizes.document_tokens // SHORTEST
    apart = _parts(pools[1], tokenizer, sizes.document_start, sizes.document_tokens, least)
    held = [document for document, _ in zip(apart, range(sizes.documents), strict=False)]
    if len(held) < 8:
        raise InvalidInput(
            f"{name} has {len(held)} held-out documents of {sizes.document_start + least} tokens or more; expected"
            " eight or more, so give more text, read fewer tokens of each or leave out fewer",
            field="domains",
        )
    return Domain(name, kept, tuple(held))


def parts_to_store(documents: Iterable[Document], tokenizer: Tokenizer, sizes: Sizes) -> tuple[Document, ...]:
    """The parts of the first documents from `sizes.document_start` on, `sizes.entries` tokens in all. None is longer
    than a twelfth of these, or than `sizes.document_tokens`.
    """
    most = max(sizes.document_tokens, sizes.entries // STORED_DOCUMENTS)
    return tuple(_take(documents, tokenizer, sizes.document_start, most, sizes.entries))


def text_hash(documents: Iterable[Document]) -> str:
    """The first 16 digits of the SHA-256 of the texts, each behind its length in bytes."""
    digest = hashlib.sha256()
    for document in documents:
        text = document.text.encode()
        digest.update(f"{len(text)} ".encode() + text)
    return digest.hexdigest()[:16]


def ngrams(text: str, length: int = NGRAM) -> list[str]:
    """The n-grams of a text's words, in lower case."""
    words = text.lower().split()
    return [" ".join(words[begin : begin + length]) for begin in range(len(words) - length + 1)]


def overlap(texts: Sequence[str], stored: Iterable[str], length: int = NGRAM) -> list[float]:
    """The share of each text's n-grams that occur in stored ones. 0 for a text of fewer words."""
    known = {gram for text in stored for gram in ngrams(text, length)}
    shares = []
    for text in texts:
        grams = ngrams(text, length)
        shares.append(sum(gram in known for gram in grams) / max(1, len(grams)))
    return shares


def _split(corpus: Corpus) -> Iterator[Document]:
    """The documents of a corpus. A file of WikiText is one for each of its articles."""
    for document in corpus:
        starts = [found.start() for found in ARTICLE.finditer(document.text)]
        if not starts:
            yield document
            continue
        for begin, end in zip(starts, [*starts[1:], None], strict=True):
            yield replace(document, id=f"{document.id}:{begin}", text=document.text[begin:end])


def _library() -> list[list[Document]]:
    """The modules of the running Python's standard library, without its tests. No package is in both lists."""
    root, pools = Path(sysconfig.get_path("stdlib")), list[list[Document]]([[], []])
    for module in sorted(root.rglob("*.py")):
        path = module.relative_to(root)
        text = module.read_text(encoding="utf-8", errors="ignore")
        if (LEFT_OUT | TESTS) & set(path.parts) or not text.strip():
            continue
        package = path.parts[0].removesuffix(".py").lstrip("_")
        is_held_out = crc32(package.encode()) % HELD_OUT_SHARE == 0
        pools[is_held_out].append(Document(path.as_posix(), text))
    return pools


def _parts(
    documents: Iterable[Document], tokenizer: Tokenizer, start: int, most: int, least: int = 1
) -> Iterator[Document]:
    """The `most` tokens from `start` on of each document that has at least `least` there."""
    for document in documents:
        text = document.text[: 16 * (start + most)]  # no tokenizer here has 16 letters a token
        ids = tokenizer.encode(text)[start : start + most].tolist()
        if len(ids) >= least and (text := tokenizer.decode(ids).strip("\ufffd")).strip():
            yield replace(document, text=text)


def _take(
    documents: Iterable[Document], tokenizer: Tokenizer, start: int, most: int, entries: int
) -> Iterator[Document]:
    """Parts of documents until there are as many tokens as entries."""
    taken = 0
    for document in _parts(documents, tokenizer, start, most):
        if taken >= entries:
            return
        (document,) = _parts([document], tokenizer, 0, entries - taken)
        yield document
        taken += len(tokenizer.encode(document.text))
