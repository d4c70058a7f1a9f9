"""One of several processes that change a store at once; it reads what to do, a line each, and says when it is done.

    python store_crowd.py STORE      reads "add N", "replace N", "delete NAME...", "compact", "tune N"

An answer of "done" means that the change is committed; "busy" that others stand in the way and nothing was changed.
"""

import sys
from pathlib import Path

from random_stores import DEFAULTS, spec
from store_history import INDEX, entries_of

from memlm.errors import Incompatible, InvalidInput, Locked, NotFound
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import KnnDefaults
from memlm.index.store.writer import StoreWriter


def batch(number: int) -> tuple[str, ...]:
    """The documents that the addition of a number brings."""
    return tuple(f"{number:04}-{each}" for each in range(2))


def change(path: Path, what: str, words: list[str]) -> None:
    if what == "compact":
        compact(path)
    elif what in ("add", "replace"):
        with StoreWriter.extend(path, spec(INDEX)) as writer:
            for name in batch(int(words[0])):
                keys_ND, values_N = entries_of(name, 2 if what == "replace" else 1)
                writer.begin_document(name, replace=what == "replace")
                if writer.is_resumed(len(values_N)):
                    writer.verify_resumed(values_N)
                else:
                    writer.append(keys_ND, values_N)
                    writer.checkpoint()
            writer.commit(defaults=DEFAULTS).close()
    else:
        with Datastore.open(path) as store:
            if what == "delete":
                store.delete(words)
            else:
                store.save_defaults(KnnDefaults(k=int(words[0]), lam=0.5, temperature=1.0, tuned_on=None))


def main(path: Path) -> None:
    for line in sys.stdin:
        what, *words = line.split()
        try:
            change(path, what, words)
            answer = "done"
        except (Locked, Incompatible, NotFound, InvalidInput) as error:
            answer = f"busy {type(error).__name__}"
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
