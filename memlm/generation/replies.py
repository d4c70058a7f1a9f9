"""The answer of a chat whose text may hold calls or a thought: the tokens that it shows, and the message it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memlm.api.chat import ChatRequest, Message
from memlm.api.constraint import Constraint
from memlm.api.generation import Token
from memlm.api.params import StreamRequest
from memlm.api.replies.families import markers_of, tags_of
from memlm.api.replies.grammar import forced_calls_grammar
from memlm.api.replies.reading import ReplyReader
from memlm.api.tools import ReplyFormat
from memlm.data.chat import ChatTemplate
from memlm.data.constrained import Matcher, TextForms
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import Checkpoint

TAG_TOKENS = 16  # at the end of a prompt, which may spell the tag before a thought


class Reply:
    """`shown` are the bytes of control tokens that are part of the answer's syntax, and else would be no text."""

    def __init__(self, reply: ReplyFormat, request: ChatRequest, tokenizer: Tokenizer, request_id: str) -> None:
        self.format, self._request = reply, request
        self._reader = ReplyReader(
            reply, request.offered_tools, request_id=request_id, parallel=request.parallel_tool_calls
        )
        known = tokenizer.special_tokens
        self._special = {marker: known[marker] for marker in markers_of(reply) if marker in known}
        self.shown = {token_id: marker.encode() for marker, token_id in self._special.items()}

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

    def matcher(self, forms: TextForms, end_ids: tuple[int, ...]) -> Matcher:
        """Leads the answer of a request that must call a tool. Raises InvalidInput for parameters of a tool that cannot
        be followed.
        """
        request = self._request
        try:
            grammar = forced_calls_grammar(
                self.format,
                request.tools,
                request.tool_choice,
                parallel=request.parallel_tool_calls,
                special=self._special,
            )
            return forms.matcher(Constraint(grammar=grammar), end_ids)
        except (InvalidInput, RecursionError) as error:
            raise InvalidInput(
                f"tool_choice {request.tool_choice!r} cannot be followed, as of the parameters of a tool ({error});"
                " give simpler ones, or tool_choice 'auto'",
                field="tools",
            ) from None

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
