"""The settings of a server. Imports no torch, since the front end reads them too."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from memlm.api.params import MAX_DRAFTS, MAX_NEIGHBORS, parse_drafts
from memlm.base.compute import check_device, check_dtype
from memlm.base.machine import ram_bytes
from memlm.base.options import RAY, RESEARCH, check_shard, option, parse_bytes, setting
from memlm.errors import InvalidInput, check_choice, check_range
from memlm.server.cluster_config import ClusterConfig
from memlm.server.sites import NO_ORIGIN, check_site
from memlm.server.telemetry.logs import FORMATS

MIN_SESSION_BYTES = 1 << 20
# Panels of the command-line options.
MODEL, NETWORK, PROCESSES, LIMITS = "Model", "Network", "Processes", "Limits"
SESSIONS, DATASTORES, SECURITY, OBSERVE = "Sessions", "Datastores", "Security", "Logs and metrics"
LOG_LEVELS = ("debug", "info", "warning", "error")
IDLE = "idle"  # in place of a niceness: the scheduler's idle class


def parse_niceness(text: str | int) -> int | str:
    """A niceness as a number. Other text stays as it is."""
    return int(text) if str(text).isdigit() else text


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A name for requests, and the folder of the adapter."""

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> AdapterFolder:
        """Parses NAME=FOLDER, or FOLDER, whose own name counts then."""
        name, equals, folder = text.partition("=")
        path = Path(folder if equals else name)
        name = name if equals else path.resolve().name
        if not name or not str(path):
            raise InvalidInput(f"adapter is {text!r}; expected NAME=FOLDER", field="adapters")
        return cls(name, path)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The model and datastores that are served, the address, and every limit. Raises InvalidInput for a bad value.

    A datastore is searched by the workers, or by the processes at `shards`, and if `partial` also without some of them.
    With an `encoder`, passages are found by its vectors, which every worker loads. Requests may name one of the
    `adapters`. `port=0` takes any free port. With `http_port` the same calls are served over HTTP too, to as many
    connections. Without an `auth_file` HTTP answers only requests for an IP address, for localhost, or for a name of
    `allowed_hosts`, and only pages of its own or of an origin in there. `num_workers` processes each own a copy of the
    model and its datastores, with `num_threads` threads (0: all cores, divided among them). A loaded worker that sends
    no heartbeat for `worker_timeout_s` is killed and replaced.

    At most `max_running` requests run at a time and `max_queued` wait, with at most `max_queued_tokens` of prompts.
    Further requests are refused. The keys and values of running generations take at most `max_cache_bytes` (0: half of
    the RAM), and a request that does not fit waits. The states of the texts that were read last take at most
    `max_prefix_cache_bytes`: a prompt that begins like one of its caller is read from where they part.

    A session ends `session_ttl_s` after its last use, or when all together hold more than `max_session_bytes`. With a
    `session_dir` sessions survive a restart. There are at most `max_sessions`, and `max_sessions_per_caller` of one
    token. Callers without a token count as one caller. One append has at most `max_append_bytes`, and all unfinished
    appends `max_unfinished_bytes`.

    A message has at most `max_message_bytes`. `max_receiving` messages are read at a time, each within
    `message_timeout_s`. A token reports at most `max_neighbors`. `drafts` is that of requests that set none. Of one
    generation at most `max_stream_bytes` of events wait for its client or are kept for resuming, of all together
    `max_event_bytes`. At most `max_connections` are open, each with `max_streams` calls, and an idle one closes after
    `connection_idle_s`. A caller has at most `max_caller_calls` open.

    With `tls_cert` and `tls_key` the server uses TLS, and with `tls_client_ca` it accepts only clients with a
    certificate of that authority. The tokens of an `auth_file` restrict callers.

    Datastores that clients build are kept in `store_dir`. `index_workers` processes of `index_threads` threads (0: all
    cores) build them at the niceness `index_nice`, or with "idle" in the scheduler's idle class. After a job, a process
    waits `index_idle_s` for the next, with the model in its RAM. With `index_ahead` one waits from the start on, for
    any time. With `background_keys`, documents without keys get them while no job waits. At most `max_jobs` run or
    wait. Texts come from folders under `corpus_roots`, or from uploads of at most `max_upload_bytes` and
    `max_upload_documents`.

    At `log_level` info each call is logged in a line, with its prompt only if `log_prompts`. The OpenTelemetry
    collector at `otlp` gets spans. After SIGTERM running requests may take `drain_s`.
    """

    model: Path = field(
        metadata=option("Folder, GGUF file, hub id, or smollm2.", "--model", "-m", metavar="MODEL", panel=MODEL)
    )
    stores: tuple[Path, ...] = field(
        default=(),
        metadata=option(
            "Datastore folder, or ray://NAME: its shards on a Ray cluster. Repeatable.",
            "--store",
            "-s",
            metavar="FOLDER|ray://NAME",
            panel=MODEL,
        ),
    )
    shards: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Process that searches a shard of a datastore (`memlm shard`), or a name on a Ray cluster. Repeatable.",
            "--shard", metavar="HOST:PORT|unix:PATH|ray://NAME", parse=check_shard, panel=MODEL,
        ),
    )  # fmt: skip
    partial: bool = field(
        default=False,
        metadata=option(
            "While a shard does not answer, search the others. Answers tell the share of entries that was searched.",
            panel=MODEL,
        ),
    )
    encoder: str = field(
        default="auto",
        metadata=option(
            "BERT encoder whose vectors find passages by meaning. auto: the installed one, if there is one.",
            metavar="FOLDER|auto|none", panel=MODEL,
        ),
    )  # fmt: skip
    adapters: tuple[AdapterFolder, ...] = field(
        default=(),
        metadata=option(
            "Adapter that requests may name, as `memlm train --adapter` or PEFT wrote it. Repeatable.", "--adapter",
            metavar="NAME=FOLDER", parse=AdapterFolder.parse, panel=MODEL,
        ),
    )  # fmt: skip
    attention_window: int | None = field(
        default=None,
        metadata=option(
            "Latest tokens that a token sees, beside the first four. Texts then have any length.",
            metavar="TOKENS",
            panel=RESEARCH,
        ),
    )
    extended_attention: int | None = field(
        default=None,
        metadata=option(
            "Tokens beyond --attention-window that each head also sees, those with the best keys.",
            metavar="K",
            panel=RESEARCH,
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=option(
            "Compute type. auto: gguf for such files, bfloat16 where it is fast, else float32. int8, int4 round.",
            metavar="auto|float32|bfloat16|float16|int8|int4|gguf",
            panel=MODEL,
        ),
    )
    device: str = field(
        default="auto",
        metadata=option("Where to compute. auto: the first GPU.", metavar="auto|cpu|cuda|cuda:N|mps", panel=MODEL),
    )
    host: str = field(default="127.0.0.1", metadata=option("Address to listen on.", panel=NETWORK))
    port: int = field(default=50051, metadata=option("Port to listen on. 0: any free port.", panel=NETWORK))
    http_port: int | None = field(
        default=None,
        metadata=option(
            "Also serve HTTP here: OpenAI's calls, datastores, health and metrics. 0: any free port.", panel=NETWORK
        ),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Name of this server over HTTP, or origin of pages that may call it. Repeatable. Without tokens other names"
            " than localhost and IP addresses are refused.",
            "--allowed-hosts", metavar="NAME|ORIGIN", parse=check_site, panel=NETWORK,
        ),
    )  # fmt: skip
    num_workers: int = field(
        default=1, metadata=option("Inference processes, each with its own model.", panel=PROCESSES)
    )
    num_threads: int = field(
        default=0, metadata=option("Threads of each worker. 0: all cores, divided.", panel=PROCESSES)
    )
    worker_timeout_s: float = field(
        default=30.0,
        metadata=setting("Replace a worker without a heartbeat for this long.", metavar="SECONDS"),
    )
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    max_running: int = field(default=32, metadata=option("Requests that run at a time.", panel=LIMITS))
    max_queued: int = field(default=256, metadata=option("Requests that may wait. Others are refused.", panel=LIMITS))
    max_queued_tokens: int = field(default=1 << 20, metadata=setting("Prompt tokens that may wait."))
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
    max_prefix_cache_bytes: int = field(
        default=1 << 30,
        metadata=option(
            "States of earlier texts, so that a chat's history is not read again. 0: none.",
            "--prefix-cache-bytes",
            metavar="BYTES",
            parse=parse_bytes,
            panel=LIMITS,
        ),
    )
    max_message_bytes: int = field(
        default=4 << 20,
        metadata=setting("One message.", "--message-bytes", metavar="BYTES", parse=parse_bytes),
    )
    max_append_bytes: int = field(
        default=64 << 20,
        metadata=setting("One append to a session.", "--append-bytes", metavar="BYTES", parse=parse_bytes),
    )
    max_unfinished_bytes: int = field(
        default=1 << 30,
        metadata=setting("All unfinished appends.", "--unfinished-bytes", metavar="BYTES", parse=parse_bytes),
    )
    max_connections: int = field(default=1024, metadata=setting("Open connections."))
    max_streams: int = field(default=256, metadata=setting("Open calls of one connection."))
    max_caller_calls: int = field(default=512, metadata=setting("Open calls of one caller."))
    max_receiving: int = field(
        default=64, metadata=setting("Messages received at a time, a fourth of them from one caller.")
    )
    max_neighbors: int = field(default=64, metadata=setting("Neighbors reported with each token."))
    drafts: int | None = field(
        default=None,
        metadata=setting(
            "Drafts of requests that leave them open, which an operator turns off to save lookups.",
            metavar="auto|off|N",
            parse=parse_drafts,
            default="auto",
        ),
    )
    max_stream_bytes: int = field(
        default=32 << 20,
        metadata=setting(
            "Events of one generation, waiting to be sent or kept to resume.",
            "--stream-bytes",
            metavar="BYTES",
            parse=parse_bytes,
        ),
    )
    max_event_bytes: int = field(
        default=512 << 20,
        metadata=setting("Events of all generations.", "--event-bytes", metavar="BYTES", parse=parse_bytes),
    )
    message_timeout_s: float = field(
        default=60.0,
        metadata=setting("End a call whose next message takes longer.", metavar="SECONDS"),
    )
    connection_idle_s: float = field(
        default=300.0,
        metadata=setting("Close a connection without calls after this long.", metavar="SECONDS"),
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
    max_sessions: int = field(default=65_536, metadata=setting("Number of sessions."))
    max_sessions_per_caller: int = field(
        default=1024,
        metadata=setting("Sessions of one token. Callers without a token count as one."),
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
    index_workers: int = field(default=1, metadata=setting("Processes that run jobs."))
    index_threads: int = field(default=0, metadata=setting("Threads of each. 0: all cores."))
    index_nice: int | str = field(
        default=10,
        metadata=setting(
            "Their niceness. Higher yields more to other processes. idle: the scheduler's idle class (Linux).",
            metavar="0..19|idle",
            parse=parse_niceness,
        ),
    )
    index_idle_s: float = field(
        default=60.0,
        metadata=setting(
            "Keep one with its model this long for the next job. 0: each job starts its own.",
            metavar="SECONDS",
        ),
    )
    background_keys: bool = field(
        default=False,
        metadata=option("Make the keys of documents without, while no job waits.", panel=DATASTORES),
    )
    index_ahead: bool = field(
        default=False,
        metadata=setting("Always keep one with its model, from the start on: the first job is short, too."),
    )
    max_jobs: int = field(default=64, metadata=setting("Jobs that run or wait."))
    max_upload_bytes: int = field(
        default=4 << 30,
        metadata=setting("One upload of documents.", "--upload-bytes", metavar="BYTES", parse=parse_bytes),
    )
    max_upload_documents: int = field(
        default=1_000_000, metadata=setting("Documents of one upload.", "--upload-documents")
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
    log_prompts: bool = field(default=False, metadata=setting("Log prompts too."))
    otlp: str | None = field(
        default=None, metadata=option("Send spans to this OpenTelemetry collector.", metavar="URL", panel=OBSERVE)
    )

    def __post_init__(self) -> None:
        names = [adapter.name for adapter in self.adapters]
        if len({*names, self.model.name}) <= len(names):
            raise InvalidInput(
                f"adapters are {', '.join(names)}, beside the model {self.model.name}; give each a name of its own",
                field="adapters",
            )
        has_shards = self.shards or any(map(is_on_ray, self.stores))
        if self.partial and not has_shards:
            raise InvalidInput("partial is for shards, and none is given; give some (shards)", field="partial")
        if self.background_keys and not (self.store_dir and self.index_workers):
            raise InvalidInput(
                "background_keys needs store_dir and index_workers above 0, without which no keys are made",
                field="background_keys",
            )
        if self.index_ahead and not (self.store_dir and self.index_workers and self.index_idle_s):
            raise InvalidInput(
                "index_ahead needs store_dir, index_workers and index_idle_s above 0, without which no index worker"
                " waits for a job",
                field="index_ahead",
            )
        if NO_ORIGIN in self.allowed_hosts and self.auth_file is None:
            raise InvalidInput(
                f"allowed_hosts has {NO_ORIGIN}, which any page can make its origin; give tokens too (auth_file), or"
                " serve your page at an address and give that",
                field="allowed_hosts",
            )
        for name, least, most in (
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
            ("drafts", 0, MAX_DRAFTS),
            ("max_stream_bytes", 1 << 10, 1 << 40),
            ("max_event_bytes", 1 << 10, 1 << 40),
            ("message_timeout_s", 0.1, 86_400),
            ("connection_idle_s", 1, 86_400),
            ("session_ttl_s", 1, 30 * 86_400),
            ("max_cache_bytes", 0, 1 << 50),
            ("max_prefix_cache_bytes", 0, 1 << 50),
            ("max_session_bytes", MIN_SESSION_BYTES, 1 << 50),
            ("max_sessions", 0, 1 << 24),
            ("max_sessions_per_caller", 0, 1 << 24),
            ("index_workers", 0, 64),
            ("index_threads", 0, 4096),
            ("index_idle_s", 0, 86_400),
            ("max_jobs", 0, 10_000),
            ("max_upload_bytes", 1 << 10, 1 << 50),
            ("max_upload_documents", 1, 1 << 40),
            ("drain_s", 0, 3600),
            ("http_port", 0, 65_535),
        ):
            check_range(name, getattr(self, name), least=least, most=most)
        if self.index_nice == IDLE:
            if not hasattr(os, "SCHED_IDLE"):
                raise InvalidInput(
                    "index_nice is idle, a scheduler's class that only Linux has; choose a niceness, 0 to 19",
                    field="index_nice",
                )
        elif isinstance(self.index_nice, str):
            raise InvalidInput(
                f"index_nice is {self.index_nice!r}; expected a niceness, 0 to 19, or {IDLE}", field="index_nice"
            )
        else:
            check_range("index_nice", self.index_nice, least=0, most=19)
        check_dtype(self.dtype)
        check_device(self.device)
        self.cluster.check_beside(
            self.num_workers,
            self.device,
            finds_shards=any(map(is_on_ray, self.stores)) or any(each.startswith(RAY) for each in self.shards),
        )
        check_choice("log_level", self.log_level, LOG_LEVELS)
        check_choice("log_format", self.log_format, FORMATS)
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise InvalidInput("TLS takes tls_cert and tls_key; tls_client_ca goes with both", field="tls_cert")
        if self.otlp is not None and not self.otlp.startswith(("http://", "https://")):
            raise InvalidInput(f"otlp is {self.otlp!r}; expected http://HOST:PORT or https://HOST:PORT", field="otlp")

    @property
    def cache_bytes(self) -> int:
        """`max_cache_bytes`, or half of the RAM."""
        return self.max_cache_bytes or ram_bytes() // 2

    def per_worker(self, num_cores: int) -> Self:
        """These settings with the limits divided among the workers, or the replicas that there are at the start.

        Those of RAM are divided among the replicas that there may be. What replicas take of the RAM by default is not
        known here, since they run on other machines.
        """
        count = self.cluster.replicas if self.cluster.is_ray else self.num_workers
        most = self.cluster.most_replicas if self.cluster.is_ray else self.num_workers
        if most == 1:
            return self
        cache_bytes = self.max_cache_bytes if self.cluster.is_ray else self.cache_bytes
        return replace(
            self,
            num_threads=self.num_threads or max(1, num_cores // count),
            max_running=-(-self.max_running // count),
            max_queued=-(-self.max_queued // count),
            max_queued_tokens=-(-self.max_queued_tokens // count),
            max_cache_bytes=cache_bytes and max(1, cache_bytes // most),  # 0 would be half of the RAM for each
            max_prefix_cache_bytes=self.max_prefix_cache_bytes // most,
            max_session_bytes=max(MIN_SESSION_BYTES, self.max_session_bytes // most),
            max_sessions=-(-self.max_sessions // count),
            max_sessions_per_caller=-(-self.max_sessions_per_caller // count),
        )


def is_on_ray(store: Path) -> bool:
    """Whether a datastore is given as ray://NAME."""
    return store.parts[:1] == (RAY.removesuffix("//"),)  # as a path has it


def worker_for_session(session: str, num_workers: int) -> int:
    """The number of the worker that owns a session. It follows from the name, also after a restart."""
    return zlib.crc32(session.encode(errors="replace")) % num_workers
