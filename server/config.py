"""How a server runs. No torch here: the front reads it too."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from memlm.api.params import MAX_NEIGHBORS
from memlm.base.machine import ram_bytes
from memlm.base.options import option, parse_bytes
from memlm.errors import InvalidInput
from memlm.server.telemetry.logs import FORMATS

MIN_SESSION_BYTES = 1 << 20
# Panels of the command-line options.
MODEL, NETWORK, PROCESSES, LIMITS = "Model", "Network", "Processes", "Limits"
SESSIONS, DATASTORES, SECURITY, OBSERVE = "Sessions", "Datastores", "Security", "Logs and metrics"
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

    model: Path = field(metadata=option("Model folder.", "--model", "-m", metavar="FOLDER", panel=MODEL))
    stores: tuple[Path, ...] = field(
        default=(), metadata=option("Datastore folder. Repeatable.", "--store", "-s", metavar="FOLDER", panel=MODEL)
    )
    dtype: str = field(
        default="float32",
        metadata=option("Compute type. auto is the faster.", metavar="float32|bfloat16|auto", panel=MODEL),
    )
    host: str = field(default="127.0.0.1", metadata=option("Address to listen on.", panel=NETWORK))
    port: int = field(default=50051, metadata=option("Port to listen on. 0: any free port.", panel=NETWORK))
    num_workers: int = field(
        default=1, metadata=option("Inference processes, each with its own model.", panel=PROCESSES)
    )
    num_threads: int = field(
        default=0, metadata=option("Threads of each worker. 0: all cores, divided.", panel=PROCESSES)
    )
    worker_timeout_s: float = field(
        default=30.0,
        metadata=option("Replace a worker without a heartbeat for this long.", metavar="SECONDS", panel=PROCESSES),
    )
    max_running: int = field(default=32, metadata=option("Requests that run at a time.", panel=LIMITS))
    max_queued: int = field(default=256, metadata=option("Requests that may wait. Others are refused.", panel=LIMITS))
    max_queued_tokens: int = field(default=1 << 20, metadata=option("Prompt tokens that may wait.", panel=LIMITS))
    max_cache_bytes: int = field(
        default=0,
        metadata=option(
            "Keys and values of running requests.",
            "--cache-bytes",
            metavar="BYTES",
            parse=parse_bytes,
            default="half of the RAM",
            panel=LIMITS,
        ),
    )
    max_message_bytes: int = field(
        default=4 << 20,
        metadata=option("One message.", "--message-bytes", metavar="BYTES", parse=parse_bytes, panel=LIMITS),
    )
    max_append_bytes: int = field(
        default=64 << 20,
        metadata=option("One append to a session.", "--append-bytes", metavar="BYTES", parse=parse_bytes, panel=LIMITS),
    )
    max_unfinished_bytes: int = field(
        default=1 << 30,
        metadata=option(
            "All unfinished appends.", "--unfinished-bytes", metavar="BYTES", parse=parse_bytes, panel=LIMITS
        ),
    )
    max_connections: int = field(default=1024, metadata=option("Open connections.", panel=NETWORK))
    max_streams: int = field(default=256, metadata=option("Open calls of one connection.", panel=NETWORK))
    max_caller_calls: int = field(default=512, metadata=option("Open calls of one caller.", panel=NETWORK))
    max_receiving: int = field(
        default=64, metadata=option("Messages received at a time, a fourth of them from one caller.", panel=NETWORK)
    )
    max_neighbors: int = field(default=64, metadata=option("Neighbors reported with each token.", panel=LIMITS))
    max_stream_bytes: int = field(
        default=32 << 20,
        metadata=option(
            "Events of one generation, waiting to be sent or kept to resume.",
            "--stream-bytes",
            metavar="BYTES",
            parse=parse_bytes,
            panel=LIMITS,
        ),
    )
    max_event_bytes: int = field(
        default=512 << 20,
        metadata=option(
            "Events of all generations.", "--event-bytes", metavar="BYTES", parse=parse_bytes, panel=LIMITS
        ),
    )
    message_timeout_s: float = field(
        default=60.0,
        metadata=option("End a call whose next message takes longer.", metavar="SECONDS", panel=NETWORK),
    )
    connection_idle_s: float = field(
        default=300.0,
        metadata=option("Close a connection without calls after this long.", metavar="SECONDS", panel=NETWORK),
    )
    session_dir: Path | None = field(
        default=None,
        metadata=option("Keep sessions here, so that they survive a restart.", metavar="FOLDER", panel=SESSIONS),
    )
    session_ttl_s: float = field(
        default=3600.0,
        metadata=option("Expire a session this long after its last use.", metavar="SECONDS", panel=SESSIONS),
    )
    max_session_bytes: int = field(
        default=4 << 30,
        metadata=option("RAM of all sessions.", "--session-bytes", metavar="BYTES", parse=parse_bytes, panel=SESSIONS),
    )
    max_sessions: int = field(default=65_536, metadata=option("Number of sessions.", panel=SESSIONS))
    max_sessions_per_caller: int = field(
        default=1024,
        metadata=option("Sessions of one token. Callers without a token count as one.", panel=SESSIONS),
    )
    store_dir: Path | None = field(
        default=None,
        metadata=option("Keep and load datastores that clients build here.", metavar="FOLDER", panel=DATASTORES),
    )
    corpus_roots: tuple[Path, ...] = field(
        default=(),
        metadata=option(
            "Clients may build from texts in this folder. Repeatable.",
            "--corpus-root",
            metavar="FOLDER",
            panel=DATASTORES,
        ),
    )
    index_workers: int = field(default=1, metadata=option("Processes that run jobs.", panel=DATASTORES))
    index_threads: int = field(default=0, metadata=option("Threads of each. 0: all cores.", panel=DATASTORES))
    index_nice: int = field(
        default=10,
        metadata=option("Their niceness, 0 to 19. Higher yields more to other processes.", panel=DATASTORES),
    )
    max_jobs: int = field(default=64, metadata=option("Jobs that run or wait.", panel=DATASTORES))
    max_upload_bytes: int = field(
        default=4 << 30,
        metadata=option(
            "One upload of documents.", "--upload-bytes", metavar="BYTES", parse=parse_bytes, panel=DATASTORES
        ),
    )
    max_upload_documents: int = field(
        default=1_000_000, metadata=option("Documents of one upload.", "--upload-documents", panel=DATASTORES)
    )
    tls_cert: Path | None = field(default=None, metadata=option("TLS certificate.", metavar="FILE", panel=SECURITY))
    tls_key: Path | None = field(default=None, metadata=option("Its private key.", metavar="FILE", panel=SECURITY))
    tls_client_ca: Path | None = field(
        default=None,
        metadata=option("Accept only clients with a certificate of this authority.", metavar="FILE", panel=SECURITY),
    )
    auth_file: Path | None = field(
        default=None,
        metadata=option("Bearer tokens (TOML): their calls, datastores and rates.", metavar="FILE", panel=SECURITY),
    )
    metrics_port: int | None = field(
        default=None, metadata=option("Serve Prometheus metrics here over HTTP. 0: any free port.", panel=OBSERVE)
    )
    drain_s: float = field(
        default=30.0,
        metadata=option("Let running requests finish after SIGTERM.", metavar="SECONDS", panel=PROCESSES),
    )
    log_level: str = field(
        default="warning",
        metadata=option("Calls are logged from info on.", metavar="debug|info|warning|error", panel=OBSERVE),
    )
    log_format: str = field(
        default="text", metadata=option("Lines for people or for machines.", metavar="text|json", panel=OBSERVE)
    )
    log_prompts: bool = field(default=False, metadata=option("Log prompts too.", panel=OBSERVE))
    otlp: str | None = field(
        default=None, metadata=option("Send spans to this OpenTelemetry collector.", metavar="URL", panel=OBSERVE)
    )

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
