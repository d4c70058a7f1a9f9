"""Text of a datastore -> keys: the view of it in which neighbors are found.

Keys are made of stored tokens, a piece of the documents at a time. Each piece is committed as a segment, so that it is
searched while the next one is made. A kill loses none of the pieces, and of the one at hand the part that was not
synced.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memlm.base.progress import Progress, silent
from memlm.data.windows import Window, WindowSize, blocks_of
from memlm.index.factory import NO_INDEX
from memlm.index.store.datastore import Datastore
from memlm.index.store.documents import DocumentRow
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import StoreSpec
from memlm.index.store.segment import Segment
from memlm.index.store.segment_writer import BLOCK_ENTRIES
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.writer import StoreWriter
from memlm.indexing.checks import Checked, run_checks
from memlm.indexing.encoding import BlockEncoder, LocalEncoder
from memlm.indexing.known_texts import StoredText, sources_of
from memlm.indexing.pruning import EncodedWindow
from memlm.indexing.text import index_words
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import document_windows, window_size
from memlm.retrieval.store import ModelStore

CHECKPOINT_WINDOWS, CHECKPOINT_TOKENS = 128, 32_768  # of a block, at most
PIECE_TOKENS = 1 << 20  # of a commit: about ten minutes of a small model on two cores
ALL = DocumentFilter()


@dataclass(frozen=True, slots=True)
class KeysMade:
    """What a run made: `entries` of `documents`, of which an interrupted one had left `resumed_entries`. `checked` has
    the checks after the last commit, which took `check_seconds`.
    """

    entries: int
    documents: int
    resumed_entries: int
    checked: Checked
    check_seconds: float


def spec_of_keys(datastore: Datastore, checkpoint: Checkpoint) -> StoreSpec:
    """How keys of a store are made: as those that are there, or else as its build asked for, by this model.

    Raises Incompatible for a model of another tokenizer, or another than that of the keys.
    """
    ModelStore(datastore, checkpoint)
    spec = datastore.manifest.spec
    if datastore.snapshot.is_keyed:
        return spec
    if spec.model_fingerprint != checkpoint.fingerprint or not spec.dim:  # of another model, or of an earlier version
        size = window_size(checkpoint.decoder)
        spec = replace(spec, context=size.window, stride=size.stride)
    return replace(
        spec,
        dim=checkpoint.decoder.config.dim,
        model_fingerprint=checkpoint.fingerprint,
        start_id=checkpoint.tokenizer.start_id,
        model=checkpoint.path.name,
        index="auto" if spec.index == NO_INDEX else spec.index,
    )


def make_keys(
    store: str | Path,
    checkpoint: Checkpoint,
    *,
    only: DocumentFilter = ALL,
    segment: int | None = None,
    most_pieces: int | None = None,
    check: str = "quick",
    encoder: BlockEncoder | None = None,
    progress: Progress = silent,
) -> KeysMade:
    """Makes the keys of all documents without, or of those that `only` chooses, or of those of one `segment`, given by
    its number, and commits them piece by piece, `most_pieces` at most. Then the store is checked, and tuned on its own
    documents, unless `check` is "none".

    Others may read the store meanwhile, delete documents and remember some. The same call goes on with an interrupted
    one. Raises Incompatible as `spec_of_keys`, StorageFull if the disk does not hold the keys, and Locked while another
    process writes.
    """
    begin_s, entries, documents, resumed = time.perf_counter(), 0, 0, 0
    encoder = encoder or LocalEncoder(checkpoint.decoder)
    with Datastore.open(store) as datastore:
        spec, had_keys = spec_of_keys(datastore, checkpoint), datastore.snapshot.is_keyed
        wanted = partial(unkeyed, only=only, number=segment)
        total = sum(int(each.sizes[rows].sum()) for each, rows in wanted(datastore.snapshot))
        for _ in count() if most_pieces is None else range(most_pieces):
            if not (rows := _next_piece(wanted(datastore.snapshot))):
                break
            with StoreWriter.keying(store, spec, rows) as writer:
                made = _Piece(writer, checkpoint, rows, encoder, entries, total, progress).write()
                resumed += writer.num_resumed_entries
                if made.entries:
                    with writer.commit(progress) as committed:
                        number = committed.manifest.last_segment
                        index_words(committed.snapshot, number, checkpoint.tokenizer, progress)
                else:  # all were deleted meanwhile
                    writer.discard()
            entries, documents = entries + made.entries, documents + made.documents
            datastore.refresh()
        made_s, checked = time.perf_counter(), Checked()
        if entries or datastore.manifest.quality is None:  # a run that was killed in its checks made all
            checked = run_checks(
                datastore, checkpoint, check=check, worked_s=made_s - begin_s, newest=had_keys, progress=progress
            )
            if not spec.keep_keys:
                datastore.drop_keys()
    return KeysMade(entries, documents, resumed, checked, time.perf_counter() - made_s)


def windows_at_once(context: int) -> int:
    """Returns the number of windows in a block, for a model with this context."""
    return max(1, min(CHECKPOINT_WINDOWS, CHECKPOINT_TOKENS // context))


def unkeyed(
    snapshot: Snapshot, *, only: DocumentFilter = ALL, number: int | None = None
) -> Iterator[tuple[Segment, list[int]]]:
    """Yields the segments without keys, or the one of a `number`, and the rows of their live documents that are
    chosen.
    """
    for segment in snapshot.segments:
        if not segment.record.is_keyed and number in (None, segment.record.number):
            wanted = ~segment.deleted_mask & (segment.chosen(only) if only else True)
            yield segment, np.flatnonzero(wanted & (segment.sizes > 0)).tolist()


def _next_piece(chosen: Iterable[tuple[Segment, list[int]]]) -> Mapping[int, list[int]]:
    """The rows of the first of the chosen documents, by the numbers of their segments: PIECE_TOKENS at most, or one
    document. A rest of less than half of that goes with them.
    """
    chosen = list(chosen)
    left = sum(int(segment.sizes[rows].sum()) for segment, rows in chosen)
    most = PIECE_TOKENS if left > 1.5 * PIECE_TOKENS else left
    piece, tokens = dict[int, list[int]](), 0
    for segment, rows in chosen:
        for row in rows:
            size = int(segment.sizes[row])
            if tokens and tokens + size > most:
                return piece
            piece.setdefault(segment.record.number, []).append(row)
            tokens += size
    return piece


class _Known(NamedTuple):
    """A document whose entries are there already, in another one or from a number of this piece on."""

    text: StoredText
    source: StoredText | int


class _KeyedWindow(NamedTuple):
    """A window, with its document if it is the first one of it, and the known documents before it."""

    window: Window
    starts: DocumentRow | None
    before: Sequence[_Known] = ()

    @property
    def num_entries(self) -> int:
        return len(self.window.targets_N) + sum(each.text.num_tokens for each in self.before)


class _Written(NamedTuple):
    entries: int
    documents: int


class _Piece:
    """Some documents of a store, as they are encoded into the segment of a writer."""

    def __init__(
        self, writer: StoreWriter, checkpoint: Checkpoint, rows: Mapping[int, list[int]], encoder: BlockEncoder,
        done: int, total: int, progress: Progress,
    ) -> None:  # fmt: skip
        self._writer, self._checkpoint, self._rows, self._encoder = writer, checkpoint, rows, encoder
        self._done, self._total, self._progress = done, total, progress
        self._block, self._encoded = list[_KeyedWindow](), 0
        self._last_known: Sequence[_Known] = ()

    def write(self) -> _Written:
        """Appends the entries of the documents that are still there."""
        writer, begun, documents = self._writer, self._done, 0
        self._tell()
        # The encoder reads ahead in its own copy of the blocks.
        blocks, ahead = itertools.tee(blocks_of(self._windows(), windows_at_once(writer.spec.context)))
        with closing(self._encode(ahead)) as encoded_blocks:
            for block in blocks:
                self._block, self._encoded = block, 0
                encoded = next(encoded_blocks)
                for (window, document, before), new in zip(block, encoded, strict=True):
                    documents += self._copy(before)
                    if document is not None:
                        writer.begin_document(document.id, title=document.title, metadata=document.metadata)
                        documents += 1
                    if new is None:
                        writer.verify_resumed(window.targets_N)
                    else:
                        writer.append(new.keys_ND, window.targets_N, new.pruned_N)
                if encoded[-1] is not None:
                    writer.checkpoint()
                self._done += sum(len(each.window.targets_N) for each in block)
                self._encoded = 0
                self._tell()
        documents += self._copy(self._last_known)
        return _Written(self._done - begun, documents)

    def _copy(self, known: Sequence[_Known]) -> int:
        """Appends known documents. Returns how many."""
        writer = self._writer
        for text, source in known:
            document, values_N = text.segment.documents.at(text.row), text.segment.text_of(text.row)
            writer.begin_document(document.id, title=document.title, metadata=document.metadata)
            if writer.is_resumed(len(values_N)):
                writer.verify_resumed(values_N)
            elif isinstance(source, int):
                writer.repeat(source, len(values_N))
            else:
                keys_ND, _, pruned_N = source.segment.entries_of(source.row)
                assert keys_ND is not None
                for begin in range(0, len(values_N), BLOCK_ENTRIES):
                    some = slice(begin, begin + BLOCK_ENTRIES)
                    writer.append(keys_ND[some], values_N[some], None if pruned_N is None else pruned_N[some])
            self._done += len(values_N)
            self._tell()
        return len(known)

    def _windows(self) -> Iterator[_KeyedWindow]:
        assert self._writer.base is not None
        spec, decoder, segments = self._writer.spec, self._checkpoint.decoder, self._writer.base.segments
        start_id, size = self._checkpoint.tokenizer.start_id, WindowSize(spec.context, spec.stride)
        texts = [
            StoredText(segment, row)
            for segment in segments
            for row in self._rows.get(segment.record.number, ())
            if not segment.deleted_mask[row]
        ]
        starts, known = [0, *itertools.accumulate(text.num_tokens for text in texts)], list[_Known]()
        for text, source in zip(texts, sources_of(texts, segments), strict=True):
            if source is not None:
                known.append(_Known(text, starts[source] if isinstance(source, int) else source))
                continue
            document, tokens_n = text.segment.documents.at(text.row), text.segment.text_of(text.row)
            for number, window in enumerate(document_windows(decoder, tokens_n, start_id, size)):
                yield _KeyedWindow(window, None if number else document, () if number else known)
            known = []
        self._last_known = known

    def _encode(self, blocks: Iterator[list[_KeyedWindow]]) -> Generator[list[EncodedWindow] | list[None], None, None]:
        """Encodes block by block. Yields None for each window that an interrupted run has written."""
        entries = 0
        for block in blocks:
            entries += sum(each.num_entries for each in block)
            if entries > self._writer.num_resumed_entries:
                blocks = itertools.chain([block], blocks)
                break
            self._encoder.skip([each.window for each in block])
            yield [None] * len(block)
        windows = ([each.window for each in block] for block in blocks)
        yield from self._encoder.encode(windows, self._writer.spec.prune, self._on_window)

    def _on_window(self, place: int) -> None:
        self._encoded += len(self._block[place].window.targets_N)
        self._tell()

    def _tell(self) -> None:
        done = self._done + self._encoded
        self._progress("make keys", done, max(self._total, done), self._encoder.note)
