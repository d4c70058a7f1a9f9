"""A model on the nodes of a Ray cluster that encodes the blocks of a build.

This process reads and cuts the corpus, and writes the datastore. Workers get blocks of windows and give back their
keys. A build therefore has one journal, whichever machines read for it: a worker that dies costs the blocks that it
had, and an interrupted build resumes with or without the cluster.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from memlm.base.figures import counted
from memlm.data.windows import Window
from memlm.distributed.cluster import connect
from memlm.errors import Incompatible, InvalidInput, MemlmError, Unavailable
from memlm.indexing.encoding import LocalEncoder
from memlm.indexing.pruning import EncodedWindow
from memlm.model.config import ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint

BLOCKS_EACH = 2  # a worker has one to encode and one to go on with
BLOCKS_AHEAD = 4  # for each worker: those encoded before an earlier one wait in this process
PATIENCE_S = 600.0  # without any worker
GREET_AGAIN_S = 1.0
MOST_DEATHS = 5  # of workers that had the same block


class Identity(NamedTuple):
    """Properties that the checkpoints of all workers share, so that equal windows have equal keys, but for rounding."""

    files: str
    number_type: str
    weights: str
    config: ModelConfig

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Identity:
        """That of a loaded checkpoint."""
        decoder = checkpoint.decoder
        return cls(checkpoint.fingerprint, str(decoder.dtype), decoder.dtype_name, decoder.config)


class Worker:
    """A process of the cluster with the model."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._encoder: LocalEncoder | None = None

    def greet(self) -> tuple[Identity, str]:
        """Loads the model. Returns which it is, and the node."""
        checkpoint = load_checkpoint(self._model, dtype=self._dtype, device=self._device)
        self._encoder = LocalEncoder(checkpoint.decoder)
        return Identity.of(checkpoint), ray.get_runtime_context().get_node_id()

    def encode(self, windows: Sequence[Window], prune: float | None) -> list[EncodedWindow]:
        """Encodes one block. A worker that was started anew since its greeting loads the model again."""
        if self._encoder is None:
            self.greet()
        assert self._encoder is not None
        (encoded,) = self._encoder.encode([windows], prune, lambda place: None)
        return encoded


class Share(NamedTuple):
    """The number of workers of a cluster, and the processors and GPUs that each takes."""

    workers: int
    cpus: int
    gpus: int

    @classmethod
    def of(cls, nodes: Iterable[dict[str, Any]], device: str) -> Share:
        """A worker for each GPU, unless the device is cpu. Without GPUs, as many equal workers as fit, each as large as
        the smallest node.

        Raises Unavailable for nodes without processors.
        """
        resources = [node["Resources"] for node in nodes if node["Alive"]]
        gpus = sum(int(min(each.get("GPU", 0), each.get("CPU", 0))) for each in resources)
        if gpus and device != "cpu":
            return cls(gpus, 1, 1)
        cpus = [int(each.get("CPU", 0)) for each in resources if each.get("CPU", 0) >= 1]
        if not cpus:
            raise Unavailable("the Ray cluster has no processors; start a node with `ray start --address ...`")
        return cls(sum(each // min(cpus) for each in cpus), min(cpus), 0)


@dataclass
class _Block:
    """A block that was given out, or is to be given out again."""

    windows: Sequence[Window]
    encoded: list[EncodedWindow] | None = None
    deaths: int = 0


class RayEncoder:
    """Encodes blocks of windows on a Ray cluster. A context manager, which ends its workers.

    `model` must be found on each node under the same name. `address` is HOST:PORT of the cluster that this machine is a
    node of, or auto. Without one, RAY_ADDRESS counts, and without that this machine becomes a cluster of its own.
    Raises InvalidInput for a model with memory, which reads the windows of a document one after another, and
    Unavailable if there is no such cluster.
    """

    def __init__(
        self,
        model: str | Path,
        checkpoint: Checkpoint,
        *,
        dtype: str = "auto",
        device: str = "auto",
        address: str | None = None,
    ) -> None:
        if checkpoint.decoder.config.is_segmented:
            raise InvalidInput(
                "engine is ray, and a model with memory reads the windows of a document one after another; leave engine"
                " out",
                field="engine",
            )
        if getattr(checkpoint.decoder.cross, "neighbors", None) is not None:
            raise InvalidInput("engine is ray, and workers cannot find the neighbors of retro", field="engine")
        self._identity, self._is_own = Identity.of(checkpoint), not ray.is_initialized()
        if self._is_own:
            connect(address)
        elif address is not None:
            raise InvalidInput(f"address is {address!r}, and Ray runs here already; leave it out", field="address")
        self._workers = list[Any]()
        self._nodes = dict[Any, str]()  # of the workers that are ready
        self._greetings = dict[Any, Any]()
        self._dead = dict[Any, float]()  # when each is to be greeted again
        self._alone_since_s = time.monotonic()
        try:
            share = Share.of(ray.nodes(), device)
            actor: Any = ray.remote(
                num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=-1, scheduling_strategy="SPREAD"
            )(Worker)  # fmt: skip
            path = str(Path(model).absolute()) if Path(model).exists() else str(model)
            self._workers += [actor.remote(path, dtype, device) for _ in range(share.workers)]
            self._greetings |= {worker.greet.remote(): worker for worker in self._workers}
        except BaseException:
            self.close()
            raise

    @property
    def note(self) -> str:
        """How many workers and nodes there are at the moment."""
        workers, nodes = len(self._nodes), len(set(self._nodes.values()))
        return f"{counted(workers, 'worker')} on {counted(nodes, 'node')}"

    def skip(self, windows: Sequence[Window]) -> None:
        """Nothing: no window needs an earlier one."""

    def encode(
        self, blocks: Iterable[Sequence[Window]], prune: float | None, on_window: Callable[[int], None]
    ) -> Iterator[list[EncodedWindow]]:
        """Encodes as `BlockEncoder`. A block whose worker dies goes to another one.

        Raises Unavailable after ten minutes without a worker, for a worker that cannot start and for a block that one
        worker after another dies of, and Incompatible if a worker has another model.
        """
        unread = iter(blocks)
        ahead, waiting = deque[_Block](), deque[_Block]()
        running: dict[Any, tuple[_Block, Any]] = {}
        while True:
            while len(ahead) < BLOCKS_AHEAD * len(self._workers) and (windows := next(unread, None)) is not None:
                ahead.append(_Block(windows))
                waiting.append(ahead[-1])
            if not ahead:
                return
            for worker in self._idle(running):
                if not waiting:
                    break
                block = waiting.popleft()
                running[worker.encode.remote(block.windows, prune)] = block, worker
            for ref in self._done([*running, *self._greetings]):
                if ref in self._greetings:
                    self._welcome(ref)
                    continue
                block, worker = running.pop(ref)
                try:
                    block.encoded = ray.get(ref)
                except (RayActorError, ObjectLostError) as error:
                    block.deaths += 1
                    if block.deaths == MOST_DEATHS:
                        raise Unavailable(
                            f"{MOST_DEATHS} workers died one after another of the same block ({error}); give the nodes"
                            " more memory, or the build a smaller window"
                        ) from error
                    waiting.appendleft(block)
                    self._lose(worker)
                except RayTaskError as error:
                    raise _cause_of(error) from error
            while ahead and (encoded := ahead[0].encoded) is not None:
                ahead.popleft()
                for place in range(len(encoded)):
                    on_window(place)
                yield encoded

    def close(self) -> None:
        """Ends the workers, and the cluster if it was started for them."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers, self._nodes, self._greetings = [], {}, {}
        if self._is_own:
            ray.shutdown()

    def __enter__(self) -> RayEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _idle(self, running: dict[Any, tuple[_Block, Any]]) -> Iterator[Any]:
        """Yields each ready worker as often as it can take another block."""
        for each in range(BLOCKS_EACH):
            for worker in self._nodes:
                if sum(busy is worker for _, busy in running.values()) <= each:
                    yield worker

    def _done(self, refs: list[Any]) -> list[Any]:
        """Waits for some of the work, a second at most. Returns the parts that are done."""
        if not self._nodes and time.monotonic() - self._alone_since_s > PATIENCE_S:
            raise Unavailable(
                f"the Ray cluster had no worker for {PATIENCE_S:.0f} s; `ray status` tells what it has, and the same"
                " command resumes the build"
            )
        for worker in [worker for worker, due_s in self._dead.items() if time.monotonic() >= due_s]:
            del self._dead[worker]
            self._greetings[worker.greet.remote()] = worker
        if not refs:
            time.sleep(GREET_AGAIN_S / 4)
            return []
        done, _ = ray.wait(refs, num_returns=1, timeout=GREET_AGAIN_S)
        return done

    def _welcome(self, ref: Any) -> None:
        """Takes a worker that has loaded the model."""
        worker = self._greetings.pop(ref)
        try:
            identity, node = ray.get(ref)
        except RayTaskError as error:
            raise _cause_of(error) from error
        except RayActorError as error:
            if error.actor_init_failed:
                raise Unavailable(
                    f"a worker of the Ray cluster cannot start: {error}; install memlm, of this version, on every node"
                ) from error
            self._lose(worker)
            return
        if differing := [
            name for name, here, there in zip(Identity._fields, self._identity, identity, strict=True) if here != there
        ]:
            raise Incompatible(
                f"a worker has loaded a model of another {' and '.join(differing)} than this process; give every node"
                " the same files, or a dtype if their processors differ"
            )
        self._nodes[worker] = node

    def _lose(self, worker: Any) -> None:
        """Notes that a worker has died. It is greeted again soon, for the cluster starts it anew."""
        if self._nodes.pop(worker, None) is not None and not self._nodes:
            self._alone_since_s = time.monotonic()
        if worker not in self._dead and worker not in self._greetings.values():
            self._dead[worker] = time.monotonic() + GREET_AGAIN_S


def _cause_of(error: RayTaskError) -> MemlmError:
    """Returns the error that a worker raised, without the stack of its process."""
    cause = error.cause
    if isinstance(cause, MemlmError):
        return cause
    return Unavailable(f"a worker of the Ray cluster failed: {type(cause).__name__}: {cause}")
