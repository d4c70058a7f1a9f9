"""Removes the neighbors of deleted documents from tokens that are still to be delivered.

A generation's tokens wait in pipes, in the front end and, if it is resumable, for minutes after its end. They are
encoded with the documents of their neighbors. When a stream delivers tokens, it removes the neighbors that were deleted
since the stream began. An answer from passages ends where a document of its prompt is deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from memlm.api.generation import Neighbor
from memlm.api.passages import Passage
from memlm.errors import NotFound
from memlm.wire.codec import token_to_wire, tokens_from_wire


class Deletion:
    """Documents that were deleted from a datastore (None: all documents). Links to the next deletion."""

    __slots__ = ("document_ids", "next", "store")

    def __init__(self, store: str, document_ids: frozenset[str] | None) -> None:
        self.store, self.document_ids = store, document_ids
        self.next: Deletion | None = None


class Deletions:
    """The latest deletion. An earlier one is kept in memory by the streams that began before it."""

    def __init__(self) -> None:
        self._latest = Deletion("", frozenset())

    def add(self, stores: Collection[str], document_ids: Collection[str] | None) -> None:
        """Records documents of a datastore (None: all) as deleted, under each of its names."""
        for store in stores:
            deletion = Deletion(store, None if document_ids is None else frozenset(document_ids))
            self._latest.next = deletion
            self._latest = deletion

    @property
    def latest(self) -> Deletion:
        """The position of a stream that begins now: later deletions concern it."""
        return self._latest


class DeletionFilter:
    """Removes neighbors that were deleted after `since` from a stream's tokens."""

    def __init__(self, since: Deletion) -> None:
        self._last_applied = since
        self._ids, self._stores = dict[str, set[str]](), set[str]()

    @property
    def is_needed(self) -> bool:
        """Whether anything was deleted since the stream began."""
        return bool(self._ids or self._stores or self._last_applied.next)

    def apply(self, tokens: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Encoded tokens without deleted neighbors. Takes time in proportion to their size."""
        self._catch_up()
        return tuple(map(self._filter_tokens, tokens))

    def check_passages(self, passages: Iterable[Passage]) -> None:
        """Raises NotFound for a passage of a deleted document: an answer cannot be had without it any more."""
        self._catch_up()
        for passage in passages:
            if self._is_deleted(passage):
                raise NotFound(
                    f"the document {passage.document_id!r} was deleted while an answer was made from it, or its"
                    " datastore was compacted or replaced; ask again",
                    kind="document",
                    name=passage.document_id,
                )

    def kept(self, passages: Iterable[Passage]) -> tuple[Passage, ...]:
        """The passages of documents that are still there."""
        self._catch_up()
        return tuple(passage for passage in passages if not self._is_deleted(passage))

    def _catch_up(self) -> None:
        while self._last_applied.next is not None:
            self._last_applied = self._last_applied.next
            if self._last_applied.document_ids is None:
                self._stores.add(self._last_applied.store)
            else:
                self._ids.setdefault(self._last_applied.store, set()).update(self._last_applied.document_ids)

    def _filter_tokens(self, encoded: bytes) -> bytes:
        tokens = tokens_from_wire([encoded])
        kept = [
            replace(token, neighbors=tuple(each for each in token.neighbors if not self._is_deleted(each)))
            for token in tokens
        ]
        return encoded if kept == [*tokens] else b"".join(map(token_to_wire, kept))

    def _is_deleted(self, found: Neighbor | Passage) -> bool:
        return found.store in self._stores or found.document_id in self._ids.get(found.store, ())
