"""A question and passages -> an answer, with all passages in one prompt, or from a mixture over prompts of one each.

A chat is a question behind earlier turns. The steps up to the first token are `start_request`. The server's worker
takes them one a turn, and `stream_request` runs them all at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any

from memlm.api.answers import MAX_QUESTION_CHARACTERS, AnswerRequest, FindPassagesRequest
from memlm.api.chat import EARLIER_CHARACTERS, EARLIER_MESSAGES, ChatRequest, Message
from memlm.api.generation import Accepted, GenerationEvent
from memlm.api.params import GenerateRequest, RetrievalParams, StreamRequest
from memlm.api.passages import BUDGET, AnswerPrompt, Passage
from memlm.base.steps import Offload, Steps, run_steps
from memlm.data.chat import ChatTemplate
from memlm.errors import Incompatible, InvalidInput, NotFound
from memlm.generation.drive import stream
from memlm.generation.engine import Engine
from memlm.generation.generation import Generation
from memlm.generation.mixture import Mixture
from memlm.generation.prompts import check_conversation
from memlm.model.files.checkpoint import Checkpoint
from memlm.prompting.asked_before import user_messages
from memlm.prompting.builder import BuiltPrompt, CountTokens, Part, alone, build_prompt, numbered
from memlm.retrieval.sentences import pointed_out

TASK, TASK_ALONE = "Answer the question from these passages.", "Answer the question from the text."
LABEL = "Question: "


@dataclass(frozen=True, slots=True)
class _Plan:
    """The prompt that an answer reports, and the texts to ask the model: one, or of a mixture several."""

    prompt: AnswerPrompt
    texts: tuple[str, ...]
    is_chat: bool


@dataclass(frozen=True, slots=True)
class Started:
    """A text before its first token, of one generation or of a mixture, and its prompt if that has passages."""

    text: Generation | Mixture
    prompt: AnswerPrompt | None = None

    @property
    def generation(self) -> Generation:
        """The generation that samples."""
        return self.text.leader if isinstance(self.text, Mixture) else self.text

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All rows, to be closed at the end."""
        return self.text.generations if isinstance(self.text, Mixture) else (self.text,)

    @property
    def accepted(self) -> Accepted:
        """The first event."""
        return replace(self.generation.accepted, prompt=self.prompt)


def start_request(
    engine: Engine, request: StreamRequest, *, request_id: str = "", owner: str = "", caller: str = ""
) -> Steps[Started]:
    """Starts any request for a stream of tokens, to be closed at the end. It may go on from texts of its `caller`.
    Raises as `start_answer` does, and `Engine.start`.
    """
    epoch = engine.prefixes.epoch  # before passages are found
    if isinstance(request, AnswerRequest):
        started = yield from start_answer(engine, request, request_id=request_id, owner=owner)
    else:
        started = yield from _start_text(engine, request, request_id=request_id, owner=owner)
    for generation in started.generations:
        generation.caller, generation.epoch = caller, epoch
    return started


def _start_text(engine: Engine, request: StreamRequest, *, request_id: str, owner: str) -> Steps[Started]:
    prompt = None
    if isinstance(request, ChatRequest) and request.finds_passages and len(engine.stores):
        request, prompt = yield from _with_passages(engine, request, owner)
    generation = yield from engine.start(request, request_id=request_id, owner=owner)
    return Started(generation, prompt)


def start_answer(engine: Engine, request: AnswerRequest, *, request_id: str = "", owner: str = "") -> Steps[Started]:
    """Finds the passages, builds the prompts and starts their generations, to be closed at the end.

    All passages that fit stand in one prompt. With `mixture`, each stands in a prompt of its own, and the last prompt
    has none. The default `budget` of a prompt is 1,024 tokens, or as many as the context has beside an answer of
    `max_tokens`, by default a quarter of it. Raises InvalidInput for a question that alone exceeds the budget, and
    NotFound for a name in `exclude_documents` that stands for no document of the datastores with passages, or of those
    that change the probabilities.
    """
    passages: Sequence[Passage] = request.passages
    if passages:
        passages = yield Offload(partial(pointed_out, request.question, request.passages), is_long=True)
    if request.finds_passages:
        with _naming_stores(request, "passages are looked for"):
            search = request.search(engine.answers.num_passages)
            close = request.num_passages is None
            passages = yield from engine.find_passages(search, request.searched_stores, close=close)
    plan: _Plan = yield Offload(partial(_plan, engine, request, passages), is_long=True)
    generations = list[Generation]()
    try:
        for text in plan.texts:
            asked = _request_for(request, text, is_chat=plan.is_chat)
            with _naming_stores(request, "probabilities are taken from"):
                generations.append((yield from engine.start(asked, request_id=request_id, owner=owner)))
        if not request.mixture:
            return Started(generations[0], plan.prompt)
        return Started(Mixture(generations), plan.prompt)
    except BaseException:
        for generation in generations:
            generation.close()
        raise


def stream_request(engine: Engine, request: StreamRequest) -> Generator[GenerationEvent, None, None]:
    """Yields Accepted, with the prompt if that has passages, the tokens, and Finished. Raises as `start_request`."""
    started = run_steps(start_request(engine, request))
    with closing(stream(engine.checkpoint, started.text, engine.prefixes)) as events:
        for event in events:
            yield started.accepted if isinstance(event, Accepted) else event


def _with_passages(engine: Engine, request: ChatRequest, owner: str) -> Steps[tuple[ChatRequest, AnswerPrompt | None]]:
    """The request with passages before its last user message, as many as the context has room for. What `Engine.start`
    refuses for its session, adapter or length is refused before anything is searched or encoded.
    """
    checkpoint, retrieval, session_ids = engine.checkpoint, request.retrieval, tuple[int, ...]()
    engine.sessions.adapter_of(request, owner=owner)
    if request.session is not None:
        session_ids = engine.sessions.state_of(request.session, owner=owner).context_ids
    num_read = len(session_ids)
    yield from check_conversation(checkpoint, request, num_read)
    before: str = yield Offload(partial(_asked_before, checkpoint, request, session_ids), is_long=num_read > 0)
    number = request.num_passages or engine.answers.num_passages
    question = request.question.strip()[-MAX_QUESTION_CHARACTERS:]
    search = FindPassagesRequest(
        question, k=number, exclude_documents=retrieval.exclude_documents, as_of=retrieval.as_of
    )
    close = request.num_passages is None
    passages = yield from engine.find_passages(search, retrieval.names, before=before, close=close)
    if not retrieval.sets_mixture:
        request = replace(request, retrieval=_alone(retrieval))
    if not passages:
        return request, None
    build = partial(_chat_prompt, engine, request, passages, num_read)
    prompt: AnswerPrompt | None = yield Offload(build, is_long=True)
    return (request, None) if prompt is None else (request.asking(prompt.text), prompt)


def _asked_before(checkpoint: Checkpoint, request: ChatRequest, session_ids: Sequence[int]) -> str:
    """The ends of the user messages before the question, to which that may refer, the latest first."""
    asked = [*request.asked_before[:EARLIER_MESSAGES]]
    if session_ids and len(asked) < EARLIER_MESSAGES:
        with suppress(InvalidInput, Incompatible):  # a template that writes no such turn, or not behind a session
            earlier = user_messages(session_ids, checkpoint.chat_template, checkpoint.tokenizer)
            asked += map(_question_of, islice(earlier, EARLIER_MESSAGES - len(asked)))
    return " ".join(text.strip()[-EARLIER_CHARACTERS:] for text in asked if text.strip())


def _question_of(text: str) -> str:
    """The question of a message, which passages stand before."""
    if text.lstrip().startswith(TASK_ALONE):
        return text.rpartition(f"\n\n{LABEL}")[2]
    return text.rpartition("\n\n")[2] if text.lstrip().startswith(TASK) else text


def _chat_prompt(
    engine: Engine, request: ChatRequest, passages: Sequence[Passage], num_read: int
) -> AnswerPrompt | None:
    """The last user message behind the passages that fit into the context, beside the other messages and `num_read`
    tokens of a session. None where the conversation alone does not fit: passages make no chat fail.
    """
    checkpoint, points_out = engine.checkpoint, engine.answers.points_out
    template, tokenizer, longest = checkpoint.chat_template, checkpoint.tokenizer, checkpoint.decoder.config.max_length

    def size(text: str) -> int:
        return len(template.encode([Message("user", text)], tokenizer))

    try:
        whole = len(template.encode(request.messages, tokenizer))
        others, budget = whole - size(request.question), whole + BUDGET  # the other messages are encoded once
        if longest is not None:
            budget = min(budget, longest - num_read - (request.sampling.max_tokens or longest // 4))
            if request.session is not None:  # which keeps the passages: later turns need room too
                budget = min(budget, whole + longest // 4)
        built = _ask(request.question, passages, budget, lambda text: others + size(text), points_out=points_out)
    except InvalidInput:  # too long without passages too, or messages that only a session's text makes a conversation
        return None
    return _prompt_of(built, passages, built.taken["passages"])


@contextmanager
def _naming_stores(request: AnswerRequest, purpose: str) -> Iterator[None]:
    """Says of which of the two lists of datastores an excluded document is unknown, where there are two."""
    try:
        yield
    except NotFound as error:
        if error.kind != "document" or not request.has_two_lists:
            raise
        raise NotFound(
            f"{error}; {purpose} there. Passages and probabilities come from two lists of datastores, and each has to"
            " know every name of exclude_documents: name one list, or set use_store to false",
            kind=error.kind,
            name=error.name,
        ) from None


class _Asking:
    """How a model is asked: by its chat template, or, without one, by a text to continue."""

    def __init__(self, engine: Engine, budget: int | None, max_tokens: int | None) -> None:
        checkpoint, self._points_out = engine.checkpoint, engine.answers.points_out
        longest, self._tokenizer = checkpoint.decoder.config.max_length, checkpoint.tokenizer
        if budget is None:  # with room for the answer
            budget = BUDGET if longest is None else min(BUDGET, longest - (max_tokens or longest // 4))
            if budget < 1:
                raise InvalidInput(
                    f"max_tokens is {max_tokens:,}, and the context has {longest:,} tokens; leave some to the prompt",
                    field="max_tokens",
                )
        self._budget = budget
        self._template: ChatTemplate | None = None
        with suppress(NotFound):
            self._template = checkpoint.chat_template

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def build(self, question: str, passages: Sequence[Passage]) -> BuiltPrompt:
        """The text of a prompt of at most `budget` tokens, those of the template included."""
        asked = question if self._template is not None else f"{LABEL}{question}\nAnswer:"
        return _ask(asked, passages, self._budget, self._num_tokens, points_out=self._points_out)

    def _num_tokens(self, text: str) -> int:
        if self._template is None:
            return len(self._tokenizer.prompt(text))
        return len(self._template.encode([Message("user", text)], self._tokenizer))


def _ask(
    question: str, passages: Sequence[Passage], budget: int, count_tokens: CountTokens, *, points_out: bool
) -> BuiltPrompt:
    """The passages that fit, under their task, and the question. One that is alone stands without a number, with its
    sentence once more behind it if `points_out`.
    """
    if not passages:
        return build_prompt((), question, budget=budget, count_tokens=count_tokens)
    ways = [(TASK, numbered(passages), question)]
    if len(passages) == 1:
        labelled = f"{LABEL}{question.removeprefix(LABEL)}"
        pieces = dict.fromkeys(alone(passages[0], points_out=each) for each in (points_out, False))  # or without it
        ways = [(TASK_ALONE, (piece,), labelled) for piece in pieces]
    for task, texts, asked in ways:
        parts = [Part("task", (task,)), Part("passages", texts)]
        with suppress(InvalidInput):  # too long with its label, which may fit without
            built = build_prompt(parts, asked, budget=budget, count_tokens=count_tokens)
            if built.taken["passages"]:  # a task about no passages would mislead
                return built
    bare = build_prompt((), question, budget=budget, count_tokens=count_tokens)
    return replace(bare, taken={"passages": ()}, left_out={"passages": tuple(range(len(passages)))})


def _prompt_of(built: BuiltPrompt, passages: Sequence[Passage], taken: Sequence[int]) -> AnswerPrompt:
    """What an answer reports of its prompt, and of the passages that were `taken`."""
    return AnswerPrompt(
        text=built.text,
        num_tokens=built.num_tokens,
        passages=tuple(passages[number] for number in taken),
        numbers=tuple(number + 1 for number in taken),
        left_out=tuple(passage for number, passage in enumerate(passages) if number not in taken),
    )


def _plan(engine: Engine, request: AnswerRequest, passages: Sequence[Passage]) -> _Plan:
    asking = _Asking(engine, request.budget, request.sampling.max_tokens)
    if request.mixture:
        each = [asking.build(request.question, [passage]) for passage in passages]
        taken = [number for number, built in enumerate(each) if built.taken["passages"]]
        prompts = [*(each[number] for number in taken), asking.build(request.question, ())]
    else:
        prompts = [asking.build(request.question, passages)]
        taken = [*prompts[0].taken.get("passages", ())]
    return _Plan(_prompt_of(prompts[0], passages, taken), tuple(built.text for built in prompts), asking.is_chat)


def _alone(retrieval: RetrievalParams) -> RetrievalParams:
    """The same without neighbors. The documents that are left out are left out of the passages alone then."""
    return replace(retrieval, use_store=False, exclude_documents=(), as_of=None)


def _request_for(request: AnswerRequest, text: str, *, is_chat: bool) -> StreamRequest:
    """The request for the answer to a prompt. A prompt of a mixture searches no datastore and drafts nothing."""
    options: dict[str, Any] = {each.name: getattr(request, each.name) for each in fields(StreamRequest)}
    if request.mixture:
        options |= {"retrieval": RetrievalParams(use_store=False), "drafts": 0}
    elif not request.mixes_neighbors:
        options["retrieval"] = _alone(request.retrieval)
    return ChatRequest((Message("user", text),), **options) if is_chat else GenerateRequest(text, **options)
