"""`memlm chat`: a conversation at a terminal, with a memory that it can change."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.api.chat import ChatRequest
from memlm.api.datastores import StoreInfo
from memlm.api.params import RetrievalParams
from memlm.base.figures import counted
from memlm.base.printable import one_line
from memlm.cli.ask.chat_memory import ChatMemory, LocalMemory, ServerMemory
from memlm.cli.ask.chat_shell import ChatShell, piped_lines, typed_lines
from memlm.cli.ask.conversation import Conversation
from memlm.cli.store.vectors import tell_missing_encoder
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import Target, adapter_name, client_of, is_served, model_of
from memlm.cli.terminal.console import out
from memlm.cli.terminal.fields import Overrides, with_fields

if TYPE_CHECKING:
    from memlm.client import Client
    from memlm.language_model import LanguageModel

NEIGHBORS = 16  # of each token, for /sources
ANSWER_S = 600.0  # the time limit of an answer, where none is given


@with_fields(leave_out=options.NOT_OF_ANSWERS)
def chat(
    context: typer.Context,
    answers: Annotated[dict[str, Any], Overrides(ChatRequest)],
    model: options.ModelOrTarget = None,
    store: Annotated[
        list[Path] | None,
        typer.Option(
            "--store", "-s", metavar="FOLDER", rich_help_panel="Model",
            help="Datastore folder. Repeatable. The first takes /remember and /add, and may be new.",
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attention_window: options.AttentionWindow = None,
    encoder: options.Encoder = "auto",
    target: Target = None,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="System message.", show_default=False)] = "",
    temperature: options.Temperature = options.TEMPERATURE,
    max_tokens: options.MaxTokens = options.MAX_TOKENS,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line.", rich_help_panel="Output")
    ] = False,
) -> None:  # fmt: skip
    """Chat with a model, in this process or on a server. /help lists the commands."""
    asked = {**answers, "temperature": temperature, "max_tokens": max_tokens}
    if is_served(context, target):
        assert target is not None
        _chat_with_server(target, asked, system, json=json)
        return
    model = model_of(model)
    retrieval = [f"--{each.name.replace('_', '-')}" for each in fields(RetrievalParams) if each.name in answers]
    retrieval += ["--passages"] * bool(answers.get("num_passages"))
    if not store and retrieval:
        raise typer.BadParameter(f"{', '.join(retrieval)} needs a datastore; give --store FOLDER")
    if answers.get("num_passages"):
        tell_missing_encoder(encoder, "auto")
    loading: dict[str, Any] = {
        "dtype": dtype, "device": device, "attention_window": attention_window, "passage_encoder": encoder,
    }  # fmt: skip
    if (adapter := asked.get("adapter")) is not None:
        loading["adapters"] = [adapter]
        asked["adapter"] = adapter_name(adapter, target)
    _chat_in_process(model, store or [], loading, asked, system, json=json)


def _chat_with_server(target: str, asked: dict[str, Any], system: str, *, json: bool) -> None:
    names = [store.name for store in asked.get("stores", ())]
    with client_of(target, ANSWER_S) as client:
        model = client.get_model()
        memory = ServerMemory(client, names[0] if names else None)
        _run(client, memory, f"{model.name} at {target}", asked, system, json=json)


def _chat_in_process(
    model: Path, stores: list[Path], loading: dict[str, Any], asked: dict[str, Any], system: str, *, json: bool
) -> None:
    from memlm.language_model import load

    new = stores[:1] if stores and not stores[0].exists() else []
    with load(model, [store for store in stores if store not in new], **loading) as lm:
        lm.checkpoint.chat_template  # noqa: B018 - raises where there is none, before anything is typed
        memory = LocalMemory(lm, stores[0] if stores else None)
        note = f"; {new[0]} will be made by /remember or /add" if new else ""
        _run(lm, memory, f"{lm.info.name}, {lm.info.num_parameters:,} parameters{note}", asked, system, json=json)


def _run(
    host: LanguageModel | Client, memory: ChatMemory, about: str, asked: dict[str, Any], system: str, *, json: bool
) -> None:
    is_typed = sys.stdin.isatty()
    conversation = Conversation(host, {**asked, "neighbors": NEIGHBORS}, system)
    shell = ChatShell(conversation, memory, json=json)
    if is_typed and not json:
        out.print(one_line(about + _described(memory.stores())), style="dim", markup=False)
        out.print("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
    shell.run(typed_lines() if is_typed else piped_lines(echo=not json))
    if shell.num_failed and not is_typed:
        raise typer.Exit(1)


def _described(stores: tuple[StoreInfo, ...]) -> str:
    return "".join(f"; datastore {info.name}, {counted(info.num_entries, 'entry')}" for info in stores)
