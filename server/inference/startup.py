"""The start of an engine: its model, datastores and sessions are loaded, then its loop runs.

An inference worker gets its messages over a pipe, a replica on a Ray cluster through Ray Serve.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from memlm.base.cpu import use_cores
from memlm.distributed.shards import Shards
from memlm.errors import Incompatible, MemlmError, Unavailable
from memlm.generation.engine import Engine
from memlm.generation.sessions.fence import SessionFence, check_of
from memlm.generation.sessions.names import SessionNames
from memlm.generation.sessions.sessions import Sessions
from memlm.index.store.exclusion import search_views
from memlm.model.files.adapter_files import attach_adapters
from memlm.model.files.catalog import find_encoder
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.files.encoder_files import load_encoder
from memlm.retrieval.store import OnLost, ViewSearch
from memlm.server.config import ServerConfig, worker_for_session
from memlm.server.inference.messages import DocumentsDeleted, Loaded, LoadFailed
from memlm.server.inference.pipe import Inbox, Outbox, PipeInbox
from memlm.server.inference.worker import Worker
from memlm.server.telemetry.logs import start_logging

log = logging.getLogger("memlm.server.worker")

ENCODER_DTYPES = ("float32", "bfloat16", "float16")  # the others are of a decoder's weights


def run_worker(
    pipe: Connection,
    config: ServerConfig,
    stores: Mapping[str, Path],
    number: int = 0,
    restarted: bool = False,
    fence: SessionFence | None = None,
) -> None:
    """Runs a worker process: loads, then serves until `Stop` or until the front end is gone.

    The worker owns the sessions whose names map to its `number`. At the server's start a datastore given by --store
    that cannot be opened is an error. In a `restarted` worker it is not, since the server is already in use. `fence` is
    that of the session folder.
    """
    # A terminal and a service manager signal the whole process group; only the front end acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def is_ours(session: str) -> bool:
        return worker_for_session(session, config.num_workers) == number

    names = SessionNames(is_ours, check=check_of(fence))
    run_engine(config, stores, PipeInbox(pipe), Outbox(pipe.send), names=names, restarted=restarted)


def run_engine(
    config: ServerConfig,
    stores: Mapping[str, Path],
    inbox: Inbox,
    outbox: Outbox,
    *,
    names: SessionNames,
    restarted: bool = False,
) -> None:
    """Loads the model and the datastores, then serves until `Stop`. The first message is `Loaded`, or `LoadFailed`,
    which is the only one. `restarted` as for `run_worker`. Ends the process where another server has the session
    folder.
    """
    start_logging(config.log_level, config.log_format)
    # Set even where nothing changes: torch keeps a number that was set, while Faiss would change the default.
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    if config.num_workers > 1:
        use_cores(config.num_threads)
    try:
        names.check()  # before a session is read
        required = set() if restarted else {path.resolve().name for path in config.stores}

        def on_lost(store: str, document_ids: Sequence[str] | None) -> None:
            outbox.send(DocumentsDeleted(store, None if document_ids is None else tuple(document_ids)))

        shards: Shards | None = None
        if config.shards:
            shards = Shards(config.shards, partial=config.partial, cluster=config.cluster.address)
        search: ViewSearch = search_views if shards is None else shards.search
        engine = _load_model(
            config, stores, _ending(names), may_fail=set(stores) - required, on_lost=on_lost, search=search
        )
        loaded = Loaded(_fingerprints(engine))
    except MemlmError as error:
        outbox.send(LoadFailed(error))
        outbox.flush()
        return
    with closing(engine.stores), shards or nullcontext():
        outbox.send(loaded)
        outbox.flush()
        Worker(
            engine, inbox, outbox.send, config.max_running, config.max_queued_tokens, outbox.flush, config.cache_bytes
        ).run()


def _fingerprints(engine: Engine) -> dict[str, str]:
    """Those of all that answers depend on, beside the datastores. Raises Incompatible for files that changed since."""
    checkpoint, encoder = engine.checkpoint, engine.passage_encoder
    adapters = checkpoint.decoder.adapters
    return {
        "model": checkpoint.fingerprint,
        "tokenizer": checkpoint.tokenizer.fingerprint,
        **{f"adapter {name!r}": adapters.get(name).fingerprint for name in adapters.names},
        **({} if encoder is None else {"encoder": encoder.fingerprint}),
    }


def _ending(names: SessionNames) -> SessionNames:
    """The same names, with a check that ends the process where another server has the folder. It answers no caller: its
    caches may be behind the files. Its server, if it lives, fails its requests with UNAVAILABLE.
    """

    def check() -> None:
        try:
            names.check()
        except Unavailable as error:
            log.error("%s; this process ends", error)
            os._exit(1)

    return names._replace(check=check)


def _load_model(
    config: ServerConfig,
    stores: Mapping[str, Path],
    names: SessionNames,
    *,
    may_fail: Collection[str],
    on_lost: OnLost,
    search: ViewSearch,
) -> Engine:
    checkpoint = load_checkpoint(
        config.model, dtype=config.dtype, device=config.device, attention_window=config.attention_window,
        extended_attention=config.extended_attention,
    )  # fmt: skip
    for part in checkpoint.decoder.config.parts:
        if part.unserved:
            raise Incompatible(f"{config.model} {part.unserved}")
    attach_adapters(checkpoint, {adapter.name: adapter.path for adapter in config.adapters})
    sessions = Sessions(
        checkpoint,
        folder=config.session_dir,
        ttl_s=config.session_ttl_s,
        max_bytes=config.max_session_bytes,
        max_sessions=config.max_sessions,
        max_per_owner=config.max_sessions_per_caller,
        names=names,
    )
    dtype = config.dtype if config.dtype in ENCODER_DTYPES else "auto"
    folder = find_encoder(config.encoder)
    encoder = None if folder is None else load_encoder(folder, dtype=dtype, device=config.device)
    return Engine(
        checkpoint, stores, sessions, may_fail=may_fail, on_lost=on_lost, passage_encoder=encoder, search=search,
        max_prefix_bytes=config.max_prefix_cache_bytes,
    )  # fmt: skip
