"""Documents -> a segment of text: their tokens, ids, titles and metadata, without keys, and the words of its passages.

This reads at the pace of the tokenizer. All that needs no keys answers once it is committed: passages, words, traces
and drafts. An interrupted reading starts the corpus again, compares the tokens on the disk with it, and appends the
rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64

from memlm.base.cpu import num_cores
from memlm.base.progress import Progress
from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.writer import StoreWriter

AT_ONCE_DOCUMENTS, AT_ONCE_CHARACTERS = 256, 1 << 17  # tokenized together
AHEAD_CHARACTERS = 1 << 20  # tokenized while others are written, and one document more: each takes some 30 bytes then
CHECKPOINT_TOKENS = 1 << 22  # that a kill may lose


OnTokens: TypeAlias = Callable[[Document, Int64[np.ndarray, " N"]], None]


@dataclass(frozen=True, slots=True)
class TextWritten:
    """How much a corpus has: documents with a token, and their tokens."""

    documents: int
    tokens: int


def ignore(document: Document, values_N: Int64[np.ndarray, " N"]) -> None:
    """The default listener."""


def write_text(
    writer: StoreWriter,
    tokenizer: Tokenizer,
    corpus: Corpus,
    *,
    replace: bool = False,
    progress: Progress,
    on_tokens: OnTokens = ignore,
) -> TextWritten:
    """Appends the documents of a corpus, for the caller to commit. With `replace`, one replaces an earlier document of
    its id. Documents without a token are left out. `on_tokens` gets each of the others with its tokens.
    """
    total, read, documents, tokens, synced = corpus.num_bytes, 0, 0, 0, 0
    progress("read", 0, total)
    for document, values_N in _tokenized(tokenizer, corpus):
        read += document.num_bytes
        if not len(values_N):
            continue
        writer.begin_document(document.id, title=document.title, metadata=document.metadata, replace=replace)
        if writer.is_resumed(len(values_N)):
            writer.verify_resumed(values_N)
        else:
            writer.append(None, values_N)
        on_tokens(document, values_N)
        documents, tokens = documents + 1, tokens + len(values_N)
        if tokens - synced >= CHECKPOINT_TOKENS and tokens > writer.num_resumed_entries:
            writer.checkpoint()
            synced = tokens
        progress("read", read, max(total, read), f"{documents:,} documents")
    return TextWritten(documents, tokens)


def index_words(snapshot: Snapshot, number: int, tokenizer: Tokenizer, progress: Progress) -> None:
    """Indexes the words of the passages of a segment, given by its number, so that the first question need not. A
    folder that cannot be written stays as it is.
    """
    for segment in snapshot.segments:
        if segment.record.number != number:
            continue
        cuts = SegmentCuts(snapshot.path, segment, tokenizer.decode_bytes)
        with closing(cuts):
            while not cuts.is_complete:
                cuts.build()
                progress("find passages", cuts.num_done, cuts.num_pieces)
            with closing(SegmentPassages(snapshot.path, segment, cuts)) as passages:
                while not passages.is_complete:
                    passages.build()
                    progress("index words", passages.num_done, len(passages))


def _tokenized(tokenizer: Tokenizer, corpus: Corpus) -> Iterator[tuple[Document, Int64[np.ndarray, " n"]]]:
    """Yields each document with its tokens. Threads tokenize the next ones meanwhile, a long one in one of them."""
    waiting = deque[tuple[list[Document], Future[list[Int64[np.ndarray, " n"]]]]]()
    with ThreadPoolExecutor(num_cores()) as pool:
        for documents in _batches(corpus):
            texts = [each.text for each in documents]
            waiting.append((documents, pool.submit(lambda texts: list(tokenizer.encode_batch(texts)), texts)))
            while len(waiting) > 1 and sum(len(each.text) for batch, _ in waiting for each in batch) > AHEAD_CHARACTERS:
                first, tokens = waiting.popleft()
                yield from zip(first, tokens.result(), strict=True)
        for first, tokens in waiting:
            yield from zip(first, tokens.result(), strict=True)


def _batches(corpus: Corpus) -> Iterator[list[Document]]:
    documents, characters = list[Document](), 0
    for document in corpus:
        documents.append(document)
        characters += len(document.text)
        if len(documents) >= AT_ONCE_DOCUMENTS or characters >= AT_ONCE_CHARACTERS:
            yield documents
            documents, characters = [], 0
    if documents:
        yield documents
