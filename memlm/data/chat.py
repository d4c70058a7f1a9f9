"""Chat: messages rendered by a model's own template, and the tokens of the result.

A template is a program in Jinja that came with the model. It runs in Jinja's sandbox, in the dialect that Hugging Face
templates are written in. Special tokens come from the template alone: a message that spells one stays plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from memlm.api.chat import Message
from memlm.base.texts import read_text
from memlm.data.template_dialect import Dialect
from memlm.data.tokenizer import SETTINGS_FILE, Tokenizer, json_of
from memlm.errors import Incompatible, InvalidInput, NotFound

TEMPLATE_FILE = "chat_template.jinja"
GGUF_TEMPLATE = "tokenizer.chat_template"
GGUF_TOKENS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Noncharacters of Unicode: no text means them. One that a conversation does not contain splits special tokens in it.
BREAKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ChatTemplate:
    """A model's template, and the special tokens that it may name. Raises Incompatible for one that is no template."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source, self.tokens = source, dict(tokens or {})
        self._dialect = Dialect()
        try:
            with self._dialect.allowance():
                self._template = self._dialect.from_string(source)
        except Exception as error:  # of Jinja, and of Python, which compiles what Jinja makes
            raise Incompatible(f"the model's chat template is no Jinja template ({error})") from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The template of a model's folder. Raises NotFound where it has none."""
        settings = json_of(folder / SETTINGS_FILE)
        source = settings.get("chat_template")
        if (file := folder / TEMPLATE_FILE).is_file():
            source = read_text(file)
        if isinstance(source, list):  # several with names, of which one is the default
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise _no_template(folder.name)
        tokens = {name: _content(settings[name]) for name in NAMED_TOKENS if settings.get(name)}
        return cls(source, tokens)

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any], name: str) -> ChatTemplate:
        """The template of a GGUF file's metadata; `name` is the file. Raises NotFound where it has none."""
        source, texts = metadata.get(GGUF_TEMPLATE), metadata.get("tokenizer.ggml.tokens", ())
        if not isinstance(source, str):
            raise _no_template(name)
        ids = {token: metadata.get(f"tokenizer.ggml.{key}_token_id") for token, key in GGUF_TOKENS.items()}
        tokens = {token: texts[place] for token, place in ids.items() if place is not None and place < len(texts)}
        return cls(source, tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as one text, with special tokens spelled out.

        With `add_generation_prompt`, it ends where the assistant's next message begins. Raises InvalidInput for no
        messages, and for what the template refuses, such as two user messages in a row.
        """
        if not messages:
            raise InvalidInput("there are no messages; give at least one", field="messages")
        return self._render(messages, add_generation_prompt=add_generation_prompt)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        given = self.tokens | {"messages": turns, "tools": None, "documents": None}
        try:
            with self._dialect.allowance(sum(len(message.content) for message in messages)):
                return self._template.render(given, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program, and raises what it likes
            raise InvalidInput(f"the model's chat template refuses the messages: {error}", field="messages") from error

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        continued: bool = False,
    ) -> list[int]:
        """Token ids of the conversation. Raises as `render`.

        If it is `continued`, the messages follow an answer of the assistant that was read before, without its end: the
        ids begin with the end of its turn.
        """
        contents = "".join(message.content for message in messages)
        breaker, answer = _absent(contents, 2)
        render = partial(self._after if continued else self.render, add_generation_prompt=add_generation_prompt)
        if continued:
            render = partial(render, answer)
        spelled = [token for token in tokenizer.special_tokens if token in contents]
        if not spelled:
            return tokenizer.encode_special(render(messages))
        pattern = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))))

        def broken(text: str) -> str:
            return pattern.sub(lambda found: found[0][0] + breaker + found[0][1:], text)

        turns = [Message(message.role, broken(message.content)) for message in messages]
        return _encode_between(render(turns), breaker, tokenizer)

    def turn_end_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The special token that the template writes right after an assistant's message, none where it writes none."""
        (answer,) = _absent("", 1)
        try:
            text = self._after(answer, (), add_generation_prompt=False)
        except (InvalidInput, Incompatible):
            return ()
        found = [token for token in tokenizer.special_tokens if text.startswith(token)]
        return (tokenizer.special_tokens[max(found, key=len)],) if found else ()

    def _after(self, answer: str, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """What the template writes after an assistant's message that is `answer`, and before further messages."""
        turns = [Message("user", "x"), Message("assistant", answer), *messages]
        _, found, after = self._render(turns, add_generation_prompt=add_generation_prompt).partition(answer)
        if not found or answer in after:
            raise Incompatible(
                "the model's chat template does not write an assistant's message once and as it is; chat without a"
                " session, and send the whole conversation"
            )
        return after


def _absent(text: str, count: int) -> list[str]:
    """Characters that are not in a text. Raises InvalidInput where too few are left."""
    absent = [each for each in BREAKERS if each not in text][:count]
    if len(absent) < count:
        raise InvalidInput("the messages contain the noncharacters of Unicode; leave them out", field="messages")
    return absent


def _no_template(name: str) -> NotFound:
    return NotFound(
        f"the model {name} has no chat template; use a model that was tuned for chat, or a plain prompt",
        kind="chat_template",
        name=name,
    )


def _encode_between(text: str, breaker: str, tokenizer: Tokenizer) -> list[int]:
    """Special tokens as themselves, and the text between them as plain text without the breakers."""
    tokens = tokenizer.special_tokens
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")
    ids = list[int]()
    for piece in pattern.split(text):
        if piece in tokens:
            ids.append(tokens[piece])
        elif piece:
            ids += tokenizer.encode(piece.replace(breaker, "")).tolist()
    return ids


def _content(token: Any) -> str:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    return str(token["content"] if isinstance(token, dict) else token)
