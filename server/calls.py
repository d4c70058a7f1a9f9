"""What is said of each call: it is counted, logged in one line under its id, and traced where that is wanted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import grpc
from grpc._cython import cygrpc

from memlm.errors import MemlmError
from memlm.events import Finished
from memlm.params import GenerateRequest
from memlm.server.metrics import Generation, Metrics
from memlm.status import CODES, kind_of
from memlm.wire import WireEvent

if TYPE_CHECKING:
    from memlm.server.tracing import Tracer

log = logging.getLogger("memlm.server.calls")


@dataclass(slots=True)
class Call:
    """One call, under the id that the worker's log, an internal error and `Accepted` know it by, too."""

    name: str
    id: str = field(default_factory=lambda: token_hex(8))
    caller: str = ""
    stores: frozenset[str] | None = frozenset()  # that the caller may know of; None: all
    peer: str = ""
    code: str = "OK"
    begun_s: float = field(default_factory=time.time)
    told: dict[str, Any] = field(default_factory=dict)
    has_finished: bool = False
    _watched: Generation | None = None

    def asks(self, question: Any, *, prompts: bool) -> None:
        """Takes in what is asked; of what people wrote nothing, unless `prompts` are wanted."""
        if isinstance(question, GenerateRequest):
            self.told |= {"session": question.session} if question.session else {}
            if prompts:
                self.told["prompt"] = question.prompt

    def hears(self, event: WireEvent, metrics: Metrics) -> None:
        """Takes in what a generation tells."""
        self._watched = self._watched or metrics.generation()
        self._watched.event(event)
        if isinstance(event, Finished):
            self.has_finished, usage = True, event.usage
            self.told |= {"reason": event.reason.value}
            self.told |= {name: getattr(usage, name) for name in ("prompt_tokens", "generated_tokens", "searches")}
            for name in ("queue_ms", "prefill_ms", "decode_ms", "retrieval_ms"):
                self.told[name] = round(getattr(usage, name), 3)


class Calls:
    """Watches all calls of a server."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None) -> None:
        """Takes what counts, and what traces."""
        self._metrics, self._tracer = metrics, tracer
        logging.getLogger(cygrpc.__name__).addFilter(tell_who_left)

    @contextmanager
    def watch(self, name: str, context: grpc.aio.ServicerContext) -> Iterator[Call]:
        """Watches a call to its end, however it ends."""
        call, begin_s = Call(name, peer=context.peer()), time.monotonic()
        span = self._tracer.span(call, context.invocation_metadata()) if self._tracer else nullcontext()
        with span, self._metrics.call(name) as ended:
            try:
                yield call
            except MemlmError as error:
                call.code = CODES[kind_of(error)].name
                call.told["error"] = str(error)
                raise
            except Exception:
                call.code = "INTERNAL"
                raise
            except BaseException:  # a caller that heard the last event may leave before the status: it had all it asked
                call.code = "OK" if call.has_finished else "CANCELLED"
                raise
            finally:
                ended(call.code)
                self._log(call, 1000 * (time.monotonic() - begin_s))

    def _log(self, call: Call, ms: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {"call": call.name, "id": call.id, "caller": call.caller, "peer": call.peer}
        fields |= {"code": call.code, "ms": round(ms, 3), **call.told}
        log.info(" ".join(f"{name}={_plain(value)}" for name, value in fields.items()), extra={"fields": fields})


def tell_who_left(record: logging.LogRecord) -> bool:
    """Filter of gRPC's own log: that a caller left just as its answer went out is no error; one line says it."""
    if record.exc_info and isinstance(record.exc_info[1], cygrpc.ExecuteBatchError):
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        record.msg, record.args = f"nobody was left to answer: {record.getMessage()}", ()
        record.exc_info = record.exc_text = None
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


def _plain(value: Any) -> str:
    """A value that stays one word in its line, whoever made it up."""
    said = str(value)
    return said if said.isprintable() and " " not in said else repr(said)
