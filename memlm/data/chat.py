"""Chat: messages rendered by a model's own template, and the tokens of the result.

A template is a program in Jinja that came with the model (`memlm.data.template_dialect`). Control tokens come from the
template alone: a message that spells one stays plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import nodes

from memlm.api.chat import Message
from memlm.base.texts import read_text
from memlm.data.control_tokens import NONCHARACTERS, RESERVED, Shield, looks_like_markup
from memlm.data.template_dialect import Dialect
from memlm.data.tokenizer import SETTINGS_FILE, Tokenizer, json_of
from memlm.errors import Incompatible, InvalidInput, NotFound

Turn: TypeAlias = "tuple[str, str]"  # role and content

TEMPLATE_FILE = "chat_template.jinja"
GGUF_TEMPLATE = "tokenizer.chat_template"
GGUF_TOKENS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Conversations whose renderings show what a template writes of its own.
PROBED_ROLES = (
    ("user",), ("system", "user", "assistant", "user"), ("developer", "user"), ("user", "assistant", "tool"),
)  # fmt: skip
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
PROBE = re.compile(r"704\d{13}")  # a content that no template writes of its own
LISTED_PROBE = re.compile(r"\{'type': 'text', 'text': '704\d{13}'\}")  # where a list was meant to be a text
SHAPES_KEPT = 64  # sequences of roles whose renderings were checked
# What templates do with a text to look for another in it.
SEARCHES = {
    "count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rpartition",
    "rsplit", "split", "startswith",
}  # fmt: skip


class ChatTemplate:
    """A model's template, and the special tokens that it may name. Raises Incompatible for one that is no template."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source, self.tokens = source, dict(tokens or {})
        self._dialect = Dialect()
        try:
            with self._dialect.allowance():
                self._template = self._dialect.from_string(source)
                self._tree = self._dialect.parse(source)
        except Exception as error:  # of Jinja, and of Python, which compiles what Jinja makes
            raise Incompatible(f"the model's chat template is no Jinja template ({error})") from error
        self._wants_parts = lru_cache(SHAPES_KEPT)(self._find_out_parts)
        self._left_out = lru_cache(SHAPES_KEPT)(self._find_left_out)

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

    def guard(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer, with all that the template writes as control tokens and no text may spell: its own markup,
        whether the tokenizer calls it special or not, and tokens that are reserved.
        """
        own = "\n".join(self._own_texts())
        others = tokenizer.other_added_tokens.items()
        found = {
            text: token_id
            for text, token_id in others
            if looks_like_markup(text) and (text in own or RESERVED.fullmatch(text))
        }
        with suppress(InvalidInput):  # it writes a token that the model does not have
            for token_id in set(tokenizer.encode_special(own)):  # also a token that was never added
                text = tokenizer.text_of(token_id)
                if text in own and text[:1] in "<[" and text[-1:] in ">]" and looks_like_markup(text):
                    found[text] = token_id
        new = {text: token_id for text, token_id in found.items() if text not in tokenizer.control_tokens}
        return tokenizer.with_control_tokens(new) if new else tokenizer

    def _own_texts(self) -> Iterator[str]:
        """The template's own writing: in its source, and in conversations, where it puts tokens together."""
        yield from self.tokens.values()
        yield from self._strings
        for roles in PROBED_ROLES:
            with suppress(InvalidInput):
                yield PROBE.sub("", self._write(_probes(roles), add_generation_prompt=True))

    @cached_property
    def _strings(self) -> frozenset[str]:
        """All texts in the template's source."""
        written = {node.data for node in self._tree.find_all(nodes.TemplateData)}
        return frozenset(written | {value for node in self._tree.find_all(nodes.Const) if (value := _string(node))})

    @cached_property
    def _searched(self) -> frozenset[str]:
        """The texts that the template looks for in messages, such as the end of a thought."""
        places = list[nodes.Node]()
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCHES:
                places += call.args
        for filtered in self._tree.find_all(nodes.Filter):
            places += filtered.args if filtered.name in SEARCHES else []
        for compared in self._tree.find_all(nodes.Compare):
            places += [compared.expr, *(operand.expr for operand in compared.ops)]
        return frozenset(value for place in places if (value := _string(place)))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as one text, with special tokens spelled out.

        With `add_generation_prompt`, it ends where the assistant's next message begins. Raises InvalidInput for no
        messages, for those that the template refuses, such as two of the user in a row, and for any that it would leave
        out.
        """
        return self._checked([(each.role, each.content) for each in messages], add_generation_prompt)

    def _checked(self, turns: Sequence[Turn], add_generation_prompt: bool) -> str:
        if not turns:
            raise InvalidInput("there are no messages; give at least one", field="messages")
        text = self._write(turns, add_generation_prompt)
        self._check_nothing_is_left_out(turns)
        return text

    def _write(self, turns: Sequence[Turn], add_generation_prompt: bool) -> str:
        in_parts = [self._wants_parts(role) for role, _ in turns]
        return self._fill(turns, in_parts, add_generation_prompt)

    def _fill(self, turns: Sequence[Turn], in_parts: Sequence[bool], add_generation_prompt: bool) -> str:
        """Runs the template, on contents that are lists of parts where `in_parts` says so."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if parts else content}
            for (role, content), parts in zip(turns, in_parts, strict=True)
        ]
        given = self.tokens | {"messages": messages, "tools": None, "documents": None}
        try:
            with self._dialect.allowance(sum(len(content) for _, content in turns)):
                return self._template.render(given, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program, and raises what it likes
            raise InvalidInput(f"the model's chat template refuses the messages: {error}", field="messages") from error

    def _find_out_parts(self, role: str) -> bool:
        """Whether the template reads a list of parts where most read a text."""
        before = {"user": (), "assistant": ("user",)}.get(role, ())
        after = () if role in ("user", "assistant") else ("user",)
        turns = _probes((*before, role, *after))
        for in_parts in (False, True):
            given = [self._wants_parts(each) for each in before], [self._wants_parts(each) for each in after]
            with suppress(InvalidInput):
                text = self._fill(turns, [*given[0], in_parts, *given[1]], add_generation_prompt=False)
                if turns[len(before)][1] in LISTED_PROBE.sub("", text):
                    return in_parts
        return False

    def _check_nothing_is_left_out(self, turns: Sequence[Turn]) -> None:
        if (place := self._left_out(tuple(role for role, _ in turns))) is not None:
            raise InvalidInput(
                f"the model's chat template leaves out message {place + 1} of {len(turns)}, whose role is"
                f" {turns[place][0]}; leave it out, or write its text into another message",
                field="messages",
            )

    def _find_left_out(self, roles: tuple[str, ...]) -> int | None:
        """The place of the first message that does not come out, for any content."""
        turns = _probes(roles)
        try:
            text = self._write(turns, add_generation_prompt=False)
        except InvalidInput:  # it reads contents, and refuses these
            return None
        written = set(PROBE.findall(LISTED_PROBE.sub("", text)))
        return next((place for place, (_, content) in enumerate(turns) if content not in written), None)

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        continued: bool = False,
    ) -> list[int]:
        """Token ids of the conversation, by a tokenizer that the template guards. Raises as `render`.

        If it is `continued`, the messages follow an answer of the assistant that was read before, without its end: the
        ids begin with the end of its turn.
        """
        shield = Shield(tokenizer.control_tokens, self._searched, [message.content for message in messages])
        known = KNOWN_ROLES | self._strings
        turns = [(shield.role(each.role, known), shield.content(each.content)) for each in messages]
        if continued:
            text = self._after(shield.answer, turns, add_generation_prompt)
        else:
            text = self._checked(turns, add_generation_prompt)
        return tokenizer.encode_parts([*shield.parts(text)])

    def turn_end_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The control token that the template writes right after an assistant's message, none where it writes none."""
        try:
            text = self._after(NONCHARACTERS[0], (), add_generation_prompt=False)
        except (InvalidInput, Incompatible):
            return ()
        found = [token for token in tokenizer.control_tokens if text.startswith(token)]
        return (tokenizer.control_tokens[max(found, key=len)],) if found else ()

    def _after(self, answer: str, turns: Sequence[Turn], add_generation_prompt: bool) -> str:
        """The template's writing after an assistant's message that is `answer`, and before further messages."""
        whole = [("user", "x"), ("assistant", answer), *turns]
        _, found, after = self._write(whole, add_generation_prompt).partition(answer)
        if not found or answer in after:
            raise Incompatible(
                "the model's chat template does not write an assistant's message once and as it is; chat without a"
                " session, and send the whole conversation"
            )
        self._check_nothing_is_left_out(whole)
        return after


def _probes(roles: Iterable[str]) -> list[Turn]:
    return [(role, f"704{number:013}") for number, role in enumerate(roles)]


def _string(node: nodes.Node) -> str:
    """The text of a literal, "" for anything else."""
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else ""


def _no_template(name: str) -> NotFound:
    return NotFound(
        f"the model {name} has no chat template; use a model that was tuned for chat, or a plain prompt",
        kind="chat_template",
        name=name,
    )


def _content(token: Any) -> str:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    return str(token["content"] if isinstance(token, dict) else token)
