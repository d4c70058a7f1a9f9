"""The requests that find passages for a question and answer it from them, and the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from memlm.api.datastores import AS_OF_OPTION, DOCUMENTS_OPTION, NAMES, WHERE_OPTION, as_filters, document_filter
from memlm.api.generation import Completion
from memlm.api.html import completion_html
from memlm.api.params import MAX_STORES, RetrievalParams, StreamRequest, stream_fields
from memlm.api.passages import (
    BUDGET,
    MAX_PASSAGES,
    MORE_PASSAGES,
    NUM_PASSAGES_OPTION,
    PASSAGES,
    AnswerPrompt,
    Passage,
    PassagesBy,
    Sentence,
    check_num_passages,
)
from memlm.api.prompts import approximate_tokens, check_text
from memlm.api.request import Request
from memlm.base.lists import check_list, items_of
from memlm.base.options import option
from memlm.base.passage_texts import PASSAGE_TOKENS
from memlm.base.storable import problem_in
from memlm.errors import InternalError, InvalidInput, check_choice, check_range
from memlm.index.store.filters import DocumentFilter, as_of_day

MAX_QUESTION_CHARACTERS = 1 << 16
MAX_PASSAGE_CHARACTERS = 1 << 18  # of all passages of one answer
MAX_BUDGET = 1 << 20  # tokens of a prompt, at most

# Of a mixture: the request's own fields, and those that have an effect there.
_MIXED = {"sampling", "retrieval", "top_logprobs", "resume_s"}
_MIXED_RETRIEVAL = {"store", "stores", "use_store", "exclude_documents", "as_of"}


@dataclass(frozen=True, slots=True)
class FindPassagesRequest(Request[tuple[Passage, ...]]):
    """Finds the `k` passages of datastores that are likeliest to answer a question, the best first.

    `store=None` searches all loaded datastores as if they were one. `documents`, `where` and `as_of` choose documents,
    as in a `SearchRequest`. `exclude_documents` are left out as if they were deleted.
    """

    question: str = field(metadata=option("The question, or other text."))
    store: str | None = field(
        default=None, metadata=option("Search this loaded datastore.", "--store-name", metavar="NAME", default="all")
    )
    k: int = field(default=8, metadata=option("Passages to show."))
    by: PassagesBy = field(
        default=PassagesBy.AUTO,
        metadata=option(
            "words: BM25. meaning: vectors of the encoder. auto: both, or words without one.",
            metavar="auto|words|meaning",
        ),
    )
    documents: tuple[str, ...] = field(default=(), metadata=DOCUMENTS_OPTION)
    where: tuple[str, ...] = field(default=(), metadata=WHERE_OPTION)
    exclude_documents: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Leave out documents with this id, in this folder, or matching this glob. Repeatable.",
            "--exclude-document", metavar="ID|FOLDER|GLOB", panel="Filters",
        ),
    )  # fmt: skip
    as_of: str | None = field(default=None, metadata=AS_OF_OPTION)

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        RetrievalParams(store=self.store, k=self.k, exclude_documents=self.exclude_documents)
        object.__setattr__(self, "as_of", as_of_day(self.as_of))
        check_choice("by", self.by, PassagesBy)
        object.__setattr__(self, "by", PassagesBy(self.by))
        _check_question(self.question)
        self.only  # noqa: B018 - raises for a wrong one

    @property
    def only(self) -> DocumentFilter:
        """The documents to look at."""
        return document_filter(self.documents, self.where)

    @classmethod
    def of(cls, question: str, **options: Any) -> FindPassagesRequest:
        """Makes one of keyword arguments, in which `documents` and `exclude_documents` may be one string, and `where`
        values by field.
        """
        excluded = items_of("exclude_documents", options.pop("exclude_documents", ()), expected=NAMES, one=True)
        return cls(question, exclude_documents=excluded, **as_filters(options))


@dataclass(frozen=True, slots=True)
class AnswerRequest(StreamRequest):
    """Answers a question from passages.

    `passages` are given, the best first, or else `num_passages` are found, `passages_by` auto, words or meaning, in
    `passage_stores`, by default in the datastores of `retrieval`, or in all. None are 1, or 4 for a model of a billion
    parameters and for a mixture. `exclude_documents` and `as_of` hold for these passages too. Those that fit into
    `budget` tokens stand in the prompt. The model reads them alone: the neighbors of tokens are mixed in only if
    `retrieval` says how (`sets_mixture`).

    With `mixture`, each passage stands in a prompt of its own, and the distributions are mixed token by token, without
    a datastore (REALM, arXiv 2002.08909). Of the other fields, only sampling, `top_logprobs`, `resume_s`, the names of
    datastores and of excluded documents, and `as_of` go with it.
    """

    question: str = field(metadata=option("The question."))
    passages: tuple[Passage, ...] = ()
    num_passages: int | None = field(default=None, metadata=NUM_PASSAGES_OPTION)
    passages_by: PassagesBy = field(
        default=PassagesBy.AUTO,
        metadata=option(
            "words: BM25. meaning: vectors of the encoder. auto: both, or words without one.", "--by",
            metavar="auto|words|meaning", panel=PASSAGES,
        ),
    )  # fmt: skip
    passage_stores: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Find passages in this loaded datastore. Repeatable.", "--passages-from", metavar="NAME", panel=PASSAGES,
            default="those that are searched",
        ),
    )  # fmt: skip
    budget: int | None = field(
        default=None,
        metadata=option(
            "Tokens of a prompt, at most.", panel=PASSAGES, default=f"{BUDGET}, or the room in the context"
        ),
    )
    mixture: bool = field(
        default=False, metadata=option("Mix the answers to prompts of one passage each.", panel=PASSAGES)
    )

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        StreamRequest.__post_init__(self)
        _check_question(self.question)
        _check_passages(self.passages)
        check_num_passages(self.num_passages)
        if self.passages and self.num_passages is not None:
            raise InvalidInput("num_passages is given with passages; leave out one", field="num_passages")
        check_choice("passages_by", self.passages_by, PassagesBy)
        object.__setattr__(self, "passages_by", PassagesBy(self.passages_by))
        _check_stores(self.passage_stores)
        check_range("budget", self.budget, least=1, most=MAX_BUDGET, whole=True)
        if self.mixture:
            self._check_mixture()

    @classmethod
    def of(
        cls,
        question: str | AnswerRequest,
        passages: Sequence[Passage] | None,
        settings: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> AnswerRequest:
        """Makes one of the arguments of `answer`, or returns a request as it is. No passages are found where `passages`
        is an empty list. `settings` are fields of this class, and `options` those of `chat`. Raises InvalidInput, also
        for anything beside a request.
        """
        if isinstance(question, AnswerRequest):
            plain = {each.name: each.default for each in fields(cls)}
            given = [*options, *(name for name, value in settings.items() if value != plain[name])]
            if given or passages is not None:
                raise InvalidInput(
                    f"an AnswerRequest takes no options; put {(*given, 'passages')[0]} into it", field="question"
                )
            return question
        own = dict(settings)
        if passages is not None and not passages:
            if own.get("num_passages"):
                raise InvalidInput("num_passages is given with passages; leave out one", field="num_passages")
            own["num_passages"] = 0
        if passages is not None:
            check_list("passages", passages, Passage, expected="passages")
        return cls(question, tuple(passages or ()), **own, **stream_fields(options))

    @property
    def finds_passages(self) -> bool:
        """Whether passages are to be found."""
        return not self.passages and self.num_passages != 0

    @property
    def searched_stores(self) -> tuple[str, ...]:
        """The names of the datastores to find passages in, or none for all."""
        return self.passage_stores or self.retrieval.names

    @property
    def mixes_neighbors(self) -> bool:
        """Whether the neighbors of tokens change the probabilities: only behind no passages, or where asked for."""
        has_passages = bool(self.passages) or self.num_passages != 0
        return self.retrieval.sets_mixture or (self.retrieval.use_store and not has_passages)

    @property
    def has_two_lists(self) -> bool:
        """Whether datastores change the probabilities, and others are named for passages."""
        return self.mixes_neighbors and not self.mixture and {*self.searched_stores} != {*self.retrieval.names}

    def search(self, default: int) -> FindPassagesRequest:
        """The request for its passages, less the datastores, with the number that is found by default. A mixture needs
        several, of which each has its own prompt.
        """
        default = MORE_PASSAGES if self.mixture else default
        return FindPassagesRequest(
            self.question,
            k=default if self.num_passages is None else self.num_passages,
            by=self.passages_by,
            exclude_documents=self.retrieval.exclude_documents,
            as_of=self.retrieval.as_of,
        )

    @property
    def shown_prompt(self) -> str:
        return self.question

    @property
    def approximate_tokens(self) -> int:
        question, given = (
            approximate_tokens(self.question),
            sum(approximate_tokens(each.text) for each in self.passages),
        )
        count = len(self.passages) or (MORE_PASSAGES if self.num_passages is None else self.num_passages)
        passages = given or PASSAGE_TOKENS * count
        if self.mixture:
            return question * (count + 1) + passages
        return min(self.budget or BUDGET, question + passages)

    def _check_mixture(self) -> None:
        plain = StreamRequest()
        wrong = [name for name in _names(StreamRequest, _MIXED) if getattr(self, name) != getattr(plain, name)]
        wrong += [
            name
            for name in _names(RetrievalParams, _MIXED_RETRIEVAL)
            if getattr(self.retrieval, name) != getattr(plain.retrieval, name)
        ]
        if wrong:
            raise InvalidInput(
                f"{wrong[0]} does not go with a mixture over passages; leave it out, or ask without the mixture",
                field=wrong[0],
            )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the passages that its prompt held, the best first, or had no room for.

    `cited` are the passages that the text names by their numbers. Of a mixture, `prompt` is that of the first passage,
    and `passage_shares` are the means of those of the tokens: the share of each of `passages` in the answer. What is
    missing to 1 is the share of the model alone. Empty where one prompt was read.
    """

    text: str
    passages: tuple[Passage, ...]
    left_out: tuple[Passage, ...]
    cited: tuple[Passage, ...]
    prompt: str
    num_prompt_tokens: int
    completion: Completion
    passage_shares: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return completion_html(self.completion.tokens, self.passages)

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        """Makes one of the completed stream of an AnswerRequest."""
        prompt = completion.accepted.prompt
        if prompt is None:
            raise InternalError("an answer began without its prompt; install the server's version")
        return cls(
            text=completion.text,
            passages=prompt.passages,
            left_out=prompt.left_out,
            cited=cited_passages(completion.text, prompt),
            prompt=prompt.text,
            num_prompt_tokens=prompt.num_tokens,
            completion=completion,
            passage_shares=tuple(map(fmean, zip(*(token.passage_shares for token in completion.tokens), strict=True))),
        )


def passage_settings(
    num_passages: int | None,
    passages_by: str,
    passage_stores: str | Sequence[str],
    budget: int | None,
    *,
    mixture: bool,
) -> dict[str, Any]:
    """The fields of an AnswerRequest of its own, from the arguments of `answer`. `passage_stores` may be one name."""
    names = items_of("passage_stores", passage_stores, expected="names of datastores", one=True)
    return {
        "num_passages": num_passages, "passages_by": passages_by, "passage_stores": names, "budget": budget,
        "mixture": mixture,
    }  # fmt: skip


def cited(text: str, num_passages: int) -> tuple[int, ...]:
    """The numbers of passages that a text names in brackets, as [1] or [2, 3], each once, in its order. Numbers of no
    passage are left out.
    """
    named = (number.strip() for group in re.findall(r"\[(\d+(?:\s*,\s*\d+)*)\]", text) for number in group.split(","))
    numbers = dict.fromkeys(int(number) for number in named if len(number) < 10)  # int() refuses 4,301 digits
    return tuple(number for number in numbers if 1 <= number <= num_passages)


def cited_passages(text: str, prompt: AnswerPrompt) -> tuple[Passage, ...]:
    """The passages of a prompt that a text names by their numbers, in its order."""
    by_number = dict(zip(prompt.numbers, prompt.passages, strict=True))
    return tuple(by_number[number] for number in cited(text, max(by_number, default=0)) if number in by_number)


def _names(record: type, without: set[str]) -> list[str]:
    return [each.name for each in fields(record) if each.name not in without]


def _check_question(question: object) -> None:
    check_text("question", question, field="question")
    assert isinstance(question, str)
    if not question.strip():
        raise InvalidInput("question is empty; give some text", field="question")
    if len(question) > MAX_QUESTION_CHARACTERS:
        raise InvalidInput(
            f"question has {len(question):,} characters; at most {MAX_QUESTION_CHARACTERS:,}: give a part of it",
            field="question",
        )


def _check_stores(names: object) -> None:
    """Raises InvalidInput for names of datastores to find passages in that are no names, too many, or not different."""
    expected = ""
    if not isinstance(names, tuple) or not all(name and isinstance(name, str) for name in names):
        expected = "names in a tuple, none empty"
    elif len(names) > MAX_STORES:
        expected = f"at most {MAX_STORES} names"
    elif len(set(names)) < len(names):
        expected = "each datastore once"
    if expected:
        raise InvalidInput(f"passage_stores is {names!r}; expected {expected}", field="passage_stores")


def _check_passages(passages: tuple[Passage, ...]) -> None:
    size = 0
    for passage in passages:
        _check_passage(passage)
        try:
            size += passage.size
        except (TypeError, ValueError) as error:
            raise _metadata_error(str(error)) from None
    if len(passages) > MAX_PASSAGES:
        raise InvalidInput(f"there are {len(passages):,} passages; at most {MAX_PASSAGES}", field="passages")
    if size > MAX_PASSAGE_CHARACTERS:
        raise InvalidInput(
            f"the passages have {size:,} characters with their metadata; at most {MAX_PASSAGE_CHARACTERS:,}: give"
            " fewer, or leave their metadata out",
            field="passages",
        )
    for passage in passages:
        if problem := problem_in(passage.metadata, "metadata"):
            raise _metadata_error(problem)


def _check_passage(passage: Passage) -> None:
    """Raises InvalidInput for texts that are none. Those of its sentence are read and sent too."""
    if not isinstance(passage, Passage):
        raise InvalidInput(
            f"a passage is of the type {type(passage).__name__}; expected a Passage, as find_passages returns it",
            field="passages",
        )
    for name in ("text", "title", "document_id", "store"):
        check_text(f"the {name} of a passage", getattr(passage, name), field=f"passages.{name}")
    lists = {name: getattr(passage, name) for name in ("headings", "also")}
    if (sentence := passage.sentence) is not None:
        if not isinstance(sentence, Sentence):
            raise InvalidInput(
                f"a sentence is of the type {type(sentence).__name__}; expected a Sentence", field="passages.sentence"
            )
        check_text("the sentence of a passage", sentence.text, field="passages.sentence")
        lists["sentence"] = sentence.words
    for name, texts in lists.items():
        for each in items_of(f"passages.{name}", texts):
            check_text(f"one of the {name} of a passage", each, field=f"passages.{name}")


def _metadata_error(problem: str) -> InvalidInput:
    return InvalidInput(
        f"the metadata of a passage cannot be sent as JSON ({problem}); leave it out", field="passages.metadata"
    )
