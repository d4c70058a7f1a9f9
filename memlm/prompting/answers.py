"""A question and passages -> an answer, with all passages in one prompt, or from a mixture over prompts of one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from memlm.api.chat import ChatRequest, Message
from memlm.api.generation import Completion
from memlm.api.handles import TokenStream
from memlm.api.options import SamplingOptions
from memlm.api.params import GenerateRequest, StreamRequest
from memlm.api.passages import Passage
from memlm.base.steps import run_steps
from memlm.data.chat import ChatTemplate
from memlm.errors import InvalidInput, NotFound, check_range
from memlm.generation.batch import stream
from memlm.generation.engine import Engine
from memlm.generation.mixture import mixed_stream
from memlm.model.checkpoint import Checkpoint
from memlm.prompting.builder import BuiltPrompt, Part, build_prompt, cited, numbered

BUDGET = 1024  # tokens of a prompt, at most, by default
TASK = "Answer the question from these passages."
MIXED = {*SamplingOptions.__annotations__, "top_logprobs"}  # the options of an answer from a mixture


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the passages that its prompt held, the best first, or had no room for.

    `cited` are the passages that the text names by their numbers. Of a mixture, `prompt` is that of the first passage,
    and `weights` are the probabilities of each passage of `passages`, and last of no passage, given the question and
    the answer.
    """

    text: str
    passages: tuple[Passage, ...]
    left_out: tuple[Passage, ...]
    cited: tuple[Passage, ...]
    prompt: str
    num_prompt_tokens: int
    completion: Completion
    weights: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.text


class _Asking:
    """How a model is asked: by its chat template, or, without one, by a text to continue."""

    def __init__(self, checkpoint: Checkpoint, budget: int | None, max_tokens: int | None) -> None:
        check_range("budget", budget, least=1, whole=True)
        longest, self._tokenizer = checkpoint.decoder.config.max_length, checkpoint.tokenizer
        if budget is None:  # with room for the answer
            budget = BUDGET if longest is None else min(BUDGET, longest - (max_tokens or longest // 4))
        self._budget = budget
        self._template: ChatTemplate | None = None
        with suppress(NotFound):
            self._template = checkpoint.chat_template

    def build(self, question: str, pieces: Sequence[str]) -> BuiltPrompt:
        """The text of a prompt of at most `budget` tokens, those of the template included."""
        asked = question if self._template is not None else f"Question: {question}\nAnswer:"
        parts = [Part("task", (TASK,)), Part("passages", tuple(pieces))] if pieces else []
        built = build_prompt(parts, asked, budget=self._budget, count_tokens=self._num_tokens)
        if pieces and not built.taken["passages"]:  # a task about no passages would mislead
            return replace(self.build(question, ()), taken=built.taken, left_out=built.left_out)
        return built

    def request(self, text: str, options: Mapping[str, Any]) -> StreamRequest:
        """The request for an answer to a prompt."""
        if self._template is None:
            return GenerateRequest.of(text, options)
        return ChatRequest.of(text, options)

    def _num_tokens(self, text: str) -> int:
        if self._template is None:
            return len(self._tokenizer.prompt(text))
        return len(self._template.encode([Message("user", text)], self._tokenizer))


def answer_question(
    engine: Engine,
    question: str,
    passages: Sequence[Passage],
    *,
    budget: int | None = None,
    mixture: bool = False,
    options: Mapping[str, Any],
) -> Answer:
    """Answers a question from passages, given the best first. `options` are those of `chat`.

    All passages that fit stand in one prompt. With `mixture`, each stands in a prompt of its own, and the text is drawn
    from the mixture of the distributions after these and after the bare question. The weight of a passage is
    proportional to 1 / rank, and the bare question ranks last. The default `budget` of a prompt is 1,024 tokens, or as
    many as the context has beside an answer of `max_tokens`, by default a quarter of it. Raises InvalidInput for a
    question that alone exceeds the budget, and for an option that does not go with a mixture.
    """
    asking = _Asking(engine.checkpoint, budget, options.get("max_tokens"))
    if mixture:
        return _mixed(engine, asking, question, passages, options)
    built = asking.build(question, numbered(passages))
    taken = built.taken.get("passages", ())
    events = stream(engine.checkpoint, run_steps(engine.start(asking.request(built.text, options))))
    completion = TokenStream.begin(events).result()
    return Answer(
        text=completion.text,
        passages=tuple(passages[number] for number in taken),
        left_out=tuple(passages[number] for number in built.left_out.get("passages", ())),
        cited=tuple(passages[n - 1] for n in cited(completion.text, len(passages)) if n - 1 in taken),
        prompt=built.text,
        num_prompt_tokens=built.num_tokens,
        completion=completion,
    )


def _mixed(
    engine: Engine, asking: _Asking, question: str, passages: Sequence[Passage], options: Mapping[str, Any]
) -> Answer:
    if refused := [name for name in options if name not in {*MIXED, "store", "exclude_documents"}]:
        raise InvalidInput(
            f"{refused[0]} does not go with a mixture over passages; leave it out, or ask without the mixture",
            field=refused[0],
        )
    built = [asking.build(question, [piece]) for piece in numbered(passages)]
    fits = [prompt.taken["passages"] != () for prompt in built]
    taken = [passage for passage, is_taken in zip(passages, fits, strict=True) if is_taken]
    prompts = [prompt for prompt, is_taken in zip(built, fits, strict=True) if is_taken]
    prompts.append(asking.build(question, ()))
    sampling = {name: value for name, value in options.items() if name in MIXED}
    requests = [asking.request(prompt.text, {**sampling, "use_store": False, "drafts": 0}) for prompt in prompts]
    generations = [run_steps(engine.start(request)) for request in requests]
    ranks, posterior = range(1, len(prompts) + 1), list[float]()
    events = mixed_stream(engine.checkpoint, generations, [1 / rank for rank in ranks], posterior)
    completion = TokenStream.begin(events).result()
    return Answer(
        text=completion.text,
        passages=tuple(taken),
        left_out=tuple(passage for passage, is_taken in zip(passages, fits, strict=True) if not is_taken),
        cited=tuple(passages[n - 1] for n in cited(completion.text, len(passages)) if fits[n - 1]),
        prompt=prompts[0].text,
        num_prompt_tokens=prompts[0].num_tokens,
        completion=completion,
        weights=tuple(posterior),
    )
