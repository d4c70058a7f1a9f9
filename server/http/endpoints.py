"""The table of all endpoints, from which the routes and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from starlette.convertors import Convertor, register_url_convertor

from memlm.server.frontend.service import Service
from memlm.server.http import bodies, completions, datastores, models, questions
from memlm.server.http.exchange import Exchange
from memlm.server.http.schema import Schema


class _Id(Convertor[str]):
    """The id of a document or model in a path: any text, also one with line ends, which a `path` does not take."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("id", _Id())

Handler = Callable[[Service, Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path. The body is JSON of a schema; `is_form` takes files of a form too."""

    method: str
    path: str
    handler: Handler
    summary: str
    group: str
    body: Schema | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    is_form: bool = False
    status: int = 200
    is_stream: bool = False


_OPENAI, _TOKENS, _STORES, _JOBS = "OpenAI", "Tokenizer", "Datastores", "Operations"
_QUESTIONS = "Questions"
_STORE, _OPERATION = "/v1/datastores/{store}", "/v1/operations/{operation}"

ENDPOINTS = (
    Endpoint("GET", "/v1/models", models.list_models, "The model that is served.", _OPENAI),
    Endpoint("GET", "/v1/models/{model:id}", models.get_model, "The model of this id.", _OPENAI),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.complete,
        "Continues prompts.",
        _OPENAI,
        bodies.COMPLETION,
        is_stream=True,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        completions.chat,
        "Answers a conversation.",
        _OPENAI,
        bodies.CHAT,
        is_stream=True,
    ),
    Endpoint("POST", "/tokenize", models.tokenize, "The token ids of a text.", _TOKENS, bodies.TOKENIZE),
    Endpoint("POST", "/detokenize", models.detokenize, "The text of token ids.", _TOKENS, bodies.DETOKENIZE),
    Endpoint("GET", "/tokenizer_info", models.tokenizer_info, "The special tokens and the chat template.", _TOKENS),
    Endpoint(
        "GET",
        "/v1/datastores",
        datastores.list_datastores,
        "The loaded datastores, by their names.",
        _STORES,
        query=bodies.PAGE_QUERY,
    ),
    Endpoint(
        "POST",
        "/v1/answers",
        questions.answer,
        "Answers a question from passages of datastores.",
        _QUESTIONS,
        bodies.ANSWER,
        is_stream=True,
    ),
    Endpoint(
        "POST",
        "/v1/datastores/passages",
        questions.passages,
        "The passages of all datastores that are likeliest to answer a question.",
        _QUESTIONS,
        bodies.PASSAGES,
    ),
    Endpoint(
        "POST",
        f"{_STORE}/passages",
        questions.passages,
        "The passages of a datastore that are likeliest to answer a question.",
        _QUESTIONS,
        bodies.PASSAGES,
    ),
    Endpoint("POST", "/v1/datastores/search", datastores.search, "Searches all datastores.", _STORES, bodies.SEARCH),
    Endpoint(
        "POST",
        "/v1/trace",
        datastores.trace,
        "The passages of a text that stand word for word in documents.",
        _STORES,
        bodies.TRACE,
    ),
    Endpoint("GET", _STORE, datastores.get_datastore, "Describes a datastore.", _STORES),
    Endpoint("POST", f"{_STORE}/search", datastores.search, "Searches a datastore.", _STORES, bodies.SEARCH),
    Endpoint(
        "POST",
        f"{_STORE}/documents",
        datastores.add_documents,
        "Starts to add documents, from JSON or from the files of a form.",
        _STORES,
        bodies.ADD,
        bodies.ADD_QUERY,
        is_form=True,
        status=datastores.ACCEPTED,
    ),
    Endpoint(
        "POST",
        f"{_STORE}/remember",
        datastores.remember,
        "Adds one text at once. After the answer every worker finds it.",
        _STORES,
        bodies.REMEMBER,
    ),
    Endpoint(
        "POST",
        f"{_STORE}/documents/delete",
        datastores.delete_documents,
        "Deletes documents. After the answer they influence nothing.",
        _STORES,
        bodies.DELETE,
    ),
    Endpoint(
        "DELETE", f"{_STORE}/documents/{{document:id}}", datastores.delete_document, "Deletes a document.", _STORES
    ),
    Endpoint(
        "GET",
        "/v1/operations",
        datastores.list_operations,
        "The caller's operations, latest first.",
        _JOBS,
        query=bodies.PAGE_QUERY,
    ),
    Endpoint(
        "GET",
        _OPERATION,
        datastores.get_operation,
        "The progress of an operation.",
        _JOBS,
        query=bodies.GET_OPERATION_QUERY,
    ),
    Endpoint("POST", f"{_OPERATION}/cancel", datastores.cancel_operation, "Cancels an operation.", _JOBS),
    Endpoint("DELETE", _OPERATION, datastores.delete_operation, "Deletes the record of one that has ended.", _JOBS),
)
