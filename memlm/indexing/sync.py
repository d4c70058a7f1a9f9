"""A folder and its datastore stay the same: new documents are added, changed ones replaced, others deleted.

A document is unchanged where the datastore holds the same tokens, title and metadata under its id. A document is gone
where an earlier synchronization of the same files and folders saw it, this one does not, and its file is gone or was
read whole. `synced.json` in the datastore's folder remembers that by hashes of ids and of their files'
paths, so that no name of a deleted document stays there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from memlm.base.files import write_atomic
from memlm.base.progress import Progress, silent
from memlm.data.corpus import ALL_FILES, Corpus, Document, NoText, Problem
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, Corrupt, InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import CURRENT
from memlm.index.store.snapshot import Snapshot
from memlm.indexing.build import BuildReport, add_to_index, build_index
from memlm.model.files.checkpoint import Checkpoint

SYNCED = "synced.json"
HASH_DIGITS = 16
VERSION = 2
NO_FILE = "no file was found, as where a folder is not mounted; no document is deleted"
CANNOT_BE_READ = "cannot be read"  # the reason of a folder or file that the system refuses


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The ids of documents that a synchronization adds, replaces and deletes; those that it keeps, although they were
    not found, because they are not known to be gone; and of those that are unchanged. `files` has hashes of the paths
    of the files that were read.
    """

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.added or self.replaced or self.deleted)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A synchronization that was done, with the report of its build or addition, if there was one."""

    plan: SyncPlan
    built: BuildReport | None = None


def plan_sync(tokenizer: Tokenizer, corpus: Corpus, store: str | Path) -> SyncPlan:
    """Compares a corpus of files with a datastore. Reads and tokenizes all of it, and changes nothing.

    Raises InvalidInput for a corpus with documents in memory or from a pipe, which cannot be read again, and for one
    without any document: a folder that is empty, or not mounted, deletes nothing. Raises AlreadyExists where a document
    would replace one that a synchronization of other files and folders made of another file.
    """
    if corpus.documents or corpus.has_pipes:
        raise InvalidInput("only files and folders can be synchronized; name some", field="corpus")
    look = _Look(corpus)
    if not (Path(store) / CURRENT).exists():
        return SyncPlan(added=tuple(document.id for document in look.documents()), files=look.files())
    added, replaced, unchanged = list[str](), list[str](), list[str]()
    with Datastore.open(store) as datastore:
        snapshot = datastore.snapshot
        for document in look.documents():
            if not snapshot.has_document(document.id):
                added.append(document.id)
            else:
                (unchanged if _is_same(snapshot, document, tokenizer) else replaced).append(document.id)
        seen = {*added, *replaced, *unchanged}
        remembered = _remembered(snapshot, Path(store), corpus)
    files = look.files()
    _check_own(Path(store), corpus, {id_: files[id_] for id_ in replaced})
    gone = {id_: file for id_, file in remembered.items() if id_ not in seen}
    kept = look.kept(gone)
    deleted = tuple(id_ for id_ in gone if id_ not in kept)
    return SyncPlan(tuple(added), tuple(replaced), deleted, tuple(kept), tuple(unchanged), files)


def sync_index(
    checkpoint: Checkpoint,
    corpus: Corpus,
    store: str | Path,
    *,
    check: str = "quick",
    progress: Progress = silent,
    plan: SyncPlan | None = None,
) -> SyncReport:
    """Makes a datastore hold the documents of a corpus of files, and the others that it held: builds it where there is
    none, adds and replaces in one commit, and deletes in another. Interrupted, it goes on when it is called again.
    Documents that went away since the plan was made are not added.

    Raises as `plan_sync`, `build_index` and `add_to_index`.
    """
    path = Path(store)
    plan = plan or plan_sync(checkpoint.tokenizer, corpus, path)
    built = None
    quiet = replace(corpus, on_problem=lambda problem: None)  # the plan has told them
    if not (path / CURRENT).exists():
        built = build_index(checkpoint, quiet, path, check=check, progress=progress)
    elif plan.added or plan.replaced:
        # Before they are there: after a kill between the two, a later call may delete them.
        _remember(path, corpus, {id_: plan.files[id_] for id_ in plan.added}, keeps_others=True)
        new = replace(quiet, only=frozenset((*plan.added, *plan.replaced)))
        try:
            built = add_to_index(checkpoint, new, path, replace=True, check=check, progress=progress)
        except NoText:  # the files went away since they were planned
            plan = replace(plan, added=(), replaced=())
    with Datastore.open(path) as datastore:
        if gone := [id_ for id_ in plan.deleted if datastore.snapshot.has_document(id_)]:
            datastore.delete(gone)
    _remember(path, corpus, plan.files, kept=plan.kept)
    return SyncReport(plan, built)


def signature_of(corpus: Corpus) -> dict[str, tuple[int, int]]:
    """The time of change, in nanoseconds, and the size of each file: equal where no file was written to."""
    found = dict[str, tuple[int, int]]()
    for name, path in corpus.files():
        try:
            status = path.stat()
        except OSError:  # it went away meanwhile
            continue
        found[name] = status.st_mtime_ns, status.st_size
    return found


class _Look:
    """One pass over a corpus, which notes the file of each document and the problems of files."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self._problems, self._names = corpus, list[Problem](), dict[str, str]()

    def documents(self) -> Iterable[Document]:
        """All documents, in order. To be taken before the rest is asked for."""
        return replace(self._corpus, on_problem=self._on_problem, on_document=self._on_document)

    def files(self) -> dict[str, str]:
        """Hashes of the paths of files by the ids of their documents."""
        hashes = {name: _hash_of(path) for name, path in self._corpus.found()}
        return {id_: hashes.get(name) or _hash(name) for id_, name in self._names.items()}  # it went away meanwhile

    def kept(self, gone: Mapping[str, str]) -> list[str]:
        """Those of some ids, given with hashes of their files' paths, whose files are there and had a problem, gave no
        document or were left out: all of them, where a folder could not be listed, or has no file.
        """
        if gone and (empty := self._corpus.empty_places()):
            for place in empty:
                self._corpus.on_problem(Problem(str(place), NO_FILE))
            return list(gone)
        if any(problem.reason == CANNOT_BE_READ for problem in self._problems):
            return list(gone)
        troubled = {each for problem in self._problems for each in (problem.where, problem.where.rpartition(":")[0])}
        whole = set(self._names.values()) - troubled
        read = {_hash_of(path) for name, path in self._corpus.found() if name in whole}
        all_files = replace(self._corpus, glob=ALL_FILES, hidden=True).found() if gone else ()
        doubtful = {_hash_of(path) for _, path in all_files} - read
        return [id_ for id_, file in gone.items() if file in doubtful]

    def _on_problem(self, problem: Problem) -> None:
        self._problems.append(problem)
        self._corpus.on_problem(problem)

    def _on_document(self, file: str, document: Document) -> None:
        self._names[document.id] = file
        self._corpus.on_document(file, document)


def _is_same(snapshot: Snapshot, document: Document, tokenizer: Tokenizer) -> bool:
    ((segment, row),) = snapshot.find_each([document.id])
    stored = segment.documents.at(row)
    if stored.title != document.title or dict(stored.metadata) != json.loads(json.dumps(dict(document.metadata))):
        return False
    return np.array_equal(segment.text_of(row), tokenizer.encode(document.text))


def _origin(corpus: Corpus) -> str:
    """The files and folders of a corpus, as a hash: the datastore need not tell where they are."""
    return _hash("\n".join(sorted(os.path.abspath(path) for path in corpus.places)))


def _hash_of(path: Path) -> str:
    return _hash(os.path.abspath(path))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:HASH_DIGITS]


def _remembered(snapshot: Snapshot, store: Path, corpus: Corpus) -> dict[str, str]:
    """The ids of live documents that came from a corpus and from no other, with hashes of their files' paths."""
    synced = _read_synced(store)
    own = synced.pop(_origin(corpus), {})
    others = set[str]().union(*synced.values())
    hashes = ((document.id, _hash(document.id)) for document in snapshot.documents())
    return {id_: own[hash_] for id_, hash_ in hashes if hash_ in own and hash_ not in others}


def _check_own(store: Path, corpus: Corpus, replaced: Mapping[str, str]) -> None:
    """Raises AlreadyExists for ids, given with hashes of their files' paths, that other files of other corpora have."""
    synced = _read_synced(store)
    own = synced.pop(_origin(corpus), {})

    def is_taken(id_: str, file: str) -> bool:
        known = [files[_hash(id_)] for files in synced.values() if _hash(id_) in files]
        return bool(known) and _hash(id_) not in own and file not in known

    if taken := [id_ for id_, file in replaced.items() if is_taken(id_, file)]:
        more = f" (and {len(taken) - 1:,} more)" if len(taken) > 1 else ""
        raise AlreadyExists(
            f"document {taken[0]!r}{more} came from another folder that was synchronized to {store}, and would be"
            " replaced; rename its file, or synchronize to another datastore. Where the folder is the same and was"
            f" moved, remove {store / SYNCED}"
        )


def _remember(
    store: Path, corpus: Corpus, files: Mapping[str, str], *, kept: Iterable[str] = (), keeps_others: bool = False
) -> None:
    """Notes that documents came from files of a corpus. Notes of `kept` ones, or of all others, stay."""
    synced, origin = _read_synced(store), _origin(corpus)
    before = synced.get(origin, {})
    stay = before if keeps_others else {hash_: before[hash_] for hash_ in map(_hash, kept) if hash_ in before}
    synced[origin] = {**stay, **{_hash(id_): file for id_, file in files.items()}}
    write_atomic(store / SYNCED, json.dumps({"version": VERSION, "synced": synced}).encode())


def _read_synced(store: Path) -> dict[str, dict[str, str]]:
    """The hashes of ids and of their files' paths by the hash of their corpus. Raises Corrupt."""
    try:
        content = json.loads((store / SYNCED).read_bytes())
        if content["version"] == 1:  # which had no files, so that none of its documents is known to be gone
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
