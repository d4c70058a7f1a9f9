"""Families of chat models, each with its own way to write calls of tools and thoughts."""

from __future__ import annotations

from memlm.api.tools import ReplyFormat

HERMES, CODER, LLAMA, MISTRAL, GEMMA, HARMONY = "hermes", "qwen3_coder", "llama3", "mistral", "gemma", "harmony"
HARMONY_TOKENS = (
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>",
)  # fmt: skip
# The texts of a family's own around its calls. A tokenizer may call them special, and a text would then lack them.
MARKERS = {
    HERMES: ("<tool_call>", "</tool_call>"),
    CODER: ("<tool_call>", "</tool_call>"),
    LLAMA: ("<|python_tag|>",),
    MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    GEMMA: (),
    HARMONY: HARMONY_TOKENS,
}
# What a family's chat template spells, the first that fits.
_SPELLED = (
    (HARMONY, ("<|channel|>",)),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (CODER, ("<function=", "<parameter=")),
    (LLAMA, ("<|python_tag|>",)),
    (LLAMA, ("ipython", '"parameters": ')),
    (GEMMA, ("<start_of_turn>",)),
    (HERMES, ("<tool_call>", "</tool_call>", "arguments")),
)
_OTHERS = ("<arg_key>",)  # GLM has tags of the same name
_THOUGHTS = ("think", "THINK")


def family_of(template: str) -> str | None:
    """The family whose calls a chat template writes, None for another."""
    if any(text in template for text in _OTHERS):
        return None
    return next((name for name, texts in _SPELLED if all(text in template for text in texts)), None)


def thought_of(template: str) -> str:
    """The name of the tags that a thought stands in, "" for a template that knows none."""
    return next((name for name in _THOUGHTS if any(tag in template for tag in tags_of(name))), "")


def tags_of(thought: str) -> tuple[str, str]:
    """The tags before a thought and after it."""
    return ("[THINK]", "[/THINK]") if thought.isupper() else (f"<{thought}>", f"</{thought}>")


def markers_of(reply: ReplyFormat) -> tuple[str, ...]:
    """The texts that must be seen in an answer to read it, although a tokenizer may call them special."""
    return (*MARKERS.get(reply.calls, ()), *(tags_of(reply.thought) if reply.thought else ()))
