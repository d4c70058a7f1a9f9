"""Responses that callers read again, or go on from: in memory, for a time, and within a share for each caller."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from memlm.errors import NotFound
from memlm.server.quota import share_of

TTL_S = 3600.0  # after its last use
MAX_BYTES = 64 << 20  # of all callers; a caller may hold a fourth, and one response a fourth of that
ENTRY_BYTES = 1024  # about: of the objects around a text


class _Kept(NamedTuple):
    data: bytes
    used_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.data) + ENTRY_BYTES


class KeptResponses:
    """The latest responses of each caller, as JSON. A new one takes the place of the caller's oldest, or, where all
    callers together hold too much, of the oldest one of the caller that holds the most.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, ttl_s: float = TTL_S) -> None:
        self._max_bytes, self._ttl_s = max_bytes, ttl_s
        self._kept = dict[str, OrderedDict[str, _Kept]]()  # of each caller by their ids, the latest used last
        self._held = dict[str, int]()
        self._expiring: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all callers."""
        return sum(self._held.values())

    def put(self, caller: str, id_: str, value: Mapping[str, Any]) -> bool:
        """Keeps a value. Returns False for one that is too large."""
        kept = _Kept(json.dumps(value).encode(), asyncio.get_running_loop().time())
        most = share_of(self._max_bytes)
        if kept.num_bytes > share_of(most):
            return False
        while self._held.get(caller, 0) + kept.num_bytes > most:
            self._drop_oldest(caller)
        while self.num_bytes + kept.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._held, key=lambda each: self._held[each]))
        self._kept.setdefault(caller, OrderedDict())[id_] = kept
        self._held[caller] = self._held.get(caller, 0) + kept.num_bytes
        self._expire_later()
        return True

    def get(self, caller: str, id_: str) -> Any:
        """A value of this caller. Raises NotFound for one that is another's, expired or not kept."""
        if id_ not in self._kept.get(caller, ()):
            raise _unknown(id_)
        kept = self._kept[caller][id_]
        self._kept[caller][id_] = kept._replace(used_s=asyncio.get_running_loop().time())
        self._kept[caller].move_to_end(id_)
        return json.loads(kept.data)

    def remove(self, caller: str, id_: str) -> None:
        """Raises NotFound as `get` does."""
        if id_ not in self._kept.get(caller, ()):
            raise _unknown(id_)
        self._drop(caller, id_)

    def _drop_oldest(self, caller: str) -> None:
        self._drop(caller, next(iter(self._kept[caller])))

    def _drop(self, caller: str, id_: str) -> None:
        self._held[caller] -= self._kept[caller].pop(id_).num_bytes
        if not self._kept[caller]:
            del self._kept[caller], self._held[caller]

    def _expire_later(self) -> None:
        """Sees to it that the next one to expire is dropped in time."""
        if self._expiring is None and self._kept:
            oldest_s = min(next(iter(each.values())).used_s for each in self._kept.values())
            self._expiring = asyncio.get_running_loop().call_at(oldest_s + self._ttl_s, self._expire)

    def _expire(self) -> None:
        self._expiring, now_s = None, asyncio.get_running_loop().time()
        for caller, kept in [*self._kept.items()]:
            for id_ in [id_ for id_, each in kept.items() if each.used_s + self._ttl_s <= now_s]:
                self._drop(caller, id_)
        self._expire_later()


def _unknown(id_: str) -> NotFound:
    name = id_[:100]
    return NotFound(
        f"no response {name!r} is kept for this caller: it has expired, was deleted or never stored, or the server was"
        " restarted; send the whole conversation as input",
        kind="response",
        name=name,
    )
