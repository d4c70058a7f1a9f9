"""`memlm inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.base.progress import LOADING
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, out, print_table, table
from memlm.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from memlm.inspect import Head, Inspection

LISTED = 12


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, GGUF file, hub id, or smollm2.")],
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="Also map attention in this text. - is standard input."),
    ] = None,
    file: options.PromptFile = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the report as an HTML page.", rich_help_panel="Output"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal random tokens.")] = 0,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Find heads that copy, look back and retrieve, their circuits, and layers for kNN attention."""
    if out_file is not None and not out_file.parent.is_dir():
        raise InvalidInput(f"{out_file} cannot be written; give a file in a folder that is there", field="out")
    read = None if text is None and file is None else options.read_prompt(text, file)
    with ConsoleProgress() as progress:
        progress(LOADING, 0, 1)
        from memlm.inspect import inspect_model, report_html

        found = inspect_model(model, read, device=device, seed=seed, progress=progress)
    if out_file is not None:
        try:
            out_file.write_text(report_html(found), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(
                f"{out_file} cannot be written ({error.strerror}); give a file in a folder that is there", field="out"
            ) from None
    if json:
        emit_json(found)
        return
    print_inspection(found)
    if out_file is not None:
        out.print(f"The report is in {out_file}.", markup=False)


def print_inspection(found: Inspection) -> None:
    """Prints the most telling heads, the causal check, and the advice."""
    from memlm.inspect import Role

    counts = [f"{len(found.with_role(role))} {role.value}" for role in Role]
    out.print(f"{found.num_layers} layers of {found.num_heads} heads: {', '.join(counts)}")
    if found.layers_without_heads:
        layers = ", ".join(map(str, found.layers_without_heads))
        out.print(f"Without attention weights, and so without heads: layers {layers}.")
    heads = [head for head in found.heads if set(head.roles) - {Role.FIRST}]
    heads.sort(key=lambda head: -head.telling)
    if heads:
        print_table(_table(heads[:LISTED]))
    first, second, *_ = found.repeat_losses
    out.print(f"{found.period} random tokens cost {first:.2f} nats each, and {second:.2f} when they come again.")
    if (ablation := found.ablation) is not None:
        others = sum(ablation.losses_without_others) / len(ablation.losses_without_others)
        out.print(
            f"Without the induction heads, repeated tokens cost {ablation.loss_without:.2f} nats in place of"
            f" {ablation.loss:.2f}, and {others:.2f} without as many others."
        )
    layers = ", ".join(map(str, found.advice.layers))
    advised = f"layer{'s' * (len(found.advice.layers) != 1)} {layers}" if layers else "no layer"
    out.print(f"For kNN attention, try {advised}. {found.advice.basis} This is a heuristic.")


def _table(heads: list[Head]) -> Table:
    shown = table("head", "induction", "previous", "duplicate", "copied", "retrieval", "roles")
    for head in heads:
        copied, retrieval = ("–" if score is None else f"{score:.2f}" for score in (head.copied, head.retrieval))
        shown.add_row(
            f"{head.layer}.{head.head}", f"{head.induction:.2f}", f"{head.previous:.2f}", f"{head.duplicate:.2f}",
            copied, retrieval, ", ".join(role.value for role in head.roles),
        )  # fmt: skip
    return shown
