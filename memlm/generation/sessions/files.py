"""Sessions on the disk: one file each, signed, checksummed and bound to its model.

A file is the magic line, a signed line of JSON, the tokens as 32-bit integers, the past if the session has one, and the
decoder's cache. The last two are in safetensors form. It is written whole under a temporary name, so a kill or a full
disk leaves the file of before. Any thread may write: the large parts are hashed and written with the interpreter
unlocked, so other threads run meanwhile.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from memlm.base.clock import Stamp
from memlm.base.files import checksum_of, read_signed, remove, sign, sync_folder, write_atomic
from memlm.errors import Corrupt, Incompatible, NotWritable
from memlm.generation.sessions.names import SUFFIX
from memlm.model import DecoderState
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.context_cache import ContextCache

MAGIC = b"memlm session 3\n"
TOKEN_TYPE = "i"


@dataclass(frozen=True, slots=True)
class SessionState:
    """The KV cache (None: empty), the tokens that are not in it yet, and all tokens of the session's text.

    `answer_ends` are the numbers of tokens at which answers of a conversation ended, without the end of the assistant's
    turn. `adapter` names the one that the text is read with. `past` has the keys of the tokens read, and possibly of
    more behind the first `past_size`: a cancelled request leaves these.
    """

    cache: DecoderState | None = None
    pending_ids: tuple[int, ...] = ()
    context_ids: tuple[int, ...] = ()
    answer_ends: tuple[int, ...] = ()
    past: ContextCache | None = None
    past_size: int = 0
    adapter: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of text, in the KV cache or not."""
        return len(self.context_ids)

    @property
    def num_read(self) -> int:
        """Tokens in the KV cache."""
        return 0 if self.cache is None else self.cache.length

    @property
    def num_prefix(self) -> int:
        """Tokens that were read before the first one of the text."""
        return self.num_read + len(self.pending_ids) - self.num_tokens

    @property
    def ends_in_answer(self) -> bool:
        """Whether the text is a conversation that ends in an answer."""
        return self.num_tokens in self.answer_ends[-1:]

    @property
    def num_bytes(self) -> int:
        """RAM of the KV cache and the past, in bytes."""
        cache_bytes = 0 if self.cache is None else self.cache.num_bytes
        return cache_bytes + (0 if self.past is None else self.past.num_bytes(self.past_size))

    def past_to_extend(self) -> ContextCache | None:
        """The past, as it is in this state. The next request appends to it in place."""
        if self.past is not None:
            self.past.crop(self.past_size)
        return self.past


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The content of a session's file. `used` is its last use by `Clock`, `used_s` by the wall clock."""

    name: str
    owner: str
    ttl_s: float
    created_s: float
    used_s: float
    used: Stamp
    state: SessionState


class SessionFiles:
    """The session files of a folder."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called before each change, and raises where this process may not make it."""
        self._folder, self._checkpoint, self._check = folder, checkpoint, check
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, record: SessionRecord) -> None:
        """Writes a session's file. Once this returns, the session survives a crash."""
        self._check()  # else a process that ends by the check leaves its temporary file
        state = record.state
        tokens = memoryview(array(TOKEN_TYPE, state.context_ids)).cast("B")
        past = b"" if state.past is None else save(state.past.save(state.past_size))
        pieces = [tokens, past, *(() if state.cache is None else state.cache.pieces())]
        digest = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            digest.update(piece)
        header: dict[str, Any] = {
            "name": record.name, "owner": record.owner, "ttl_s": record.ttl_s, "created_s": record.created_s,
            "used_s": record.used_s, "used": record.used, "pending_ids": state.pending_ids, "token_bytes": len(tokens),
            "answer_ends": state.answer_ends, "past_bytes": len(past), "cache": digest.hexdigest(),
            "model": self._checkpoint.fingerprint, "tokenizer": self._checkpoint.tokenizer.fingerprint,
        }  # fmt: skip
        if state.adapter is not None:
            header["adapter"] = state.adapter, self._checkpoint.decoder.adapters.get(state.adapter).fingerprint
        try:
            write_atomic(self._file(record.name), MAGIC, sign(header), b"\n", *pieces, check=self._check)
        except FileNotFoundError:  # a server that took the folder has removed the temporary file
            self._check()
            raise

    def remove(self, name: str) -> None:
        """Removes a session's file. It stays where the folder cannot be written to: no caller waits for its end."""
        with suppress(NotWritable):
            self._remove(name)

    def remove_for_good(self, name: str) -> None:
        """Removes a session's file. Once this returns, a crash does not bring it back."""
        self._remove(name)
        sync_folder(self._folder)

    def read_all(self, is_ours: Callable[[str], bool]) -> Iterator[SessionRecord]:
        """Reads the sessions with names that `is_ours` accepts, and removes their files of interrupted writes. Raises
        Corrupt for a damaged file, Incompatible for a file of another model.
        """
        self._remove_left(left for left in self._folder.glob(f"*{SUFFIX}.*tmp") if is_ours(left.name.partition(".")[0]))
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if is_ours(path.stem):
                yield self._read(path)

    def read(self, name: str) -> SessionRecord | None:
        """Reads one session, or None without a file, and removes files of interrupted writes. Raises as `read_all`."""
        self._remove_left(self._folder.glob(f"{name}{SUFFIX}.*tmp"))
        path = self._file(name)
        return self._read(path) if path.exists() else None

    def _remove(self, name: str) -> None:
        self._check()
        remove(self._file(name))

    def _remove_left(self, files: Iterable[Path]) -> None:
        """Removes the files of processes that were killed while they wrote."""
        if files := list(files):
            self._check()  # after they were listed: so they are none of a server that takes the folder from now on
        for left in files:
            remove(left)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _read(self, path: Path) -> SessionRecord:
        content = path.read_bytes()
        head, _, data = content.removeprefix(MAGIC).partition(b"\n")
        try:
            if not content.startswith(MAGIC):
                raise ValueError("is no session of this version")
            header = read_signed(head)
            if checksum_of(data) != header["cache"]:
                raise ValueError("was changed (wrong checksum)")
        except ValueError as error:
            raise Corrupt(f"{path} {error}; remove it to go on without it") from error
        if (header["model"], header["tokenizer"]) != (
            self._checkpoint.fingerprint,
            self._checkpoint.tokenizer.fingerprint,
        ):
            raise Incompatible(
                f"{path} is a session of another model; serve that one, or remove the file to go on without it"
            )
        adapter = self._adapter(path, header)
        context_ids, data = array(TOKEN_TYPE, data[: header["token_bytes"]]), data[header["token_bytes"] :]
        decoder, cache, past = self._checkpoint.decoder, None, None
        if past_bytes := header.get("past_bytes", 0):
            past, data = ContextCache.restored(load(data[:past_bytes])), data[past_bytes:]
        if data:
            cache = DecoderState.restore(data, decoder.config, dtype=decoder.dtype, device=decoder.device)
        state = SessionState(
            cache, tuple(header["pending_ids"]), tuple(context_ids), _answer_ends(header, len(context_ids)),
            past, 0 if past is None else len(past), adapter,
        )  # fmt: skip
        used = (str(header["used"][0]), float(header["used"][1]))
        return SessionRecord(
            header["name"], header["owner"], header["ttl_s"], header["created_s"], header["used_s"], used, state
        )

    def _adapter(self, path: Path, header: dict[str, Any]) -> str | None:
        """The name of the session's adapter. Raises Incompatible where it is not loaded, or is another one."""
        name, fingerprint = header.get("adapter", (None, None))
        adapters = self._checkpoint.decoder.adapters
        if name is not None and not (name in adapters.names and adapters.get(name).fingerprint == fingerprint):
            raise Incompatible(
                f"{path} is a session with an adapter {name!r} that is not loaded, or is another one now; load that"
                " one, or remove the file to go on without it"
            )
        return None if name is None else str(name)


def _answer_ends(header: dict[str, Any], num_tokens: int) -> tuple[int, ...]:
    """The ends of answers. Earlier files say of the last one alone whether the text ends there."""
    return tuple(header.get("answer_ends", (num_tokens,) if header.get("ends_in_answer") else ()))
