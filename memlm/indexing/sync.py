"""A folder and its datastore stay the same: new documents are added, changed ones replaced, others deleted.

A document is unchanged where the datastore holds the same tokens, title and metadata under its id. A document is gone
where an earlier synchronization of the same files and folders saw it, and this one does not. `synced.json` in the
datastore's folder remembers that by hashes of ids, so that no name of a deleted document stays there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memlm.base.files import write_atomic
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus, Document, Problem
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Corrupt, InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import CURRENT
from memlm.index.store.snapshot import Snapshot
from memlm.indexing.build import BuildReport, add_to_index, build_index
from memlm.model.files.checkpoint import Checkpoint

SYNCED = "synced.json"
HASH_DIGITS = 16
VERSION = 1
CANNOT_BE_READ = "cannot be read"  # the reason of a folder or file that the system refuses


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The ids of documents that a synchronization adds, replaces and deletes; those that it keeps, although they are
    gone, because their files could not be read; and of those that are unchanged.
    """

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()

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
    without any document: a folder that is empty, or not mounted, deletes nothing.
    """
    if corpus.documents or corpus.has_pipes:
        raise InvalidInput("only files and folders can be synchronized; name some", field="corpus")
    problems = list[Problem]()

    def told(problem: Problem) -> None:
        problems.append(problem)
        corpus.on_problem(problem)

    documents = iter(replace(corpus, on_problem=told))
    if not (Path(store) / CURRENT).exists():
        return SyncPlan(added=tuple(document.id for document in documents))
    added, replaced, unchanged = list[str](), list[str](), list[str]()
    with Datastore.open(store) as datastore:
        snapshot = datastore.snapshot
        for document in documents:
            if not snapshot.has_document(document.id):
                added.append(document.id)
            else:
                (unchanged if _is_same(snapshot, document, tokenizer) else replaced).append(document.id)
        seen = {*added, *replaced, *unchanged}
        gone = [id_ for id_ in _remembered(snapshot, Path(store), corpus) if id_ not in seen]
    kept = _unread(gone, problems)
    deleted = tuple(id_ for id_ in gone if id_ not in kept)
    return SyncPlan(tuple(added), tuple(replaced), deleted, tuple(kept), tuple(unchanged))


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
        _remember(path, corpus, plan.added, keeps_others=True)
        new = replace(quiet, only=frozenset((*plan.added, *plan.replaced)))
        built = add_to_index(checkpoint, new, path, replace=True, check=check, progress=progress)
    with Datastore.open(path) as datastore:
        if gone := [id_ for id_ in plan.deleted if datastore.snapshot.has_document(id_)]:
            datastore.delete(gone)
    _remember(path, corpus, (*plan.added, *plan.replaced, *plan.unchanged, *plan.kept))
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


def _is_same(snapshot: Snapshot, document: Document, tokenizer: Tokenizer) -> bool:
    ((segment, row),) = snapshot.find_each([document.id])
    stored = segment.documents.at(row)
    if stored.title != document.title or dict(stored.metadata) != json.loads(json.dumps(dict(document.metadata))):
        return False
    return np.array_equal(segment.text_of(row), tokenizer.encode(document.text))


def _unread(gone: Sequence[str], problems: Sequence[Problem]) -> list[str]:
    """Those of the ids whose files are there and could not be read: all of them, where a folder could not be listed."""
    if any(problem.reason == CANNOT_BE_READ for problem in problems):
        return list(gone)
    named = {each for problem in problems for each in (problem.where, problem.where.rpartition(":")[0])}
    return [id_ for id_ in gone if id_ in named]


def _origin(corpus: Corpus) -> str:
    """The files and folders of a corpus, as a hash: the datastore need not tell where they are."""
    return _hash("\n".join(sorted(os.path.abspath(path) for path in corpus.places)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:HASH_DIGITS]


def _remembered(snapshot: Snapshot, store: Path, corpus: Corpus) -> list[str]:
    """The ids of live documents that came from a corpus and from no other."""
    synced = _read_synced(store)
    own = synced.pop(_origin(corpus), frozenset())
    own = own.difference(*synced.values())
    return [document.id for document in snapshot.documents() if _hash(document.id) in own]


def _remember(store: Path, corpus: Corpus, ids: Iterable[str], *, keeps_others: bool = False) -> None:
    """Notes that documents came from a corpus, and with `keeps_others` those that were noted before."""
    synced, origin = _read_synced(store), _origin(corpus)
    before = synced.get(origin, frozenset()) if keeps_others else frozenset()
    synced[origin] = before | {_hash(id_) for id_ in ids}
    content = {"version": VERSION, "synced": {each: sorted(hashes) for each, hashes in synced.items()}}
    write_atomic(store / SYNCED, json.dumps(content).encode())


def _read_synced(store: Path) -> dict[str, frozenset[str]]:
    """The hashes of ids by the hash of their corpus. Raises Corrupt."""
    try:
        content = json.loads((store / SYNCED).read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, expected {VERSION}")
        return {str(origin): frozenset(hashes) for origin, hashes in content["synced"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"{store / SYNCED} is damaged ({error}); remove it: the next synchronization deletes nothing"
        ) from error
