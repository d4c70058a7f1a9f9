"""Authorization: one rule for each rpc says which datastores a caller may use, and answers and errors are redacted.

Every request passes `Rights.authorize` first, every answer `Rights.redact`, and every error `Rights.redact_error`. A
token that is restricted to some datastores cannot address any other, whether by name or by an absolute, relative or
linked path, and does not learn other datastores' names. No caller learns absolute paths of the server.
`Principal.check` limits which calls a token may make, and how often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from memlm.api.answers import AnswerRequest
from memlm.api.chat import ChatRequest
from memlm.api.datastores import AddDocumentsRequest, LoadDatastoreRequest, StoreInfo
from memlm.api.operations import OperationInfo, OperationPage
from memlm.api.params import RetrievalParams, StoreWeight
from memlm.errors import MemlmError, NotFound, PermissionDenied
from memlm.server.config import ServerConfig
from memlm.server.frontend.auth import Principal
from memlm.server.registry import DatastoreRegistry

Names: TypeAlias = frozenset[str] | None  # None: all
Rule: TypeAlias = Callable[["Rights", Principal, Any], Any]


class Rights:
    def __init__(self, config: ServerConfig, stores: DatastoreRegistry) -> None:
        self.stores = stores
        self._folders = {path for folder in (config.store_dir, config.session_dir) for path in _spellings(folder)}
        self._names_by_path = {
            path: stores.display_name(given) for given in config.stores for path in _spellings(given)
        }
        encoders = [] if config.encoder in ("auto", "none") else [Path(config.encoder)]
        for given in (config.model, *encoders):
            self._names_by_path |= dict.fromkeys(_spellings(given), given.name)
        paths = sorted({*self._folders, *self._names_by_path}, key=len, reverse=True)
        self._path_pattern = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, paths))})(/|(?![\w-]|\.\w))")

    def authorize(self, call: str, caller: Principal, request: Any) -> Any:
        """Returns a request with its open choices filled in from the caller's datastores.

        Raises PermissionDenied for a datastore that the caller may not use.
        """
        return RULES[call](self, caller, request)

    def redact(self, caller: Principal, answer: Any) -> Any:
        """The part of an answer that its caller may see."""
        match answer:
            case StoreInfo():
                problem = self._hide_paths(answer.problem)
                return replace(answer, path=self.stores.display_name(Path(answer.path)), problem=problem)
            case OperationInfo() if answer.error is not None:
                return replace(answer, error=self.redact_error(caller.stores, answer.error))
            case OperationPage():
                operations = tuple(self.redact(caller, info) for info in answer.operations)
                return replace(answer, operations=operations)
            case (StoreInfo(), *_):
                return tuple(self.redact(caller, info) for info in answer if _may_use(caller, info.name))
        return answer

    def redact_error(self, stores: Names, error: MemlmError) -> MemlmError:
        """An error as a caller of these datastores may see it. The operator's log has it in full."""
        if isinstance(error, NotFound) and error.kind == "datastore" and stores is not None:
            loaded = ", ".join(sorted(stores & set(self.stores.paths))) or "none"
            name = self._hide_paths(error.name)
            return NotFound(
                f"no datastore {name!r} is loaded, or lies there; loaded: {loaded}", kind="datastore", name=name
            )
        redacted = copy(error)
        redacted.args = (self._hide_paths(str(error)),)
        if isinstance(redacted, NotFound):
            redacted.name = self._hide_paths(redacted.name)
        return redacted

    def _hide_paths(self, text: str) -> str:
        """Replaces absolute paths of the server by relative ones, and its model and given datastores by their names."""
        return self._path_pattern.sub(self._shorten, text)

    def _shorten(self, found: re.Match[str]) -> str:
        path, slash = found[1], found[2]
        if path in self._names_by_path:
            return self._names_by_path[path] + slash
        return "" if slash else Path(path).name


def _no_store(rights: Rights, caller: Principal, request: Any) -> Any:
    """For rpcs without a datastore."""
    return request


def _own_resource(rights: Rights, caller: Principal, request: Any) -> Any:
    """For rpcs about a session, a generation or an operation, which are looked up among the caller's."""
    return request


def _all_stores(rights: Rights, caller: Principal, request: Any) -> Any:
    """For rpcs that list datastores. `Rights.redact` filters the list."""
    return request


def _one_store(rights: Rights, caller: Principal, request: Any) -> Any:
    """For rpcs about one datastore, which a caller with only one may leave out."""
    if caller.stores is None:
        return request
    if request.store is None and len(caller.stores) == 1:
        return replace(request, store=next(iter(caller.stores)))
    if request.store is None:
        raise PermissionDenied(
            f"the token {caller.name!r} has to name a datastore; it may use {_allowed_names(caller)}"
        )
    _check_names(caller, [request.store])
    return request


def _one_store_that_grows(rights: Rights, caller: Principal, request: AddDocumentsRequest) -> Any:
    """For AddDocuments, which deletes documents where it synchronizes, and makes a datastore where there is none."""
    if request.sync:
        caller.check_right("DeleteDocuments")
    request = _one_store(rights, caller, request)
    if request.sync and request.store is not None and request.store not in rights.stores.paths:
        caller.check_right("BuildDatastore")
    return request


def _with_retrieval(rights: Rights, caller: Principal, request: Any) -> Any:
    """For rpcs that retrieve from one or several datastores, by default from all of the caller's."""
    retrieval: RetrievalParams = request.retrieval
    if caller.stores is None:
        return request
    names = [each.name for each in retrieval.stores] or ([] if retrieval.store is None else [retrieval.store])
    _check_names(caller, names)
    if names or not (retrieval.use_store and _searches(request)):
        return request
    allowed = sorted(caller.stores & set(rights.stores.paths))
    if not allowed:
        return replace(request, retrieval=replace(retrieval, use_store=False))
    return replace(request, retrieval=replace(retrieval, stores=tuple(map(StoreWeight, allowed))))


def _searches(request: Any) -> bool:
    """Whether a request that names no datastore searches all. With an adapter, only a chat does, for its passages."""
    return getattr(request, "adapter", None) is None or (isinstance(request, ChatRequest) and request.finds_passages)


def _with_passages(rights: Rights, caller: Principal, request: AnswerRequest) -> AnswerRequest:
    """For Answer, which also finds passages, by default in all of the caller's datastores."""
    if caller.stores is None:
        return request
    named = request.searched_stores
    _check_names(caller, named)
    request = _with_retrieval(rights, caller, request)
    if named or not request.finds_passages:
        return request
    allowed = sorted(caller.stores & set(rights.stores.paths))
    if not allowed:
        raise PermissionDenied(
            f"the token {caller.name!r} has no loaded datastore to find passages in; give passages, or set num_passages"
            " to 0"
        )
    return replace(request, passage_stores=tuple(allowed))


def _with_path(rights: Rights, caller: Principal, request: LoadDatastoreRequest) -> LoadDatastoreRequest:
    """For LoadDatastore: the folder and the name have to be the caller's."""
    request = _one_store(rights, caller, request)
    path = rights.stores.resolve(request.path)
    if caller.stores is not None and not caller.stores & rights.stores.owners_of(path):
        raise PermissionDenied(
            f"the token {caller.name!r} may not load {request.path!r}; it may load where they lie:"
            f" {_allowed_names(caller)}"
        )
    return replace(request, path=str(path))


RULES: Mapping[str, Rule] = {
    "Generate": _with_retrieval,
    "Chat": _with_retrieval,
    "Answer": _with_passages,
    "Score": _with_retrieval,
    "ResumeGeneration": _own_resource,
    "CancelGeneration": _own_resource,
    "Tokenize": _no_store,
    "Detokenize": _no_store,
    "GetModel": _no_store,
    "GetServerInfo": _no_store,
    "ListDatastores": _all_stores,
    "GetDatastore": _one_store,
    "Search": _one_store,
    "FindPassages": _one_store,
    "Trace": _one_store,
    "Remember": _one_store,
    "DeleteDocuments": _one_store,
    "BuildDatastore": _one_store,
    "AddDocuments": _one_store_that_grows,
    "CompactDatastore": _one_store,
    "UnloadDatastore": _one_store,
    "LoadDatastore": _with_path,
    "CreateSession": _own_resource,
    "AppendToSession": _own_resource,
    "GetSession": _own_resource,
    "ListSessions": _own_resource,
    "ForgetInSession": _own_resource,
    "ForkSession": _own_resource,
    "DeleteSession": _own_resource,
    "GetOperation": _own_resource,
    "ListOperations": _own_resource,
    "WaitOperation": _own_resource,
    "CancelOperation": _own_resource,
    "DeleteOperation": _own_resource,
}


def _may_use(caller: Principal, name: str) -> bool:
    return caller.stores is None or name in caller.stores


def _check_names(caller: Principal, names: Sequence[str]) -> None:
    for name in names:
        if not _may_use(caller, name):
            raise PermissionDenied(
                f"the token {caller.name!r} may not use the datastore {name!r}; it may use {_allowed_names(caller)}"
            )


def _allowed_names(caller: Principal) -> str:
    return ", ".join(sorted(caller.stores or ())) or "none"


def _spellings(path: Path | None) -> set[str]:
    return set() if path is None else {str(path.absolute()), str(path.resolve())}
