"""The datastore that a conversation writes to: a folder in process, or one of a server's."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memlm.api.datastores import StoreInfo
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress, silent
from memlm.cli.served.operations import follow
from memlm.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.data.corpus import Corpus
    from memlm.language_model import LanguageModel

RETRIEVAL_FIELDS = {field.name for field in fields(RetrievalParams)}


class ChatMemory(Protocol):
    """Adds documents to a datastore and deletes them. Each answer that begins later uses the change."""

    def stores(self) -> tuple[StoreInfo, ...]:
        """The datastores that answers search."""

    def usable(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of an answer, without those of retrieval as long as a new datastore is not built."""

    def add(self, corpus: Corpus, progress: Progress) -> str:
        """Adds documents, and returns the name of their datastore."""

    def remember(self, document_id: str, text: str) -> str:
        """Adds a short text at once, and returns the name of its datastore."""

    def delete(self, document_id: str) -> str:
        """Deletes a document, and returns the name of its datastore."""


def note_id() -> str:
    """An id for a text that was typed."""
    return f"note-{secrets.token_hex(3)}"


class LocalMemory:
    """The datastores of a model in this process. The first folder takes what is added, and is built if need be."""

    def __init__(self, lm: LanguageModel, folder: Path | None) -> None:
        self._lm, self._folder = lm, folder

    def stores(self) -> tuple[StoreInfo, ...]:
        return self._lm.stores

    def usable(self, options: dict[str, Any]) -> dict[str, Any]:
        if self._folder is None or self._lm.stores:
            return options
        return {name: value for name, value in options.items() if name not in RETRIEVAL_FIELDS}

    def add(self, corpus: Corpus, progress: Progress) -> str:
        """Raises InvalidInput without a folder."""
        from memlm.indexing.build import add_to_index, build_index

        if self._folder is None:
            raise InvalidInput(
                "there is no datastore to write to; start with --store FOLDER, which may be a new folder", field="store"
            )
        if (name := self._name()) is None:
            build_index(self._lm.checkpoint, corpus, self._folder, progress=progress)
            return self._lm.load_datastore(self._folder).name
        add_to_index(self._lm.checkpoint, corpus, self._folder, progress=progress)
        self._lm.refresh()
        return name

    def remember(self, document_id: str, text: str) -> str:
        from memlm.data.corpus import Corpus, Document

        if (name := self._name()) is None:
            return self.add(Corpus([Document(document_id, text)]), silent)
        return self._lm.remember(text, store=name, document_id=document_id).store

    def delete(self, document_id: str) -> str:
        return _delete_in(self.stores(), lambda name: self._lm.delete_documents([document_id], store=name), document_id)

    def _name(self) -> str | None:
        """The name of the folder's datastore, once it is built."""
        known = {Path(info.path).resolve(): info.name for info in self._lm.stores}
        return None if self._folder is None else known.get(self._folder.resolve())


class ServerMemory:
    """The datastores of a server. `store` takes what is added; without it, the only one."""

    def __init__(self, client: Client, store: str | None) -> None:
        self._client, self._store = client, store

    def stores(self) -> tuple[StoreInfo, ...]:
        return self._client.datastores.list()

    def usable(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def add(self, corpus: Corpus, progress: Progress) -> str:
        name = self._name()
        job = self._client.datastores.add(name, corpus)
        try:
            follow(job, progress).outcome()
        except KeyboardInterrupt:
            job.cancel()
            raise
        return name

    def remember(self, document_id: str, text: str) -> str:
        return self._client.datastores.remember(self._name(), text, document_id=document_id).store

    def _name(self) -> str:
        """The datastore to write to. Raises InvalidInput if there is none, or several of which none was named."""
        names = [info.name for info in self.stores()]
        if self._store is None and len(names) != 1:
            listed = f"{len(names)} datastores ({', '.join(names)})" if names else "no datastore"
            raise InvalidInput(f"the server has {listed}; name the one to write to with --store-name", field="store")
        return self._store or names[0]

    def delete(self, document_id: str) -> str:
        delete = self._client.datastores.delete_documents
        return _delete_in(self.stores(), lambda name: delete(name, [document_id]), document_id)


def _delete_in(stores: Sequence[StoreInfo], delete: Callable[[str], object], document_id: str) -> str:
    """Deletes a document in the first datastore that has it. Raises NotFound where none has."""
    for info in stores:
        with suppress(NotFound):
            delete(info.name)
            return info.name
    names = ", ".join(info.name for info in stores) or "any datastore, since none is loaded"
    raise NotFound(f"no document {document_id!r} in {names}", kind="document", name=document_id)
