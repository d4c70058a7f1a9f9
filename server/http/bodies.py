"""The schemas of request bodies and of the URL's parameters."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from memlm.api.answers import MAX_BUDGET, MAX_QUESTION_CHARACTERS
from memlm.api.datastores import CHECKS, KEYS, MAX_DOCUMENT_IDS, MAX_FILTERS, SearchBy
from memlm.api.paging import MAX_PAGE, MAX_PAGE_SIZE
from memlm.api.params import (
    MAX_EXCLUDED,
    MAX_NEIGHBORS,
    MAX_STOP_STRINGS,
    MAX_STORES,
    MAX_TOP_LOGPROBS,
    RetrievalParams,
    SamplingParams,
    StreamRequest,
)
from memlm.api.passages import FEW_PASSAGES, MAX_PASSAGES, MORE_PASSAGES, PassagesBy
from memlm.api.prompts import MAX_TOKEN_IDS
from memlm.api.tracing import RankBy, TraceRequest
from memlm.base.options import OPTION, Bounds, Option, bounds_of
from memlm.server.http.schema import INT32, Schema

MAX_PROMPTS, MAX_CHOICES = 2048, 128
DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI has it
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def _whole(description: str, least: int = 0, most: int = INT32) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "description": description}


def _number(description: str, **bounds: float) -> Schema:
    return {"type": "number", **bounds, "description": description}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _texts(description: str) -> Schema:
    return {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PASSAGES, "description": description}


def _switch(description: str) -> Schema:
    return {"type": "boolean", "description": description}


def _object(properties: dict[str, Schema], required: tuple[str, ...] = (), description: str = "") -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **({"description": description} if description else {}),
    }


def _field(record_type: Any, name: str, description: str = "") -> Schema:
    """The schema of a dataclass's field: its type, its bounds, and the help of its command-line option."""
    hint, limits = get_type_hints(record_type)[name], bounds_of(record_type).get(name, Bounds())
    kind = next(kind for each, kind in _KINDS.items() if each in (hint, *get_args(hint)))
    field = next(each for each in fields(record_type) if each.name == name)
    shown = field.metadata.get(OPTION, Option(""))
    default = shown.default or ("" if field.default in (None, False, MISSING) else field.default)
    words = [description or shown.help, "Above 0." if limits.above == 0 else ""]
    words.append(f"Left out: {default}." if default and not description else "")
    most = INT32 if limits.most is None and kind == "integer" else limits.most
    return {
        "type": kind,
        **({} if limits.least is None else {"minimum": limits.least}),
        **({} if most is None else {"maximum": most}),
        "description": " ".join(filter(None, words)),
    }


def _limit(description: str) -> Schema:
    return {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": INT32}, {"type": "integer", "enum": [-1]}],
        "x-expected": "at least 1, or -1 for no limit",
        "x-none": [-1],
        "description": f"{description} -1: the same.",
    }


def _unsupported(neutral: Schema, description: str = "Not supported.", advice: str = "leave it out") -> Schema:
    return {**neutral, "x-unsupported": advice, "description": description}


def _ignored(kind: str) -> Schema:
    return {"type": kind, "description": "Accepted, and without effect."}


TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32}, "minItems": 1}

TEXT_OR_PARTS: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": _object(
                {
                    "type": {
                        "type": "string",
                        "enum": ["text"],
                        "x-expected": "text; images, audio and files are not supported",
                    },
                    "text": _text(""),
                    "cache_control": _ignored("object"),
                    "annotations": _ignored("array"),
                },
                ("type", "text"),
            ),
        },
    ],
    "x-expected": "a text, or parts of the type text",
    "description": "A text, or parts of the type text.",
}

_AS_OF = _text(
    "Only documents that held then, by valid_from and supersedes of their metadata: a date, a date and a time, or"
    " today. Left out: all."
)
MEMORY = _object(
    {
        "stores": {
            "anyOf": [
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STORES},
                {"type": "object", "additionalProperties": {"type": "number"}},
            ],
            "x-expected": "names of datastores in a list, or weights by name",
            "description": "Datastores to search: names, or weights by name. Left out: all. []: the model alone.",
        },
        **{name: _field(RetrievalParams, name) for name in ("k", "lam", "knn_temperature", "nprobe", "spalm")},
        "loop_guard": _switch("Keep memory from repeating a run of the last tokens."),
        "exclude_documents": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MAX_EXCLUDED,
            "description": "Answer as if these documents were deleted: ids, folders of ids, or globs.",
        },
        "as_of": _AS_OF,
        "context_cache": _field(RetrievalParams, "context_cache"),
        "neighbors": _field(StreamRequest, "neighbors", "Nearest neighbors reported with each token."),
    },
    description="The memory's share in the answer. With this object, {} too, the answer reports its figures.",
)

_FEW = f"Left out: {FEW_PASSAGES}, or {MORE_PASSAGES} for a model of a billion parameters."
CHAT_MEMORY: Schema = {
    **MEMORY,
    "properties": {
        **MEMORY["properties"],
        "passages": _whole(
            "Passages to find for the last user message, and to put before it. With passages, the neighbors of tokens"
            f" are mixed in only where a parameter of memory says how. 0: none. {_FEW}",
            0,
            MAX_PASSAGES,
        ),
    },
}

# Fields of SamplingParams that bodies have by the same name. `max_tokens` and `stop` take other forms too.
SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name not in ("max_tokens", "stop"))
_SAMPLING: dict[str, Schema] = {
    **{name: _field(SamplingParams, name) for name in SAMPLING},
    "top_k": {**_whole("Sample from the k likeliest tokens. 0 or -1: from all.", -1), "x-none": [0, -1]},
    "seed": _field(SamplingParams, "seed", "Equal seeds give equal answers. Choice n has seed + n."),
    "stop": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
        ],
        "x-expected": "a string, or strings in a list",
        "description": "The text ends before the first of these.",
    },
}
_COMMON: dict[str, Schema] = {
    "model": _text("The id of /v1/models."),
    **_SAMPLING,
    "n": _whole("Answers to each prompt.", 1, MAX_CHOICES),
    "stream": _switch("Send events as they come."),
    "stream_options": _object(
        {
            "include_usage": _switch("Send one more event, with the usage."),
            "include_obfuscation": _unsupported({"type": "boolean", "enum": [False]}),
        },
        description="Goes with stream.",
    ),
    "user": _ignored("string"),
    "safety_identifier": _ignored("string"),
    "prompt_cache_key": _ignored("string"),
    "prompt_cache_retention": _ignored("string"),
    "service_tier": _ignored("string"),
    "store": _ignored("boolean"),
    "metadata": _ignored("object"),
    "memory": MEMORY,
    "drafts": _field(
        StreamRequest, "drafts", "Most tokens to draft ahead in one step. 0: none. Left out: chosen by cost."
    ),
    "prediction": _object(
        {"type": {"type": "string", "enum": ["content"]}, "content": TEXT_OR_PARTS},
        ("type", "content"),
        "A text that the answer may resemble, a source of drafts.",
    ),
    "frequency_penalty": _unsupported({"type": "number", "enum": [0]}),
    "presence_penalty": _unsupported({"type": "number", "enum": [0]}),
    "logit_bias": _unsupported({"type": "object", "maxProperties": 0}),
}

COMPLETION = _object(
    {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {**TOKEN_IDS, "maxItems": MAX_TOKEN_IDS},
                {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
            "x-expected": f"a text, token ids in a list, or a list of up to {MAX_PROMPTS} of these",
            "description": "A text, token ids, or a list of texts or of lists of token ids.",
        },
        "max_tokens": _whole(
            "Maximum number of tokens. 0 goes with echo. Left out: 16. -1: the room in the context.", -1
        ),
        "logprobs": _whole("Report log-probabilities, and this many likely tokens.", 0, MAX_TOP_LOGPROBS),
        "echo": _switch("Begin the answer with the prompt."),
        **_COMMON,
        "best_of": _unsupported({"type": "integer", "enum": [1]}),
        "suffix": _unsupported({"type": "string", "enum": [""]}),
    },
    ("model", "prompt"),
)

_AS_TEXT = "give tool calls and their results as the texts of messages, without it"
_MESSAGE = _object(
    {
        "role": _text("system, user, assistant, or another role that the model's template knows."),
        "content": TEXT_OR_PARTS,
        "name": _ignored("string"),
        "annotations": _ignored("array"),
        "cache_control": _ignored("object"),
        "reasoning_content": _ignored("string"),
        "reasoning": _ignored("string"),
        "refusal": _unsupported({"type": "string", "enum": [""]}),
        "tool_calls": _unsupported({"type": "array", "maxItems": 0}, advice=_AS_TEXT),
        "tool_call_id": _unsupported({"type": "string", "enum": [""]}, advice=_AS_TEXT),
        "function_call": _unsupported({"type": "object", "maxProperties": 0}, advice=_AS_TEXT),
    },
    ("role", "content"),
)

CHAT = _object(
    {
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "description": "The conversation."},
        "max_completion_tokens": _limit("Maximum number of tokens. Left out: the room in the context."),
        "max_tokens": _limit("The older name of max_completion_tokens."),
        "logprobs": _switch("Report log-probabilities."),
        "top_logprobs": _whole("Report this many likely tokens too. Goes with logprobs.", 0, MAX_TOP_LOGPROBS),
        **_COMMON,
        "memory": CHAT_MEMORY,
        "tools": _unsupported({"type": "array", "maxItems": 0}),
        "tool_choice": _unsupported({"type": "string", "enum": ["none", "auto"]}),
        "parallel_tool_calls": _unsupported({"type": "boolean", "enum": [True, False]}),
        "functions": _unsupported({"type": "array", "maxItems": 0}),
        "function_call": _unsupported({"type": "string", "enum": ["none", "auto"]}),
        "response_format": _unsupported(
            _object({"type": _unsupported({"type": "string", "enum": ["text"]})}, ("type",)), "Only text."
        ),
        "modalities": _unsupported({"type": "array", "items": {"type": "string", "enum": ["text"]}}, "Only text."),
        "audio": _unsupported({"type": "object", "maxProperties": 0}),
        "reasoning_effort": _unsupported({"type": "string", "enum": ["none"]}),
        "verbosity": _unsupported({"type": "string", "enum": ["medium"]}),
        "chat_template_kwargs": _unsupported({"type": "object", "maxProperties": 0}),
        "web_search_options": _unsupported({"type": "object", "maxProperties": 0}),
    },
    ("model", "messages"),
)

TOKENIZE = _object(
    {
        "prompt": _text("The text. The text of one special token alone is that token."),
        "model": _text("The id of /v1/models."),
        "add_special_tokens": _unsupported({"type": "boolean", "enum": [False]}, "Special tokens are never added."),
    },
    ("prompt",),
)
DETOKENIZE = _object(
    {"tokens": {**TOKEN_IDS, "minItems": 0, "maxItems": MAX_TOKEN_IDS}, "model": _text("The id of /v1/models.")},
    ("tokens",),
)

_FILTERS: dict[str, Schema] = {
    "documents": {
        "type": "array",
        "items": {"type": "string"},
        "maxItems": MAX_FILTERS,
        "description": "Only documents with one of these ids, in one of these folders, or matching these globs.",
    },
    "where": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "maxProperties": MAX_FILTERS,
        "description": "Only documents with this metadata.",
    },
    "as_of": _AS_OF,
}
SEARCH = _object(
    {
        "text": _text("The text to search for: by state its end, by words all of it."),
        "k": _whole("Number of places. Left out: 8.", 1, MAX_NEIGHBORS),
        "nprobe": _whole("Inverted lists to search, by state.", 1),
        "by": {"type": "string", "enum": [each.value for each in SearchBy], "description": "What a search compares."},
        **_FILTERS,
    },
    ("text",),
)

_QUESTION: Schema = {"type": "string", "maxLength": MAX_QUESTION_CHARACTERS, "description": "The question."}
_PASSAGES_BY: Schema = {
    "type": "string",
    "enum": [each.value for each in PassagesBy],
    "description": "By words (BM25), by meaning (the encoder of the server, which it needs), or by auto: both where"
    " the server has an encoder, else words. Left out: by auto.",
}
PASSAGES = _object(
    {
        "question": _QUESTION,
        "k": _whole("Number of passages. Left out: 8.", 1, MAX_NEIGHBORS),
        "by": _PASSAGES_BY,
        **_FILTERS,
        "exclude_documents": MEMORY["properties"]["exclude_documents"],
    },
    ("question",),
)
_PASSAGE = _object(
    {
        "text": _text("Its text."),
        "document_id": _text("The id of its document."),
        "title": _text("The title of its document. An answer may name it."),
        "store": _text("The datastore of its document."),
        "token_offset": _whole("Tokens from the start of the document."),
        "num_tokens": _whole("Its tokens."),
        "first_line": _whole("Its first line in the document, from 1. 0: not known."),
        "last_line": _whole("Its last line."),
        "headings": _texts("The headings above it, the highest first."),
        "first_page": _whole("Its first page, slide or sheet, from 1. 0: none."),
        "last_page": _whole("Its last page, slide or sheet."),
        "also": _texts("Places of passages of nearly the same text."),
        "sentence": _object(
            {
                "text": _text("The sentence that is likeliest to answer."),
                "offset": _whole("Characters from the start of the passage's text."),
                "line": _whole("Its line in the document, from 1. 0: not known."),
                "page": _whole("Its page, slide or sheet, from 1. 0: none."),
                "words": _texts("The words of the question, as it writes them."),
            },
            ("text",),
            "Left out: the server points it out.",
        ),
        "score": _number("The score that it was found with."),
        "metadata": {"type": "object", "description": "Values by name."},
    },
    ("text", "document_id"),
)
ANSWER = _object(
    {
        "question": _QUESTION,
        "model": _text("The id of /v1/models."),
        "passages": {
            "type": "array",
            "items": _PASSAGE,
            "maxItems": MAX_PASSAGES,
            "description": "Passages to answer from, the best first. Left out: those that are found.",
        },
        "num_passages": _whole(f"Passages to find. 0: none. {_FEW}", 0, MAX_PASSAGES),
        "passages_by": _PASSAGES_BY,
        "passage_stores": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MAX_STORES,
            "description": "Datastores to find passages in. Left out: those of memory, or all.",
        },
        "budget": _whole("Tokens of a prompt, at most. Left out: 1,024, or the room in the context.", 1, MAX_BUDGET),
        "mixture": _switch("Mix the answers to prompts of one passage each, without a datastore."),
        "max_tokens": _limit("Maximum number of tokens. Left out: the room in the context."),
        **_SAMPLING,
        "stream": _switch("Send events as they come."),
        "memory": MEMORY,
        "drafts": _COMMON["drafts"],
    },
    ("question",),
)

TRACE = _object(
    {
        "text": _text("The text to trace."),
        "store": _text("The datastore to look into. Left out: all."),
        **{name: _field(TraceRequest, name) for name in ("min_tokens", "spans_per_token", "max_documents")},
        "rank_by": {"type": "string", "enum": [each.value for each in RankBy], "description": "Which come first."},
        **_FILTERS,
    },
    ("text",),
)

_DOCUMENT: dict[str, Schema] = {
    "id": _text("The document's id."),
    "text": _text("Its text."),
    "title": _text("Its title."),
    "metadata": {"type": "object", "description": "Values by name."},
}
_ADDING: dict[str, Schema] = {
    "replace": _switch("Replace documents whose ids exist. Otherwise such documents are refused."),
    "check": {"type": "string", "enum": list(CHECKS), "description": "How much of the result to check."},
    "keys": {
        "type": "string",
        "enum": list(KEYS),
        "description": "When keys are made: now, none, or auto, where that takes less than a minute.",
    },
    "request_id": _text("Repeating a request with its id returns the first operation."),
    "sync": _text(
        "The caller's name for a folder, which the datastore is made the same as: what an earlier upload under it"
        " brought and this one does not is deleted. `replace` is then about documents that came under other names."
    ),
    "dry_run": _switch("With sync, only report what would change."),
}
ADD = _object(
    {
        "documents": {
            "type": "array",
            "items": _object(_DOCUMENT, ("id", "text")),
            "minItems": 1,
            "description": "The documents.",
        },
        "keep": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MAX_DOCUMENT_IDS,
            "description": "With sync, ids of documents, or folders of ids, that stay although they are not sent.",
        },
        **_ADDING,
    },
    ("documents",),
)
ADD_QUERY = _ADDING
REMEMBER = _object(
    {**_DOCUMENT, "id": _text("Left out: a hash of the text."), "replace": _ADDING["replace"]}, ("text",)
)
DELETE = _object(
    {
        "document_ids": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "maxItems": MAX_DOCUMENT_IDS,
            "description": "If one is missing, nothing is deleted.",
        }
    },
    ("document_ids",),
)
PAGE_QUERY: dict[str, Schema] = {
    "page_size": _whole(f"At most this many; above {MAX_PAGE} means {MAX_PAGE}.", 0, MAX_PAGE_SIZE),
    "page_token": _text("next_page_token of the page before."),
}
GET_OPERATION_QUERY: dict[str, Schema] = {
    "wait_s": _number("Answer when the operation has ended, or after this many seconds.", minimum=0, maximum=3600)
}


def schema_of_document(schema: Any) -> Any:
    """A schema as the OpenAPI document shows it: optional parameters may be null, and our own keywords are left out."""
    if isinstance(schema, list):
        return [schema_of_document(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {key: schema_of_document(value) for key, value in schema.items() if not key.startswith("x-")}
    if isinstance(schema.get("properties"), dict):
        required = schema.get("required", ())
        shown["properties"] = {
            name: each if name in required else _nullable(each) for name, each in shown["properties"].items()
        }
    return shown


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    enum = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **enum, "type": [schema["type"], "null"]}
