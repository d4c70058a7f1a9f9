"""Options that several commands share: one name, one meaning, one help text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

Corpora = Annotated[
    list[str],
    typer.Argument(metavar="CORPUS...", help="Files or folders: text, JSON Lines, Parquet, .gz, .zst; or - for stdin."),
]
Texts = Annotated[list[str], typer.Argument(metavar="TEXT...", help="Held-out files or folders, as a corpus.")]
Glob = Annotated[str, typer.Option(help="Which files of a folder are read.")]
OnError = Annotated[str, typer.Option(metavar="skip|fail", help="What to do with text that cannot be used.")]
Purge = Annotated[
    bool,
    typer.Option("--purge", help="Go on until no file holds a deleted document; give up interrupted additions."),
]
Model = Annotated[Path, typer.Option("--model", "-m", metavar="MODEL", help="A model's folder.")]
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A datastore's folder.")]
Stores = Annotated[list[Path] | None, typer.Option("--store", "-s", metavar="STORE", help="A datastore's folder.")]
Dtype = Annotated[
    str, typer.Option(metavar="float32|bfloat16|auto", help="What the model computes in; auto takes the faster.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

StoreName = Annotated[str | None, typer.Option("--store-name", metavar="NAME", help="Which loaded datastore speaks.")]
StoreWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--store-name",
        metavar="NAME[=WEIGHT]",
        help="Which loaded datastore speaks; may be given again (default: all).",
    ),
]
MinPointers = Annotated[
    int | None,
    typer.Option(help="Follow the last neighbors in place of a search where this many can be; 0 always searches."),
]
NoStore = Annotated[bool, typer.Option("--no-store", help="The model alone.")]
K = Annotated[int | None, typer.Option("--k", help="Neighbors to retrieve.")]
Lam = Annotated[float | None, typer.Option("--lam", help="Weight of the memory, 0 to 1.")]
KnnTemperature = Annotated[float | None, typer.Option("--knn-temperature", help="Softmax temperature over distances.")]
Nprobe = Annotated[int | None, typer.Option("--nprobe", help="Inverted lists to search.")]

Spalm = Annotated[bool, typer.Option("--spalm", help="Put the neighbors through the model's trained gate.")]

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="At most this many tokens.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy (default: the model's own, else 1).")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Draw from the likeliest tokens that hold this mass.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Leave out tokens this many times rarer than the likeliest.")
]
Penalty = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1 makes tokens that were seen rarer.")
]
TimeLimit = Annotated[float | None, typer.Option("--time-limit", help="Seconds after which the text ends.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this string; may be given again.")]
ShowSources = Annotated[
    bool, typer.Option("--show-sources", help="Color tokens by their share of memory; name the places.")
]
EarlyExit = Annotated[
    bool, typer.Option("--early-exit", help="Leave later layers out where the model was calibrated to be sure.")
]

NEIGHBORS_SHOWN = 16


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others keep their defaults."""
    return {name: value for name, value in options.items() if value is not None}


def weights(use: list[str] | None) -> dict[str, float] | None:
    """What `--store-name NAME[=WEIGHT]` says, where it was given."""
    told = {}
    for said in use or ():
        name, _, weight = said.partition("=")
        try:
            told[name] = float(weight or 1)
        except ValueError:
            raise typer.BadParameter(f"--store-name is {said!r}; expected NAME or NAME=WEIGHT, as code=0.5") from None
    return told or None


def num_bytes(said: str | None) -> int | None:
    """A number of bytes as people write it: 1500000, 500M, 2GB (powers of 1000), 2GiB (of 1024)."""
    if said is None:
        return None
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", said, re.IGNORECASE)
    if not found or not found[1].replace(".", "", 1).isdigit():
        raise typer.BadParameter(f"{said!r} is no number of bytes; expected one as 500M or 2GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))
