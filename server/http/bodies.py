"""The schemas of request bodies and of the URL's parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from memlm.api.answers import MAX_BUDGET, MAX_QUESTION_CHARACTERS
from memlm.api.constraint import MAX_CHOICES as MAX_CHOICE_TEXTS
from memlm.api.datastores import CHECKS, KEYS, MAX_DOCUMENT_IDS, MAX_FILTERS, SearchBy
from memlm.api.documents import MAX_PART_TOKENS, PART_TOKENS
from memlm.api.embeddings import MAX_INPUTS, MAX_READ_TOKENS
from memlm.api.paging import MAX_PAGE, MAX_PAGE_SIZE
from memlm.api.params import (
    MAX_BIAS,
    MAX_BIASES,
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
from memlm.api.tools import (
    EFFORTS,
    MAX_CALLS,
    MAX_OPTION_CHARACTERS,
    MAX_TEMPLATE_OPTIONS,
    MAX_TOOLS,
    TOOL_CHOICES,
)
from memlm.api.tracing import RankBy, TraceRequest
from memlm.server.http.fields import field_of as _field
from memlm.server.http.fields import ignored as _ignored
from memlm.server.http.fields import limit as _limit
from memlm.server.http.fields import number as _number
from memlm.server.http.fields import object_with as _object
from memlm.server.http.fields import switch as _switch
from memlm.server.http.fields import text as _text
from memlm.server.http.fields import texts as _texts
from memlm.server.http.fields import unsupported as _unsupported
from memlm.server.http.fields import whole as _whole
from memlm.server.http.schema import INT32, Schema

MAX_PROMPTS, MAX_CHOICES = 2048, 128
DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI has it


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

# Fields of SamplingParams that bodies have by the same name. Others take other forms too.
_OTHER_FORMS = ("max_tokens", "stop", "logit_bias")
SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name not in _OTHER_FORMS)
_SAMPLING: dict[str, Schema] = {
    **{name: _field(SamplingParams, name) for name in SAMPLING},
    "frequency_penalty": _field(
        SamplingParams, "frequency_penalty", "Taken from a token's log-probability for each time that it was generated."
    ),
    "presence_penalty": _field(
        SamplingParams, "presence_penalty", "Taken from a token's log-probability if it was generated before."
    ),
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_BIASES,
        "description": "Numbers to add to the log-probabilities of tokens, by token id.",
    },
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
_ANY_SCHEMA: Schema = {"type": "object", "description": "A JSON Schema."}
_TEXT_SCHEMA: Schema = {
    "anyOf": [_ANY_SCHEMA, {"type": "string"}],
    "x-expected": "a JSON Schema, as an object or as text",
    "description": "A JSON Schema, as an object or as text.",
}
_CHOICES: Schema = {
    "type": "array",
    "items": {"type": "string"},
    "minItems": 1,
    "maxItems": MAX_CHOICE_TEXTS,
    "description": "The text is one of these.",
}
_REGEX, _GRAMMAR = _text("A regular expression that the text matches."), _text("A grammar: Lark's, or GBNF.")
# The form of the text: OpenAI's parameter, and the newer and the older ones of vLLM.
FORMS: dict[str, Schema] = {
    "response_format": _object(
        {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema"], "description": ""},
            "json_schema": _object(
                {
                    "schema": _ANY_SCHEMA,
                    "name": _ignored("string"),
                    "description": _ignored("string"),
                    "strict": _ignored("boolean"),
                }
            ),
        },
        ("type",),
        "The form of the text: any, a JSON object, or JSON of a schema.",
    ),
    "structured_outputs": _object(
        {
            "json": _TEXT_SCHEMA,
            "json_object": _switch("The text is a JSON object."),
            "regex": _REGEX,
            "choice": _CHOICES,
            "grammar": _GRAMMAR,
        },
        description="The form of the text, in the words of vLLM.",
    ),
    "guided_json": _TEXT_SCHEMA,
    "guided_regex": _REGEX,
    "guided_choice": _CHOICES,
    "guided_grammar": _GRAMMAR,
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
    **FORMS,
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

_CALL = _object(
    {
        "id": _text("The id of the call, which the message of its result has too."),
        "type": {"type": "string", "enum": ["function"], "description": "The only one."},
        "function": _object(
            {"name": _text("The tool."), "arguments": _text("The text of a JSON object.")}, ("name", "arguments")
        ),
        "index": _ignored("integer"),
    },
    ("function",),
)
_MESSAGE = _object(
    {
        "role": _text("system, user, assistant, tool, or another role that the model's template knows."),
        "content": TEXT_OR_PARTS,
        "name": _text("Of a tool's result: the tool. Of others it is accepted, and without effect."),
        "annotations": _ignored("array"),
        "cache_control": _ignored("object"),
        "reasoning_content": _text("Of the assistant: the thought before its content."),
        "reasoning": _text("Another name of reasoning_content."),
        "refusal": _unsupported({"type": "string", "enum": [""]}),
        "tool_calls": {
            "type": "array",
            "items": _CALL,
            "maxItems": MAX_CALLS,
            "description": "Of the assistant: the calls that it made. With them, content may be null.",
        },
        "tool_call_id": _text("Of a tool's result: the id of the call."),
        "function_call": _unsupported({"type": "object", "maxProperties": 0}, advice="give tool_calls"),
    },
    ("role",),
)
_TOOL = _object(
    {
        "type": {"type": "string", "enum": ["function"], "description": "The only one."},
        "function": _object(
            {
                "name": _text("Up to 128 letters, digits, '_', '-' and '.'."),
                "description": _text("What it does, for the model."),
                "parameters": {"type": "object", "description": "The JSON Schema of the object of its arguments."},
                "strict": _ignored("boolean"),
            },
            ("name",),
        ),
    },
    ("type", "function"),
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
        "tools": {
            "type": "array",
            "items": _TOOL,
            "maxItems": MAX_TOOLS,
            "description": "Functions that the model may call.",
        },
        "tool_choice": {
            "anyOf": [
                {"type": "string", "enum": list(TOOL_CHOICES)},
                _object(
                    {
                        "type": {"type": "string", "enum": ["function"]},
                        "function": _object({"name": _text("The tool to call.")}, ("name",)),
                    },
                    ("type", "function"),
                ),
            ],
            "x-expected": "auto, none, required, or a function by name",
            "description": "auto, none (as if there were no tools), required, or the tool to call.",
        },
        "parallel_tool_calls": _switch("Whether an answer may hold several calls. Left out: true."),
        "functions": _unsupported({"type": "array", "maxItems": 0}, advice="give tools"),
        "function_call": _unsupported({"type": "string", "enum": ["none", "auto"]}, advice="give tool_choice"),
        "modalities": _unsupported({"type": "array", "items": {"type": "string", "enum": ["text"]}}, "Only text."),
        "audio": _unsupported({"type": "object", "maxProperties": 0}),
        "reasoning_effort": {
            "type": "string",
            "enum": list(EFFORTS),
            "description": "How much to think, for models whose chat template reads it. Of others without effect.",
        },
        "verbosity": _unsupported({"type": "string", "enum": ["medium"]}),
        "chat_template_kwargs": {
            "type": "object",
            "maxProperties": MAX_TEMPLATE_OPTIONS,
            "additionalProperties": {
                "anyOf": [
                    {"type": "boolean"},
                    {"type": "number"},
                    {"type": "string", "maxLength": MAX_OPTION_CHARACTERS},
                ],
                "x-expected": f"true, false, a number, or a text of up to {MAX_OPTION_CHARACTERS:,} characters",
            },
            "description": "Variables of the model's chat template, such as enable_thinking.",
        },
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

EMBEDDINGS = _object(
    {
        "input": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_INPUTS},
                {**TOKEN_IDS, "maxItems": MAX_READ_TOKENS},
                {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": MAX_INPUTS},
            ],
            "x-expected": f"a text, texts, token ids or lists of them: at least one, and at most {MAX_INPUTS:,} texts",
            "description": f"A text, at most {MAX_INPUTS:,} texts, or texts as token ids of the encoder.",
        },
        "model": _text("The id of /v1/models, or the name of the encoder. The answer has the name of what was used."),
        "encoding_format": {
            "type": "string",
            "enum": ["float", "base64"],
            "description": "Vectors as lists of numbers, or as base64 of float32. Left out: float.",
        },
        "dimensions": _whole("How many numbers of each vector count, the first ones. Left out: all.", 1),
        "truncate": _switch("Read the begin of a text that is too long, which is refused otherwise."),
        "user": _ignored("string"),
    },
    ("input",),
)
RERANK = _object(
    {
        "query": _text("The query."),
        "documents": {
            "type": "array",
            "items": {
                "anyOf": [{"type": "string"}, _object({"text": _text("Its text.")}, ("text",))],
                "x-expected": "a text, or an object with a text",
            },
            "minItems": 1,
            "maxItems": MAX_INPUTS,
            "description": f"At most {MAX_INPUTS:,} documents: texts, or objects with a text.",
        },
        "model": _text("The id of /v1/models, or the name of the reranker or the encoder."),
        "top_n": _whole("How many to return, the best. Left out: all.", 1),
        "return_documents": _switch("Return the texts of the documents too."),
        "user": _ignored("string"),
    },
    ("query", "documents"),
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
        **FORMS,
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
READ_QUERY: dict[str, Schema] = {
    "token_offset": _whole("Tokens from the start of the document, with which the part begins."),
    "num_tokens": _whole(f"Tokens of the part; left out: {PART_TOKENS:,}.", 1, MAX_PART_TOKENS),
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
