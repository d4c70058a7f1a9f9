"""A conversation of several turns with a model in process or on a server, which reads each turn once."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memlm.api.chat import Message
from memlm.api.handles import Session, TokenStream
from memlm.errors import InvalidInput, MemlmError, NotFound, Overloaded, PermissionDenied

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

TOO_LONG = ("prompt", "max_tokens")  # fields of the error of a conversation that fills the context


class Conversation:
    """The turns so far, and the session that has read them.

    A session is opened anew, and reads all turns again, after an answer was stopped, the system message changed, or the
    session expired. When the context is full, the oldest turns are left out.
    """

    def __init__(self, host: LanguageModel | Client, options: dict[str, Any], system: str = "") -> None:
        """`options` are those of `chat`."""
        self._host, self.options, self._system = host, options, system
        self._turns: list[Message] = []
        self._session: Session | None = None
        self._num_read = 0  # turns in the session
        self._takes_sessions = True

    def ask(self, text: str) -> TokenStream:
        """Adds the user's turn, and starts the answer. An error leaves the conversation as it was."""
        before = list(self._turns)
        self._turns.append(Message("user", text))
        try:
            return self._start()
        except BaseException:
            self._turns = before
            self.forget_session()
            raise

    def keep(self, answer: str, *, is_complete: bool) -> None:
        """Adds the answer to the conversation, also one that was stopped."""
        self._turns.append(Message("assistant", answer))
        self._num_read = len(self._turns)
        if not is_complete:
            self.forget_session()

    def take_back(self) -> None:
        """Removes the user's turn of an answer that failed."""
        self._turns.pop()
        self.forget_session()

    def reset(self) -> None:
        """Begins a new conversation, with the same system message."""
        self._turns.clear()
        self.forget_session()

    @property
    def system(self) -> str:
        """The system message, "" for the template's own."""
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        self._system = text
        self.forget_session()

    def forget_session(self) -> None:
        """Deletes the session. The next turn opens another one."""
        if self._session is not None:
            with suppress(MemlmError):
                self._session.delete()
        self._session, self._num_read = None, 0

    def _start(self) -> TokenStream:
        options = self.options
        while True:
            try:
                return self._send(options)
            except InvalidInput as error:
                if error.field not in TOO_LONG:
                    raise
                if len(self._turns) > 1:
                    del self._turns[:2]  # a question and its answer
                    self.forget_session()
                elif error.field == "max_tokens" and "max_tokens" in options:
                    options = {name: value for name, value in options.items() if name != "max_tokens"}
                else:
                    raise
            except NotFound as error:
                if error.kind != "session" or self._session is None:
                    raise
                self._session, self._num_read = None, 0  # expired, or of a worker that was replaced

    def _send(self, options: dict[str, Any]) -> TokenStream:
        if self._session is None and self._takes_sessions:
            try:
                self._session = self._host.session(adapter=self.options.get("adapter"))
            except (PermissionDenied, Overloaded):
                self._takes_sessions = False  # each turn sends the whole conversation
        if self._session is not None and self._num_read:
            return self._session.chat(self._turns[self._num_read :], **options)
        system = [Message("system", self._system)] if self._system else []
        host = self._host if self._session is None else self._session
        return host.chat([*system, *self._turns], **options)
