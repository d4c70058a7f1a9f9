"""A folder and its datastore stay the same: new documents are added, changed ones replaced, others deleted.

A document is unchanged where the datastore holds the same tokens, title and metadata under its id. A document is gone
where an earlier synchronization of the same files and folders saw it, this one does not, and neither its file nor a
folder on the way to it is in doubt. `synced.json` in the datastore's folder remembers that by hashes of ids and of
paths, so that no name of a deleted document stays there.

Documents come from a folder of this machine (`SyncedFolder`), or from an upload of one (`memlm.server.jobs.uploads`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as but
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memlm.base.files import write_atomic
from memlm.base.progress import COMPARING, DELETING, Progress, silent
from memlm.data.corpus import Corpus, Document, NoText
from memlm.data.synced_folder import SyncedFolder, hash_of
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, Corrupt
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import commit_lock
from memlm.index.store.manifest import CURRENT
from memlm.index.store.snapshot import Snapshot
from memlm.indexing.build import BuildReport, add_to_index, build_index
from memlm.model.files.checkpoint import Checkpoint

SYNCED = "synced.json"
VERSION = 3


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
    """The ids of documents that a synchronization adds, replaces and deletes; those that it keeps, although they were
    not found, because they are not known to be gone, or came from other folders too; and of those that are unchanged.
    `files` has the ways of the files that were read. `builds` a datastore where there is none.
    """

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    builds: bool = field(default=False, compare=False, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.added or self.replaced or self.deleted)


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
    added, replaced, unchanged = list[str](), list[str](), list[str]()
    with Datastore.open(path) as datastore:
        snapshot = datastore.snapshot
        for document in _told(source.documents(), progress):
            if not snapshot.has_document(document.id):
                added.append(document.id)
            else:
                (unchanged if _is_same(snapshot, document, tokenizer) else replaced).append(document.id)
        files = source.files()
        remembered, shared = _remembered(snapshot, path, source.origin)
    if not replace:
        _check_own(path, source, {id_: files[id_] for id_ in replaced})
    gone = {id_: way for id_, way in remembered.items() if id_ not in files}
    doubtful = source.doubtful() if gone else set[str]()
    kept = {id_ for id_, way in gone.items() if not doubtful.isdisjoint(way.split("/"))}
    kept |= set[str]() if replace else shared & gone.keys()
    deleted = tuple(id_ for id_ in gone if id_ not in kept)
    in_order = tuple(id_ for id_ in gone if id_ in kept)
    return SyncPlan(tuple(added), tuple(replaced), deleted, in_order, tuple(unchanged), files)


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
    memory = _Memory(path, source.origin, takes=replace)

    def finish() -> None:
        _delete(path, found.deleted, progress)
        memory.write(found.files, kept=found.kept)
        on_text()

    options: dict[str, Any] = {"keys": keys, "check": check, "progress": progress, "on_text": finish}
    if found.builds:
        return SyncReport(found, build_index(checkpoint, documents, path, **options))
    if found.added or found.replaced:
        # Before they are there: after a kill between the two, a later call may delete them.
        memory.write({id_: found.files[id_] for id_ in found.added}, keeps_others=True)
        new = but(documents, only=frozenset((*found.added, *found.replaced)))
        try:
            return SyncReport(found, add_to_index(checkpoint, new, path, replace=True, **options))
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


def _delete(store: Path, document_ids: Sequence[str], progress: Progress) -> None:
    """Deletes those documents that are there."""
    if not document_ids:
        return
    progress(DELETING, 0, len(document_ids))
    with Datastore.open(store) as datastore:
        if there := [id_ for id_ in document_ids if datastore.snapshot.has_document(id_)]:
            datastore.delete(there)


def _is_same(snapshot: Snapshot, document: Document, tokenizer: Tokenizer) -> bool:
    ((segment, row),) = snapshot.find_each([document.id])
    stored = segment.documents.at(row)
    if stored.title != document.title or dict(stored.metadata) != json.loads(json.dumps(dict(document.metadata))):
        return False
    values_N = segment.text_of(row)
    # Which takes a tenth of the time of tokenizing. A tokenizer that loses something may give another text.
    if tokenizer.decode(values_N.tolist(), whole=True) == document.text:
        return True
    return np.array_equal(values_N, tokenizer.encode(document.text))


def _remembered(snapshot: Snapshot, store: Path, origin: str) -> tuple[dict[str, str], set[str]]:
    """The ids of live documents that came from an origin, with the ways of their files, and those of them that came
    from others too.
    """
    synced = _read_synced(store)
    own = synced.pop(origin, {})
    others = set[str]().union(*synced.values())
    hashes = [(document.id, hash_of(document.id)) for document in snapshot.documents()]
    remembered = {id_: own[hash_] for id_, hash_ in hashes if hash_ in own}
    return remembered, {id_ for id_, hash_ in hashes if hash_ in others}


def _check_own(store: Path, source: SyncSource, replaced: Mapping[str, str]) -> None:
    """Raises AlreadyExists for ids, given with the ways of their files, that other origins have of other files."""
    synced = _read_synced(store)
    own = synced.pop(source.origin, {})

    def is_taken(id_: str, way: str) -> bool:
        known = [ways[hash_of(id_)] for ways in synced.values() if hash_of(id_) in ways]
        is_same = source.is_local and _file(way) in map(_file, known)
        return bool(known) and hash_of(id_) not in own and not is_same

    if taken := [id_ for id_, way in replaced.items() if is_taken(id_, way)]:
        more = f" (and {len(taken) - 1:,} more)" if len(taken) > 1 else ""
        raise AlreadyExists(
            f"document {taken[0]!r}{more} came from another folder that was synchronized to {store}, and would be"
            " replaced; rename its file, synchronize to another datastore, or replace it all the same (--replace), as"
            " where the folder is the same and was moved"
        )


def _file(way: str) -> str:
    return way.rpartition("/")[2]


@dataclass(frozen=True)
class _Memory:
    """The memory of a datastore of the synchronizations of an origin, which `takes` documents of others."""

    store: Path
    origin: str
    takes: bool

    def write(self, files: Mapping[str, str], *, kept: Iterable[str] = (), keeps_others: bool = False) -> None:
        """Notes that documents came from files, given by their ways. Notes of `kept` ones, or of all others, stay."""
        new = {hash_of(id_): way for id_, way in files.items()}
        with commit_lock(self.store):
            synced = _read_synced(self.store)
            before = synced.pop(self.origin, {})
            if self.takes:
                synced = {origin: _without(ways, new) for origin, ways in synced.items()}
            if keeps_others:
                stay = before
            else:  # what others have too is theirs from now on
                others = set[str]().union(*synced.values())
                stay = {hash_: before[hash_] for hash_ in {*map(hash_of, kept)} & before.keys() - others}
            after = {**synced, self.origin: {**stay, **new}}
            if after != {**synced, self.origin: before} or self.takes:
                write_atomic(self.store / SYNCED, json.dumps({"version": VERSION, "synced": after}).encode())


def _without(ways: Mapping[str, str], taken: Mapping[str, str]) -> dict[str, str]:
    return {hash_: way for hash_, way in ways.items() if hash_ not in taken}


def _read_synced(store: Path) -> dict[str, dict[str, str]]:
    """The ways of files by the hashes of their documents' ids, by their origin. Raises Corrupt."""
    try:
        content = json.loads((store / SYNCED).read_bytes())
        if content["version"] in (1, 2):  # which had no folders, so that none of its documents is known to be gone
            return {}
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, expected {VERSION}")
        return {str(origin): dict(files) for origin, files in content["synced"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"{store / SYNCED} is damaged ({error}); remove it: the next synchronization deletes nothing"
        ) from error
