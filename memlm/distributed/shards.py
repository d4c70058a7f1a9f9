"""Searches of datastores whose segments are divided among shards: every shard at once, and its answers merged.

The result is that of a search in this process, to the bit. This process has the datastore's folder open too: values,
documents and deletions are its own, and a shard only ranks keys.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeAlias

import grpc
import numpy as np
from jaxtyping import Float32, Float64, Int64

from memlm.base.addresses import channel_options_of, proxy_advice
from memlm.base.lists import items_of
from memlm.base.options import RAY, check_shard
from memlm.distributed.shard_finder import ShardFinder
from memlm.distributed.shard_messages import (
    ALL_LIVE,
    DESCRIBE,
    SEARCH,
    Description,
    SegmentView,
    ShardAnswer,
    ShardSearch,
    core_of,
    digest_of,
    packed_mask,
)
from memlm.errors import InvalidInput, Unavailable
from memlm.index.neighbors import Neighbors
from memlm.index.store.exclusion import search_views
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import ROW_BITS
from memlm.index.store.segment import Segment
from memlm.index.store.shards import shards_of
from memlm.index.store.snapshot import Snapshot

MAX_MESSAGE_BYTES = 256 << 20
CHANNEL = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # the limit of an attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.enable_retries", 0),  # another replica answers sooner
    ("grpc.use_local_subchannel_pool", 1),
)
TIMEOUT_S, GREETING_S = 5.0, 1.0
GREET_AGAIN_S, CHECK_AGAIN_S = 0.5, 5.0
FIRST_REST_S, LONGEST_REST_S, MOST_DOUBLINGS = 0.25, 30.0, 10  # of a process after failed searches
FIRST_GREETING_S = 10.0  # that a new object waits for its shards

_Segments: TypeAlias = tuple[Segment, ...]  # of a view of a datastore

log = logging.getLogger("memlm.shards")


@dataclass(eq=False, slots=True)
class _Replica:
    """A process of a shard. It is `reachable` if it answered when it was asked last. After failed searches it rests."""

    address: str
    channel: grpc.Channel
    description: Description | None = None
    reachable: bool = False
    failures: int = 0
    rests_until_s: float = 0.0
    is_logged: bool = False  # its failure, since it answered last

    @property
    def is_ready(self) -> bool:
        """Whether a search may go to it."""
        return self.reachable and time.monotonic() >= self.rests_until_s

    def describe(self) -> None:
        """Asks which shard it is."""
        try:
            self.description = Description.decode(self.channel.unary_unary(DESCRIBE)(b"", timeout=GREETING_S))
        except (grpc.RpcError, ValueError):
            self.reachable = False
        else:
            self.reachable = True

    def search(self, search: ShardSearch, timeout_s: float) -> Any:
        """Starts a search. Returns its future."""
        return self.channel.unary_unary(SEARCH).future(search.encode(), timeout=max(0.0, timeout_s))

    def note(self, *, failed: bool) -> None:
        """Notes how a search ended."""
        self.failures = min(self.failures + 1, MOST_DOUBLINGS) if failed else 0
        self.is_logged = self.is_logged and failed
        if failed:
            self.reachable = False
            self.rests_until_s = time.monotonic() + min(FIRST_REST_S * 2**self.failures, LONGEST_REST_S)


@dataclass(slots=True)
class _Asked:
    """A search of one shard that is under way."""

    shard: int
    search: ShardSearch
    replicas: list[_Replica]  # the one that is asked, and those to be asked if it fails
    deadline_s: float
    future: Any = None

    def ask(self, masks: Mapping[str, bytes] | None = None) -> ShardAnswer:
        """Waits for the answer of the first replica, which is asked again if there are `masks` to send."""
        if masks is not None:
            self.start(replace(self.search, masks=masks))
        return ShardAnswer.decode(self.future.result())

    def start(self, search: ShardSearch) -> None:
        """Sends a search to the first replica. The time that is left is shared with the others."""
        timeout_s = (self.deadline_s - time.monotonic()) / len(self.replicas)
        self.future = self.replicas[0].search(search, timeout_s)


class Shards:
    """The shards of one or several datastores, by their addresses: HOST:PORT, or unix:PATH. Several addresses may be
    replicas of one shard. `ray://NAME` stands for the addresses that shards on a Ray cluster have at the time. Any
    thread may search. A context manager.

    A search takes at most `timeout_s`. If a replica fails, another one of its shard is asked. If all of a shard fail,
    so does the search, or, with `partial`, goes on without this shard, and its result tells the shares of the entries.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        partial: bool = False,
        cluster: str | None = None,
    ) -> None:
        """Waits up to ten seconds for all of them. Those that do not answer by then are asked again, until they do.

        `cluster` is the address of that with the shards `ray://NAME`, by default RAY_ADDRESS, or this node's cluster.
        """
        addresses = items_of("shards", addresses, expected="addresses")
        if repeated := [each for each in addresses if addresses.count(each) > 1]:
            raise InvalidInput(f"the shard {repeated[0]!r} was given twice; leave one out", field="shards")
        self._timeout_s, self._partial, self._turn = timeout_s, partial, 0
        self._known_stores = set[str]()
        given = [check_shard(each) for each in addresses]
        self._replicas = [_connected(each) for each in given if not each.startswith(RAY)]
        self._finders = [ShardFinder(each, cluster) for each in given if each.startswith(RAY)]
        self._unfound = {finder.url for finder in self._finders}  # under which there is no address
        self._masks: weakref.WeakKeyDictionary[Segment, tuple[SegmentView, bytes]] = weakref.WeakKeyDictionary()
        self._closing, self._moving = threading.Event(), threading.Lock()
        deadline_s = time.monotonic() + FIRST_GREETING_S
        self._threads = [threading.Thread(target=self._follow, args=(each,), daemon=True) for each in self._finders]
        for thread in self._threads:
            thread.start()
        while self._silent:
            for replica in self._replicas:
                if replica.description is None:
                    replica.describe()
            if time.monotonic() > deadline_s or self._closing.wait(0.1):
                break
        self._threads.append(threading.Thread(target=self._greet, name="shards", daemon=True))
        self._threads[-1].start()

    def search(
        self,
        views_Q: Sequence[Snapshot],
        queries_QD: Float32[np.ndarray, "Q D"],
        k: int,
        *,
        nprobe: int | None = None,
        only: DocumentFilter | None = None,
    ) -> Neighbors:
        """Searches as `search_views` does, in the shards of the datastore. One without shards is searched here.

        Raises Unavailable if a shard does not answer, with `partial` if none does.
        """
        if not views_Q:
            return Neighbors.none(0, k)
        replicas = self._replicas_of(store_id := views_Q[0].manifest.store_id)
        if replicas is None:
            return search_views(views_Q, queries_QD, k, nprobe=nprobe, only=only)
        segments, (views, view_Q) = views_Q[0].segments, _numbered(views_Q)
        if only and len(views) > 1:
            raise ValueError("different views take no filter")
        if not segments:
            return Neighbors.none(len(queries_QD), k)
        shard_of = shards_of([segment.record for segment in segments], len(replicas))
        whole = ShardSearch(store_id, views_Q[0].rounded(queries_QD, k), k, nprobe, (), view_Q, only)
        found = self._answers(self._ask(whole, views, shard_of, replicas), views)
        if not found:
            raise Unavailable("no shard that has entries of the datastore answers; try again in a moment")
        shares_Q = _shares_of(views, view_Q, [shard in found for shard in shard_of])
        return replace(_merged([*found.values()], segments, k), shares_Q=shares_Q)

    def close(self) -> None:
        """Closes the connections."""
        self._closing.set()
        for finder in self._finders:
            finder.close()
        for thread in self._threads:
            thread.join()
        for replica in self._replicas:
            replica.channel.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _silent(self) -> list[str]:
        """The addresses that have never answered, and the names under which there was none yet."""
        names = sorted(self._unfound)  # read before the replicas, which are there once a name leaves it
        return names + [replica.address for replica in self._replicas if replica.description is None]

    def _follow(self, finder: ShardFinder) -> None:
        """Asks where the shards of a name are: often while one of them does not answer, and all now and then."""
        before, asked_s, problem, gone = set[str](), -math.inf, "", list[tuple[float, _Replica]]()
        while not self._closing.is_set():
            mine = [each for each in self._replicas if each.address in before]
            is_due = time.monotonic() - asked_s > CHECK_AGAIN_S
            if is_due or not mine or not all(each.reachable for each in mine):
                asked_s, last = time.monotonic(), problem
                try:
                    finder.ask()
                except Unavailable as error:
                    problem = str(error)
                else:
                    problem, now = "", set(finder.addresses.values())
                    with self._moving:
                        if not now:
                            self._unfound.add(finder.url)
                        gone += [(asked_s, each) for each in self._replicas if each.address in before - now]
                        kept = [each for each in self._replicas if each.address not in before - now]
                        self._replicas = kept + [_connected(each) for each in sorted(now - before)]
                        if now:
                            self._unfound.discard(finder.url)
                    before = now
                if problem != last and not self._closing.is_set():
                    log.warning("%s", problem or f"Ray tells again where the shards of {finder.url} are")
            for since_s, each in gone:
                if time.monotonic() > since_s + 2 * self._timeout_s:  # no search uses it any more
                    each.channel.close()
            gone = [(since_s, each) for since_s, each in gone if time.monotonic() <= since_s + 2 * self._timeout_s]
            self._closing.wait(CHECK_AGAIN_S if problem else GREET_AGAIN_S)  # Ray takes seconds to be asked anew
        for _, each in gone:
            each.channel.close()

    def _greet(self) -> None:
        """Asks those that failed or never answered again and again, and all now and then."""
        checked_s = time.monotonic()
        while not self._closing.wait(GREET_AGAIN_S):
            is_due = time.monotonic() - checked_s > CHECK_AGAIN_S
            checked_s = time.monotonic() if is_due else checked_s
            for replica in self._replicas:
                was_reachable = replica.reachable
                if is_due or not was_reachable:
                    replica.describe()
                if replica.reachable != was_reachable:
                    log.warning("the shard at %s %s", replica.address, "answers" if replica.reachable else "is gone")

    def _ask(
        self, whole: ShardSearch, views: Sequence[_Segments], shard_of: Sequence[int], replicas: list[list[_Replica]]
    ) -> list[_Asked]:
        """Sends each shard the part of a search that is in its segments, if one of its replicas is there."""
        asked, deadline_s = list[_Asked](), time.monotonic() + self._timeout_s
        for shard in sorted(set(shard_of)):
            mine = [place for place, other in enumerate(shard_of) if other == shard]
            named = tuple(tuple(self._view_of(view[place])[0] for place in mine) for view in views)
            if replicas[shard - 1]:
                asked.append(_Asked(shard, replace(whole, views=named), replicas[shard - 1], deadline_s))
                asked[-1].start(asked[-1].search)
        return asked

    def _answers(self, asked: Sequence[_Asked], views: Sequence[_Segments]) -> dict[int, Neighbors]:
        """Waits for what each shard finds in the views, with `partial` those that answer."""
        masks = {view.deleted: mask for each in views for view, mask in map(self._view_of, each) if mask}
        found = dict[int, Neighbors]()
        try:
            for each in asked:
                try:
                    found[each.shard] = _answer(each, masks)
                except Unavailable as error:
                    if not self._partial:
                        raise
                    if not each.replicas[0].is_logged:
                        log.warning("searches go on without a shard: %s", error)
                        each.replicas[0].is_logged = True
        finally:
            for each in asked:
                each.future.cancel()
        return found

    def _replicas_of(self, store_id: str) -> list[list[_Replica]] | None:
        """The replicas of each shard of a datastore, those first that answered last time. None for a datastore without
        shards. Raises Unavailable for one whose shards are not all known, or do not answer. With `partial` such a shard
        has no replicas.
        """
        silent = self._silent  # read first: one that answers just now is known below
        mine = [
            (each, of) for each in self._replicas if (of := each.description) is not None and of.store_id == store_id
        ]
        if not mine:
            if silent:  # one of them may have the datastore
                raise Unavailable(f"no shard answers at {', '.join(silent)}{proxy_advice(silent[0])}")
            self._log_unknown(store_id)
            return None
        shards = self._by_shard(mine)
        if self._partial and any(map(_is_ready, shards)):
            return [replicas if _is_ready(replicas) else [] for replicas in shards]
        _check_whole(shards, silent)
        return shards

    def _log_unknown(self, store_id: str) -> None:
        """Says once of a datastore that it has no shards."""
        if store_id not in self._known_stores:
            self._known_stores.add(store_id)
            log.warning("no shard is of the datastore with the id %s, which is searched here", store_id)

    def _by_shard(self, known: list[tuple[_Replica, Description]]) -> list[list[_Replica]]:
        """The replicas of each shard, those first that are ready. Raises Unavailable where they are of several
        divisions of the datastore.
        """
        if len(_divisions(known)) > 1:  # some may be gone for good
            known = [(each, of) for each, of in known if each.reachable] or known
        if len(divisions := _divisions(known)) > 1:
            raise Unavailable(f"the shards are of {' and of '.join(map(str, divisions))}; start all of them anew")
        shards: list[list[_Replica]] = [[] for _ in range(divisions[0])]
        self._turn = (self._turn + 1) % len(known)  # so that replicas share the work
        for replica, of in known[self._turn :] + known[: self._turn]:
            shards[of.shard - 1].append(replica)
        for replicas in shards:
            replicas.sort(key=lambda replica: not replica.is_ready)
        return shards

    def _view_of(self, segment: Segment) -> tuple[SegmentView, bytes]:
        """The name of a segment with its deletions, and the mask, which is empty without any."""
        if (known := self._masks.get(segment)) is None:
            mask = packed_mask(segment.deleted_mask) if segment.any_deleted else b""
            known = SegmentView(core_of(segment.record), digest_of(mask) if mask else ALL_LIVE), mask
            self._masks[segment] = known
        return known


def _divisions(known: Sequence[tuple[_Replica, Description]]) -> list[int]:
    """The different numbers of shards that replicas are of, in ascending order."""
    return sorted({of.num_shards for _, of in known})


def _is_ready(replicas: Sequence[_Replica]) -> bool:
    """Whether a search may go to one of the replicas of a shard, those first that are ready."""
    return bool(replicas) and replicas[0].is_ready


def _check_whole(shards: Sequence[Sequence[_Replica]], silent: Sequence[str]) -> None:
    """Raises Unavailable for a shard that is not there or does not answer. `silent` addresses never answered."""
    if lacking := [str(number) for number, replicas in enumerate(shards, 1) if not replicas]:
        answer = f"; no answer from {', '.join(silent)}{proxy_advice(silent[0])}" if silent else ""
        raise Unavailable(f"no address is that of shard {', '.join(lacking)} of {len(shards)}{answer}")
    for number, replicas in enumerate(shards, 1):
        if not _is_ready(replicas):
            raise Unavailable(f"shard {number} at {replicas[0].address} does not answer; try again in a moment")


def _connected(address: str) -> _Replica:
    return _Replica(address, grpc.insecure_channel(address, options=(*CHANNEL, *channel_options_of(address))))


def _answer(asked: _Asked, masks: Mapping[str, bytes]) -> Neighbors:
    """Waits for the answer of a shard, or asks its next replica. Raises Unavailable if there is none."""
    while True:
        replica, search = asked.replicas[0], asked.search
        try:
            answer = asked.ask()
            if answer.missing:
                own = {each.deleted for view in search.views for each in view} - {ALL_LIVE}
                answer = asked.ask({digest: masks[digest] for digest in own})
            if answer.found is None or not answer.is_of(search):
                raise ValueError("its answer is of another search")
        except (grpc.RpcError, ValueError, KeyError, TypeError) as error:
            replica.note(failed=True)
            if len(asked.replicas) > 1:
                asked.replicas = asked.replicas[1:]
                asked.start(search)
                continue
            raise Unavailable(
                f"shard {asked.shard} at {replica.address} does not answer ({_reason(error)}); try again in a moment"
            ) from error
        replica.note(failed=False)
        return answer.found


def _shares_of(
    views: Sequence[_Segments], view_Q: Int64[np.ndarray, " Q"], is_searched: Sequence[bool]
) -> Float64[np.ndarray, " Q"] | None:
    """The share of each query's view that lies in searched segments. None if all of each does."""
    if all(is_searched):
        return None
    shares = np.array([_share(view, is_searched) for view in views])
    return None if (shares == 1).all() else shares[view_Q]


def _share(view: _Segments, is_searched: Sequence[bool]) -> float:
    """The share of a view's live entries that lie in searched segments."""
    sizes = [segment.num_live_entries for segment in view]
    searched = sum(size for size, found in zip(sizes, is_searched, strict=True) if found)
    return searched / sum(sizes) if searched < sum(sizes) else 1.0


def _numbered(views_Q: Sequence[Snapshot]) -> tuple[list[_Segments], Int64[np.ndarray, " Q"]]:
    """The segments of each different view, and the number of each query's view."""
    number_of: dict[_Segments, int] = {}
    view_Q = np.array([number_of.setdefault(view.segments, len(number_of)) for view in views_Q])
    return [*number_of], view_Q


def _merged(parts: Sequence[Neighbors], segments: _Segments, k: int) -> Neighbors:
    """The k nearest of several shards. Of equal distances, those in earlier segments come first, as in one process."""
    place_of = {segment.record.number: place for place, segment in enumerate(segments)}
    arrays = zip(*((part.distances_QK, part.ids_QK, part.values_QK) for part in parts), strict=True)
    distances_QM, ids_QM, values_QM = (np.concatenate(each, axis=1) for each in arrays)
    numbers, inverse = np.unique(ids_QM >> ROW_BITS, return_inverse=True)
    places = np.array([place_of.get(number, len(place_of)) for number in numbers.tolist()])
    places_QM = places[inverse].reshape(ids_QM.shape)
    order_QM = np.argsort(places_QM, axis=1, kind="stable")
    nearest_QM = np.take_along_axis(distances_QM, order_QM, axis=1).argsort(axis=1, kind="stable")
    order_QK = np.take_along_axis(order_QM, nearest_QM, axis=1)[:, :k]
    return Neighbors(distances_QM, ids_QM, values_QM).take(order_QK)


def _reason(error: Exception) -> str:
    """What gRPC says of a failed call."""
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
