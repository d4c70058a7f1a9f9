"""Requests and answers of the Datastores service.

Each request refuses values that mean nothing as it is made, so a bad request fails in the client before it travels, and
in the server if another client sent it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memlm.api.params import RetrievalParams, _PlainRequest
from memlm.base.storable import check_document
from memlm.errors import InvalidInput
from memlm.index.factory import check_factory

MAX_DOCUMENT_IDS = 10_000
MAX_PATHS = 1000
MAX_NAME = 200
STORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ListDatastoresRequest(_PlainRequest):
    """Which datastores are loaded?"""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Which places of a datastore are most like the end of this text? `store=None` asks all that are loaded."""

    text: str
    store: str | None = None
    k: int = 8
    nprobe: int | None = None

    def __post_init__(self) -> None:
        """Refuses what `RetrievalParams` refuses."""
        RetrievalParams(store=self.store, k=self.k, nprobe=self.nprobe)


@dataclass(frozen=True, slots=True)
class DeleteDocumentsRequest:
    """Let these documents never speak again."""

    document_ids: tuple[str, ...]
    store: str | None = None

    def __post_init__(self) -> None:
        """Refuses none, and more than one call may name."""
        count = len(self.document_ids)
        if not 1 <= count <= MAX_DOCUMENT_IDS:
            raise InvalidInput(
                f"document_ids has {count} ids; expected 1 to {MAX_DOCUMENT_IDS} in one call", field="document_ids"
            )

    @classmethod
    def of(cls, document_ids: Sequence[str], store: str | None) -> DeleteDocumentsRequest:
        """Refuses a lone string, too, whose letters would be taken for ids."""
        if isinstance(document_ids, str):
            raise InvalidInput(f"document_ids is the text {document_ids!r}; expected a list", field="document_ids")
        return cls(tuple(document_ids), store)


@dataclass(frozen=True, slots=True)
class GetDatastoreRequest:
    """What is known of this datastore?"""

    store: str | None = None


@dataclass(frozen=True, slots=True)
class BuildDatastoreRequest:
    """Make a datastore of texts that the server can read. Options as in `memlm.build_index`; `drop_keys` is its
    keep_keys=False. With `replace` it takes the place of one of that name. The same `request_id` and request again is
    the same operation.
    """

    store: str
    corpus: tuple[str, ...]
    glob: str | None = None
    index: str | None = None
    target: float | None = None
    max_ram_bytes: int | None = None
    drop_keys: bool = False
    prune: float | None = None
    stride: int | None = None
    seed: int | None = None
    replace: bool = False
    request_id: str = ""

    def __post_init__(self) -> None:
        """Refuses what cannot be a name, and what means nothing."""
        check_store_name(self.store)
        _check_request_id(self.request_id)
        if not 1 <= len(self.corpus) <= MAX_PATHS:
            raise InvalidInput(f"corpus has {len(self.corpus)} paths; expected 1 to {MAX_PATHS}", field="corpus")
        if self.index is not None:
            check_factory(self.index)
        for name, low, high in (("target", 0.0, 1.0), ("prune", 0.0, 1.0)):
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise InvalidInput(f"{name} is {value!r}; expected between {low:g} and {high:g}", field=name)
        for name, low, high in (("max_ram_bytes", 1, 1 << 60), ("stride", 1, 1 << 30), ("seed", 0, (1 << 31) - 2)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidInput(f"{name} is {value!r}; expected {low} to {high}", field=name)


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A text that is to be added, under an id. One that `continues` goes on with the one before it, whose id it has;
    the client cuts up what is too large for a message.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False

    def __post_init__(self) -> None:
        """Refuses what could not be found again, and what is no text."""
        if not self.id:
            raise InvalidInput("a document has no id; give each one its own", field="documents.id")
        if not (self.continues or self.text.strip()) or "\0" in self.text:
            raise InvalidInput(f"document {self.id!r} has no text, or a NUL in it", field="documents.text")
        check_document(self.id, self.title, self.metadata)


@dataclass(frozen=True, slots=True)
class AddDocumentsRequest:
    """Add these documents, read as the datastore's others were."""

    store: str | None = None
    replace: bool = False
    request_id: str = ""
    documents: tuple[NewDocument, ...] = ()

    def __post_init__(self) -> None:
        """Refuses an id that is none."""
        _check_request_id(self.request_id)


@dataclass(frozen=True, slots=True)
class CompactDatastoreRequest:
    """Merges the segments of a datastore, without the documents that are deleted. With `purge`, no file of it holds a
    deleted document afterwards.
    """

    store: str | None = None
    request_id: str = ""
    purge: bool = False

    def __post_init__(self) -> None:
        """Refuses an id that is none."""
        _check_request_id(self.request_id)


@dataclass(frozen=True, slots=True)
class LoadDatastoreRequest:
    """Take a datastore into service, under a name or its folder's, in the place of one of that name or not."""

    path: str
    store: str | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be a name."""
        if self.store is not None:
            check_store_name(self.store)


@dataclass(frozen=True, slots=True)
class UnloadDatastoreRequest:
    """Take a datastore out of service."""

    store: str


# What begins long work, and what asks after it: for the front, which need not bother a model with it.
JobRequest: TypeAlias = BuildDatastoreRequest | AddDocumentsRequest | CompactDatastoreRequest


def check_store_name(name: str) -> None:
    """Raises InvalidInput for what cannot name a datastore."""
    if not STORE_NAME.fullmatch(name):
        raise InvalidInput(
            f"store is {name[:MAX_NAME]!r}; expected up to 100 letters, digits, dots, dashes and underscores, not a"
            " dot first",
            field="store",
        )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_NAME:
        raise InvalidInput(f"request_id has {len(request_id)} characters; at most {MAX_NAME}", field="request_id")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One loaded datastore, and the defaults that a request takes from it. `path` is where it lies: of a server,
    relative to its folder for datastores, or the name of one that it was started with.

    `store_id` identifies the store, whose `manifest` counts its commits. `problem` is why it cannot be used, or empty;
    of a store that could not be opened, the sizes are 0.
    """

    name: str
    path: str
    manifest: int
    num_entries: int
    num_documents: int
    num_deleted_documents: int
    dim: int
    index: str
    bytes_per_entry: float
    k: int
    lam: float
    knn_temperature: float
    tuned_on: str | None
    store_id: str = ""
    problem: str = ""

    @classmethod
    def unusable(cls, name: str, path: str, problem: str) -> StoreInfo:
        """A datastore that could not be opened."""
        return cls(name, path, 0, 0, 0, 0, 0, "", 0.0, 0, 0.0, 0.0, None, problem=problem)


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """What a deletion did: how many documents and entries no longer speak, as of which manifest."""

    store: str
    manifest: int
    num_documents: int
    num_entries: int
