"""A conversation of several turns with a model in process or on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlm.api.chat import Message
from memlm.api.handles import TokenStream
from memlm.errors import InvalidInput

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

# Fields of the error of a conversation that fills the context, or a request.
TOO_LONG = ("prompt", "max_tokens", "messages")


class Conversation:
    """The turns so far, without the passages that answers were asked from. Each turn sends all of them, and the model
    reads those alone that it does not know (`memlm.generation.prefix_cache`): the last one, or behind a window that has
    moved all of them. When the context is full, the oldest turns are left out.
    """

    def __init__(self, host: LanguageModel | Client, options: dict[str, Any], system: str = "") -> None:
        """`options` are those of `chat`. Without a `system` message, the template has its own."""
        self._host, self.options, self.system = host, options, system
        self._turns: list[Message] = []

    def ask(self, text: str) -> TokenStream:
        """Adds the user's turn, and starts the answer. An error leaves the conversation as it was."""
        before = list(self._turns)
        self._turns.append(Message("user", text))
        try:
            return self._start()
        except BaseException:
            self._turns = before
            raise

    def keep(self, answer: str) -> None:
        """Adds the answer to the conversation, also one that was stopped."""
        self._turns.append(Message("assistant", answer))

    def take_back(self) -> None:
        """Removes the user's turn of an answer that failed."""
        self._turns.pop()

    def reset(self) -> None:
        """Begins a new conversation, with the same system message."""
        self._turns.clear()

    def _start(self) -> TokenStream:
        options, system = self.options, [Message("system", self.system)] if self.system else []
        while True:
            try:
                return self._host.chat([*system, *self._turns], **options)
            except InvalidInput as error:
                if error.field not in TOO_LONG:
                    raise
                if len(self._turns) > 1:
                    del self._turns[:2]  # a question and its answer
                elif error.field == "max_tokens" and "max_tokens" in options:
                    options = {name: value for name, value in options.items() if name != "max_tokens"}
                else:
                    raise
