"""/v1/embeddings in OpenAI's shape, and /v1/rerank in that of Cohere and Jina."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memlm.api.embeddings import Embeddings, EmbedRequest, Ranking, RerankRequest, TokenIds
from memlm.errors import InvalidInput
from memlm.server.frontend.service import Service
from memlm.server.http.bodies import EMBEDDINGS, RERANK
from memlm.server.http.exchange import Exchange
from memlm.server.http.openai import check_model
from memlm.server.http.reading import read_body

_PARAMETERS = {"texts": "input", "token_ids": "input"}  # of bodies, by the fields of requests


async def embed(service: Service, exchange: Exchange) -> None:
    async with service.admit("Embed", exchange) as call:
        body = await read_body(service, call, exchange, EMBEDDINGS)
        _check_model(service, body, service.model.encoder)
        with _naming_parameters():
            request = await asyncio.to_thread(_embed_request, body)
            answer: Embeddings = await service.ask(call, request)
        is_base64 = body.get("encoding_format") == "base64"
        await exchange.reply(await asyncio.to_thread(_encoded, answer, is_base64=is_base64))


async def rerank(service: Service, exchange: Exchange) -> None:
    async with service.admit("Rerank", exchange) as call:
        body = await read_body(service, call, exchange, RERANK)
        _check_model(service, body, service.model.reranker, service.model.encoder)
        texts = tuple(each if isinstance(each, str) else each["text"] for each in body["documents"])
        ranking: Ranking = await service.ask(call, RerankRequest(body["query"], texts, body.get("top_n")))
        results: list[dict[str, Any]] = [
            {"index": each.index, "relevance_score": each.score} for each in ranking.documents
        ]
        if body.get("return_documents"):
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        usage = {"prompt_tokens": ranking.num_tokens, "total_tokens": ranking.num_tokens}
        shown = {"object": "list", "model": ranking.model, "by": ranking.by, "results": results, "usage": usage}
        await exchange.reply_json(shown)


def _check_model(service: Service, body: dict[str, Any], *others: str | None) -> None:
    """Raises NotFound for a name that is neither the served model's nor one of the others."""
    served = (*(name for name in others if name is not None), *service.model_names)
    check_model(body.get("model", served[0]), served)


def _embed_request(body: dict[str, Any]) -> EmbedRequest:
    given = body["input"]
    inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    options = body.get("dimensions"), body.get("truncate", False)
    if isinstance(inputs[0], str):
        return EmbedRequest(tuple(inputs), (), *options)
    return EmbedRequest((), tuple(TokenIds(tuple(ids)) for ids in inputs), *options)


@contextmanager
def _naming_parameters() -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(str(error), field=_PARAMETERS.get(error.field, error.field)) from None


def _encoded(answer: Embeddings, *, is_base64: bool) -> bytes:
    """The answer as JSON. One vector at a time, since `json` holds the interpreter's lock for all that it writes."""
    row_bytes, parts = 4 * answer.dim, list[str]()
    for index in range(len(answer)):
        row = answer.data[index * row_bytes : (index + 1) * row_bytes]
        shown = f'"{b64encode(row).decode()}"' if is_base64 else _numbers(row)
        parts.append(f'{{"object": "embedding", "index": {index}, "embedding": {shown}}}')
    usage = {"prompt_tokens": answer.num_tokens, "total_tokens": answer.num_tokens}
    rest = json.dumps({"model": answer.model, "usage": usage}).removeprefix("{")
    return f'{{"object": "list", "data": [{", ".join(parts)}], {rest}'.encode()


def _numbers(row: bytes) -> str:
    """A vector as a list in JSON, with the digits that tell float32 numbers apart."""
    numbers = array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"[{','.join(format(number, '.9g') for number in numbers)}]"
