# The public names of memlm, in the order of use, and the modules that they are imported from.
# ruff: noqa: I001
from memlm.language_model import load as load, LanguageModel as LanguageModel
from memlm.zoo.shapes.seq2seq import Seq2Seq as Seq2Seq
from memlm.training.train import train as train
from memlm.indexing.build import (
    build_index as build_index,
    index_keys as index_keys,
    add_to_index as add_to_index,
    compact_index as compact_index,
)
from memlm.indexing.tune import tune as tune
from memlm.evaluation import evaluate as evaluate
from memlm.data.corpus import Corpus as Corpus, Document as Document
from memlm.index.store.datastore import Datastore as Datastore
from memlm.client import Client as Client, AsyncClient as AsyncClient
from memlm.api.params import (
    GenerateRequest as GenerateRequest,
    SamplingParams as SamplingParams,
    RetrievalParams as RetrievalParams,
    StoreWeight as StoreWeight,
)
from memlm.api.chat import ChatRequest as ChatRequest, Message as Message
from memlm.api.generation import (
    Token as Token,
    Completion as Completion,
    Neighbor as Neighbor,
    Alternative as Alternative,
    Accepted as Accepted,
    Finished as Finished,
    FinishReason as FinishReason,
    Usage as Usage,
)
from memlm.api.passages import Passage as Passage
from memlm.api.answers import Answer as Answer
from memlm.api.scoring import Score as Score, TokenScore as TokenScore, Figures as Figures
from memlm.api.tracing import Trace as Trace, TracedSpan as TracedSpan
from memlm.api.server import ModelInfo as ModelInfo, ServerInfo as ServerInfo
from memlm.api.datastores import StoreInfo as StoreInfo, DeleteReport as DeleteReport
from memlm.api.sessions import SessionInfo as SessionInfo
from memlm.api.handles import Operation as Operation
from memlm.api.operations import OperationInfo as OperationInfo, JobState as JobState, JobReport as JobReport
from memlm.errors import MemlmError as MemlmError
from memlm.base.version import __version__ as __version__
