"""What a caller may do with which datastore: one rule for each rpc, and what answers and errors may show.

Every question passes `Rights.checked` before anything is done with it, every answer `Rights.visible`, and every error
`Rights.visible_error`. A token that is restricted to some datastores can name no other: not by its name, not by an
absolute, relative or linked path, and it is told no other's name. No caller is told where on the server's disk
something lies. Which calls a token may make, and how often, is `Caller.check`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from memlm.api.datastores import LoadDatastoreRequest, StoreInfo
from memlm.api.operations import OperationInfo, OperationPage
from memlm.api.params import RetrievalParams, StoreWeight
from memlm.errors import MemlmError, NotFound, PermissionDenied
from memlm.server.config import ServerConfig
from memlm.server.frontend.auth import Caller
from memlm.server.registry import Stores

Names: TypeAlias = frozenset[str] | None  # None: all
Rule: TypeAlias = Callable[["Rights", Caller, Any], Any]


class Rights:
    """The rights of all callers over the datastores of a server."""

    def __init__(self, config: ServerConfig, stores: Stores) -> None:
        self.stores = stores
        self._folders = {path for folder in (config.store_dir, config.session_dir) for path in _spellings(folder)}
        self._named = {path: stores.shown(given) for given in config.stores for path in _spellings(given)}
        self._named |= dict.fromkeys(_spellings(config.model), config.model.name)
        places = sorted({*self._folders, *self._named}, key=len, reverse=True)
        self._places = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, places))})(/|(?![\w-]|\.\w))")

    def checked(self, call: str, caller: Caller, question: Any) -> Any:
        """A question as its caller may put it, with what it leaves open filled in. Raises PermissionDenied where it is
        about a datastore that the caller may not use.
        """
        return RULES[call](self, caller, question)

    def visible(self, caller: Caller, answer: Any) -> Any:
        """The part of an answer that its caller may see."""
        match answer:
            case StoreInfo():
                problem = self._without_places(answer.problem)
                return replace(answer, path=self.stores.shown(Path(answer.path)), problem=problem)
            case OperationInfo() if answer.error is not None:
                return replace(answer, error=self.visible_error(caller.stores, answer.error))
            case OperationPage():
                operations = tuple(self.visible(caller, info) for info in answer.operations)
                return replace(answer, operations=operations)
            case (StoreInfo(), *_):
                return tuple(self.visible(caller, info) for info in answer if _may_use(caller, info.name))
        return answer

    def visible_error(self, stores: Names, error: MemlmError) -> MemlmError:
        """An error as a caller of these datastores may see it. The operator's log has it in full."""
        if isinstance(error, NotFound) and error.kind == "datastore" and stores is not None:
            loaded = ", ".join(sorted(stores & set(self.stores.paths))) or "none"
            name = self._without_places(error.name)
            return NotFound(
                f"no datastore {name!r} is loaded, or lies there; loaded: {loaded}", kind="datastore", name=name
            )
        shown = copy(error)
        shown.args = (self._without_places(str(error)),)
        if isinstance(shown, NotFound):
            shown.name = self._without_places(shown.name)
        return shown

    def _without_places(self, text: str) -> str:
        """A text with paths relative to the folders of the server, and with names for its model and given stores."""
        return self._places.sub(self._shortened, text)

    def _shortened(self, found: re.Match[str]) -> str:
        place, slash = found[1], found[2]
        if place in self._named:
            return self._named[place] + slash
        return "" if slash else Path(place).name


def _about_no_store(rights: Rights, caller: Caller, question: Any) -> Any:
    """Needs no datastore."""
    return question


def _about_own(rights: Rights, caller: Caller, question: Any) -> Any:
    """Names a session, a generation or an operation, which is looked up among those of the caller."""
    return question


def _about_all_stores(rights: Rights, caller: Caller, question: Any) -> Any:
    """Lists datastores; `Rights.visible` leaves out those that the caller may not use."""
    return question


def _about_one_store(rights: Rights, caller: Caller, question: Any) -> Any:
    """Names one datastore, or, where the caller may use only one, leaves it open."""
    if caller.stores is None:
        return question
    if question.store is None and len(caller.stores) == 1:
        return replace(question, store=next(iter(caller.stores)))
    if question.store is None:
        raise PermissionDenied(f"the token {caller.name!r} has to name a datastore; it may use {_own(caller)}")
    _check_names(caller, [question.store])
    return question


def _with_retrieval(rights: Rights, caller: Caller, question: Any) -> Any:
    """Names datastores that answer together, or leaves them open: then those that are in service and the caller's."""
    retrieval: RetrievalParams = question.retrieval
    if caller.stores is None:
        return question
    names = [each.name for each in retrieval.stores] or ([] if retrieval.store is None else [retrieval.store])
    _check_names(caller, names)
    if names or not retrieval.use_store:
        return question
    own = sorted(caller.stores & set(rights.stores.paths))
    if not own:
        return replace(question, retrieval=replace(retrieval, use_store=False))
    return replace(question, retrieval=replace(retrieval, stores=tuple(map(StoreWeight, own))))


def _with_path(rights: Rights, caller: Caller, question: LoadDatastoreRequest) -> LoadDatastoreRequest:
    """Names a folder on the server, and what it is to be called: both have to be the caller's."""
    question = _about_one_store(rights, caller, question)
    path = rights.stores.located(question.path)
    if caller.stores is not None and not caller.stores & rights.stores.owners_of(path):
        raise PermissionDenied(
            f"the token {caller.name!r} may not load {question.path!r}; it may load where they lie: {_own(caller)}"
        )
    return replace(question, path=str(path))


RULES: Mapping[str, Rule] = {
    "Generate": _with_retrieval,
    "Score": _with_retrieval,
    "ResumeGeneration": _about_own,
    "CancelGeneration": _about_own,
    "Tokenize": _about_no_store,
    "Detokenize": _about_no_store,
    "GetModel": _about_no_store,
    "GetServerInfo": _about_no_store,
    "ListDatastores": _about_all_stores,
    "GetDatastore": _about_one_store,
    "Search": _about_one_store,
    "DeleteDocuments": _about_one_store,
    "BuildDatastore": _about_one_store,
    "AddDocuments": _about_one_store,
    "CompactDatastore": _about_one_store,
    "UnloadDatastore": _about_one_store,
    "LoadDatastore": _with_path,
    "CreateSession": _about_own,
    "AppendToSession": _about_own,
    "GetSession": _about_own,
    "ListSessions": _about_own,
    "ForkSession": _about_own,
    "DeleteSession": _about_own,
    "GetOperation": _about_own,
    "ListOperations": _about_own,
    "WaitOperation": _about_own,
    "CancelOperation": _about_own,
    "DeleteOperation": _about_own,
}


def _may_use(caller: Caller, name: str) -> bool:
    return caller.stores is None or name in caller.stores


def _check_names(caller: Caller, names: Sequence[str]) -> None:
    for name in names:
        if not _may_use(caller, name):
            raise PermissionDenied(
                f"the token {caller.name!r} may not use the datastore {name!r}; it may use {_own(caller)}"
            )


def _own(caller: Caller) -> str:
    return ", ".join(sorted(caller.stores or ())) or "none"


def _spellings(path: Path | None) -> set[str]:
    return set() if path is None else {str(path.absolute()), str(path.resolve())}
