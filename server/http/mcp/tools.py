"""The tools that an agent may call: each makes one request of the contract, and an object of its answer.

Arguments are checked by the same schemas as the bodies of HTTP. An answer is small enough for an agent to read: it has
no metadata and no prompt, and its texts have bounds.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from memlm.api.answers import Answer, AnswerRequest, FindPassagesRequest
from memlm.api.datastores import MAX_REMEMBERED_CHARACTERS, DeleteDocumentsRequest, RememberRequest
from memlm.api.params import RetrievalParams, SamplingParams
from memlm.api.passages import Passage
from memlm.api.request import Request
from memlm.api.tracing import TracedSpan, TraceRequest
from memlm.errors import InvalidInput
from memlm.server.http.bodies import DELETE, PASSAGES, REMEMBER, TRACE
from memlm.server.http.mcp.uris import uri_of
from memlm.server.http.records import object_of, url_of
from memlm.server.http.schema import Schema, check, normalized

R = TypeVar("R")

ANSWER_TOKENS, MAX_ANSWER_TOKENS = 512, 4096
ANSWER_S = 50.0  # an agent gives a tool 60 s by default, and half an answer is better than none
TEMPERATURE = 0.3
MAX_FOUND, MAX_SPAN_PLACES, MAX_TRACED_CHARACTERS, MAX_FORGOTTEN = 20, 5, 1 << 16, 100
MAX_SHOWN = 300  # characters of a title, a heading or a snippet


class Host(Protocol):
    """A model with its datastores, as one caller may use it: in this process, or of a server."""

    def may_call(self, call: str) -> bool:
        """Whether the caller may make a call of the contract, as far as that is known here."""

    async def ask(self, request: Request[R]) -> R:
        """The answer to a request that has one. Raises MemlmError."""

    async def answer(self, request: AnswerRequest) -> Answer:
        """The whole answer to a question. Raises MemlmError."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: the `call` of the contract that it makes, the schemas of its arguments and of its answer, and the words
    that an agent reads.
    """

    name: str
    title: str
    description: str
    call: str
    arguments: Schema
    answer: Schema
    run: Callable[[Host, dict[str, Any]], Awaitable[dict[str, Any]]]
    is_read_only: bool = True
    is_destructive: bool = False


def tools_for(host: Host) -> list[Tool]:
    """The tools that a caller has the rights for."""
    return [tool for tool in TOOLS if host.may_call(tool.call)]


def tool_of(name: str) -> Tool:
    """The tool of a name. Raises InvalidInput for one that does not exist."""
    names = [tool.name for tool in TOOLS]
    if name not in names:
        near = difflib.get_close_matches(name[:100], names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidInput(f"there is no tool {name[:100]!r}; {hint}the tools are {', '.join(names)}", field="name")
    return next(tool for tool in TOOLS if tool.name == name)


async def call(host: Host, tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Calls a tool. Raises InvalidInput, naming the argument, for a wrong one, and else as the host."""
    return await tool.run(host, await asyncio.to_thread(_checked, tool, arguments))  # a message may have many of them


def _checked(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = normalized(dict(arguments), tool.arguments)
    check(values, tool.arguments, "")
    return values


async def _search(host: Host, arguments: dict[str, Any]) -> dict[str, Any]:
    request = FindPassagesRequest.of(arguments.pop("question"), **arguments)
    return {"passages": [_passage(passage) for passage in await host.ask(request)]}


async def _ask(host: Host, arguments: dict[str, Any]) -> dict[str, Any]:
    request = AnswerRequest(
        arguments["question"],
        passage_stores=(arguments["store"],) if "store" in arguments else (),
        sampling=SamplingParams(
            max_tokens=arguments.get("max_tokens", ANSWER_TOKENS), temperature=TEMPERATURE, time_limit_s=ANSWER_S
        ),
        retrieval=RetrievalParams(
            exclude_documents=tuple(arguments.get("exclude_documents", ())), as_of=arguments.get("as_of")
        ),
    )
    answer = await host.answer(request)
    prompt, cited = answer.completion.accepted.prompt, {id(passage) for passage in answer.cited}
    assert prompt is not None
    numbered = zip(prompt.numbers, answer.passages, strict=True)
    return {
        "answer": answer.text,
        "sources": [
            {"number": number, "is_cited": id(passage) in cited, **_passage(passage)} for number, passage in numbered
        ],
        "finish_reason": answer.completion.finished.reason.value,
    }


async def _remember(host: Host, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments["document_id"] = arguments.pop("id", None)
    report = await host.ask(RememberRequest.of(arguments.pop("text"), arguments.pop("store", None), **arguments))
    ids = report.document_ids
    return {"store": report.store, "document_ids": list(ids), "uris": [uri_of(report.store, each) for each in ids]}


async def _forget(host: Host, arguments: dict[str, Any]) -> dict[str, Any]:
    report = await host.ask(DeleteDocumentsRequest(tuple(arguments["document_ids"]), arguments.get("store")))
    return {"store": report.store, "num_documents": report.num_documents}


async def _trace(host: Host, arguments: dict[str, Any]) -> dict[str, Any]:
    options = {"max_documents": 3, **arguments}
    found = await host.ask(TraceRequest.of(options.pop("text"), options.pop("store", None), **options))
    return {
        "tokens": found.tokens,
        "traced_tokens": found.traced_tokens,
        "share": found.share,
        "spans": [_span(span) for span in found.spans],
    }


def _passage(passage: Passage) -> dict[str, Any]:
    pointed = passage.sentence
    return {
        "uri": uri_of(passage.store, passage.document_id, passage.first_line, passage.last_line),
        "address": url_of(passage),
        "place": _cut(passage.sentence_place),
        "store": passage.store,
        "document_id": passage.document_id,
        "title": _cut(passage.title),
        "headings": [_cut(each) for each in passage.headings],
        "text": passage.text,
        "sentence": None if pointed is None else pointed.text,
        "score": passage.score,
    }


def _span(span: TracedSpan) -> dict[str, Any]:
    shown = object_of(span)
    shown["places"] = [
        {
            "uri": uri_of(place.store, place.document_id, place.line, place.line),
            "store": place.store,
            "document_id": place.document_id,
            "title": _cut(place.title),
            "line": place.line,
            "snippet": _cut(place.snippet),
        }
        for place in span.places
    ]
    return shown


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _object(properties: Mapping[str, Schema], required: tuple[str, ...] | None = None) -> Schema:
    """An object. Left out, all its properties are required, as those of an answer."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


def _of(kind: str, description: str) -> Schema:
    return {"type": kind, "description": description}


def _list(items: Schema, description: str) -> Schema:
    return {"type": "array", "items": items, "description": description}


def _only(schema: Schema, *names: str) -> dict[str, Schema]:
    """Some properties of an object."""
    return {name: schema["properties"][name] for name in names}


_STORE: dict[str, Schema] = {"store": _of("string", "The name of the datastore. Left out: all, or the only one.")}
_OF_ONE: dict[str, Schema] = {"store": _of("string", "The name of the datastore. Left out: the only one.")}
_TEXT: Schema = {"type": "string"}
_SHOWN_PASSAGE: dict[str, Schema] = {
    "uri": _of("string", "The resource with these lines. Without its #, that of the whole document."),
    "address": _of("string", "Where a person finds the document: its address on the web, if it has one, else a URI."),
    "place": _of("string", "The place to cite, as notes/ports.md:5."),
    "store": _TEXT,
    "document_id": _TEXT,
    "title": _TEXT,
    "headings": _list(_TEXT, "The headings above it, the highest first."),
    "text": _TEXT,
    "sentence": {"type": ["string", "null"], "description": "Its sentence that is likeliest to answer."},
    "score": {"type": "number"},
}
_PLACE: dict[str, Schema] = {
    "uri": _TEXT,
    "store": _TEXT,
    "document_id": _TEXT,
    "title": _TEXT,
    "line": _of("integer", "The line in the document, from 1."),
    "snippet": _of("string", "The text around the place."),
}
_SPAN: dict[str, Schema] = {
    "begin": _of("integer", "Its first character in the text, from 0."),
    "end": _of("integer", "The character behind its last one."),
    "tokens": {"type": "integer"},
    "text": _TEXT,
    "rarity": _of("number", "How improbable it is in the documents, in nats."),
    "count": _of("integer", "How often it stands there, at most 1,000."),
    "places": _list(_object(_PLACE), "One place a document."),
}

TOOLS = (
    Tool(
        "search",
        "Search the documents",
        "Find the passages of the user's documents that are likeliest to answer a question. Each has its text and the"
        " place to cite. Use it before you answer from memory, and where you write the answer yourself.",
        "FindPassages",
        _object(
            {
                "question": PASSAGES["properties"]["question"],
                "k": {
                    "type": "integer", "minimum": 1, "maximum": MAX_FOUND,
                    "description": "Number of passages. Left out: 8.",
                },
                **_STORE,
                **_only(PASSAGES, "by", "documents", "where", "exclude_documents", "as_of"),
            },
            ("question",),
        ),
        _object({"passages": _list(_object(_SHOWN_PASSAGE), "The best first. Empty where nothing was found.")}),
        _search,
    ),
    Tool(
        "ask",
        "Ask the documents",
        "Answer a question from the user's documents by the local model, with the passages that it read as sources. It"
        " takes seconds. Check the answer against its sources. `search` is faster, and finds the passages alone.",
        "Answer",
        _object(
            {
                "question": PASSAGES["properties"]["question"],
                **_STORE,
                "max_tokens": {
                    "type": "integer", "minimum": 1, "maximum": MAX_ANSWER_TOKENS,
                    "description": f"Tokens of the answer, at most. Left out: {ANSWER_TOKENS}.",
                },
                **_only(PASSAGES, "exclude_documents", "as_of"),
            },
            ("question",),
        ),
        _object(
            {
                "answer": _TEXT,
                "sources": _list(
                    _object(
                        {
                            "number": _of("integer", "The number by which the answer may name it, as [1]."),
                            "is_cited": _of("boolean", "Whether the answer names it."),
                            **_SHOWN_PASSAGE,
                        }
                    ),
                    "The passages that the model read, the best first. Empty: it answered alone.",
                ),
                "finish_reason": {"type": "string", "enum": ["end", "stop", "length", "time"]},
            }
        ),
        _ask,
    ),
    Tool(
        "trace",
        "Trace a text to its documents",
        "Find where a text is from: its longest passages that stand word for word in the user's documents, with their"
        " places. Use it to check a quotation, or to find the source of a sentence.",
        "Trace",
        _object(
            {
                "text": {"type": "string", "maxLength": MAX_TRACED_CHARACTERS, "description": "The text to trace."},
                **_STORE,
                "min_tokens": TRACE["properties"]["min_tokens"],
                "max_documents": {
                    "type": "integer", "minimum": 1, "maximum": MAX_SPAN_PLACES,
                    "description": "Documents to show for each span. Left out: 3.",
                },
                **_only(TRACE, "documents", "where", "as_of"),
            },
            ("text",),
        ),
        _object(
            {
                "tokens": _of("integer", "Tokens of the text."),
                "traced_tokens": _of("integer", "Tokens in a span."),
                "share": _of("number", "The share of the text that lies in a span."),
                "spans": _list(_object(_SPAN), "In the order of the text. Empty where nothing stands word for word."),
            }
        ),
        _trace,
    ),
    Tool(
        "remember",
        "Remember a text",
        "Add a short text to the user's documents, for good. From then on `search` and `ask` find it. Only where the"
        " user wants something kept. A text that is there already, or an id that is taken, is refused.",
        "Remember",
        _object(
            {
                "text": {**REMEMBER["properties"]["text"], "maxLength": MAX_REMEMBERED_CHARACTERS},
                **_OF_ONE,
                **_only(REMEMBER, "id", "title", "metadata"),
            },
            ("text",),
        ),
        _object({"store": _TEXT, "document_ids": _list(_TEXT, ""), "uris": _list(_TEXT, "")}),
        _remember,
        is_read_only=False,
    ),
    Tool(
        "forget",
        "Forget documents",
        "Delete documents for good, by their ids as `search` shows them. From then on nothing of them is in any answer."
        " Only where the user asks for it. If one id is missing, nothing is deleted.",
        "DeleteDocuments",
        _object(
            {"document_ids": {**DELETE["properties"]["document_ids"], "maxItems": MAX_FORGOTTEN}, **_OF_ONE},
            ("document_ids",),
        ),
        _object({"store": _TEXT, "num_documents": _of("integer", "How many were deleted.")}),
        _forget,
        is_read_only=False,
        is_destructive=True,
    ),
)  # fmt: skip
