"""Authentication: the tokens of callers, with the calls, datastores and rates that each may use.

A token file (TOML) lists them:

    [[token]]
    name = "ann"                       # owns sessions, takes turns, appears in the log
    sha256 = "5e88..."                 # of the secret, or secret = "..." itself, 16 characters or more
    calls = ["Generate", "Score"]      # left out: all
    stores = ["docs"]                  # left out: all
    requests_per_minute = 600          # left out: no limit

It is read again when it changes. If the new version cannot be read, the previous one stays in force and an error is
logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlm.base.texts import text_of
from memlm.errors import InvalidInput, Overloaded, PermissionDenied, Unauthenticated
from memlm.server.frontend.watched_files import WatchedFiles, warn_if_world_readable

BURST_S = 10.0  # of its rate that a caller may use at once
MIN_SECRET_CHARS = 16
FIELDS = {"name", "secret", "sha256", "calls", "stores", "requests_per_minute"}

log = logging.getLogger("memlm.server")


@dataclass(slots=True)
class Principal:
    """The sender of a call: a token of the token file. Without such a file every sender is the default, unrestricted
    one.
    """

    name: str = ""
    digest: bytes = b""
    calls: frozenset[str] | None = None
    stores: frozenset[str] | None = None
    requests_per_minute: float | None = None
    _tokens_left: float = field(default=0.0, repr=False)
    _filled_s: float | None = field(default=None, repr=False)

    def check(self, call: str) -> None:
        """Raises PermissionDenied for a call that the token may not make, and Overloaded above its rate."""
        self.check_right(call)
        if self.requests_per_minute is not None:
            self._take_token(self.requests_per_minute / 60)

    def may_call(self, call: str) -> bool:
        """Whether the token may make a call."""
        return self.calls is None or call in self.calls

    def check_right(self, call: str) -> None:
        """Raises PermissionDenied for a call that the token may not make."""
        if not self.may_call(call):
            allowed = ", ".join(sorted(self.calls or ())) or "nothing"
            raise PermissionDenied(f"the token {self.name!r} may not call {call}; it may call {allowed}")

    def continue_rate_limit(self, previous: Principal) -> None:
        """Takes over the unused calls of the token's previous version."""
        self._tokens_left, self._filled_s = previous._tokens_left, previous._filled_s

    def _take_token(self, per_s: float) -> None:
        """Takes one call from a bucket that fills at the caller's rate."""
        now_s, capacity = time.monotonic(), max(1.0, BURST_S * per_s)
        filled_s = now_s if self._filled_s is None else self._filled_s
        tokens_left = (
            capacity if self._filled_s is None else min(capacity, self._tokens_left + (now_s - filled_s) * per_s)
        )
        self._filled_s, self._tokens_left = now_s, tokens_left
        if tokens_left < 1:
            wait_s = (1 - tokens_left) / per_s
            raise Overloaded(
                f"the token {self.name!r} may call {60 * per_s:g} times a minute; try again in {wait_s:.2g} s",
                retry_after_s=wait_s,
            )
        self._tokens_left -= 1


class Authenticator:
    """Identifies callers by their tokens."""

    def __init__(self, path: Path | None) -> None:
        """Raises InvalidInput, with the reason, for a token file that cannot be used."""
        self._path, self._callers = path, tuple[Principal, ...]()
        if path is not None:
            self._file = _watch_file(path)
            self._callers = _parse_callers(self._file.contents[0], path)

    @property
    def is_open(self) -> bool:
        """Whether calls need no token."""
        return self._path is None

    def authenticate(self, metadata: Any) -> Principal:
        """The caller whose token a call's metadata has. Raises Unauthenticated for an unknown or missing token."""
        if self._path is None:
            return Principal()
        self._reload_if_changed(self._path)
        header = next((value for key, value in metadata or () if key == "authorization"), "")
        kind, _, secret = str(header).partition(" ")
        digest, found = _digest(secret), None
        for caller in self._callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        if found is None or kind.lower() != "bearer":
            raise Unauthenticated("this server wants a token that it knows; give one (token=..., or --token)")
        return found

    def _reload_if_changed(self, path: Path) -> None:
        try:
            if self._file.reload():
                self._replace(_parse_callers(self._file.contents[0], path))
                log.info("%s was read again: %d tokens", path, len(self._callers))
        except (InvalidInput, OSError) as error:
            log.error("%s was not read again, the last one stays in force: %s", path, error)

    def _replace(self, callers: tuple[Principal, ...]) -> None:
        """Replaces the callers. A caller whose rate is unchanged keeps its count of calls."""
        previous = {(caller.name, caller.requests_per_minute): caller for caller in self._callers}
        for caller in callers:
            caller.continue_rate_limit(previous.get((caller.name, caller.requests_per_minute), caller))
        self._callers = callers


def _watch_file(path: Path) -> WatchedFiles:
    try:
        file = WatchedFiles(path)
        warn_if_world_readable(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return file


def _unreadable(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput(f"{path} cannot be read as a file of tokens ({error})", field="auth_file")


def _parse_callers(content: bytes, path: Path) -> tuple[Principal, ...]:
    try:
        entries_by_key = tomllib.loads(text_of(content))
    except ValueError as error:
        raise _unreadable(path, error) from error
    entries = entries_by_key.get("token")
    if (
        set(entries_by_key) != {"token"}
        or not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        raise InvalidInput(f"{path} has no tokens; write [[token]] with a name and a secret", field="auth_file")
    callers = tuple(_parse_caller(entry, f"{path}: token {number}") for number, entry in enumerate(entries, start=1))
    for kind, values in (("name", [c.name for c in callers]), ("secret", [c.digest for c in callers])):
        if len(set(values)) < len(values):
            raise InvalidInput(f"{path}: two tokens have the same {kind}", field="auth_file")
    return callers


def _parse_caller(entry: dict[str, Any], where: str) -> Principal:
    if unknown := sorted(set(entry) - FIELDS):
        raise InvalidInput(f"{where} has {unknown}; expected {', '.join(sorted(FIELDS))}", field="auth_file")
    name, secret, sha256 = entry.get("name"), entry.get("secret"), entry.get("sha256")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{where} has no name", field="auth_file")
    if (secret is None) == (sha256 is None):
        raise InvalidInput(f"{where} ({name!r}) needs either a secret or a sha256", field="auth_file")
    if secret is not None and (not isinstance(secret, str) or len(secret) < MIN_SECRET_CHARS):
        raise InvalidInput(f"{where} ({name!r}) has a secret under {MIN_SECRET_CHARS} characters", field="auth_file")
    rate = entry.get("requests_per_minute")
    if rate is not None and (not isinstance(rate, int | float) or isinstance(rate, bool) or not rate > 0):
        raise InvalidInput(f"{where} ({name!r}) has requests_per_minute {rate!r}; expected above 0", field="auth_file")
    try:
        digest = _digest(secret) if secret is not None else bytes.fromhex(str(sha256))
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 32:
        raise InvalidInput(f"{where} ({name!r}) has a sha256 that is not 64 hexadecimal digits", field="auth_file")
    calls, stores = (_parse_names(entry, key, where) for key in ("calls", "stores"))
    return Principal(name, digest, calls, stores, None if rate is None else float(rate))


def _parse_names(entry: dict[str, Any], key: str, where: str) -> frozenset[str] | None:
    names = entry.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InvalidInput(f"{where} has {key} {names!r}; expected a list of names", field="auth_file")
    return frozenset(names)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
