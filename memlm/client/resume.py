"""TLS settings of a client, and the state for resuming a broken stream. Imports no gRPC."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlm.api.generation import Accepted, GenerationEvent, ResumeGenerationRequest
from memlm.api.params import StreamRequest
from memlm.errors import InvalidInput, MemlmError, NotFound, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_TARGET = "localhost:50051"
DEFAULT_TIMEOUT_S = 60.0
RESUME_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings: the authority that signed the server (`ca`, default the system's), and the client's certificate.

    `cert` and `key` are needed by a server with `tls_client_ca`. All are PEM files. Raises InvalidInput for one alone.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):  # which would abort the process in gRPC
            raise InvalidInput("a client's certificate needs its key; give both cert and key, or neither", field="cert")


class StreamResumer:
    """Progress of a generation's stream, and the request that resumes it after its connection broke."""

    def __init__(self, request: StreamRequest, allowed_s: float) -> None:
        self.request: StreamRequest | ResumeGenerationRequest = request
        self.request_id = ""
        self._tokens, self._resume_s = 0, request.resume_s
        self._deadline_s, self._broken_s = time.monotonic() + allowed_s, 0.0
        self._error: MemlmError | None = None

    @property
    def left_s(self) -> float:
        """Seconds left of the call's time limit."""
        return max(0.0, self._deadline_s - time.monotonic())

    @property
    def must_be_cancelled(self) -> bool:
        """Whether the generation would run on without its client."""
        return self._resume_s is not None and bool(self.request_id)

    def is_new(self, event: GenerationEvent) -> bool:
        """Whether an event is new. After a break, Accepted arrives again."""
        self._error = None
        if isinstance(event, tuple):
            self._tokens += len(event)
        elif isinstance(event, Accepted):
            first, self.request_id = not self.request_id, event.request_id
            return first
        return True

    def resume(self, error: MemlmError) -> float:
        """Prepares the next attempt. Returns the seconds to wait before it, or raises the error for good."""
        if self._error is not None and isinstance(error, NotFound) and error.kind == "generation":
            raise self._error from None
        if self._resume_s is None or not self.request_id or not isinstance(error, Unavailable):
            raise error
        now_s = time.monotonic()
        if self._error is None:
            self._error, self._broken_s = error, now_s
        if now_s - self._broken_s + RESUME_PAUSE_S > self._resume_s:
            raise self._error from None
        self.request = ResumeGenerationRequest(self.request_id, self._tokens)
        return RESUME_PAUSE_S
