"""Events of a generation -> the parts of OpenAI's answers: text, log-probabilities, and the memory's figures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlm.api.generation import Accepted, Finished, FinishReason, Token, Usage
from memlm.api.passages import AnswerPrompt
from memlm.api.scoring import TokenScore
from memlm.server.http.openai import AnswerForm
from memlm.server.http.records import annotations_of, object_of

IMPOSSIBLE = -9999.0  # OpenAI's log-probability of what cannot be, since JSON has no infinity
_REASONS = {
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME: "length",
}
_quoted = json.encoder.encode_basestring_ascii  # what _to_json does to a text
_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # json.dumps would make one each time


@dataclass(slots=True)
class ChoiceAnswer:
    """What has come of one choice, or, in a stream, since its last event."""

    index: int
    form: AnswerForm
    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    memory: dict[str, Any] | None = None
    finish_reason: str | None = None
    _offset: int = 0
    _head: bytes = b""
    _around: tuple[bytes, ...] = ()  # of the text, in an event that shows nothing else
    _prompt: AnswerPrompt | None = None  # that has passages
    _said: list[str] = field(default_factory=list)  # the whole text, behind such a prompt
    _has_echo: bool = False
    _echo_share: float | None = None

    def __post_init__(self) -> None:
        self._head = f'data: {_to_json(self.form.head)[:-1]},"choices":['.encode()  # of every event
        self.clear()
        if self.logprobs is None and self.memory is None:
            content = {"delta": {"content": ""}} if self.form.is_chat else {"text": ""}
            self._around = tuple(self._encoded(content).rsplit(b'""', 1))

    def clear(self) -> None:
        """Forgets the events that were sent."""
        self.text = ""
        if self.form.num_logprobs is not None:
            names = (
                ("content", "refusal")
                if self.form.is_chat
                else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            )
            self.logprobs = {name: [] for name in names}
        self.memory = {"tokens": []} if self.form.shows_memory else None

    def add_echo(self, text: str, scores: Sequence[TokenScore], first: str | None, share: float | None = None) -> None:
        """Adds the prompt. `first` is the text of a first token that is only read, and `share` the searched share."""
        self._has_echo, self._echo_share = True, share
        self.text += text
        if self.logprobs is not None:
            if first is not None:
                self._add_logprob(first, None, None)
            for score in scores:
                top = [(each.text, each.logprob) for each in score.top_logprobs]
                self._add_logprob(score.text, finite(score.logprob), _by_text(top, score.text, score.logprob))

    def add_accepted(self, accepted: Accepted) -> None:
        if accepted.prompt is not None and accepted.prompt.passages:
            self._prompt = accepted.prompt
        if self.memory is not None:
            names = ("seed", "store", "k", "lam", "knn_temperature", "keyed_share")
            self.memory |= {name: getattr(accepted, name) for name in names}
            if accepted.prompt is not None:
                self.memory["passages"] = [object_of(passage) for passage in accepted.prompt.passages]

    def add_tokens(self, tokens: Sequence[Token]) -> None:
        text = "".join([token.text for token in tokens])
        self.text += text
        if self._prompt is not None:
            self._said.append(text)
        self._has_echo = False
        if self.logprobs is not None:
            for token in tokens:
                if self.form.is_chat:
                    self.logprobs["content"].append(_chat_logprob(token))
                else:
                    self._add_logprob(
                        _legacy_text(token.bytes), finite(token.logprob), _top_logprobs(token), len(token.text)
                    )
        if self.memory is not None:
            self.memory["tokens"] += map(_memory_token, tokens)

    def add_finished(self, finished: Finished) -> None:
        self.finish(_REASONS[finished.reason], finished.usage.searched_share)
        if self._has_echo and self.logprobs is not None:
            # Clients that score a prompt ask for one token, and drop the last entry, which is that token's.
            self._add_logprob("", None, None)

    def finish(self, reason: str, share: float | None = None) -> None:
        """Ends the choice. `share` is that of the searches behind the prompt."""
        self.finish_reason = reason
        share = min((each for each in (self._echo_share, share) if each is not None), default=None)
        if self.memory is not None or (share is not None and share < 1):  # which no answer leaves out
            self.memory = {**(self.memory or {}), "searched_share": share}

    def _add_logprob(
        self, text: str, logprob: float | None, top: dict[str, float] | None, size: int | None = None
    ) -> None:
        assert self.logprobs is not None
        for name, value in zip(self.logprobs, (text, logprob, top, self._offset), strict=True):
            self.logprobs[name].append(value)
        self._offset += len(text) if size is None else size

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is no stream."""
        message = {"role": "assistant", "content": self.text, **self._annotations}
        return self._choice({"message": message} if self.form.is_chat else {"text": self.text})

    def event(self, *, first: bool = False) -> bytes:
        """A server-sent event with what has come since the last one."""
        if self._around and self.text and not first and self.finish_reason is None:
            data = _quoted(self.text).encode().join(self._around)  # most events differ from the others in their text
            self.text = ""
            return data
        if self.form.is_chat:
            delta = (
                {"role": "assistant", "content": self.text} if first else {"content": self.text} if self.text else {}
            )
            content: dict[str, Any] = {"delta": {**delta, **self._annotations}}
        else:
            content = {"text": self.text}
        data = self._encoded(content)
        self.clear()
        return data

    def _encoded(self, content: dict[str, Any]) -> bytes:
        return self._head + _to_json(self._choice(content)).encode() + b"]}\n\n"

    @property
    def _annotations(self) -> dict[str, Any]:
        """The sources of an answer that has ended: in a stream they come with its last event, as OpenAI's do."""
        if self._prompt is None or self.finish_reason is None:
            return {}
        return {"annotations": annotations_of(self._prompt, "".join(self._said))}

    @property
    def is_empty(self) -> bool:
        """Whether an event would tell nothing."""
        has_details = self.logprobs is not None or self.memory is not None
        return not self.text and self.finish_reason is None and not has_details

    def _choice(self, content: dict[str, Any]) -> dict[str, Any]:
        logprobs: Any = self.logprobs
        if self.form.is_chat and logprobs is not None:
            logprobs = {"content": logprobs["content"], "refusal": None}
        choice = {"index": self.index, **content, "logprobs": logprobs, "finish_reason": self.finish_reason}
        return choice if self.memory is None else {**choice, "memory": self.memory}


@dataclass(slots=True)
class AnswerUsage:
    """The usage of an answer, of all its choices together."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    searched_share: float | None = None
    drafted: Counter[str] = field(default_factory=Counter)  # by source
    accepted: Counter[str] = field(default_factory=Counter)
    drafts: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0

    def add(self, usage: Usage, *, counts_prompt: bool) -> None:
        """Adds the usage of one choice."""
        self.prompt_tokens += usage.prompt_tokens * counts_prompt
        self.cached_tokens += usage.cached_tokens * counts_prompt
        self.generated_tokens += usage.generated_tokens
        self.steps += usage.steps
        self.add_share(usage.searched_share)
        for each in usage.drafts:
            self.drafted[each.source] += each.drafted
            self.accepted[each.source] += each.accepted
            self.drafts[each.source] += each.drafts

    def add_share(self, share: float | None) -> None:
        """Adds the share of entries that the searches of one choice, or of its prompt, could reach."""
        if share is not None:
            self.searched_share = min(share, 1.0 if self.searched_share is None else self.searched_share)

    def shown(self, *, has_prediction: bool) -> dict[str, Any]:
        """The object `usage`. What came of a prediction is in OpenAI's words, and of all drafts in those of `Usage`."""
        shown: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated_tokens,
            "total_tokens": self.prompt_tokens + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.searched_share is not None and self.searched_share < 1:
            shown["searched_share"] = self.searched_share
        if has_prediction:
            accepted = self.accepted["request"]
            shown["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self.drafted["request"] - accepted,
            }
        if self.drafted:
            shown["steps"] = self.steps
            shown["drafts"] = [
                {
                    "source": source,
                    "drafted": drafted,
                    "accepted": self.accepted[source],
                    "drafts": self.drafts[source],
                }
                for source, drafted in self.drafted.items()
            ]
        return shown


def server_sent(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + _to_json(value).encode() + b"\n\n"


def finite(logprob: float) -> float:
    """A log-probability, as JSON can hold it."""
    return max(IMPOSSIBLE, logprob)


def _memory_token(token: Token) -> dict[str, Any]:
    """The memory's part in a token. `knn_logprob` is null where nothing was retrieved, or no neighbor has the token."""
    return {
        "id": token.id,
        "text": token.text,
        "lam": token.lam,
        "memory_share": token.knn_share,
        "logprob": finite(token.logprob),
        "lm_logprob": finite(token.lm_logprob),
        "knn_logprob": None if token.knn_logprob == -math.inf else token.knn_logprob,
        "neighbors": [object_of(each) for each in token.neighbors],
        "passage_shares": list(token.passage_shares),
    }


def _chat_logprob(token: Token) -> dict[str, Any]:
    entry = _entry(token.bytes.decode(errors="replace"), token.logprob, token.bytes)
    top = [_entry(each.text, each.logprob, each.text.encode()) for each in token.top_logprobs]
    return {**entry, "top_logprobs": top}


def _entry(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


def _top_logprobs(token: Token) -> dict[str, float] | None:
    top = [(each.text, each.logprob) for each in token.top_logprobs]
    return _by_text(top, _legacy_text(token.bytes), token.logprob)


def _by_text(top: Iterable[tuple[str, float]], text: str, logprob: float) -> dict[str, float] | None:
    """The likely tokens by their texts, and the token itself, as OpenAI does. The likeliest of equal texts stays."""
    found = dict[str, float]()
    for each, each_logprob in top:
        found.setdefault(each, finite(each_logprob))
    if found:
        found.setdefault(text, finite(logprob))
    return found or None


def _legacy_text(data: bytes) -> str:
    """A token's text, or its bytes where they are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
