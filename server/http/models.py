"""/v1/models and the tokenizer's calls, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import time
from typing import Any

from memlm.api.generation import DetokenizeRequest, TokenizeRequest
from memlm.api.server import GetModelRequest, ModelInfo
from memlm.server.frontend.service import Service
from memlm.server.http.bodies import DETOKENIZE, TOKENIZE
from memlm.server.http.exchange import Exchange
from memlm.server.http.openai import check_model
from memlm.server.http.reading import read_body
from memlm.server.http.records import object_of

STARTED_S = int(time.time())


async def list_models(service: Service, exchange: Exchange) -> None:
    async with service.admit("GetModel", exchange) as call:
        model = await service.ask(call, GetModelRequest())
        models = [_model(service, model, adapter) for adapter in (None, *service.adapter_names)]
        await exchange.reply_json({"object": "list", "data": models})


async def get_model(service: Service, exchange: Exchange) -> None:
    async with service.admit("GetModel", exchange) as call:
        model = await service.ask(call, GetModelRequest())
        adapter = check_model(exchange.path_params["model"], service.model_names, service.adapter_names)
        await exchange.reply_json(_model(service, model, adapter))


async def tokenize(service: Service, exchange: Exchange) -> None:
    async with service.admit("Tokenize", exchange) as call:
        body = await read_body(service, call, exchange, TOKENIZE)
        check_model(body.get("model", service.model_names[0]), service.model_names, service.adapter_names)
        special = (await service.tokenizer_info()).special_tokens.get(body["prompt"])
        ids = list(await service.ask(call, TokenizeRequest(body["prompt"]))) if special is None else [special]
        context = service.model.context_length
        await exchange.reply_json({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": None})


async def detokenize(service: Service, exchange: Exchange) -> None:
    async with service.admit("Detokenize", exchange) as call:
        body = await read_body(service, call, exchange, DETOKENIZE)
        check_model(body.get("model", service.model_names[0]), service.model_names, service.adapter_names)
        text = await service.ask(call, DetokenizeRequest(tuple(body["tokens"])))
        await exchange.reply_json({"prompt": text})


async def tokenizer_info(service: Service, exchange: Exchange) -> None:
    """The fields of a `tokenizer_config.json`, as vLLM answers, and the tokenizer's size and fingerprint."""
    async with service.admit("GetModel", exchange) as call:
        model: ModelInfo = await service.ask(call, GetModelRequest())
        tokenizer = await service.tokenizer_info()
        named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        special = {str(number): {"content": text, "special": True} for text, number in tokenizer.special_tokens.items()}
        await exchange.reply_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **named,
                "additional_special_tokens": [text for text in tokenizer.special_tokens if text not in named.values()],
                "added_tokens_decoder": special,
                "add_bos_token": tokenizer.adds_bos,
                "add_eos_token": False,
                "chat_template": tokenizer.chat_template,
                "model_max_length": model.context_length,
                "vocab_size": model.vocab_size,
                "fingerprint": model.tokenizer_fingerprint,
            }
        )


def _model(service: Service, model: ModelInfo, adapter: str | None) -> dict[str, Any]:
    """A model as OpenAI lists it, with its figures under `memory`. An adapter has a parent, as in vLLM."""
    return {
        "id": adapter or service.model_names[0],
        "object": "model",
        "created": STARTED_S,
        "owned_by": "memlm",
        "max_model_len": model.context_length,
        "memory": object_of(model),
        **({"parent": service.model_names[0]} if adapter else {}),
    }
