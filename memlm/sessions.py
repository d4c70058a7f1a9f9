"""What a model has read and goes on from: sessions, each with its own memories, an owner, and a time to live.

A session holds what was appended to it and every token of the generations in it that came to their end, save the
model's end of text. A generation that is cancelled, or an append that is, leaves it as it was. One at a time may use
it; the next is told that it is busy. The least recently used go where room is short. With a folder, what was
acknowledged is on the disk.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memlm.checkpoint import Checkpoint
from memlm.errors import Corrupt, Incompatible, InvalidInput, Locked, NotFound
from memlm.index.durable import checksum_of, remove, write_whole
from memlm.index.manifest import sign, signed
from memlm.model import DecoderState, decoding_threads
from memlm.model.pool import UNBOUNDED, copied
from memlm.questions import CreateSessionRequest
from memlm.reports import SessionInfo

PIECE_TOKENS = 512
DEFAULT_TTL_S = 3600.0
DEFAULT_MAX_BYTES = 4 << 30
GONE_KEPT = 1024
MAGIC = b"memlm session 1\n"
SUFFIX = ".session"


@dataclass(frozen=True, slots=True)
class Past:
    """What was read: the state after it (None: nothing), the tokens that come next and were not read yet, and all that
    a repetition penalty sees.
    """

    state: DecoderState | None = None
    unread: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of text, read or not."""
        return len(self.seen)

    @property
    def num_read(self) -> int:
        """Places taken in the context."""
        return 0 if self.state is None else self.state.length

    @property
    def num_bytes(self) -> int:
        """What it holds in memory."""
        return 0 if self.state is None else self.state.num_bytes


@dataclass(slots=True)
class _Session:
    name: str
    owner: str
    ttl_s: float
    created_s: float
    used_s: float
    past: Past = field(default_factory=Past)
    busy: bool = False
    reading: int = 0  # tokens of an append that is going on, and how many of them were read
    reading_done: int = 0


class Lease:
    """The use of a session by one generation: it ends with what is to be kept, or with nothing."""

    def __init__(self, sessions: Sessions, name: str, past: Past) -> None:
        """`Sessions.lease` makes one."""
        self._sessions, self._name, self.past = sessions, name, past
        self._open = True

    def end(self, past: Past | None) -> None:
        """Gives the session back; what it holds from now on, or None for what it held."""
        if self._open:
            self._open = False
            self._sessions._give_back(self._name, past)


class Sessions:
    """The sessions of one model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        folder: str | Path | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        max_bytes: int = DEFAULT_MAX_BYTES,
        is_ours: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Takes up what an earlier run left in `folder`. A file of another model, or a damaged one, is refused. Where
        several processes share the folder, `is_ours` tells by their names which sessions are this one's.
        """
        self._checkpoint, self._ttl_s, self._max_bytes, self._is_ours = checkpoint, ttl_s, max_bytes, is_ours
        self._folder = None if folder is None else Path(folder)
        self._sessions: dict[str, _Session] = {}
        self._gone: dict[str, tuple[str, str]] = {}  # name -> owner, and why
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                if not is_ours(path.stem):
                    continue
                session = self._restore(path)
                self._sessions[session.name] = session
            for left in self._folder.glob(f"*{SUFFIX}.*tmp"):  # by a process that was killed while it wrote
                if is_ours(left.name.partition(".")[0]):
                    remove(left)

    @property
    def num_bytes(self) -> int:
        """What all of them hold in memory."""
        return sum(session.past.num_bytes for session in self._sessions.values())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._sessions)

    def create(self, *, owner: str = "", ttl_s: float | None = None) -> SessionInfo:
        """A new one, empty, under a name that nobody guesses. It goes `ttl_s` after it was last used."""
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        CreateSessionRequest(ttl_s)
        now_s = time.time()
        session = _Session(self._new_name(), owner, ttl_s, now_s, now_s)
        self._keep(session)
        self._sessions[session.name] = session
        return self._info(session)

    def get(self, name: str, *, owner: str = "") -> SessionInfo:
        """What is known of one. Raises NotFound for one that is not there, or another's."""
        return self._info(self._find(name, owner))

    def list(self, *, owner: str = "") -> tuple[SessionInfo, ...]:
        """All of an owner's, the latest used first."""
        self.expire()
        mine = [session for session in self._sessions.values() if session.owner == owner]
        return tuple(self._info(session) for session in sorted(mine, key=lambda session: -session.used_s))

    def fork(self, name: str, *, owner: str = "") -> SessionInfo:
        """A copy that goes its own way. States are never changed in place, so it shares what the first has read."""
        source = self._idle(name, owner)
        now_s = time.time()
        twin = replace(source, name=self._new_name(), created_s=now_s, used_s=now_s)
        self._keep(twin)
        self._sessions[twin.name] = twin
        return self._info(twin)

    def delete(self, name: str, *, owner: str = "") -> SessionInfo:
        """Forgets one; tells what it was. Raises Locked while it is being used."""
        session = self._idle(name, owner)
        self._drop(session, "was deleted")
        return self._info(session)

    def append(
        self, name: str, text: str = "", *, token_ids: tuple[int, ...] = (), owner: str = ""
    ) -> Generator[None, None, SessionInfo]:
        """Reads a text, or tokens, a piece a step. Raises InvalidInput for nothing, for both, and for more than the
        model's context takes.
        """
        if bool(text) == bool(token_ids):
            raise InvalidInput("give either text or token_ids", field="text")
        session = self._idle(name, owner)
        tokenizer, decoder = self._checkpoint.tokenizer, self._checkpoint.decoder
        new = list(token_ids) or tokenizer.encode(text).tolist()
        if any(not 0 <= each < tokenizer.vocab_size for each in new):
            raise InvalidInput(f"a token id is outside the vocabulary of {tokenizer.vocab_size}", field="token_ids")
        past = session.past
        unread = [*(past.unread if past.seen else tokenizer.prompt("")), *new]
        longest = decoder.config.max_length
        if longest is not None and past.num_read + len(unread) > longest:
            raise InvalidInput(
                f"the session has {past.num_tokens:,} tokens and {len(new):,} come; the model's context has"
                f" {longest - 1:,}: append less, or use a model with memory",
                field="text",
            )
        session.busy, session.reading, session.reading_done = True, len(new), 0
        try:
            capacity = UNBOUNDED if longest is None else past.num_read + len(unread)
            state = (
                decoder.new_state(capacity=capacity)
                if past.state is None
                else copied(past.state, 0, decoder, capacity=capacity)
            )
            for begin in range(0, len(unread) - 1, PIECE_TOKENS):
                piece = unread[begin : min(begin + PIECE_TOKENS, len(unread) - 1)]
                with torch.inference_mode(), decoding_threads(decoder, len(piece)):
                    decoder.keys(torch.tensor([piece]), state)
                session.reading_done = begin + len(piece)
                yield
            self._give_back(name, Past(state, (unread[-1],), (*past.seen, *new)))
        finally:
            session.busy, session.reading = False, 0
        return self._info(session)

    def lease(self, name: str, *, owner: str = "") -> Lease:
        """The use of one, for a generation. Raises Locked where somebody uses it."""
        session = self._idle(name, owner)
        session.busy, session.used_s = True, time.time()
        return Lease(self, name, session.past)

    def expire(self) -> None:
        """Drops those whose time has run out."""
        now_s = time.time()
        for session in tuple(self._sessions.values()):
            if not session.busy and session.used_s + session.ttl_s < now_s:
                self._drop(session, f"was not used for {session.ttl_s:g} s")

    def _new_name(self) -> str:
        while not self._is_ours(name := secrets.token_hex(16)):
            pass
        return name

    def _give_back(self, name: str, past: Past | None) -> None:
        session = self._sessions[name]
        session.busy, session.used_s = False, time.time()
        if past is not None:
            self._keep(replace(session, past=past))
            session.past = past
            self._make_room(session)

    def _make_room(self, latest: _Session) -> None:
        """Drops the least recently used while all together hold too much. States that forks share count for each."""
        for session in sorted(self._sessions.values(), key=lambda session: session.used_s):
            if self.num_bytes <= self._max_bytes:
                return
            if not session.busy and session is not latest:
                self._drop(session, "was dropped to make room for others")

    def _find(self, name: str, owner: str) -> _Session:
        self.expire()
        session = self._sessions.get(name)
        if session is not None and session.owner == owner:
            return session
        gone = self._gone.get(name)
        why = f"it {gone[1]}" if gone and gone[0] == owner else "create one, or list those there are"
        raise NotFound(f"no session {name!r}; {why}", kind="session", name=name)

    def _idle(self, name: str, owner: str) -> _Session:
        session = self._find(name, owner)
        if session.busy:
            raise Locked(f"the session {name!r} is being used; wait for that, or fork it first")
        return session

    def _drop(self, session: _Session, why: str) -> None:
        del self._sessions[session.name]
        self._gone[session.name] = (session.owner, why)
        while len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        if self._folder is not None:
            remove(self._folder / f"{session.name}{SUFFIX}")

    def _info(self, session: _Session) -> SessionInfo:
        return SessionInfo(
            name=session.name,
            num_tokens=session.past.num_tokens,
            num_bytes=session.past.num_bytes,
            created_s=session.created_s,
            used_s=session.used_s,
            expires_s=session.used_s + session.ttl_s,
            busy=session.busy,
            reading=session.reading,
            reading_done=session.reading_done,
        )

    def _keep(self, session: _Session) -> None:
        """Writes a session to the disk, where it is to survive: whole, under its name, at once."""
        if self._folder is None:
            return
        past = session.past
        data = b"" if past.state is None else past.state.save()
        told: dict[str, Any] = {
            "name": session.name, "owner": session.owner, "ttl_s": session.ttl_s, "created_s": session.created_s,
            "used_s": session.used_s, "unread": past.unread, "seen": past.seen, "state": checksum_of(data),
            "model": self._checkpoint.fingerprint, "tokenizer": self._checkpoint.tokenizer.fingerprint,
        }  # fmt: skip
        write_whole(self._folder / f"{session.name}{SUFFIX}", MAGIC + sign(told) + b"\n" + data)

    def _restore(self, path: Path) -> _Session:
        """Reads a session anew, and checks it before it counts."""
        content = path.read_bytes()
        head, _, data = content.removeprefix(MAGIC).partition(b"\n")
        try:
            if not content.startswith(MAGIC):
                raise ValueError("is no session")
            told = signed(head)
            if checksum_of(data) != told["state"]:
                raise ValueError("was changed (wrong checksum)")
        except ValueError as error:
            raise Corrupt(f"{path} {error}; remove it to go on without it") from error
        if (told["model"], told["tokenizer"]) != (self._checkpoint.fingerprint, self._checkpoint.tokenizer.fingerprint):
            raise Incompatible(
                f"{path} is a session of another model; serve that one, or remove the file to go on without it"
            )
        state = DecoderState.restore(data, self._checkpoint.decoder.config) if data else None
        past = Past(state, tuple(told["unread"]), tuple(told["seen"]))
        return _Session(told["name"], told["owner"], told["ttl_s"], told["created_s"], told["used_s"], past)
