"""Conversations: messages, and the request for an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from memlm.api.params import BEGINNING_CHARACTERS, StreamRequest, stream_fields
from memlm.api.passages import BUDGET, MORE_PASSAGES, NUM_PASSAGES_OPTION, check_num_passages
from memlm.api.prompts import approximate_tokens, check_text
from memlm.api.tools import (
    EFFORTS,
    MAX_CALLS,
    Tool,
    ToolCall,
    calls_of,
    check_call_id,
    check_template_options,
    check_tools,
    tools_of,
)
from memlm.base.passage_texts import PASSAGE_TOKENS
from memlm.errors import InvalidInput

MAX_MESSAGES = 4096
EARLIER_MESSAGES, EARLIER_CHARACTERS = 3, 300  # of the user, before the last one, and the end of each of them
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")  # as a template writes it between special tokens
TOKENS_OF_A_TURN = 4  # about: those around a message


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: `role` is system, user, assistant, tool, or another that the model's template knows.

    An assistant's message may have `tool_calls`, beside a content or instead of it, and the `reasoning` before it. The
    result of a call is a message of the role tool: its content is the result, `tool_call_id` the call's id, and
    `name` the tool's.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_text("role", self.role, field="messages.role")
        check_text("content", self.content, field="messages.content")
        if not ROLE.fullmatch(self.role):
            raise InvalidInput(
                f"role is {self.role!r}; expected system, user, assistant, or another word of letters",
                field="messages.role",
            )
        check_call_id(self.tool_call_id, field="messages.tool_call_id")
        check_text("name", self.name, field="messages.name")
        check_text("reasoning", self.reasoning, field="messages.reasoning")
        if self.tool_calls and self.role != "assistant":
            raise InvalidInput(
                f"tool_calls are given with the role {self.role}; expected the role assistant",
                field="messages.tool_calls",
            )
        if len(self.tool_calls) > MAX_CALLS:
            raise InvalidInput(
                f"a message has {len(self.tool_calls)} tool_calls; at most {MAX_CALLS}", field="messages.tool_calls"
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that a template may write of it."""
        calls = (text for call in self.tool_calls for text in (call.id, call.name, call.arguments))
        return (self.content, self.reasoning, self.tool_call_id, self.name, *calls)


Conversation: TypeAlias = "str | Sequence[Message | Mapping[str, Any]]"
# The fields of a message as a dict: those of `Message`, and `reasoning` as servers call it.
_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"})
_OWN = frozenset(
    {"num_passages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "template_options"}
)


@dataclass(frozen=True, slots=True)
class ChatRequest(StreamRequest):
    """The answer to a conversation, rendered by the model's chat template.

    With a `session`, the messages are those that are new: the session holds the earlier ones and the answers.

    Where datastores are searched, `num_passages` passages for the last user message are found in them, and stand before
    it (None: as many as `AnswerRequest` finds, 0: none). The three user messages before that one count less, as it may
    refer to them. The neighbors of tokens are mixed in only with 0, or if `retrieval` says how (`sets_mixture`).

    The model may call one of `tools`, several at once unless `parallel_tool_calls` is false. `tool_choice` is auto,
    none (as if there were no tools), required (it calls at least one), or the name of the tool that it calls.
    `reasoning_effort` and `template_options` are variables of the chat template, without effect where it reads none of
    them.
    """

    messages: tuple[Message, ...]
    num_passages: int | None = field(default=None, metadata=NUM_PASSAGES_OPTION)
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        StreamRequest.__post_init__(self)
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            raise InvalidInput(
                f"there are {len(self.messages)} messages; expected 1 to {MAX_MESSAGES}", field="messages"
            )
        check_num_passages(self.num_passages)
        check_tools(self.tools, self.tool_choice)
        check_template_options(self.template_options)
        if self.constraint.name and self.offered_tools and self.tool_choice != "auto":
            raise InvalidInput(
                f"{self.constraint.name} is given with the tool_choice {self.tool_choice!r}, which leaves no content to"
                " have a form; leave out one",
                field=self.constraint.name,
            )
        if self.reasoning_effort is not None and self.reasoning_effort not in EFFORTS:
            raise InvalidInput(
                f"reasoning_effort is {self.reasoning_effort!r}; expected one of {', '.join(EFFORTS)}",
                field="reasoning_effort",
            )

    @classmethod
    def of(cls, messages: Conversation | ChatRequest, options: Mapping[str, Any]) -> ChatRequest:
        """Makes one of messages and keyword arguments, or returns a request as it is. Raises InvalidInput."""
        if isinstance(messages, ChatRequest):
            if options:
                raise InvalidInput(f"a ChatRequest takes no options; got {', '.join(options)}", field="messages")
            return messages
        own = {name: value for name, value in options.items() if name in _OWN}
        others = {name: value for name, value in options.items() if name not in own}
        if "tools" in own:
            own["tools"] = tools_of(own["tools"])
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
        return passages + TOKENS_OF_A_TURN * len(self.messages) + sum(map(approximate_tokens, self.texts))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that a template may write of it."""
        messages = (text for message in self.messages for text in message.texts)
        return (*messages, *(json.dumps(tool.as_function) for tool in self.offered_tools))

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is given."""
        return () if self.tool_choice == "none" else self.tools


@dataclass(frozen=True, slots=True)
class CountTokensRequest(ChatRequest):
    """How many tokens the model would read for a chat, its passages and its template included. Nothing is generated."""

    @classmethod
    def before(cls, chat: ChatRequest) -> CountTokensRequest:
        """The request for the tokens of a chat."""
        return cls(**{each.name: getattr(chat, each.name) for each in fields(chat)})


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
    needed = {"role"} if isinstance(given, Mapping) and given.get("tool_calls") else {"role", "content"}
    if not isinstance(given, Mapping) or not needed <= set(given) <= _KEYS:
        shown = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise InvalidInput(
            f"a message is {shown!r}; expected an object with role and content, or with tool_calls, and no others but"
            f" {', '.join(sorted(_KEYS - {'role', 'content', 'tool_calls'}))}",
            field="messages",
        )
    calls = calls_of(given.get("tool_calls") or ())
    return Message(
        given["role"],
        "" if calls and given.get("content") is None else given["content"],
        calls,
        given.get("tool_call_id") or "",
        given.get("name") or "",
        given.get("reasoning") or given.get("reasoning_content") or "",
    )
