"""The answer of a chat whose text may hold calls or a thought: the tokens that it shows, and the message it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memlm.api.chat import ChatRequest, Message
from memlm.api.constraint import MAX_CHARACTERS, Constraint
from memlm.api.generation import Token
from memlm.api.params import StreamRequest
from memlm.api.replies.families import markers_of, tags_of
from memlm.api.replies.grammar import reply_grammar
from memlm.api.replies.reading import ReplyReader
from memlm.api.tools import ReplyFormat
from memlm.data.chat import ChatTemplate
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import Checkpoint

TAG_TOKENS = 16  # at the end of a prompt, which may spell the tag before a thought


class Reply:
    """`shown` are the bytes of control tokens that are part of the answer's syntax, and else would be no text."""

    def __init__(self, reply: ReplyFormat, request: ChatRequest, tokenizer: Tokenizer, request_id: str) -> None:
        self.format, self._control = reply, tokenizer.special_tokens
        self._reader = ReplyReader(
            reply, request.offered_tools, request_id=request_id, parallel=request.parallel_tool_calls
        )
        ids = {marker: tokenizer.special_tokens.get(marker) for marker in markers_of(reply)}
        self.shown = {token_id: marker.encode() for marker, token_id in ids.items() if token_id is not None}

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, request: StreamRequest, prompt_ids: Sequence[int], request_id: str
    ) -> Reply | None:
        """None where the answer is all content."""
        if not isinstance(request, ChatRequest):
            return None
        template, tokenizer = checkpoint.chat_template, checkpoint.tokenizer
        found = template.reply_format(
            has_tools=bool(request.offered_tools), in_thought=_ends_in_tag(template, tokenizer, prompt_ids)
        )
        return None if found is None else cls(found, request, tokenizer, request_id)

    def constraint_of(self, request: StreamRequest) -> tuple[Constraint, str]:
        """The form of the whole answer, with the syntax of its calls and its thought, and the field that asks for it,
        "" where none does. A grammar is the whole answer's: raises InvalidInput where the prompt has begun a thought.
        """
        assert isinstance(request, ChatRequest)
        form, tools = request.constraint, request.offered_tools
        must_call = bool(tools) and request.tool_choice != "auto"
        if form.grammar and self.format.in_thought:
            raise InvalidInput(
                "grammar is given, and the model begins with a thought, which the grammar would have to hold; turn it"
                " off by a variable of its template (as enable_thinking), or give a regex or a json_schema",
                field="grammar",
            )
        if form.grammar or not (must_call or form.name):
            return form, form.name
        grammar = reply_grammar(
            self.format, tools, request.tool_choice, parallel=request.parallel_tool_calls, special=self._control,
            form=None if must_call else form,
        )  # fmt: skip
        if tools and len(grammar) > MAX_CHARACTERS:
            raise InvalidInput(
                f"the schemas of the tools to call have {len(grammar):,} characters; expected at most"
                f" {MAX_CHARACTERS:,}: offer fewer tools, or name one by tool_choice",
                field="tools",
            )
        return Constraint(grammar=grammar), "tools" if must_call else form.name

    def add(self, tokens: Iterable[Token]) -> None:
        """Reads more of the answer."""
        self._reader.feed("".join(token.text for token in tokens))

    def finish(self) -> Message:
        """The answer, after its last token."""
        self._reader.finish()
        return self._reader.message


def _ends_in_tag(template: ChatTemplate, tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    thought = template.thought
    end = "".join(map(tokenizer.text_of, ids[-TAG_TOKENS:])).rstrip() if thought else ""
    return bool(thought) and end.endswith(tags_of(thought)[0])
