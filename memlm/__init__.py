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

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "true")  # grpc looks when it is first imported: see memlm.Client

if TYPE_CHECKING:
    from memlm.async_client import AsyncClient
    from memlm.build import add_to_index, build_index, compact_index
    from memlm.client import Client
    from memlm.corpus import Corpus, Document
    from memlm.errors import MemlmError
    from memlm.evaluate import evaluate
    from memlm.events import Accepted, Alternative, Completion, Finished, FinishReason, Neighbor, Token, Usage
    from memlm.index.datastore import Datastore
    from memlm.language_model import LanguageModel, load
    from memlm.operations import JobReport, JobState, Operation, OperationInfo
    from memlm.params import GenerateRequest, MemoryParams, SamplingParams, StoreWeight
    from memlm.reports import DeleteReport, Figures, ModelInfo, Score, ServerInfo, SessionInfo, StoreInfo, TokenScore
    from memlm.train import train
    from memlm.tune import tune

__version__ = "0.1.0"

_HOMES = {
    "memlm.build": "add_to_index build_index compact_index",
    "memlm.async_client": "AsyncClient",
    "memlm.client": "Client",
    "memlm.corpus": "Corpus Document",
    "memlm.errors": "MemlmError",
    "memlm.evaluate": "evaluate",
    "memlm.events": "Accepted Alternative Completion Finished FinishReason Neighbor Token Usage",
    "memlm.index.datastore": "Datastore",
    "memlm.language_model": "LanguageModel load",
    "memlm.operations": "JobReport JobState Operation OperationInfo",
    "memlm.params": "GenerateRequest MemoryParams SamplingParams StoreWeight",
    "memlm.reports": "DeleteReport Figures ModelInfo Score ServerInfo SessionInfo StoreInfo TokenScore",
    "memlm.train": "train",
    "memlm.tune": "tune",
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
    "MemoryParams",
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
