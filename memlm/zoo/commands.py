"""`memlm zoo`: what models with parts of the zoo read beside their text, and mixtures of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.api.params import GenerateRequest, SamplingParams
from memlm.cli.eval import print_evaluation
from memlm.cli.terminal import options, render
from memlm.cli.terminal.fields import with_fields

if TYPE_CHECKING:
    from memlm.language_model import LanguageModel
    from memlm.zoo.demix.model_mixture import ModelMixture

app = typer.Typer(help="Read and mix models with parts of the literature (docs/zoo.md).", no_args_is_help=True)

Models = Annotated[
    list[Path],
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Folder, GGUF file, hub id, or smollm2. Several, of one tokenizer, are mixed as likely as each makes the"
        " text.",
        rich_help_panel="Model",
    ),
]
Domain = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Domain whose experts read, of a model that has some.", rich_help_panel="Model"),
]
MixDomains = Annotated[
    bool,
    typer.Option(
        "--mix-domains", help="Mix all domains of a model, as likely as each makes the text.", rich_help_panel="Model"
    ),
]
Top = Annotated[
    int,
    typer.Option(
        metavar="N", help="Likeliest models or domains that predict a token, 0 for all.", rich_help_panel="Model"
    ),
]
ChunkStore = Annotated[
    Path | None,
    typer.Option(
        metavar="STORE", help="Datastore whose texts a model with the cross retro reads.", rich_help_panel="Model"
    ),
]


@app.command(epilog="Example: memlm zoo generate 'The gateway' --model books --model code --top 1")
@with_fields()
def generate(  # noqa: PLR0913 - an option is an argument
    sampling: SamplingParams,
    model: Models,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    domain: Domain = None,
    mix_domains: MixDomains = False,
    top: Top = 0,
    chunk_store: ChunkStore = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Continue a prompt in this process."""
    request = GenerateRequest(options.read_prompt(prompt, file), sampling=sampling)
    is_mixed = mix_domains or len(model) > 1
    if is_mixed and (domain or chunk_store):
        raise typer.BadParameter("a mixture goes with neither --domain nor --chunk-store; leave them out")
    if top and not is_mixed:
        raise typer.BadParameter("--top chooses among several models; give more as --model, or --mix-domains")
    with ExitStack() as held:
        reader: LanguageModel | ModelMixture = (
            _mixture(model, top, dtype, device, mix_domains=mix_domains)
            if is_mixed
            else held.enter_context(_loaded(model[0], dtype, device, domain, chunk_store))
        )
        with reader.generate(request) as tokens:
            render.print_generation(tokens, prompt=request.prompt, json=json, show_sources=False)


@app.command("eval", epilog="Example: memlm zoo eval heldout/ --model demix --domain code")
def evaluate(  # noqa: PLR0913
    texts: options.Texts,
    model: options.Model,
    domain: Domain = None,
    chunk_store: ChunkStore = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    glob: options.Glob = "**/*",
    hidden: options.Hidden = False,
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Measure perplexity on held-out text."""
    documents = options.corpus_of(texts, glob, on_error, hidden=hidden)
    print_evaluation(partial(_loaded, model, dtype, device, domain, chunk_store), documents, json=json)


@contextmanager
def _loaded(
    model: Path, dtype: str, device: str, domain: str | None, chunk_store: Path | None
) -> Iterator[LanguageModel]:
    """A model with its domain and its chunks."""
    from memlm.language_model import load
    from memlm.zoo.demix.domains import fix_domain
    from memlm.zoo.retro.datastore_chunks import read_chunks

    with ExitStack() as held:
        lm = held.enter_context(load(model, dtype=dtype, device=device))
        if domain is not None:
            fix_domain(lm, domain)
        if chunk_store:
            held.enter_context(read_chunks(lm, chunk_store))
        yield lm


def _mixture(models: Sequence[Path], top: int, dtype: str, device: str, *, mix_domains: bool) -> ModelMixture:
    from memlm.zoo.demix.model_mixture import ModelMixture

    mixture = ModelMixture(models, top=top, dtype=dtype, device=device)
    if mix_domains and not any(reader.domain for reader in mixture.readers):
        raise typer.BadParameter(f"--mix-domains mixes experts of domains, and {models[0]} has none; leave it out")
    return mixture
