"""/v1/responses: OpenAI's newer form of a chat, with file_search over datastores, and responses that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from memlm.server.frontend.service import Service
from memlm.server.http.chats import answer_chat, chat_request
from memlm.server.http.exchange import Exchange
from memlm.server.http.openai import answer_form
from memlm.server.http.reading import read_body
from memlm.server.http.response_answer import ResponseAnswer
from memlm.server.http.response_bodies import RESPONSE, chat_of, messages_of


async def create_response(service: Service, exchange: Exchange) -> None:
    """Answers a conversation, or the next turn of one that is kept."""
    async with service.admit("Chat", exchange) as call:
        body, caller = await read_body(service, call, exchange, RESPONSE), call.caller.name
        previous = body.get("previous_response_id")
        earlier = [] if previous is None else service.kept_responses.get(caller, previous)["messages"]
        chat = chat_of(body, earlier)
        form = answer_form(chat, service.model_names, service.adapter_names, is_chat=True)
        form = replace(form, shows_memory="memory" in body)
        said = [*earlier, *messages_of(body["input"])]
        keep = partial(_keep, service, caller, said) if body.get("store", True) else None
        await answer_chat(service, call, exchange, ResponseAnswer(form, chat_request(chat, form), body, keep))


async def get_response(service: Service, exchange: Exchange) -> None:
    async with service.admit("Chat", exchange) as call:
        kept = service.kept_responses.get(call.caller.name, exchange.path_params["response"])
        await exchange.reply_json(kept["response"])


async def delete_response(service: Service, exchange: Exchange) -> None:
    """Deletes a response. Those that went on from it have its text, and stay."""
    async with service.admit("Chat", exchange) as call:
        name = exchange.path_params["response"]
        service.kept_responses.remove(call.caller.name, name)
        await exchange.reply_json({"id": name, "object": "response", "deleted": True})


def _keep(
    service: Service, caller: str, said: list[dict[str, Any]], response: Mapping[str, Any], answer: Mapping[str, Any]
) -> bool:
    """Keeps a response and its conversation, without instructions, which the next turn gives anew."""
    kept = {"messages": [*said, answer], "response": response}
    return service.kept_responses.put(caller, response["id"], kept)
