"""Conversations: messages, and the request for an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from memlm.api.params import BEGINNING_CHARACTERS, StreamRequest, stream_fields
from memlm.api.passages import BUDGET, MORE_PASSAGES, NUM_PASSAGES_OPTION, check_num_passages
from memlm.api.prompts import approximate_tokens, check_text
from memlm.base.passage_texts import PASSAGE_TOKENS
from memlm.errors import InvalidInput

MAX_MESSAGES = 4096
EARLIER_MESSAGES, EARLIER_CHARACTERS = 3, 300  # of the user, before the last one, and the end of each of them
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")  # as a template writes it between special tokens
TOKENS_OF_A_TURN = 4  # about: those around a message


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: `role` is system, user, assistant, or another that the model's template knows."""

    role: str
    content: str

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_text("role", self.role, field="messages.role")
        check_text("content", self.content, field="messages.content")
        if not ROLE.fullmatch(self.role):
            raise InvalidInput(
                f"role is {self.role!r}; expected system, user, assistant, or another word of letters",
                field="messages.role",
            )


Conversation: TypeAlias = "str | Sequence[Message | Mapping[str, str]]"


@dataclass(frozen=True, slots=True)
class ChatRequest(StreamRequest):
    """The answer to a conversation, rendered by the model's chat template.

    With a `session`, the messages are those that are new: the session holds the earlier ones and the answers.

    Where datastores are searched, `num_passages` passages for the last user message are found in them, and stand before
    it (None: as many as `AnswerRequest` finds, 0: none). The three user messages before that one count less, as it may
    refer to them. The neighbors of tokens are mixed in only with 0, or if `retrieval` says how (`sets_mixture`).
    """

    messages: tuple[Message, ...]
    num_passages: int | None = field(default=None, metadata=NUM_PASSAGES_OPTION)

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        StreamRequest.__post_init__(self)
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            raise InvalidInput(
                f"there are {len(self.messages)} messages; expected 1 to {MAX_MESSAGES}", field="messages"
            )
        check_num_passages(self.num_passages)

    @classmethod
    def of(cls, messages: Conversation | ChatRequest, options: Mapping[str, Any]) -> ChatRequest:
        """Makes one of messages and keyword arguments, or returns a request as it is. Raises InvalidInput."""
        if isinstance(messages, ChatRequest):
            if options:
                raise InvalidInput(f"a ChatRequest takes no options; got {', '.join(options)}", field="messages")
            return messages
        own = {name: value for name, value in options.items() if name == "num_passages"}
        others = {name: value for name, value in options.items() if name not in own}
        return cls(messages_of(messages), **own, **stream_fields(others))

    @property
    def question(self) -> str:
        """The last user message, for which passages are found, "" without one."""
        return next((each.content for each in reversed(self.messages) if each.role == "user"), "")

    @property
    def asked_before(self) -> tuple[str, ...]:
        """The user messages before the last one, the latest first."""
        return tuple(each.content for each in reversed(self.messages) if each.role == "user")[1:]

    @property
    def finds_passages(self) -> bool:
        """Whether passages are to be found, where there is a datastore."""
        return self.retrieval.use_store and self.num_passages != 0 and bool(self.question.strip())

    def asking(self, text: str) -> ChatRequest:
        """The request with another text in the place of its question."""
        place = max(number for number, message in enumerate(self.messages) if message.role == "user")
        before, behind = self.messages[:place], self.messages[place + 1 :]
        return replace(self, messages=(*before, Message("user", text), *behind))

    @property
    def shown_prompt(self) -> str:
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    @property
    def beginning(self) -> str:
        """The messages up to the first one of the user."""
        count = 1 + next((number for number, each in enumerate(self.messages) if each.role == "user"), 0)
        return "\n".join(each.content[:BEGINNING_CHARACTERS] for each in self.messages[:count])

    @property
    def approximate_tokens(self) -> int:
        passages = min(BUDGET, PASSAGE_TOKENS * (self.num_passages or MORE_PASSAGES)) if self.finds_passages else 0
        return passages + sum(TOKENS_OF_A_TURN + approximate_tokens(message.content) for message in self.messages)


def messages_of(given: object) -> tuple[Message, ...]:
    """Messages from objects, from dicts of role and content, or from the text of one user message.

    Raises InvalidInput for anything else.
    """
    if isinstance(given, str):
        return (Message("user", given),)
    if isinstance(given, Mapping | Message) or not isinstance(given, Iterable):
        raise InvalidInput(
            f"messages is of the type {type(given).__name__}; expected a list of messages, or a text", field="messages"
        )
    return tuple(map(_message_of, given))


def _message_of(given: object) -> Message:
    if isinstance(given, Message):
        return given
    if not isinstance(given, Mapping) or set(given) != {"role", "content"}:
        shown = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise InvalidInput(
            f"a message is {shown!r}; expected an object with role and content, and nothing else", field="messages"
        )
    return Message(given["role"], given["content"])
