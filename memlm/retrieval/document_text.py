"""Reads a part of a document: its tokens as text, and the line in which they begin."""

from __future__ import annotations

from functools import partial

from memlm.api.documents import DocumentText, ReadDocumentRequest
from memlm.base.steps import Offload, Steps
from memlm.data.tokenizer import Tokenizer
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.store import ModelStore

CHARACTER_BYTES = 4  # of UTF-8 at most: so many tokens may share a character
COUNTED_TOKENS = 1 << 20  # whose line ends are counted at a time


def read_document(store: ModelStore, request: ReadDocumentRequest, tokenizer: Tokenizer) -> Steps[DocumentText]:
    """Reads a part of a document outside the loop. Raises NotFound for one that is not there."""
    while True:
        snapshot = store.snapshot
        part: DocumentText = yield Offload(partial(_part, store.name, snapshot, request, tokenizer), is_long=True)
        if store.snapshot == snapshot:  # it was not deleted meanwhile
            return part


def _part(name: str, snapshot: Snapshot, request: ReadDocumentRequest, tokenizer: Tokenizer) -> DocumentText:
    ((segment, row),) = snapshot.find_each([request.document_id])
    document = segment.documents.at(row)
    first, last = segment.starts[row : row + 2].tolist()
    total = last - first
    begin = min(request.token_offset, total)
    end = min(begin + request.num_tokens, total)
    values_N, newlines_V = segment.values_N[first:last], tokenizer.newlines
    lines = sum(
        int(newlines_V[values_N[at : min(at + COUNTED_TOKENS, begin)].astype("int64")].sum())
        for at in range(0, begin, COUNTED_TOKENS)
    )
    own = tokenizer.decode_bytes(values_N[begin:end].tolist())
    own = _without_rest(own) if begin else own
    after = tokenizer.decode_bytes(values_N[end : end + CHARACTER_BYTES].tolist())
    text = own + _rest(after) if own else own  # a part within a character belongs to the one before
    whole = text.decode(errors="replace")
    if not begin and tokenizer.prepends_space:
        whole = whole.removeprefix(" ")
    return DocumentText(
        store=name,
        document_id=document.id,
        title=document.title,
        text=whole,
        token_offset=begin,
        num_tokens=end - begin,
        total_tokens=total,
        first_line=1 + lines,
        metadata=document.metadata,
    )


def _rest(data: bytes) -> bytes:
    """The bytes at the begin that continue a character of the text before, as the last part of which they are read."""
    return data[: len(data) - len(_without_rest(data))]


def _without_rest(data: bytes) -> bytes:
    count = next((place for place, byte in enumerate(data[:CHARACTER_BYTES]) if byte & 0xC0 != 0x80), len(data))
    return data[min(count, CHARACTER_BYTES - 1) :]
