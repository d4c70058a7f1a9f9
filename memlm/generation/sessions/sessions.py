"""Sessions: KV caches that later requests continue, each with a name, an owner and a time to live.

A session holds all appended text and every token of its finished generations, without the model's end of text. A
cancelled generation or append leaves it unchanged. One call at a time uses a session, and the next is refused. The
least recently used sessions are dropped if RAM is short. With a folder, acknowledged changes are on the disk.

Lifetimes follow `Clock`, so a corrected wall clock drops nothing. After a reboot they start anew. Users see times of
the wall clock.

Operations that write or copy much are `Steps` (`memlm.base.steps`).
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from memlm.api.params import StreamRequest
from memlm.api.sessions import CreateSessionRequest, ForgetInSessionRequest, SessionInfo
from memlm.base.clock import Clock
from memlm.base.steps import Offload, Steps, run_steps
from memlm.errors import InvalidInput, Locked, NotFound, Overloaded
from memlm.generation.sessions.files import SessionFiles, SessionRecord, SessionState
from memlm.generation.sessions.names import SessionNames
from memlm.generation.sessions.reading import ReadProgress, SessionReader, copied_aside
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.own_past import ContextSettings

SESSION_BYTES, TOKEN_BYTES = 2048, 40  # of Python's own objects, about
DEFAULT_TTL_S = 3600.0
DEFAULT_MAX_BYTES = 4 << 30
EXPIRED_AT_ONCE = 64
GONE_KEPT = 1024
RETRY_AFTER_S = 60.0


@dataclass(eq=False, slots=True)
class _Session:
    name: str
    owner: str
    ttl_s: float
    created_s: float
    used_s: float
    used_at_s: float  # the last use by `Clock`, which lifetimes follow; `used_s` is for users
    state: SessionState = field(default_factory=SessionState)
    busy: bool = False
    progress: ReadProgress = field(default_factory=ReadProgress)  # of a change that is going on

    @property
    def num_bytes(self) -> int:
        """RAM in bytes, with that of an empty session."""
        return SESSION_BYTES + TOKEN_BYTES * len(self.state.context_ids) + self.state.num_bytes

    @property
    def ends_at_s(self) -> float:
        """The time by `Clock` at which it expires, if it is not used until then."""
        return self.used_at_s + self.ttl_s


class Lease:
    """The use of a session by one generation. It ends with a new state for the session, or with none."""

    def __init__(self, sessions: Sessions, session: _Session) -> None:
        self._sessions, self._session, self.state = sessions, session, session.state
        self._open = True

    def keep(self, state: SessionState) -> Steps[None]:
        """Gives the session back with another state. If that cannot be written, the session stays as it was."""
        if self._open:
            self._open = False
            yield from self._sessions._give_back(self._session, state)

    def end(self, state: SessionState | None) -> None:
        """Gives the session back at once. None leaves it unchanged."""
        if state is not None:
            run_steps(self.keep(state))
        elif self._open:
            self._open = False
            self._sessions._release(self._session)


class Sessions:
    """The sessions of one model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        folder: str | Path | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_sessions: int | None = None,
        max_per_owner: int | None = None,
        names: SessionNames | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Reads the sessions that an earlier run left in `folder`. Raises Incompatible for a file of another model,
        Corrupt for a damaged one. If several processes share the folder, `names` are those of this process.
        """
        self._ttl_s, self._max_bytes, self._names = ttl_s, max_bytes, names or SessionNames()
        self._adapters = checkpoint.decoder.adapters
        self.context_settings = ContextSettings.load(checkpoint.path)
        self._reader = SessionReader(checkpoint, self.context_settings)
        self._max_sessions, self._max_per_owner, self._clock = max_sessions, max_per_owner, clock or Clock()
        self._files = None if folder is None else SessionFiles(Path(folder), checkpoint, self._names.check)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # the least recently used first
        self._of_owner: defaultdict[str, dict[str, _Session]] = defaultdict(dict)
        self._expiring: list[tuple[float, str]] = []  # a heap with one entry for each session, which may be too early
        self._gone: dict[str, tuple[str, str]] = {}  # name -> owner, and why
        self._num_bytes = 0
        if self._files is not None:
            for session in sorted(
                map(self._restored, self._files.read_all(self._names.are_ours)), key=lambda each: each.used_at_s
            ):
                self._add(session)

    @property
    def num_bytes(self) -> int:
        """RAM of all sessions, in bytes. Caches that forks share count for each."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, *, owner: str = "", ttl_s: float | None = None, adapter: str | None = None) -> Steps[SessionInfo]:
        """Creates an empty session under a name that cannot be guessed. It expires `ttl_s` after its last use. Its
        text is read with an `adapter`.

        Raises Overloaded if there are as many sessions as allowed, NotFound for an adapter that is not loaded.
        """
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        CreateSessionRequest(ttl_s)
        if adapter is not None:
            self._adapters.find(adapter)
        self._check_room(owner)
        return (yield from self._begin(owner, ttl_s, SessionState(adapter=adapter)))

    def get(self, name: str, *, owner: str = "") -> SessionInfo:
        """Describes a session. Raises NotFound for one that is not there, or is another owner's."""
        return self._info(self._find(name, owner))

    def state_of(self, name: str, *, owner: str = "") -> SessionState:
        """The state of a session. Raises as `get`."""
        return self._find(name, owner).state

    def adapter_of(self, request: StreamRequest, *, owner: str = "") -> str | None:
        """The adapter that a request is read with. Raises NotFound for a session, or an adapter, that is not there,
        and InvalidInput for another adapter than that of the request's session.
        """
        if request.adapter is not None:
            self._adapters.find(request.adapter)
        if request.session is None:
            return request.adapter
        adapter = self._find(request.session, owner).state.adapter
        if request.adapter not in (None, adapter):
            its = "the model alone" if adapter is None else f"the adapter {adapter!r}"
            raise InvalidInput(
                f"adapter is {request.adapter!r}, and the session's text is read with {its}; leave it out, or create a"
                " session with this adapter",
                field="adapter",
            )
        return adapter

    def list(self, *, owner: str = "") -> tuple[SessionInfo, ...]:
        """Describes all of an owner's sessions, the latest used first."""
        self.expire()
        sessions = [session for session in self._of_owner.get(owner, {}).values() if not self._is_over(session)]
        return tuple(self._info(session) for session in sorted(sessions, key=lambda session: -session.used_s))

    def fork(self, name: str, *, owner: str = "") -> Steps[SessionInfo]:
        """Copies a session. KV caches are never changed in place, so the copy shares that of the first.

        Raises Locked while the session is used, Overloaded as `create`.
        """
        source = self._idle(name, owner)
        self._check_room(owner)
        state = source.state
        if state.past is not None:  # is extended in place
            source.busy = True
            try:
                past = yield from copied_aside(partial(state.past.copy, state.past_size), state.num_bytes)
            finally:
                source.busy = False
            state = replace(state, past=past)
        return (yield from self._begin(owner, source.ttl_s, state))

    def delete(self, name: str, *, owner: str = "") -> Steps[SessionInfo]:
        """Deletes a session and returns its last description. Raises Locked while it is used."""
        session = self._idle(name, owner)
        if self._files is not None:
            session.busy = True
            try:
                yield Offload(partial(self._files.remove_for_good, name), must_end=True)
            finally:
                session.busy = False
        self._remove(session, "was deleted")
        return self._info(session)

    def append(
        self, name: str, text: str = "", *, token_ids: tuple[int, ...] = (), owner: str = ""
    ) -> Steps[SessionInfo]:
        """Reads a text, or tokens, in pieces. Raises InvalidInput for nothing, for both, and for more than the model's
        context takes.
        """
        if bool(text) == bool(token_ids):
            raise InvalidInput("give either text or token_ids", field="text")
        return (yield from self._edit(name, owner, partial(self._reader.append, text=text, token_ids=token_ids)))

    def forget(self, name: str, start: int, stop: int, *, owner: str = "") -> Steps[SessionInfo]:
        """Forgets the tokens from `start` up to `stop`, as if they had never been appended.

        The tokens behind them are read again, in pieces. All others are too, where the KV cache does not go back as far
        as `start`. Raises InvalidInput for a span without tokens, and for one beyond the session's.
        """
        ForgetInSessionRequest(name, start, stop)
        return (yield from self._edit(name, owner, partial(self._reader.forget, start=start, stop=stop)))

    def read_file(self, name: str) -> SessionRecord | None:
        """Reads the file of a session that another process had, if there is one. May run in a thread. Raises as the
        constructor.
        """
        return None if self._files is None else self._files.read(name)

    def adopt(self, record: SessionRecord | None) -> None:
        """Adds a session that was read from its file, unless it is there."""
        if record is not None and record.name not in self._sessions:
            self._add(self._restored(record))

    def lease(self, name: str, *, owner: str = "") -> Lease:
        """Reserves a session for a generation. Raises Locked while it is used."""
        session = self._idle(name, owner)
        session.busy = True
        self._touch(session)
        return Lease(self, session)

    def expire(self) -> None:
        """Drops expired sessions, a bounded number in one call."""
        now_s = self._clock.now_s()
        for _ in range(EXPIRED_AT_ONCE):
            if not self._expiring or self._expiring[0][0] > now_s:
                return
            _, name = heapq.heappop(self._expiring)
            session = self._sessions.get(name)
            if session is not None and self._is_over(session):
                self._drop(session, f"was not used for {session.ttl_s:g} s")
            elif session is not None:  # used since, or in use
                heapq.heappush(self._expiring, (max(session.ends_at_s, now_s), name))

    def _edit(
        self, name: str, owner: str, edit: Callable[[SessionState, ReadProgress], Steps[SessionState]]
    ) -> Steps[SessionInfo]:
        """Replaces the state of a session that nothing else uses. An error leaves the session as it was."""
        session = self._idle(name, owner)
        session.busy = True
        try:
            state = yield from edit(session.state, session.progress)
            yield from self._give_back(session, state)
        finally:
            session.busy, session.progress = False, ReadProgress()
        return self._info(session)

    def _begin(self, owner: str, ttl_s: float, state: SessionState) -> Steps[SessionInfo]:
        """Adds a session. While its file is written it is busy, and counts already."""
        now_s = time.time()
        session = _Session(self._new_name(), owner, ttl_s, now_s, now_s, self._clock.now_s(), state, busy=True)
        self._add(session)
        try:
            yield from self._write(session, state)
        except BaseException:
            self._remove(session, "could not be written")
            raise
        session.busy = False
        return self._info(session)

    def _check_room(self, owner: str) -> None:
        """Raises Overloaded where one session more would be too many."""
        count, most = len(self._of_owner.get(owner, ())), self._max_per_owner
        if most is not None and count >= most:
            raise Overloaded(
                f"the caller has {count:,} sessions, which is all that one may have (max_sessions_per_caller); delete"
                " those that are not used any more",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._max_sessions is not None and len(self) >= self._max_sessions:
            raise Overloaded(
                f"there are {len(self):,} sessions, which is all that this server takes (max_sessions); delete some, or"
                " try again when others have expired",
                retry_after_s=RETRY_AFTER_S,
            )

    def _restored(self, record: SessionRecord) -> _Session:
        used_at_s = self._clock.now_s() - self._clock.since_s(record.used)
        return _Session(
            record.name, record.owner, record.ttl_s, record.created_s, record.used_s, used_at_s, record.state
        )

    def _new_name(self) -> str:
        while not self._names.are_ours(name := secrets.token_hex(16) + self._names.suffix):
            pass
        return name

    def _write(self, session: _Session, state: SessionState) -> Steps[None]:
        """Writes a session's file with a state, where there is a folder."""
        if self._files is not None:
            stamp = self._clock.stamp(session.used_at_s)
            record = SessionRecord(
                session.name, session.owner, session.ttl_s, session.created_s, session.used_s, stamp, state
            )
            yield Offload(partial(self._files.write, record), must_end=True)

    def _give_back(self, session: _Session, state: SessionState) -> Steps[None]:
        """Writes a new state. Only then the session has it, and is free again."""
        try:
            self._touch(session)
            yield from self._write(session, state)
            self._num_bytes -= session.num_bytes
            session.state = state
            self._num_bytes += session.num_bytes
        finally:
            self._release(session)
        self._make_room(session)

    def _release(self, session: _Session) -> None:
        session.busy = False
        self._touch(session)

    def _touch(self, session: _Session) -> None:
        """Records a use."""
        session.used_s, session.used_at_s = time.time(), self._clock.now_s()
        self._sessions.move_to_end(session.name)

    def _is_over(self, session: _Session) -> bool:
        return not session.busy and session.ends_at_s < self._clock.now_s()

    def _make_room(self, latest: _Session) -> None:
        """Drops the least recently used sessions while all together hold too much."""
        while self._num_bytes > self._max_bytes:
            idle = (session for session in self._sessions.values() if not session.busy and session is not latest)
            if (oldest := next(idle, None)) is None:
                return
            self._drop(oldest, "was dropped to make room for others")

    def _find(self, name: str, owner: str) -> _Session:
        self.expire()
        session = self._sessions.get(name)
        if session is not None and self._is_over(session):
            self._drop(session, f"was not used for {session.ttl_s:g} s")
        elif session is not None and session.owner == owner:
            return session
        gone = self._gone.get(name)
        why = f"it {gone[1]}" if gone and gone[0] == owner else "create one, or list those there are"
        raise NotFound(f"no session {name!r}; {why}", kind="session", name=name)

    def _idle(self, name: str, owner: str) -> _Session:
        session = self._find(name, owner)
        if session.busy:
            raise Locked(f"the session {name!r} is being used; wait for that, or fork it first")
        return session

    def _add(self, session: _Session) -> None:
        self._sessions[session.name] = self._of_owner[session.owner][session.name] = session
        self._num_bytes += session.num_bytes
        if len(self._expiring) > 2 * len(self._sessions) + EXPIRED_AT_ONCE:  # mostly of sessions that are gone
            self._expiring = [(each.ends_at_s, each.name) for each in self._sessions.values()]
            heapq.heapify(self._expiring)
        else:
            heapq.heappush(self._expiring, (session.ends_at_s, session.name))

    def _drop(self, session: _Session, why: str) -> None:
        """Removes a session and its file."""
        self._remove(session, why)
        if self._files is not None:
            self._files.remove(session.name)

    def _remove(self, session: _Session, why: str) -> None:
        del self._sessions[session.name]
        of_owner = self._of_owner[session.owner]
        del of_owner[session.name]
        if not of_owner:
            del self._of_owner[session.owner]
        self._num_bytes -= session.num_bytes
        self._gone[session.name] = (session.owner, why)
        while len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]

    def _info(self, session: _Session) -> SessionInfo:
        return SessionInfo(
            name=session.name,
            num_tokens=session.state.num_tokens,
            num_bytes=session.num_bytes,
            created_s=session.created_s,
            used_s=session.used_s,
            expires_s=session.used_s + session.ttl_s,
            busy=session.busy,
            reading=session.progress.num_tokens,
            reading_done=session.progress.num_done,
            adapter=session.state.adapter,
        )
