"""A request's prompt -> the tokens that a generation reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memlm.api.chat import ChatRequest
from memlm.api.params import GenerateRequest, StreamRequest
from memlm.base.steps import Offload, Steps
from memlm.data.tokenizer import SHORT_CHARACTERS, Tokenizer
from memlm.errors import InvalidInput
from memlm.generation.sessions.files import SessionState
from memlm.model.files.checkpoint import Checkpoint

MESSAGE_CHARACTERS = 128  # of text take as long to encode as a template to write a message


class EncodedPrompt(NamedTuple):
    """The tokens of a request's prompt, and those of its draft, which the text is expected to resemble."""

    ids: Sequence[int]
    expected_ids: Sequence[int] = ()

    def behind(
        self, session: SessionState, request: StreamRequest, tokenizer: Tokenizer, *, as_document: bool
    ) -> list[int]:
        """The tokens that the model reads first: what a session's text left to be read and the prompt, or the prompt in
        its frame, which `as_document` is that of a datastore's documents. Raises InvalidInput if there are none.
        """
        if session.context_ids:
            ids = [*session.pending_ids, *self.ids]
        elif isinstance(request, GenerateRequest) and not request.prompt_token_ids:
            ids = tokenizer.framed(self.ids, as_document=as_document)
        else:
            ids = [*self.ids]
        if not ids:
            raise InvalidInput("the session's text has ended; give a prompt to go on with", field="prompt")
        return ids


def prompt_steps(checkpoint: Checkpoint, request: StreamRequest, session: SessionState) -> Steps[EncodedPrompt]:
    """Encodes a prompt after a session's text, and the request's draft, long ones outside the loop.

    A prompt that is far too long is refused before it is encoded.
    """
    ids = yield from _prompt_ids(checkpoint, request, session)
    return EncodedPrompt(ids, (yield from checkpoint.tokenizer.encode_steps(request.draft)))


def _prompt_ids(checkpoint: Checkpoint, request: StreamRequest, session: SessionState) -> Steps[Sequence[int]]:
    if isinstance(request, ChatRequest):
        return (yield from _conversation_steps(checkpoint, request, session))
    assert isinstance(request, GenerateRequest)
    tokenizer, ids = checkpoint.tokenizer, request.prompt_token_ids
    _check_fits(checkpoint, session.num_read, len(ids) or tokenizer.least_tokens(request.prompt))
    yield from tokenizer.check_ids(ids, "prompt_token_ids")
    return ids or (yield from tokenizer.encode_steps(request.prompt))


def _conversation_steps(checkpoint: Checkpoint, request: ChatRequest, session: SessionState) -> Steps[list[int]]:
    tokenizer, messages = checkpoint.tokenizer, request.messages
    yield from check_conversation(checkpoint, request, session.num_read)

    def encode() -> list[int]:
        return checkpoint.chat_template.encode(messages, tokenizer, continued=session.ends_in_answer)

    if sum(MESSAGE_CHARACTERS + len(message.content) for message in messages) <= SHORT_CHARACTERS:
        return encode()
    encoded: list[int] = yield Offload(encode)
    return encoded


def check_conversation(checkpoint: Checkpoint, request: ChatRequest, num_read: int) -> Steps[None]:
    """Refuses a conversation that is far too long behind `num_read` tokens of a session, and one of a model without a
    template, before anything is encoded.
    """
    least = sum(checkpoint.tokenizer.least_tokens(message.content) for message in request.messages)
    _check_fits(checkpoint, num_read, least)
    # The first time reads the template from the disk, and prepares the tokenizer for renderings.
    yield Offload(lambda: (checkpoint.chat_end_ids, checkpoint.tokenizer.encode_parts(())))


def _check_fits(checkpoint: Checkpoint, num_read: int, least_tokens: int) -> None:
    longest, least = checkpoint.decoder.config.max_length, num_read + least_tokens
    if longest is not None and least > longest:
        raise too_long(f"at least {least:,}", longest)


def too_long(size: str, context: int) -> InvalidInput:
    """The error for a prompt of `size` tokens."""
    return InvalidInput(
        f"the prompt has {size} tokens; the model takes at most {context - 1}: shorten the prompt", field="prompt"
    )


def room_for(checkpoint: Checkpoint, num_positions: int, max_tokens: int | None) -> int:
    """Returns how many tokens may be generated after `num_positions`: `max_tokens`, or all that fit the context."""
    config = checkpoint.decoder.config
    if config.max_length is None:  # Transformer-XL memory takes any length; without a limit, one segment
        return max_tokens or config.context_length
    room = config.max_length - num_positions + 1
    if room < 1:
        raise too_long(str(num_positions - 1), config.max_length)
    if max_tokens is not None and max_tokens > room:
        raise InvalidInput(
            f"max_tokens is {max_tokens}; after a prompt of {num_positions - 1} tokens the context of"
            f" {config.max_length} has room for {room}: ask for at most that, or leave max_tokens out",
            field="max_tokens",
        )
    return max_tokens or room
