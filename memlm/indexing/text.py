"""Documents -> a segment of text: their tokens, ids, titles and metadata, without keys, and the words of its passages.

This reads at the pace of the tokenizer. All that needs no keys answers once it is committed: passages, words, traces
and drafts. An interrupted reading starts the corpus again, compares the tokens on the disk with it, and appends the
rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from memlm.base.progress import Progress
from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.writer import StoreWriter

AT_ONCE_DOCUMENTS, AT_ONCE_CHARACTERS = 256, 1 << 19  # tokenized together, on all cores
CHECKPOINT_TOKENS = 1 << 22  # that a kill may lose


@dataclass(frozen=True, slots=True)
class TextWritten:
    """How much a corpus has: documents with a token, and their tokens."""

    documents: int
    tokens: int


def write_text(
    writer: StoreWriter, tokenizer: Tokenizer, corpus: Corpus, *, replace: bool = False, progress: Progress
) -> TextWritten:
    """Appends the documents of a corpus, for the caller to commit. With `replace`, one replaces an earlier document of
    its id. Documents without a token are left out.
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
    """Yields each document with its tokens. Several are tokenized together."""
    documents, characters = list[Document](), 0
    for document in itertools.chain(corpus, [None]):
        if document is not None:
            documents.append(document)
            characters += len(document.text)
            if len(documents) < AT_ONCE_DOCUMENTS and characters < AT_ONCE_CHARACTERS:
                continue
        yield from zip(documents, tokenizer.encode_batch([each.text for each in documents]), strict=True)
        documents, characters = [], 0
