from google.longrunning import operations_pb2 as _operations_pb2
from memlm.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SearchBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEARCH_BY_UNSPECIFIED: _ClassVar[SearchBy]
    SEARCH_BY_STATE: _ClassVar[SearchBy]
    SEARCH_BY_WORDS: _ClassVar[SearchBy]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_DONE: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
SEARCH_BY_UNSPECIFIED: SearchBy
SEARCH_BY_STATE: SearchBy
SEARCH_BY_WORDS: SearchBy
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_DONE: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState

class ListDatastoresRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDatastoresResponse(_message.Message):
    __slots__ = ("datastores", "next_page_token")
    DATASTORES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    datastores: _containers.RepeatedCompositeFieldContainer[Datastore]
    next_page_token: str
    def __init__(self, datastores: _Optional[_Iterable[_Union[Datastore, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Datastore(_message.Message):
    __slots__ = ("name", "path", "manifest", "num_entries", "num_documents", "num_deleted_documents", "dim", "index", "bytes_per_entry", "k", "lam", "knn_temperature", "tuned_on", "store_id", "problem", "recall", "nats_change", "lam_adapts", "num_keyed_entries", "num_keyed_documents")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DELETED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_ENTRY_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LAM_FIELD_NUMBER: _ClassVar[int]
    KNN_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TUNED_ON_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    NATS_CHANGE_FIELD_NUMBER: _ClassVar[int]
    LAM_ADAPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
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
    tuned_on: str
    store_id: str
    problem: str
    recall: float
    nats_change: float
    lam_adapts: bool
    num_keyed_entries: int
    num_keyed_documents: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., manifest: _Optional[int] = ..., num_entries: _Optional[int] = ..., num_documents: _Optional[int] = ..., num_deleted_documents: _Optional[int] = ..., dim: _Optional[int] = ..., index: _Optional[str] = ..., bytes_per_entry: _Optional[float] = ..., k: _Optional[int] = ..., lam: _Optional[float] = ..., knn_temperature: _Optional[float] = ..., tuned_on: _Optional[str] = ..., store_id: _Optional[str] = ..., problem: _Optional[str] = ..., recall: _Optional[float] = ..., nats_change: _Optional[float] = ..., lam_adapts: bool = ..., num_keyed_entries: _Optional[int] = ..., num_keyed_documents: _Optional[int] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("text", "store", "k", "nprobe", "by", "documents", "where", "as_of")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    NPROBE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    text: str
    store: str
    k: int
    nprobe: int
    by: SearchBy
    documents: _containers.RepeatedScalarFieldContainer[str]
    where: _containers.RepeatedScalarFieldContainer[str]
    as_of: str
    def __init__(self, text: _Optional[str] = ..., store: _Optional[str] = ..., k: _Optional[int] = ..., nprobe: _Optional[int] = ..., by: _Optional[_Union[SearchBy, str]] = ..., documents: _Optional[_Iterable[str]] = ..., where: _Optional[_Iterable[str]] = ..., as_of: _Optional[str] = ...) -> None: ...

class SearchResponse(_message.Message):
    __slots__ = ("neighbors",)
    NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    neighbors: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Neighbor]
    def __init__(self, neighbors: _Optional[_Iterable[_Union[_generation_pb2.Neighbor, _Mapping]]] = ...) -> None: ...

class FindPassagesRequest(_message.Message):
    __slots__ = ("question", "store", "k", "by", "documents", "where", "exclude_documents", "as_of")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    question: str
    store: str
    k: int
    by: _generation_pb2.PassagesBy
    documents: _containers.RepeatedScalarFieldContainer[str]
    where: _containers.RepeatedScalarFieldContainer[str]
    exclude_documents: _containers.RepeatedScalarFieldContainer[str]
    as_of: str
    def __init__(self, question: _Optional[str] = ..., store: _Optional[str] = ..., k: _Optional[int] = ..., by: _Optional[_Union[_generation_pb2.PassagesBy, str]] = ..., documents: _Optional[_Iterable[str]] = ..., where: _Optional[_Iterable[str]] = ..., exclude_documents: _Optional[_Iterable[str]] = ..., as_of: _Optional[str] = ...) -> None: ...

class FindPassagesResponse(_message.Message):
    __slots__ = ("passages",)
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    passages: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Passage]
    def __init__(self, passages: _Optional[_Iterable[_Union[_generation_pb2.Passage, _Mapping]]] = ...) -> None: ...

class DeleteDocumentsRequest(_message.Message):
    __slots__ = ("store", "document_ids")
    STORE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    store: str
    document_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, store: _Optional[str] = ..., document_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteDocumentsResponse(_message.Message):
    __slots__ = ("store", "manifest", "num_documents", "num_entries")
    STORE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    store: str
    manifest: int
    num_documents: int
    num_entries: int
    def __init__(self, store: _Optional[str] = ..., manifest: _Optional[int] = ..., num_documents: _Optional[int] = ..., num_entries: _Optional[int] = ...) -> None: ...

class RememberRequest(_message.Message):
    __slots__ = ("store", "documents", "replace")
    STORE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    store: str
    documents: _containers.RepeatedCompositeFieldContainer[Document]
    replace: bool
    def __init__(self, store: _Optional[str] = ..., documents: _Optional[_Iterable[_Union[Document, _Mapping]]] = ..., replace: bool = ...) -> None: ...

class RememberResponse(_message.Message):
    __slots__ = ("store", "manifest", "num_entries", "document_ids")
    STORE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    store: str
    manifest: int
    num_entries: int
    document_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, store: _Optional[str] = ..., manifest: _Optional[int] = ..., num_entries: _Optional[int] = ..., document_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetDatastoreRequest(_message.Message):
    __slots__ = ("store",)
    STORE_FIELD_NUMBER: _ClassVar[int]
    store: str
    def __init__(self, store: _Optional[str] = ...) -> None: ...

class BuildDatastoreRequest(_message.Message):
    __slots__ = ("store", "corpus", "glob", "index", "target", "max_ram_bytes", "drop_keys", "prune", "stride", "seed", "replace", "request_id", "hidden", "window", "check", "keys")
    STORE_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    GLOB_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MAX_RAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROP_KEYS_FIELD_NUMBER: _ClassVar[int]
    PRUNE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    store: str
    corpus: _containers.RepeatedScalarFieldContainer[str]
    glob: str
    index: str
    target: float
    max_ram_bytes: int
    drop_keys: bool
    prune: float
    stride: int
    seed: int
    replace: bool
    request_id: str
    hidden: bool
    window: int
    check: str
    keys: str
    def __init__(self, store: _Optional[str] = ..., corpus: _Optional[_Iterable[str]] = ..., glob: _Optional[str] = ..., index: _Optional[str] = ..., target: _Optional[float] = ..., max_ram_bytes: _Optional[int] = ..., drop_keys: bool = ..., prune: _Optional[float] = ..., stride: _Optional[int] = ..., seed: _Optional[int] = ..., replace: bool = ..., request_id: _Optional[str] = ..., hidden: bool = ..., window: _Optional[int] = ..., check: _Optional[str] = ..., keys: _Optional[str] = ...) -> None: ...

class AddDocumentsRequest(_message.Message):
    __slots__ = ("store", "replace", "request_id", "documents", "check", "keys", "sync", "keep", "num_documents", "dry_run")
    STORE_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    store: str
    replace: bool
    request_id: str
    documents: _containers.RepeatedCompositeFieldContainer[Document]
    check: str
    keys: str
    sync: str
    keep: _containers.RepeatedScalarFieldContainer[str]
    num_documents: int
    dry_run: bool
    def __init__(self, store: _Optional[str] = ..., replace: bool = ..., request_id: _Optional[str] = ..., documents: _Optional[_Iterable[_Union[Document, _Mapping]]] = ..., check: _Optional[str] = ..., keys: _Optional[str] = ..., sync: _Optional[str] = ..., keep: _Optional[_Iterable[str]] = ..., num_documents: _Optional[int] = ..., dry_run: bool = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ("id", "text", "title", "metadata", "continues", "file")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    id: str
    text: str
    title: str
    metadata: str
    continues: bool
    file: str
    def __init__(self, id: _Optional[str] = ..., text: _Optional[str] = ..., title: _Optional[str] = ..., metadata: _Optional[str] = ..., continues: bool = ..., file: _Optional[str] = ...) -> None: ...

class CompactDatastoreRequest(_message.Message):
    __slots__ = ("store", "request_id", "purge", "check")
    STORE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    store: str
    request_id: str
    purge: bool
    check: str
    def __init__(self, store: _Optional[str] = ..., request_id: _Optional[str] = ..., purge: bool = ..., check: _Optional[str] = ...) -> None: ...

class LoadDatastoreRequest(_message.Message):
    __slots__ = ("store", "path", "replace")
    STORE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    store: str
    path: str
    replace: bool
    def __init__(self, store: _Optional[str] = ..., path: _Optional[str] = ..., replace: bool = ...) -> None: ...

class UnloadDatastoreRequest(_message.Message):
    __slots__ = ("store",)
    STORE_FIELD_NUMBER: _ClassVar[int]
    store: str
    def __init__(self, store: _Optional[str] = ...) -> None: ...

class JobMetadata(_message.Message):
    __slots__ = ("kind", "store", "state", "phase", "done", "total", "per_s", "left_s", "created_s", "started_s", "ended_s", "attempts", "skipped")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    PER_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    store: str
    state: JobState
    phase: str
    done: int
    total: int
    per_s: float
    left_s: float
    created_s: float
    started_s: float
    ended_s: float
    attempts: int
    skipped: int
    def __init__(self, kind: _Optional[str] = ..., store: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., per_s: _Optional[float] = ..., left_s: _Optional[float] = ..., created_s: _Optional[float] = ..., started_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., attempts: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class JobReport(_message.Message):
    __slots__ = ("store", "manifest", "num_documents", "num_entries", "index", "bytes_per_entry", "seconds", "num_deleted_documents", "sync")
    STORE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_ENTRY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DELETED_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    store: str
    manifest: int
    num_documents: int
    num_entries: int
    index: str
    bytes_per_entry: float
    seconds: float
    num_deleted_documents: int
    sync: SyncOutcome
    def __init__(self, store: _Optional[str] = ..., manifest: _Optional[int] = ..., num_documents: _Optional[int] = ..., num_entries: _Optional[int] = ..., index: _Optional[str] = ..., bytes_per_entry: _Optional[float] = ..., seconds: _Optional[float] = ..., num_deleted_documents: _Optional[int] = ..., sync: _Optional[_Union[SyncOutcome, _Mapping]] = ...) -> None: ...

class SyncOutcome(_message.Message):
    __slots__ = ("num_added", "num_replaced", "num_deleted", "num_kept", "num_unchanged", "added", "replaced", "deleted", "kept")
    NUM_ADDED_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLACED_FIELD_NUMBER: _ClassVar[int]
    NUM_DELETED_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    num_added: int
    num_replaced: int
    num_deleted: int
    num_kept: int
    num_unchanged: int
    added: _containers.RepeatedScalarFieldContainer[str]
    replaced: _containers.RepeatedScalarFieldContainer[str]
    deleted: _containers.RepeatedScalarFieldContainer[str]
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_added: _Optional[int] = ..., num_replaced: _Optional[int] = ..., num_deleted: _Optional[int] = ..., num_kept: _Optional[int] = ..., num_unchanged: _Optional[int] = ..., added: _Optional[_Iterable[str]] = ..., replaced: _Optional[_Iterable[str]] = ..., deleted: _Optional[_Iterable[str]] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...
