from memlm.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListDatastoresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDatastoresResponse(_message.Message):
    __slots__ = ("datastores",)
    DATASTORES_FIELD_NUMBER: _ClassVar[int]
    datastores: _containers.RepeatedCompositeFieldContainer[Datastore]
    def __init__(self, datastores: _Optional[_Iterable[_Union[Datastore, _Mapping]]] = ...) -> None: ...

class Datastore(_message.Message):
    __slots__ = ("name", "path", "manifest", "num_entries", "num_documents", "num_deleted_documents", "dim", "index", "bytes_per_entry", "k", "lam", "knn_temperature", "tuned_on")
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
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., manifest: _Optional[int] = ..., num_entries: _Optional[int] = ..., num_documents: _Optional[int] = ..., num_deleted_documents: _Optional[int] = ..., dim: _Optional[int] = ..., index: _Optional[str] = ..., bytes_per_entry: _Optional[float] = ..., k: _Optional[int] = ..., lam: _Optional[float] = ..., knn_temperature: _Optional[float] = ..., tuned_on: _Optional[str] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("text", "store", "k", "nprobe")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    NPROBE_FIELD_NUMBER: _ClassVar[int]
    text: str
    store: str
    k: int
    nprobe: int
    def __init__(self, text: _Optional[str] = ..., store: _Optional[str] = ..., k: _Optional[int] = ..., nprobe: _Optional[int] = ...) -> None: ...

class SearchResponse(_message.Message):
    __slots__ = ("neighbors",)
    NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    neighbors: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Neighbor]
    def __init__(self, neighbors: _Optional[_Iterable[_Union[_generation_pb2.Neighbor, _Mapping]]] = ...) -> None: ...

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
