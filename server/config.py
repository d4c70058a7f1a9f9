"""How a server runs. No torch here: the front reads it too."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from memlm.api.params import MAX_NEIGHBORS
from memlm.base.machine import ram_bytes
from memlm.errors import InvalidInput
from memlm.server.telemetry.logs import FORMATS

MIN_SESSION_BYTES = 1 << 20
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What is served, where, and how much of it at once. Raises InvalidInput for what cannot be.

    `port=0` takes any free port. `num_workers` processes own the model and its datastores, each its own copy, and
    share the work; each has `num_threads`, 0 shares all cores out. A loaded worker that sends no heartbeat for
    `worker_timeout_s` is killed and replaced. At most `max_running` requests run side by side and `max_queued` wait,
    with no more than `max_queued_tokens` of prompts; what is more is refused. The keys and values of running
    generations take at most `max_cache_bytes` (0: half of the memory): a request that needs more than is free waits.
    Sessions go `session_ttl_s` after their last use, or when all together hold more than `max_session_bytes`; with a
    `session_dir` they survive a restart. There are at most `max_sessions`, and `max_sessions_per_caller` of one token;
    callers without a token count as one. One append may bring `max_append_bytes`, all unfinished ones
    `max_unfinished_bytes`. A message takes `max_message_bytes`; `max_receiving` messages are read at a time, each
    within `message_timeout_s`. A token reports `max_neighbors`. Of one generation `max_stream_bytes` of events wait
    for its client or are kept for resuming, of all together `max_event_bytes`. At most `max_connections` are open,
    each with `max_streams` calls, and closed after `connection_idle_s` without any; a caller has at most
    `max_caller_calls` open. With a `tls_cert` and its `tls_key` the server speaks TLS, with a `tls_client_ca` to
    clients alone whose certificates that one signed; an `auth_file` has the tokens that may call. What clients build
    is kept in a `store_dir`; `index_workers` processes of `index_threads` threads (0: all cores) build there at the
    niceness `index_nice`; at most `max_jobs` run or wait, and texts are read from under `corpus_roots` alone, or
    uploaded, `max_upload_bytes` and `max_upload_documents` at a time. At a `metrics_port` Prometheus is answered, over
    HTTP. At `log_level` info each call is logged in a line, with its prompt only if `log_prompts`; an `otlp` collector
    gets its spans. `drain_s` bounds how long running requests may go on once the server was told to stop.
    """

    model: Path
    stores: tuple[Path, ...] = ()
    dtype: str = "float32"
    host: str = "127.0.0.1"
    port: int = 50051
    num_workers: int = 1
    num_threads: int = 0
    worker_timeout_s: float = 30.0
    max_running: int = 32
    max_queued: int = 256
    max_queued_tokens: int = 1 << 20
    max_cache_bytes: int = 0
    max_message_bytes: int = 4 << 20
    max_append_bytes: int = 64 << 20
    max_unfinished_bytes: int = 1 << 30
    max_connections: int = 1024
    max_streams: int = 256
    max_caller_calls: int = 512
    max_receiving: int = 64
    max_neighbors: int = 64
    max_stream_bytes: int = 32 << 20
    max_event_bytes: int = 512 << 20
    message_timeout_s: float = 60.0
    connection_idle_s: float = 300.0
    session_dir: Path | None = None
    session_ttl_s: float = 3600.0
    max_session_bytes: int = 4 << 30
    max_sessions: int = 65_536
    max_sessions_per_caller: int = 1024
    store_dir: Path | None = None
    corpus_roots: tuple[Path, ...] = ()
    index_workers: int = 1
    index_threads: int = 0
    index_nice: int = 10
    max_jobs: int = 64
    max_upload_bytes: int = 4 << 30
    max_upload_documents: int = 1_000_000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    auth_file: Path | None = None
    metrics_port: int | None = None
    drain_s: float = 30.0
    log_level: str = "warning"
    log_format: str = "text"
    log_prompts: bool = False
    otlp: str | None = None

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name, low, high in (
            ("port", 0, 65_535),
            ("num_workers", 1, 256),
            ("num_threads", 0, 4096),
            ("worker_timeout_s", 1, 86_400),
            ("max_running", 1, 4096),
            ("max_queued", 0, 1 << 20),
            ("max_queued_tokens", 0, 1 << 40),
            ("max_message_bytes", 1 << 10, 1 << 30),
            ("max_append_bytes", 1 << 10, 1 << 40),
            ("max_unfinished_bytes", 1 << 10, 1 << 40),
            ("max_connections", 1, 1 << 20),
            ("max_streams", 1, 1 << 20),
            ("max_caller_calls", 1, 1 << 20),
            ("max_receiving", 1, 1 << 20),
            ("max_neighbors", 0, MAX_NEIGHBORS),
            ("max_stream_bytes", 1 << 10, 1 << 40),
            ("max_event_bytes", 1 << 10, 1 << 40),
            ("message_timeout_s", 0.1, 86_400),
            ("connection_idle_s", 1, 86_400),
            ("session_ttl_s", 1, 30 * 86_400),
            ("max_cache_bytes", 0, 1 << 50),
            ("max_session_bytes", MIN_SESSION_BYTES, 1 << 50),
            ("max_sessions", 0, 1 << 24),
            ("max_sessions_per_caller", 0, 1 << 24),
            ("index_workers", 0, 64),
            ("index_threads", 0, 4096),
            ("index_nice", 0, 19),
            ("max_jobs", 0, 10_000),
            ("max_upload_bytes", 1 << 10, 1 << 50),
            ("max_upload_documents", 1, 1 << 40),
            ("drain_s", 0, 3600),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidInput(f"{name} is {value!r}; expected {low} to {high}", field=name)
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise InvalidInput(f"metrics_port is {self.metrics_port}; expected 0 to 65535", field="metrics_port")
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise InvalidInput("TLS takes tls_cert and tls_key; tls_client_ca goes with both", field="tls_cert")
        if self.log_format not in FORMATS:
            raise InvalidInput(f"log_format is {self.log_format!r}; expected text or json", field="log_format")
        if self.otlp is not None and not self.otlp.startswith(("http://", "https://")):
            raise InvalidInput(f"otlp is {self.otlp!r}; expected http://HOST:PORT or https://HOST:PORT", field="otlp")
        if self.log_level not in LOG_LEVELS:
            raise InvalidInput(
                f"log_level is {self.log_level!r}; expected one of {', '.join(LOG_LEVELS)}", field="log_level"
            )

    @property
    def cache_bytes(self) -> int:
        """`max_cache_bytes`, or half of the memory there is."""
        return self.max_cache_bytes or ram_bytes() // 2

    def per_worker(self, num_cores: int) -> Self:
        """What each of the workers may take on of what all of them may."""
        count = self.num_workers
        if count == 1:
            return self
        return replace(
            self,
            num_threads=self.num_threads or max(1, num_cores // count),
            max_running=-(-self.max_running // count),
            max_queued=-(-self.max_queued // count),
            max_queued_tokens=-(-self.max_queued_tokens // count),
            max_cache_bytes=self.cache_bytes // count,
            max_session_bytes=max(MIN_SESSION_BYTES, self.max_session_bytes // count),
            max_sessions=-(-self.max_sessions // count),
            max_sessions_per_caller=-(-self.max_sessions_per_caller // count),
        )


def worker_for_session(session: str, num_workers: int) -> int:
    """Which worker has a session: told by its name alone, also after a restart, and with more or fewer workers."""
    return zlib.crc32(session.encode(errors="replace")) % num_workers
