"""Prometheus metrics: load, latencies, and the age of the last heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from memlm.api.generation import DraftSource, Finished, Usage
from memlm.api.operations import JobState, OperationInfo
from memlm.api.server import ModelInfo
from memlm.base.version import __version__
from memlm.server.telemetry.datastores import DatastoreMetrics
from memlm.wire.codec import WireEvent

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WEIGHTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)


class Metrics:
    """The metrics of one server. Names begin with memlm_; times are in seconds."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # of the front end: processor time, RAM, open files
        self.datastores = DatastoreMetrics()
        registry.register(self.datastores)
        self._requests = Counter(
            "memlm_requests", "Finished calls, by call and status code.", ["call", "code"], registry=registry
        )
        self._open = Gauge("memlm_requests_open", "Calls in progress.", registry=registry)
        self._seconds = Histogram(
            "memlm_request_seconds", "Duration of a call.", ["call"], buckets=SECONDS, registry=registry
        )
        self._first = Histogram(
            "memlm_time_to_first_token_seconds",
            "Time to a generation's first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self._between = Histogram(
            "memlm_time_between_tokens_seconds",
            "Mean time between an event's tokens.",
            buckets=SECONDS,
            registry=registry,
        )
        self._tokens = Counter("memlm_tokens", "Tokens of prompts, and tokens generated.", ["kind"], registry=registry)
        self._cached = Counter(
            "memlm_cached_tokens", "Tokens of prompts that an earlier text of the caller began with.", registry=registry
        )
        self._drafts = DraftMetrics(registry)
        self._searches = Counter("memlm_searches", "Tokens for which a datastore was searched.", registry=registry)
        self._retrieval = Histogram(
            "memlm_retrieval_seconds", "Mean time of a generation's searches.", buckets=SECONDS, registry=registry
        )
        self._lam = Histogram(
            "memlm_lam", "Mean weight of p_kNN in a generation's mixture.", buckets=WEIGHTS, registry=registry
        )
        self._beat = Gauge(
            "memlm_heartbeat_age_seconds",
            "Age of the last heartbeat of the worker with the oldest one.",
            registry=registry,
        )
        self._jobs = Gauge("memlm_operations", "Operations, by state.", ["state"], registry=registry)
        self._job_progress = Gauge(
            "memlm_operation_progress", "Finished share of the running operation's phase.", registry=registry
        )
        self._gauges = {
            name: Gauge(f"memlm_{name}", help_, registry=registry)
            for name, help_ in (
                ("running", "Running requests."),
                ("waiting", "Waiting requests."),
                ("waiting_tokens", "Tokens of the waiting requests' prompts."),
                ("sessions", "Sessions."),
                ("session_bytes", "RAM that sessions hold."),
                ("cache_bytes", "RAM that keys and values of running generations may take."),
                ("prefix_cache_bytes", "RAM of the states of earlier texts, which prompts go on from."),
            )
        }

    def describe(self, model: str, info: ModelInfo) -> None:
        """Registers the version and the model, under the name that clients give."""
        about = Info("memlm", "Version, model, dtype and device.", registry=self.registry)
        about.info({"version": __version__, "model": model, "dtype": info.dtype, "device": info.device})

    def observe_workers(self, age_s: Callable[[], float], stats: Callable[[], Stats]) -> None:
        """Registers functions that return the age of the oldest heartbeat, and the workers' figures."""
        self._beat.set_function(age_s)
        for name, gauge in self._gauges.items():
            gauge.set_function(partial(_stat, stats, name))

    def observe_jobs(self, jobs: Callable[[], Sequence[OperationInfo]]) -> None:
        """Registers a function that returns all operations."""
        for state in JobState:
            count = partial(_count, jobs, state)
            self._jobs.labels(state.value).set_function(count)
        self._job_progress.set_function(lambda: _progress(jobs()))

    @contextmanager
    def call(self, name: str) -> Iterator[Callable[[str], None]]:
        """Counts a call while the block lasts. The yielded function sets its status code."""
        begin_s, ended = time.monotonic(), ["INTERNAL"]
        self._open.inc()
        try:
            yield lambda code: ended.__setitem__(0, code)
        finally:
            self._open.dec()
            self._requests.labels(name, ended[0]).inc()
            self._seconds.labels(name).observe(time.monotonic() - begin_s)

    def generation_times(self) -> GenerationTimes:
        return GenerationTimes(self)


class DraftMetrics:
    """Steps, and what came of drafts by their source. The names of the latter are vLLM's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._steps = Counter("memlm_steps", "Forward passes that named tokens, of all generations.", registry=registry)
        drafted = "memlm_spec_decode_num_draft_tokens", "Drafted tokens."
        accepted = "memlm_spec_decode_num_accepted_tokens", "Drafted tokens that the texts took."
        drafts = "memlm_spec_decode_num_drafts", "Drafts: forward passes of a text that had one."
        self._drafted, self._accepted, self._drafts = (
            Counter(name, about, ["source"], registry=registry) for name, about in (drafted, accepted, drafts)
        )
        for source in DraftSource:  # so that each counter begins at 0
            for counter in (self._drafted, self._accepted, self._drafts):
                counter.labels(source)

    def observe(self, usage: Usage) -> None:
        """Adds a generation that has ended."""
        self._steps.inc(usage.steps)
        for each in usage.drafts:
            self._drafted.labels(each.source).inc(each.drafted)
            self._accepted.labels(each.source).inc(each.accepted)
            self._drafts.labels(each.source).inc(each.drafts)


def _stat(stats: Callable[[], Stats], name: str) -> float:
    return float(getattr(stats(), name))


def _count(jobs: Callable[[], Sequence[OperationInfo]], state: JobState) -> float:
    return float(sum(job.state == state for job in jobs()))


def _progress(jobs: Sequence[OperationInfo]) -> float:
    running = [job for job in jobs if job.state == JobState.RUNNING and job.total]
    return running[0].done / running[0].total if running else 0.0


class GenerationTimes:
    """Observes the times of one generation's events, from its creation on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._last_s, self._has_begun = metrics, time.monotonic(), False

    def event(self, event: WireEvent) -> None:
        """Observes an event that goes out."""
        now_s = time.monotonic()
        if isinstance(event, Finished):
            usage = event.usage
            self._metrics._tokens.labels("prompt").inc(usage.prompt_tokens)
            self._metrics._cached.inc(usage.cached_tokens)
            self._metrics._tokens.labels("generated").inc(usage.generated_tokens)
            self._metrics._drafts.observe(usage)
            self._metrics._searches.inc(usage.searches)
            if usage.searches:
                self._metrics._retrieval.observe(usage.retrieval_ms / usage.searches / 1000)
                self._metrics._lam.observe(usage.lam)
        elif isinstance(event, tuple) and event:
            if self._has_begun:
                self._metrics._between.observe((now_s - self._last_s) / len(event))
            else:
                self._metrics._first.observe(now_s - self._last_s)
            self._last_s, self._has_begun = now_s, True


@dataclass(frozen=True, slots=True)
class Stats:
    """The load of a worker."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    sessions: int = 0
    session_bytes: int = 0
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
