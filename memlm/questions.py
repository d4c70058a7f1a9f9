"""What a server is asked besides generation: the dataclasses that the client, the server and its worker share.

Like `memlm.api.GenerateRequest`, each refuses values that mean nothing as it is made, so a bad request fails in the
client before it travels, and in the server if another client sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from memlm.api import GenerateRequest, MemoryParams
from memlm.errors import InvalidInput

MAX_DOCUMENT_IDS = 10_000
MAX_TTL_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """How probable is this text?"""

    text: str
    memory: MemoryParams = field(default_factory=MemoryParams)
    token_scores: bool = False


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Which tokens make this text?"""

    text: str


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Which text do these tokens make?"""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GetModelRequest:
    """Which model is loaded?"""


@dataclass(frozen=True, slots=True)
class GetServerInfoRequest:
    """What does the server take?"""


@dataclass(frozen=True, slots=True)
class ListDatastoresRequest:
    """Which datastores are loaded?"""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Which places of a datastore are most like the end of this text? `store=None` asks all that are loaded."""

    text: str
    store: str | None = None
    k: int = 8
    nprobe: int | None = None

    def __post_init__(self) -> None:
        """Refuses what `MemoryParams` refuses."""
        MemoryParams(store=self.store, k=self.k, nprobe=self.nprobe)


@dataclass(frozen=True, slots=True)
class DeleteDocumentsRequest:
    """Let these documents never speak again."""

    document_ids: tuple[str, ...]
    store: str | None = None

    def __post_init__(self) -> None:
        """Refuses none, and more than one call may name."""
        count = len(self.document_ids)
        if not 1 <= count <= MAX_DOCUMENT_IDS:
            raise InvalidInput(
                f"document_ids has {count} ids; expected 1 to {MAX_DOCUMENT_IDS} in one call", field="document_ids"
            )

    @classmethod
    def of(cls, document_ids: Sequence[str], store: str | None) -> DeleteDocumentsRequest:
        """Refuses a lone string, too, whose letters would be taken for ids."""
        if isinstance(document_ids, str):
            raise InvalidInput(f"document_ids is the text {document_ids!r}; expected a list", field="document_ids")
        return cls(tuple(document_ids), store)


@dataclass(frozen=True, slots=True)
class CreateSessionRequest:
    """A session that nobody has read anything into, for `ttl_s` seconds after its last use."""

    ttl_s: float | None = None

    def __post_init__(self) -> None:
        """Refuses what is no time."""
        if self.ttl_s is not None and not 0 < self.ttl_s <= MAX_TTL_S:
            raise InvalidInput(f"ttl_s is {self.ttl_s}; expected above 0 and at most {MAX_TTL_S:,.0f}", field="ttl_s")


@dataclass(frozen=True, slots=True)
class AppendToSessionRequest:
    """Read this into a session."""

    session: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GetSessionRequest:
    """What is known of this session?"""

    session: str


@dataclass(frozen=True, slots=True)
class ListSessionsRequest:
    """Which sessions are the caller's?"""


@dataclass(frozen=True, slots=True)
class ForkSessionRequest:
    """Another session that has read the same."""

    session: str


@dataclass(frozen=True, slots=True)
class DeleteSessionRequest:
    """Forget this session."""

    session: str


Question: TypeAlias = (
    GenerateRequest
    | ScoreRequest
    | TokenizeRequest
    | DetokenizeRequest
    | GetModelRequest
    | GetServerInfoRequest
    | ListDatastoresRequest
    | SearchRequest
    | DeleteDocumentsRequest
    | CreateSessionRequest
    | AppendToSessionRequest
    | GetSessionRequest
    | ListSessionsRequest
    | ForkSessionRequest
    | DeleteSessionRequest
)
