"""The datastore: keys and values in, neighbours out; numpy and Faiss, no torch.

    with StoreWriter.create("store", spec) as writer:        # memlm.index.writer
        writer.begin_document("a.txt")
        writer.append(keys_ND, values_N)
        datastore = writer.commit()
    datastore.search(queries_QD, k=8)                         # memlm.index.datastore

Names are loaded when they are first used, so that `memlm.index.errors` can be had without Faiss.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlm.index.datastore import Datastore
    from memlm.index.manifest import KnnDefaults, Manifest, StoreSpec
    from memlm.index.neighbours import Neighbours, Searcher
    from memlm.index.view import Place
    from memlm.index.writer import StoreWriter

_HOME_OF = {
    "Datastore": "memlm.index.datastore",
    "Place": "memlm.index.view",
    "KnnDefaults": "memlm.index.manifest",
    "Manifest": "memlm.index.manifest",
    "StoreSpec": "memlm.index.manifest",
    "Neighbours": "memlm.index.neighbours",
    "Searcher": "memlm.index.neighbours",
    "StoreWriter": "memlm.index.writer",
}

__all__ = ["Datastore", "KnnDefaults", "Manifest", "Neighbours", "Place", "Searcher", "StoreSpec", "StoreWriter"]


def __getattr__(name: str) -> Any:
    """Loads a public name from its home (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'memlm.index' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
