"""The grammar of a forced call compiles, holds the families' own texts, and allows nothing that is read as no call."""

import json
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import PreTrainedTokenizerFast

from memlm.api.replies.families import HARMONY_TOKENS, MARKERS, markers_of
from memlm.api.replies.grammar import reply_grammar
from memlm.api.replies.reading import read_reply
from memlm.api.tools import ReplyFormat, Tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
}
TOOLS = (Tool("weather", "", SCHEMA), Tool("get.time-2"))
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome <b>\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
    '<parameter=at>\n{"x": true}\n</parameter>\n</function>\n</tool_call>'
)
LLAMA = '{"name": "weather", "parameters": {"city": "Rome", "unit": "C"}}'
HARMONY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "unit": "C"}'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
THINKS, THINKING = ReplyFormat("hermes", "think"), ReplyFormat("hermes", "think", in_thought=True)
CASES = [
    (ReplyFormat("hermes"), (), HERMES, 1),
    (ReplyFormat("hermes"), (), f"{HERMES}\n{HERMES}", 2),
    (ReplyFormat("hermes"), ("<tool_call>", "</tool_call>"), f"{HERMES}\n{HERMES}", 2),
    (THINKS, (), f"<think>\nhm\n</think>\n\n{HERMES}", 1),
    (THINKS, (), HERMES, 1),
    (THINKING, (), f"hm </thin\n</think>\n\n{HERMES}", 1),
    (THINKING, ("<think>", "</think>"), f"hm\n</think>\n\n{HERMES}", 1),
    (ReplyFormat("qwen3_coder"), (), f"{CODER}\n{CODER}", 2),
    (ReplyFormat("llama3"), (), f"{LLAMA}; {LLAMA}", 2),
    (ReplyFormat("gemma"), (), LLAMA, 1),
    (ReplyFormat("gemma"), (), f"[{LLAMA}, {LLAMA}]", 2),
    (ReplyFormat("mistral"), (), f'[TOOL_CALLS][{LLAMA.replace("parameters", "arguments")}]', 1),
    (ReplyFormat("mistral"), MARKERS["mistral"], '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "unit": "F"}' * 2, 2),
    (ReplyFormat("harmony"), (), HARMONY, 1),
    (ReplyFormat("harmony"), HARMONY_TOKENS, HARMONY, 1),
    (ReplyFormat("harmony"), HARMONY_TOKENS, THOUGHT + HARMONY, 1),
]  # fmt: skip


class Guide:
    """A tokenizer of bytes with some special tokens, and texts led by a grammar."""

    def __init__(self, grammar: str, special: tuple[str, ...], tokenizer: Any) -> None:
        backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
        backend.add_special_tokens([*special])
        self.backend, self.ids = backend, {text: backend.token_to_id(text) for text in special}
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
        self._tokenizer = from_tokenizer(fast)
        self.grammar = grammar

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        found = llguidance.LLMatcher(self._tokenizer, grammar)
        assert not found.get_error(), found.get_error()
        return found

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether a text is whole by the grammar."""
        matcher = self.matcher(grammar)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def invent(self, grammar: str, seed: int, most: int) -> tuple[str, bool]:
        """A text of tokens drawn among those that the grammar allows, and whether it is whole."""
        matcher, generator, text = self.matcher(grammar), np.random.default_rng(seed), b""
        mask = allocate_token_bitmask(1, self._tokenizer.vocab_size)
        special = {number: name for name, number in self.ids.items()}
        for _ in range(most):
            if matcher.is_accepting():
                return text.decode(errors="replace"), True
            fill_next_token_bitmask(matcher, mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._tokenizer.vocab_size]
            allowed = np.flatnonzero(bits)
            token_id = int(generator.choice(allowed))
            matcher.consume_token(token_id)
            shown = special.get(token_id)
            text += shown.encode() if shown else bytes(self.decode(token_id))
        return text.decode(errors="replace"), False

    def decode(self, token_id: int) -> bytes:
        return bytes(self._tokenizer.decode_bytes([token_id]))


@pytest.mark.parametrize(("reply", "special", "text", "count"), CASES)
def test_the_familys_own_text_is_of_the_grammar_and_is_read(tokenizer, reply, special, text, count):
    guide = Guide("", special, tokenizer)
    for choice in ("required", "weather"):
        grammar = reply_grammar(reply, TOOLS, choice, special=guide.ids)
        assert guide.accepts(grammar, text) == (choice == "required" or (count == 1 and not text.startswith("[{")))
    calls = read_reply(text, reply, TOOLS).tool_calls
    assert [call.name for call in calls] == ["weather"] * count
    assert all(json.loads(call.arguments)["city"].startswith("Rome") for call in calls)
    other = reply_grammar(reply, TOOLS, "get.time-2", special=guide.ids)
    assert not guide.accepts(other, text)
    alone = reply_grammar(reply, TOOLS, "required", parallel=False, special=guide.ids)
    assert guide.accepts(alone, text) == (count == 1 and not text.startswith("[{"))


@pytest.mark.parametrize(("reply", "special", "text", "count"), CASES)
def test_what_breaks_the_schema_is_not_of_the_grammar(tokenizer, reply, special, text, count):
    guide = Guide("", special, tokenizer)
    grammar = reply_grammar(reply, TOOLS, "required", special=guide.ids)
    for change in (("Rome", 'Rome", "a": "b'), ("city", "town"), ("weather", "rm"), ('"C"', '"K"'), ("\nC\n", "\nK\n")):
        broken = text.replace(*change)
        assert broken == text or ("parameter" in text and change[0] == "Rome") or not guide.accepts(grammar, broken)
    assert not guide.accepts(grammar, "Hi")
    assert not guide.accepts(grammar, "")


@pytest.mark.parametrize(
    ("reply", "is_special"),
    [*((reply, each) for reply in (*map(ReplyFormat, MARKERS), THINKS) for each in (False, True)), (THINKING, True)],
)
def test_a_text_that_the_grammar_leads_is_read_as_calls(tokenizer, reply, is_special):
    """Of drawn tokens: such a text is as odd as any that the grammar allows."""
    guide = Guide("", markers_of(reply) if is_special else (), tokenizer)
    simple = Tool("weather", "", {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9}},
                                  "required": ["days"], "additionalProperties": False})  # fmt: skip
    tools, whole = (simple, Tool("open", "", {"properties": {}, "additionalProperties": False})), 0
    grammar = reply_grammar(reply, tools, "required", special=guide.ids)
    for seed in range(40):
        text, is_whole = guide.invent(grammar, seed, 400)
        whole += is_whole
        if is_whole:
            message = read_reply(text, reply, tools)
            assert message.tool_calls, text
            assert message.content == "", text
    assert whole >= 10
