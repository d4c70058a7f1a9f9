"""Requests and responses of the Datastores service.

A request checks its values when it is made: in the client before it is sent, and in the server when it arrives.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from memlm.api.generation import Neighbor
from memlm.api.operations import OperationInfo
from memlm.api.paging import check_page_size, page_of
from memlm.api.params import RetrievalParams, as_of_option
from memlm.api.request import Request
from memlm.base.lists import check_list, items_of
from memlm.base.options import option, parse_bytes
from memlm.base.storable import check_document
from memlm.errors import InvalidInput, check_choice, check_kind, check_range
from memlm.index.factory import check_factory
from memlm.index.store.filters import DocumentFilter, as_of_day, problems_of

MAX_DOCUMENT_IDS = 10_000
MAX_PATHS = 1000
MAX_REMEMBERED, MAX_REMEMBERED_CHARACTERS = 1000, 1 << 18  # documents of a call, and what they hold together
MAX_FILTERS = 100  # of one search
INDEX = "Index"
MAX_NAME = 200
HASH = re.compile("[0-9a-f]{16}")  # of a path
WAY = re.compile(f"{HASH.pattern}(/{HASH.pattern}){{0,31}}")  # to a file, through its folders
CHECKS = ("quick", "full", "none")
KEYS = ("auto", "now", "none")  # when the keys of new text are made
IDS, NAMES, FIELDS = "ids of documents", "ids, folders or globs of documents", "FIELD=VALUE"  # in errors about lists
PATHS = "paths on the server"
STORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A loaded datastore, and the defaults that requests take from it.

    A server reports `path` relative to its datastore folder, or the name of a datastore that it was started with.
    `store_id` identifies the datastore, and `manifest` counts its commits. `problem` is empty for a usable datastore.
    The sizes of a datastore that could not be opened are 0. Neighbors are found among the `num_keyed_entries` of
    `num_keyed_documents`, which have keys. `recall` is the share of the nearest k entries that a
    search finds, and `nats_change` its loss for a token against exact search, both None where they were not measured.
    `lam` is not used where `lam_adapts`.
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
    recall: float | None = None
    nats_change: float | None = None
    lam_adapts: bool = False
    num_keyed_entries: int = 0
    num_keyed_documents: int = 0

    @classmethod
    def unusable(cls, name: str, path: str, problem: str) -> StoreInfo:
        """Describes a datastore that could not be opened."""
        return cls(name, path, 0, 0, 0, 0, 0, "", 0.0, 0, 0.0, 0.0, None, problem=problem)


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """Number of deleted documents and entries, and the manifest that committed the deletion."""

    store: str
    manifest: int
    num_documents: int
    num_entries: int


@dataclass(frozen=True, slots=True)
class DatastorePage:
    """One page of datastores, by their names. `next_page_token` is empty on the last page."""

    datastores: tuple[StoreInfo, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True)
class ListDatastoresRequest(Request[DatastorePage]):
    """Lists the loaded datastores. `page_size=0` asks for all, `page_token` for the next page."""

    page_size: int = 0
    page_token: str = ""

    def __post_init__(self) -> None:
        check_page_size(self.page_size)

    def page(self, stores: Iterable[StoreInfo]) -> DatastorePage:
        """The page of all these datastores. Raises InvalidInput for a token of another form."""
        return DatastorePage(*page_of(stores, lambda store: (0.0, store.name), self.page_size, self.page_token))


class SearchBy(StrEnum):
    """The objects that a search compares."""

    STATE = "state"  # of the model: the contexts that it would continue alike
    WORDS = "words"  # of the texts: the places where they follow each other


DOCUMENTS_OPTION = option(
    "Only documents with this id, in this folder, or matching this glob. Repeatable.", "--document",
    metavar="ID|FOLDER|GLOB", panel="Filters",
)  # fmt: skip
WHERE_OPTION = option(
    "Only documents with this metadata. Repeatable: all must hold.", metavar="FIELD=VALUE", panel="Filters"
)
AS_OF_OPTION = as_of_option("Filters")


@dataclass(frozen=True, slots=True)
class SearchRequest(Request[tuple[Neighbor, ...]]):
    """Finds places in datastores: by `state`, the `k` where the model was in the state in which it is at the end of a
    text, nearest first; by `words`, the first `k` where the words of a text follow each other.

    `store=None` searches all loaded datastores. `documents` are ids, folders of ids, or globs, of which one must match;
    `where` are FIELD=VALUE of the metadata, which must all hold. `as_of` is a time, as in `RetrievalParams`.
    """

    text: str = field(metadata=option("The text to search for: by state its end, by words all of it."))
    store: str | None = field(
        default=None, metadata=option("Search this loaded datastore.", "--store-name", metavar="NAME", default="all")
    )
    k: int = field(default=8, metadata=option("Places to show."))
    nprobe: int | None = field(default=None, metadata=option("Inverted lists to search, by state.", panel="Filters"))
    by: SearchBy = field(
        default=SearchBy.STATE,
        metadata=option(
            "state: where the model was in the same state. words: where these words stand.", metavar="state|words"
        ),
    )
    documents: tuple[str, ...] = field(default=(), metadata=DOCUMENTS_OPTION)
    where: tuple[str, ...] = field(default=(), metadata=WHERE_OPTION)
    as_of: str | None = field(default=None, metadata=AS_OF_OPTION)

    def __post_init__(self) -> None:
        check_kind("text", self.text, str, "a text")
        object.__setattr__(self, "as_of", as_of_day(self.as_of))
        self.retrieval  # noqa: B018 - raises for a wrong field
        check_choice("by", self.by, SearchBy)
        object.__setattr__(self, "by", SearchBy(self.by))
        if self.nprobe is not None and self.by is SearchBy.WORDS:
            raise InvalidInput("nprobe is of a search by state; leave it out, or search by state", field="nprobe")
        self.only  # noqa: B018 - raises for a wrong one

    @property
    def retrieval(self) -> RetrievalParams:
        """How it searches by state."""
        return RetrievalParams(store=self.store, k=self.k, nprobe=self.nprobe, as_of=self.as_of)

    @property
    def only(self) -> DocumentFilter:
        """The documents to look at."""
        return document_filter(self.documents, self.where)

    @classmethod
    def of(cls, text: str, store: str | None, **options: Any) -> SearchRequest:
        """Makes one of keyword arguments, in which `documents` may be one string, and `where` values by field."""
        return cls(text, store, **as_filters(options))


def document_filter(documents: Sequence[str], where: Sequence[str]) -> DocumentFilter:
    """Makes a filter of the fields of a request. Raises InvalidInput for too many, and for a malformed one."""
    documents = items_of("documents", documents, expected=NAMES)
    where = items_of("where", where, expected=FIELDS)
    for name, filters in (("documents", documents), ("where", where)):
        if len(filters) > MAX_FILTERS:
            raise InvalidInput(f"{name} has {len(filters)} filters; at most {MAX_FILTERS}", field=name)
    return DocumentFilter(documents, tuple(parse_fields(where).items()))


def as_filters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as the fields of a request: `documents` may be one string, `where` values by field."""
    documents, where = options.get("documents", ()), options.get("where", ())
    if isinstance(where, Mapping):
        where = tuple(f"{name}={value}" for name, value in where.items())
    return {
        **options,
        "documents": items_of("documents", documents, expected=NAMES, one=True),
        "where": items_of("where", where, expected=FIELDS, one=True),
    }


def parse_fields(where: Sequence[str], field: str = "where") -> dict[str, str]:
    """Parses FIELD=VALUE of metadata, given as the parameter `field`. Raises InvalidInput for another form, and for a
    name that comes twice.
    """
    found: dict[str, str] = {}
    for each in where:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise InvalidInput(f"{field} is {each!r}; expected FIELD=VALUE, as license=unknown", field=field)
        if name in found:
            raise InvalidInput(f"{field} names {name!r} twice; give each field once", field=field)
        found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class DeleteDocumentsRequest(Request[DeleteReport]):
    """Deletes documents from a datastore."""

    document_ids: tuple[str, ...]
    store: str | None = None

    def __post_init__(self) -> None:
        check_list("document_ids", self.document_ids, expected=IDS)
        count = len(self.document_ids)
        if not 1 <= count <= MAX_DOCUMENT_IDS:
            raise InvalidInput(
                f"document_ids has {count} ids; expected 1 to {MAX_DOCUMENT_IDS} in one call", field="document_ids"
            )

    @classmethod
    def of(cls, document_ids: Sequence[str], store: str | None) -> DeleteDocumentsRequest:
        """Makes one of a list of ids. Raises InvalidInput for anything else, such as one id."""
        return cls(items_of("document_ids", document_ids, expected=IDS), store)


@dataclass(frozen=True, slots=True)
class GetDatastoreRequest(Request[StoreInfo]):
    """Describes a datastore."""

    store: str | None = None


@dataclass(frozen=True, slots=True)
class BuildDatastoreRequest(Request[OperationInfo]):
    """Builds a datastore from texts that the server can read, with the options of `memlm.build_index`.

    `drop_keys` is `keep_keys=False`. `replace` replaces a datastore of this name. Repeating a request with its
    `request_id` returns the first request's operation.
    """

    store: str = field(metadata=option("The new datastore's name.", metavar="NAME"))
    corpus: tuple[str, ...] = field(metadata=option("Files and folders on the server.", metavar="PATH..."))
    glob: str | None = field(default=None, metadata=option("Files to read in folders.", default="**/*"))
    hidden: bool = field(
        default=False, metadata=option("Also read hidden files, environments, and files that .gitignore excludes.")
    )
    keys: str = field(
        default="auto",
        metadata=option(
            "Make keys, by which generation finds neighbors: at once, not now, or (auto) if it takes below a minute.",
            metavar="auto|now|none",
        ),
    )
    index: str | None = field(
        default=None,
        metadata=option("Index of the keys, as Faiss names it.", default="auto", metavar="auto|FACTORY", panel=INDEX),
    )
    target: float | None = field(
        default=None, metadata=option("Share of the softmax mass to find.", "--share", default="0.95", panel=INDEX)
    )
    max_ram_bytes: int | None = field(
        default=None,
        metadata=option(
            "Limit the RAM of a search, as 500M or 2GiB.", "--max-ram", metavar="BYTES", parse=parse_bytes, panel=INDEX
        ),
    )
    drop_keys: bool = field(
        default=False,
        metadata=option("Keep only codes, and no keys to re-rank by.", "--no-keep-keys", panel=INDEX),
    )
    prune: float | None = field(
        default=None,
        metadata=option("Leave out entries that the model predicts with this probability.", metavar="P", panel=INDEX),
    )
    window: int | None = field(
        default=None,
        metadata=option("Tokens that the model reads at once.", default="its context, at most 1024", panel=INDEX),
    )
    stride: int | None = field(
        default=None, metadata=option("Tokens that each window adds.", default="half the window", panel=INDEX)
    )
    seed: int | None = field(default=None, metadata=option("Equal seeds give equal indexes.", panel=INDEX))
    check: str = field(default="quick", metadata=option("How much of the result to check.", metavar="quick|full|none"))
    replace: bool = field(default=False, metadata=option("Replace a datastore of this name."))
    request_id: str = field(
        default="", metadata=option("Repeating a request with its id returns the first operation.", metavar="ID")
    )

    def __post_init__(self) -> None:
        check_store_name(self.store)
        _check_request_id(self.request_id)
        check_list("corpus", self.corpus, expected=PATHS)
        if not 1 <= len(self.corpus) <= MAX_PATHS:
            raise InvalidInput(f"corpus has {len(self.corpus)} paths; expected 1 to {MAX_PATHS}", field="corpus")
        if self.index is not None:
            check_factory(self.index)
        for name in ("target", "prune"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise InvalidInput(f"{name} is {value!r}; expected above 0 and below 1", field=name)
        check_range("max_ram_bytes", self.max_ram_bytes, least=1, most=1 << 60)
        check_range("window", self.window, least=1, most=1 << 30)
        check_range("stride", self.stride, least=1, most=1 << 30)
        check_choice("keys", self.keys, KEYS)
        check_choice("check", self.check, CHECKS)
        check_range("seed", self.seed, least=0, most=(1 << 31) - 2)


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to add. With `continues`, its text is appended to the previous document, which has the same id.

    The client splits documents that are too large for one message. `file` is the way to the file of a document that is
    synchronized (`memlm.data.synced_folder`), by default its id's.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    file: str = ""

    def __post_init__(self) -> None:
        if self.file and not WAY.fullmatch(self.file):
            raise InvalidInput(
                f"document {self.id!r} has the file {self.file[:MAX_NAME]!r}; expected up to 32 hashes, each of 16"
                " hexadecimal digits, with / between them",
                field="documents.file",
            )
        if not self.id:
            raise InvalidInput("a document has no id; give each one its own", field="documents.id")
        text: object = self.text
        if not isinstance(text, str) or not (self.continues or text.strip()) or "\0" in text:
            raise InvalidInput(f"document {self.id!r} has no text, or a NUL in it", field="documents.text")
        check_document(self.id, self.title, self.metadata)
        for name, problem in problems_of(self.metadata).items():
            raise InvalidInput(f"document {self.id!r}: {problem}", field=f"documents.metadata.{name}")


@dataclass(frozen=True, slots=True)
class AddDocumentsRequest(Request[OperationInfo]):
    """Adds documents to a datastore. `keys` are made with its window and stride; "auto" makes none in one without.

    With `sync`, the name of a folder, the datastore becomes the same as it, or with `dry_run` only says how. `keep` are
    hashes of files and folders whose documents stay. The last message has the number of documents.
    """

    store: str | None = None
    replace: bool = False
    request_id: str = ""
    documents: tuple[NewDocument, ...] = ()
    check: str = "quick"
    keys: str = "auto"
    sync: str = ""
    keep: tuple[str, ...] = ()
    num_documents: int = 0
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_choice("keys", self.keys, KEYS)
        check_choice("check", self.check, CHECKS)
        _check_request_id(self.request_id)
        if len(self.sync) > MAX_NAME:
            raise InvalidInput(
                f"sync has {len(self.sync)} characters; expected a name of at most {MAX_NAME}", field="sync"
            )
        if self.dry_run and not self.sync:
            raise InvalidInput("dry_run is of a synchronization; name a folder in sync", field="dry_run")
        for each in self.keep:
            if not HASH.fullmatch(each):
                raise InvalidInput(
                    f"keep has {each[:MAX_NAME]!r}; expected a hash of 16 hexadecimal digits", field="keep"
                )


@dataclass(frozen=True, slots=True)
class RememberReport:
    """The documents that a datastore remembers, the number of their entries, and the manifest that committed them."""

    store: str
    manifest: int
    num_entries: int
    document_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RememberRequest(Request[RememberReport]):
    """Adds documents to a datastore at once, without a job. With `replace`, a document replaces the one of its id."""

    documents: tuple[NewDocument, ...]
    store: str | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        for document in self.documents:
            if not isinstance(document, NewDocument):
                raise InvalidInput(
                    f"a document is of the type {type(document).__name__}; expected NewDocument(id, text), or one text",
                    field="documents",
                )
        count, size = len(self.documents), sum(len(document.text) for document in self.documents)
        if not 1 <= count <= MAX_REMEMBERED or size > MAX_REMEMBERED_CHARACTERS:
            raise InvalidInput(
                f"documents has {count:,} documents with {size:,} characters; expected 1 to {MAX_REMEMBERED:,} with at"
                f" most {MAX_REMEMBERED_CHARACTERS:,} in one call: add larger ones by AddDocuments",
                field="documents",
            )
        if any(document.continues for document in self.documents):
            raise InvalidInput("continues is of AddDocuments; send each document whole", field="documents.continues")
        if any(document.file for document in self.documents):
            raise InvalidInput("file is of a synchronization; leave it out", field="documents.file")

    @classmethod
    def of(
        cls,
        text: str | Sequence[NewDocument],
        store: str | None,
        *,
        document_id: str | None = None,
        title: str = "",
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> RememberRequest:
        """Makes one of a text or of documents. The default id of a text is a hash of it, so that a text is remembered
        once. Raises InvalidInput for an id, a title or metadata beside documents.
        """
        if isinstance(text, str):
            document = NewDocument(document_id or text_id(text), text, title, {} if metadata is None else metadata)
            return cls((document,), store, replace)
        if document_id is not None or title or metadata is not None:
            raise InvalidInput(
                "document_id, title and metadata are of a text; documents have their own", field="documents"
            )
        check_list("documents", text, NewDocument, expected="one text, or documents")
        return cls(tuple(text), store, replace)


def text_id(text: str) -> str:
    """The id of a text that was given none: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CompactDatastoreRequest(Request[OperationInfo]):
    """Merges the segments of a datastore without its deleted documents. `purge` removes them from every file."""

    store: str | None = None
    request_id: str = ""
    purge: bool = False
    check: str = "quick"

    def __post_init__(self) -> None:
        check_choice("check", self.check, CHECKS)
        _check_request_id(self.request_id)


@dataclass(frozen=True, slots=True)
class LoadDatastoreRequest(Request[StoreInfo]):
    """Loads a datastore under the name `store` (default: its folder's), replacing a loaded one with `replace`."""

    path: str
    store: str | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        if self.store is not None:
            check_store_name(self.store)


@dataclass(frozen=True, slots=True)
class UnloadDatastoreRequest(Request[StoreInfo]):
    """Unloads a datastore. Its files stay."""

    store: str


JobRequest: TypeAlias = BuildDatastoreRequest | AddDocumentsRequest | CompactDatastoreRequest


def check_store_name(name: str) -> None:
    """Raises InvalidInput for an invalid datastore name."""
    if not STORE_NAME.fullmatch(name):
        raise InvalidInput(
            f"store is {name[:MAX_NAME]!r}; expected up to 100 letters, digits, dots, dashes and underscores, not a"
            " dot first",
            field="store",
        )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_NAME:
        raise InvalidInput(f"request_id has {len(request_id)} characters; at most {MAX_NAME}", field="request_id")
