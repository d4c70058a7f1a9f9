"""The datastore: stores keys and values, and finds neighbors. Uses numpy and Faiss, no torch.

    with StoreWriter.create("store", spec) as writer:        # memlm.index.store.writer
        writer.begin_document("a.txt")
        writer.append(keys_ND, values_N)
        datastore = writer.commit()
    datastore.search(queries_QD, k=8)                         # memlm.index.store.datastore

Names are imported on first use, so that `memlm.errors` can be imported without Faiss.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlm.index.neighbors import Neighbors, Searcher
    from memlm.index.store.datastore import Datastore
    from memlm.index.store.manifest import KnnDefaults, Manifest, StoreSpec
    from memlm.index.store.snapshot import Place
    from memlm.index.store.writer import StoreWriter

_HOME_OF = {
    "Datastore": "memlm.index.store.datastore",
    "Place": "memlm.index.store.snapshot",
    "KnnDefaults": "memlm.index.store.manifest",
    "Manifest": "memlm.index.store.manifest",
    "StoreSpec": "memlm.index.store.manifest",
    "Neighbors": "memlm.index.neighbors",
    "Searcher": "memlm.index.neighbors",
    "StoreWriter": "memlm.index.store.writer",
}

__all__ = ["Datastore", "KnnDefaults", "Manifest", "Neighbors", "Place", "Searcher", "StoreSpec", "StoreWriter"]


def __getattr__(name: str) -> Any:
    """Loads a public name from its home (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'memlm.index' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
