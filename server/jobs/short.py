"""Short additions, which an inference worker reads within seconds where all index workers are at work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from memlm.api.datastores import NewDocument
from memlm.data.corpus import Corpus
from memlm.errors import Incompatible
from memlm.server.jobs.job import Job
from memlm.server.jobs.worker import ADD

SHORT_BYTES = 16 << 10  # of an upload: about 4,000 tokens, read a piece at a time between the steps of the batch


def may_overtake(job: Job, jobs: Iterable[Job]) -> bool:
    """Whether a waiting job is a short addition that was never tried, and no earlier one of `jobs` is on its datastore:
    operations on one datastore keep their order.
    """
    if job.kind != ADD or job.attempts or _size_of(job.documents) > SHORT_BYTES:
        return False
    return not any(
        other.is_open and _is_same(other, job) and other is not job and other.created_s <= job.created_s
        for other in jobs
    )


def _is_same(one: Job, other: Job) -> bool:
    return Path(one.path).resolve() == Path(other.path).resolve()


def documents_of(job: Job) -> tuple[NewDocument, ...]:
    """Reads the documents of an addition. Raises Incompatible for some that have to be left out, which an index worker
    tells.
    """
    problems = list[object]()
    corpus = Corpus((Path(job.documents),), on_problem=problems.append)
    documents = tuple(NewDocument(each.id, each.text, each.title, each.metadata) for each in corpus)
    if problems:
        raise Incompatible(f"{len(problems)} of its documents have to be left out")
    return documents


def _size_of(file: str) -> int:
    """The size in bytes. A file that is gone has more than any other."""
    try:
        return Path(file).stat().st_size
    except OSError:
        return sys.maxsize
