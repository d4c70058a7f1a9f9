"""memlm: a language model whose memory you can read, edit, scale and serve.

    import memlm
    lm = memlm.load("MODEL", stores=["STORE"])
    for token in lm.generate("def main(", max_tokens=64):
        print(token.text, end="")

Names are loaded when they are first used, so that `import memlm.client` and `memlm --help` need neither torch nor
Faiss.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memlm.base.version import __version__

if TYPE_CHECKING:
    from memlm.api.datastores import DeleteReport, StoreInfo
    from memlm.api.generation import Accepted, Alternative, Completion, Finished, FinishReason, Neighbor, Token, Usage
    from memlm.api.operations import JobReport, JobState, Operation, OperationInfo
    from memlm.api.params import GenerateRequest, RetrievalParams, SamplingParams, StoreWeight
    from memlm.api.scoring import Figures, Score, TokenScore
    from memlm.api.server import ModelInfo, ServerInfo
    from memlm.api.sessions import SessionInfo
    from memlm.client import AsyncClient, Client
    from memlm.data.corpus import Corpus, Document
    from memlm.errors import MemlmError
    from memlm.evaluation import evaluate
    from memlm.index.store.datastore import Datastore
    from memlm.indexing.build import add_to_index, build_index, compact_index
    from memlm.indexing.tune import tune
    from memlm.language_model import LanguageModel, load
    from memlm.training.train import train

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "true")  # grpc looks when it is first imported: see memlm.Client

_HOMES = {
    "memlm.api.datastores": "DeleteReport StoreInfo",
    "memlm.api.generation": "Accepted Alternative Completion FinishReason Finished Neighbor Token Usage",
    "memlm.api.operations": "JobReport JobState Operation OperationInfo",
    "memlm.api.params": "GenerateRequest RetrievalParams SamplingParams StoreWeight",
    "memlm.api.scoring": "Figures Score TokenScore",
    "memlm.api.server": "ModelInfo ServerInfo",
    "memlm.api.sessions": "SessionInfo",
    "memlm.client": "AsyncClient Client",
    "memlm.data.corpus": "Corpus Document",
    "memlm.errors": "MemlmError",
    "memlm.evaluation": "evaluate",
    "memlm.index.store.datastore": "Datastore",
    "memlm.indexing.build": "add_to_index build_index compact_index",
    "memlm.indexing.tune": "tune",
    "memlm.language_model": "LanguageModel load",
    "memlm.training.train": "train",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [  # noqa: RUF022 - in the order of use
    "load",
    "LanguageModel",
    "train",
    "build_index",
    "add_to_index",
    "compact_index",
    "tune",
    "evaluate",
    "Corpus",
    "Document",
    "Datastore",
    "Client",
    "AsyncClient",
    "GenerateRequest",
    "SamplingParams",
    "RetrievalParams",
    "StoreWeight",
    "Token",
    "Completion",
    "Neighbor",
    "Alternative",
    "Accepted",
    "Finished",
    "FinishReason",
    "Usage",
    "Score",
    "TokenScore",
    "Figures",
    "ModelInfo",
    "StoreInfo",
    "SessionInfo",
    "ServerInfo",
    "DeleteReport",
    "Operation",
    "OperationInfo",
    "JobState",
    "JobReport",
    "MemlmError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Loads a public name from its home (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'memlm' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
