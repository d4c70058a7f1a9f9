"""The index of the words of a segment's passages: derived from its tokens, and disposable.

`SegmentCuts` says where each passage begins. The postings are of the terms of its text, of the title and of the
headings above it. They have deleted documents too, so the caller weighs words over the passages that are live.
"""

from __future__ import annotations

import threading
import weakref
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Bool

from memlm.base.phrases import RULE, terms_of
from memlm.errors import MemlmError
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.files import DerivedFile
from memlm.index.store.derived.postings import Postings, PostingsWriter
from memlm.index.store.manifest import PASSAGES
from memlm.index.store.segment import VALUES, Segment

FORMAT = "4"
PASSAGES_AT_ONCE = 512


class SegmentPassages:
    """The words of the passages of one segment, as complete `cuts` number them. `build` completes them, some passages a
    call. Where the folder cannot be written, they live in RAM.

    A file of another form, or of other tokens, is made anew. Any thread may call the methods. `is_complete` says
    whether `build` is done.
    """

    def __init__(self, store: Path, segment: Segment, cuts: SegmentCuts) -> None:
        self.cuts, self._file = cuts, DerivedFile(store, segment, PASSAGES)
        self._identity = f"{FORMAT} {RULE} {cuts.form} {segment.record.files[VALUES].checksum}"
        self._done, self._lock = 0, threading.Lock()
        self._live = np.zeros(0, bool), np.zeros(0, bool)
        self._output: BinaryIO | None = None
        self._writer: PostingsWriter | None = None
        self._postings = self._opened()
        self.is_complete = self._postings is not None

    def __len__(self) -> int:
        return len(self.cuts)

    @property
    def postings(self) -> Postings:
        """The complete postings."""
        assert self._postings is not None
        return self._postings

    def live_P(self, deleted_mask: Bool[np.ndarray, " docs"]) -> Bool[np.ndarray, " P"]:
        """Which passages are of documents that are not deleted. The last mask is remembered."""
        known, live_P = self._live
        if known is not deleted_mask:
            live_P = ~deleted_mask[self.cuts.documents_P]
            self._live = deleted_mask, live_P
        return live_P

    @property
    def num_done(self) -> int:
        """Passages that `build` has added, or all of a file that was complete."""
        return len(self) if self.is_complete else self._done

    def build(self) -> None:
        """Adds some passages, and completes the file with the last ones."""
        with self._lock:
            if self.is_complete:
                return
            if self._writer is None:
                self._begin()
            assert self._writer is not None
            end = min(self._done + PASSAGES_AT_ONCE, len(self))
            texts = self.cuts.searched_texts(range(self._done, end))
            try:
                for text in texts:
                    self._writer.add(terms_of(text))
                if end == len(self):
                    self._finish()
            except OSError:  # the disk is full
                self._discard()
                self._begin_in_ram()
                return
            self._done = end

    def close(self) -> None:
        """Removes an incomplete file. A complete one is closed with its last reader."""
        with self._lock:
            if not self.is_complete:
                self._discard()

    def _opened(self) -> Postings | None:
        """Opens the complete file of these very passages, if there is one."""
        try:
            with self._file.path.open("rb") as file:
                found = Postings.mapped(file, str(self._file.path))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if found.identity == self._identity and len(found) == len(self) else None

    def _begin(self) -> None:
        try:
            with self._file.begun() as temporary:
                self._output = temporary.open("x+b")
                weakref.finalize(self, self._output.close)  # of one that is dropped before it is complete
        except (MemlmError, OSError):
            self._begin_in_ram()
        else:
            self._writer = PostingsWriter(self._output)

    def _begin_in_ram(self) -> None:
        self._output, self._done = BytesIO(), 0
        self._writer = PostingsWriter(self._output)

    def _finish(self) -> None:
        assert self._writer is not None
        assert self._output is not None
        self._writer.finish(self._identity)
        if isinstance(self._output, BytesIO):
            self._postings = Postings(self._output.getvalue())
        else:
            self._postings = Postings.mapped(self._output, str(self._file.path))  # also where it is not published
            self._file.publish()
            self._output.close()
        self._writer = self._output = None
        self.is_complete = True

    def _discard(self) -> None:
        if self._output is not None:
            self._output.close()
        self._writer = self._output = None
        self._file.discard()
