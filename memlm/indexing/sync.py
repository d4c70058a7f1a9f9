"""A folder and its datastore stay the same: new documents are added, changed ones replaced, others deleted.

A document is unchanged where the datastore holds the same tokens, title and metadata under its id. A document is gone
where an earlier synchronization of the same files and folders brought it, this one does not find it, and neither its
file nor a folder on the way to it is in doubt. One that others have put in its place meanwhile is neither replaced nor
deleted. `memlm.indexing.synced` remembers the documents that were brought.

Documents come from a folder of this machine (`SyncedFolder`), or from an upload of one (`memlm.server.jobs.uploads`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as but
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memlm.api.operations import SYNC_KINDS, SyncOutcome
from memlm.base.progress import COMPARING, DELETING, Progress, silent
from memlm.data.corpus import Corpus, Document, NoText
from memlm.data.synced_folder import SyncedFolder, hash_of
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import CURRENT
from memlm.index.store.snapshot import Snapshot
from memlm.indexing.build import BuildReport, add_to_index, build_index
from memlm.indexing.synced import Memory, Notes, content_of, note_brought, note_coming
from memlm.model.files.checkpoint import Checkpoint


class SyncSource(Protocol):
    """Documents of files, which are read before the rest is asked for. `origin` is a hash that tells the files and
    folders of one synchronization from those of others, and `is_local` says that files of one way are one file,
    whatever their origin.
    """

    @property
    def origin(self) -> str: ...

    @property
    def is_local(self) -> bool: ...

    def documents(self) -> Corpus:
        """All documents."""

    def files(self) -> Mapping[str, str]:
        """The ways of their files (see `memlm.data.synced_folder`) by their ids."""

    def doubtful(self) -> set[str]:
        """Hashes of the files and folders whose documents are kept although they were not found."""


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The ids of documents that a synchronization adds, replaces and deletes; those that it keeps, because they were
    not found and are not known to be gone, or came from other folders too, or were changed by others since they were
    brought; and of those that are unchanged. `files` has the ways of the files that were read, and `notes` are for the
    memory of the datastore. `builds` a datastore where there is none.
    """

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    notes: Notes = field(default_factory=Notes, compare=False, repr=False)
    builds: bool = field(default=False, compare=False, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.added or self.replaced or self.deleted)

    @property
    def outcome(self) -> SyncOutcome:
        """The counts, and all ids but those of unchanged documents."""
        named: dict[str, Any] = {kind: getattr(self, kind) for kind in SYNC_KINDS}
        counts: dict[str, Any] = {f"num_{kind}": len(ids) for kind, ids in named.items()}
        return SyncOutcome(**counts, **named, num_unchanged=len(self.unchanged))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A synchronization that was done, with the report of its build or addition, if there was one."""

    plan: SyncPlan
    built: BuildReport | None = None


def plan_sync(
    tokenizer: Tokenizer,
    corpus: Corpus | SyncSource,
    store: str | Path,
    *,
    replace: bool = False,
    progress: Progress = silent,
) -> SyncPlan:
    """Compares a corpus of files with a datastore. Reads and tokenizes all of it, and changes nothing.

    Raises InvalidInput for a corpus with documents in memory or from a pipe, which cannot be read again, and for one
    without any document: a folder that is empty, or not mounted, deletes nothing. Raises AlreadyExists where a document
    would replace one that a synchronization of other files and folders made of another file, unless `replace`.
    """
    source, path = _source_of(corpus), Path(store)
    if not (path / CURRENT).exists():
        new = tuple(document.id for document in source.documents())
        return SyncPlan(added=new, files=source.files(), builds=True)
    with Datastore.open(path) as datastore:
        compared = _Compared(datastore.snapshot, tokenizer, source, Memory.read(path, source.origin))
        for document in _told(source.documents(), progress):
            compared.take(document)
        return compared.plan(path, replace=replace)


def sync_index(
    checkpoint: Checkpoint,
    corpus: Corpus | SyncSource,
    store: str | Path,
    *,
    replace: bool = False,
    keys: str = "auto",
    check: str = "quick",
    progress: Progress = silent,
    plan: SyncPlan | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> SyncReport:
    """Makes a datastore hold the documents of a corpus of files, and the others that it held: builds it where there is
    none, adds and replaces in one commit, deletes in another, calls `on_text`, and makes the new keys, as `keys`
    says. Interrupted, it goes on when it is called again. Documents that went away since the plan was made are not
    added. With `replace`, documents that synchronizations of other files and folders made are these files' from now on.

    Raises as `plan_sync`, `build_index` and `add_to_index`.
    """
    source, path = _source_of(corpus), Path(store)
    found = plan or plan_sync(checkpoint.tokenizer, source, path, replace=replace, progress=progress)
    documents = but(source.documents(), on_problem=lambda problem: None)  # the plan has told them
    written = dict[str, int]()

    def on_tokens(document: Document, values_N: np.ndarray) -> None:
        written[document.id] = content_of(document.title, document.metadata, values_N)

    def finish() -> None:
        nonlocal found
        if changed := _delete(path, found.notes.gone, progress):
            deleted = tuple(id_ for id_ in found.deleted if id_ not in changed)
            found = but(found, deleted=deleted, kept=(*found.kept, *changed))
        note_brought(path, source.origin, found.files, written, found.notes, takes=replace)
        on_text()

    options: dict[str, Any] = {"keys": keys, "check": check, "progress": progress, "on_text": finish, "anew": True}
    if found.builds:
        built = build_index(checkpoint, documents, path, on_tokens=on_tokens, **options)
        return SyncReport(found, built)
    if found.added or found.replaced:
        new = but(documents, only=frozenset((*found.added, *found.replaced)))
        options |= {"on_tokens": on_tokens, "replace": True}
        options["before_commit"] = partial(note_coming, path, source.origin, found.files, written)
        try:
            built = add_to_index(checkpoint, new, path, **options)
            return SyncReport(found, built)
        except NoText:  # the files went away since they were planned
            found = but(found, added=(), replaced=())
    finish()
    return SyncReport(found)


def _source_of(corpus: Corpus | SyncSource) -> SyncSource:
    return SyncedFolder(corpus) if isinstance(corpus, Corpus) else corpus


def _told(corpus: Corpus, progress: Progress) -> Iterator[Document]:
    """The documents of a corpus, with the progress of reading them."""
    total, read = corpus.num_bytes, 0
    for document in corpus:
        progress(COMPARING, read, max(total, read))
        yield document
        read += document.num_bytes


def _delete(store: Path, contents: Mapping[str, int], progress: Progress) -> set[str]:
    """Deletes documents that are there with their contents. Returns those that others have changed meanwhile."""
    if not contents:
        return set()
    progress(DELETING, 0, len(contents))
    with Datastore.open(store) as datastore:
        there = {id_: _content_in(datastore.snapshot, id_) for id_ in contents if datastore.snapshot.has_document(id_)}
        changed = {id_ for id_, content in there.items() if content != contents[id_]}
        if gone := [id_ for id_ in there if id_ not in changed]:
            datastore.delete(gone)
    return changed


class _Compared:
    """The documents of a source beside those of a datastore."""

    def __init__(self, snapshot: Snapshot, tokenizer: Tokenizer, source: SyncSource, memory: Memory) -> None:
        self._snapshot, self._tokenizer, self._source, self._memory = snapshot, tokenizer, source, memory
        self._added, self._unchanged = list[str](), dict[str, int]()
        self._differing = dict[str, int]()  # with their contents, as those that are unchanged

    def take(self, document: Document) -> None:
        """Compares one document of the source."""
        if not self._snapshot.has_document(document.id):
            self._added.append(document.id)
            return
        content, is_same = _compare(self._snapshot, document, self._tokenizer)
        (self._unchanged if is_same else self._differing)[document.id] = content

    def plan(self, store: Path, *, replace: bool) -> SyncPlan:
        """The rest, once all documents were taken. Raises AlreadyExists as `plan_sync`."""
        files, memory = self._source.files(), self._memory
        foreign = () if replace else self._foreign(store, files)
        live = {hash_of(document.id): document.id for document in self._snapshot.documents()}
        gone = [id_ for hash_, id_ in live.items() if hash_ in memory.own and id_ not in files]
        doubtful = self._source.doubtful() if gone else set[str]()
        held = {id_ for id_ in gone if any(not doubtful.isdisjoint(row.hashes) for row in memory.own[hash_of(id_)])}
        contents = {id_: _content_in(self._snapshot, id_) for id_ in gone if id_ not in held}
        deleted = {id_: content for id_, content in contents.items() if self._may_delete(id_, content, replace=replace)}
        kept = (*foreign, *(id_ for id_ in gone if id_ not in deleted))
        replaced = tuple(id_ for id_ in self._differing if id_ not in set(foreign))
        notes = Notes(self._unchanged, deleted, frozenset((*foreign, *held)), memory.dead(live.keys()))
        return SyncPlan(tuple(self._added), replaced, tuple(deleted), kept, tuple(self._unchanged), files, notes)

    def _foreign(self, store: Path, files: Mapping[str, str]) -> tuple[str, ...]:
        """The documents that others have changed since the source brought them. Raises AlreadyExists where the source
        never did, and another one has.
        """
        foreign, taken, memory = list[str](), list[str](), self._memory
        for id_, content in self._differing.items():
            others = memory.of_others(id_, content)
            is_same_file = self._source.is_local and _file(files[id_]) in {row.file for row in others}
            if memory.has_own(id_, content) or is_same_file:
                continue
            if hash_of(id_) in memory.own:
                foreign.append(id_)
            elif others:
                taken.append(id_)
        if taken:
            more = f" (and {len(taken) - 1:,} more)" if len(taken) > 1 else ""
            raise AlreadyExists(
                f"document {taken[0]!r}{more} came from another folder that was synchronized to {store}, and would be"
                " replaced; rename its file, synchronize to another datastore, or replace it all the same (--replace),"
                " as where the folder is the same and was moved"
            )
        return tuple(foreign)

    def _may_delete(self, id_: str, content: int, *, replace: bool) -> bool:
        """Whether a document is the one that the source brought, and no other source has it too."""
        return self._memory.has_own(id_, content) and (replace or not self._memory.of_others(id_, content))


def _compare(snapshot: Snapshot, document: Document, tokenizer: Tokenizer) -> tuple[int, bool]:
    """The content of the stored document of that id, and whether it is this one."""
    ((segment, row),) = snapshot.find_each([document.id])
    stored, values_N = segment.documents.at(row), segment.text_of(row)
    content = content_of(stored.title, stored.metadata, values_N)
    if stored.title != document.title or dict(stored.metadata) != json.loads(json.dumps(dict(document.metadata))):
        return content, False
    # Which takes a tenth of the time of tokenizing. A tokenizer that loses something may give another text.
    if tokenizer.decode(values_N.tolist(), whole=True) == document.text:
        return content, True
    return content, np.array_equal(values_N, tokenizer.encode(document.text))


def _content_in(snapshot: Snapshot, id_: str) -> int:
    ((segment, row),) = snapshot.find_each([id_])
    stored = segment.documents.at(row)
    return content_of(stored.title, stored.metadata, segment.text_of(row))


def _file(way: str) -> str:
    return way.rpartition("/")[2]
