"""`memlm bench variants`: the parts of the decoder side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.base.printable import one_line
from memlm.cli import options
from memlm.cli.console import ConsoleProgress, emit_json, err, out, print_table, table
from memlm.errors import InvalidInput, check_choice, check_range

MINUTES = 45.0

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "bits_a_byte": ("bits a byte", lambda value: f"{value:.3f}"),
    "bits_a_byte_at_mark_0": ("at 1/4 of the tokens", lambda value: f"{value:.3f}"),
    "bits_a_byte_at_mark_1": ("at 1/2", lambda value: f"{value:.3f}"),
    "train_tokens_per_s": ("trained tokens/s", lambda value: f"{value:,.0f}"),
    "decode_tokens_per_s_at_1000": ("decoded tokens/s at 1k", lambda value: f"{value:,.0f}"),
    "decode_tokens_per_s_at_8000": ("at 8k", lambda value: f"{value:,.0f}"),
    "decode_tokens_per_s_at_64000": ("at 64k", lambda value: f"{value:,.0f}"),
    "state_bytes_a_token": ("state bytes a token", lambda value: f"{value:,.0f}"),
    "state_bytes_at_64000": ("MB at 64k", lambda value: f"{value / 1e6:,.1f}"),
    "all_parameters": ("parameters", lambda value: f"{value:,}"),
    "exactness": ("exact to the", str),
}


def variants(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT...]", help="A corpus (default: some of the standard library).")
    ] = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Train each part on the synthetic task that shows its effect.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="NAME,...", help="Variants, or parts with an effect (default: all).")
    ] = "",
    minutes: Annotated[float | None, typer.Option(help="Time of the table.", show_default=f"{MINUTES:g}")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="With --effects: runs side by side, each on one thread.", show_default="1")
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute.")] = "cpu",
    out_file: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the table as Markdown too.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Parts of the decoder side by side: learning, speed and memory of small models of equal parameters. Or, with
    --effects, each on the task that shows its effect.
    """
    from memlm.bench.report import report

    check_range("jobs", jobs, least=1, whole=True)
    check_range("minutes", minutes, above=0)
    check_choice("device", device, ("auto", "cpu", "cuda"))
    of_table = {"texts": bool(texts), "out": out_file is not None, "minutes": minutes is not None}
    for name, is_given in of_table.items():
        if effects and is_given:
            raise InvalidInput(f"{name} belongs to the table of variants; leave it or --effects out", field=name)
    if jobs is not None and not effects:
        raise InvalidInput("jobs goes with --effects; leave it out, or add --effects", field="jobs")
    if out_file is not None and not out_file.parent.is_dir():
        raise InvalidInput(f"there is no folder {out_file.parent}; make it, or write elsewhere", field="out")
    with ConsoleProgress() as progress:
        if effects:
            from memlm.bench.effects import bench_effects

            figures = bench_effects(names_in(only), jobs=jobs or 1, device=device, progress=progress)
        else:
            figures = _table(texts, minutes or MINUTES, names_in(only), device, progress)
    if out_file is not None:
        out_file.write_text(markdown(figures), encoding="utf-8")
    if json:
        emit_json(report(figures, repeats=None))
    elif effects:
        print_effects(figures)
    else:
        print_variants(figures)


def _table(
    texts: list[str] | None, minutes: float, only: list[str], device: str, progress: ConsoleProgress
) -> dict[str, Any]:
    from memlm.bench.texts import library_texts, workplace
    from memlm.bench.variants import bench_variants
    from memlm.data.corpus import Corpus

    with workplace() as folder:
        corpus = Corpus(texts or [library_texts(folder / "texts", 4_000_000)])
        return bench_variants(corpus, minutes=minutes, only=only, device=device, progress=progress)


def names_in(only: str) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in only.split(",") if name.strip()]


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table as text. A mark after the name means that the machine was busy, an equals sign that the bits
    are those of the plain model within twice its spread.
    """
    name = row["way"] + ("*" if row["disturbed"] else "")
    shown = [form(row[key]) if row.get(key) is not None else "-" for key, (_, form) in COLUMNS.items()]
    shown[0] += " =" if row["equals_plain"] else ""
    return [name, *shown]


def markdown(figures: dict[str, Any]) -> str:
    """The table of variants in Markdown, with its error."""
    names = ["variant", *(name for name, _ in COLUMNS.values())]
    lines = [names, ["---"] * len(names), *map(cells, figures["rows"])]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{notes(figures)}\n"


def notes(figures: dict[str, Any]) -> str:
    """What the signs of a table mean, and its error."""
    return (
        f"The bits of three plain runs differ by {figures['spread_of_plain']:.3f}. Those marked = are nearer than twice"
        " that to the plain mean, and count as equal. A run marked * changed its speed on the way by more than 5 %."
        f" Each row took {figures['seconds_a_row']:.0f} s on {figures['device']}. The marks are"
        f" {' and '.join(f'{mark:,}' for mark in figures['marks'])} tokens. Speeds are of this"
        " implementation, which masks scores where an idea could leave them out."
    )


def print_variants(figures: dict[str, Any]) -> None:
    """Prints the table and its notes."""
    shown = table("variant", *(name for name, _ in COLUMNS.values()), title="bench variants")
    for row in figures["rows"]:
        shown.add_row(*cells(row))
    print_table(shown)
    out.print(notes(figures), markup=False)
    _print_errors(figures)


def print_effects(figures: dict[str, Any]) -> None:
    """Prints a table of configs for each effect."""
    for effect, expects in figures["expects"].items():
        rows = [row for row in figures["rows"] if row["effect"] == effect]
        # A config may have figures that the plain one lacks.
        names = list(dict.fromkeys(name for row in rows for name in row if f"{name}_least" in row))
        shown = table("config", "seeds", *(name.replace("_", " ") for name in names), title=effect)
        for row in rows:
            values = (
                f"{row[n]:.3g} ({row[f'{n}_least']:.3g} to {row[f'{n}_most']:.3g})" if n in row else "" for n in names
            )
            shown.add_row(row["config"], str(row["seeds"]), *values)
        print_table(shown)
        out.print(one_line(f"expected: {expects}"), markup=False)
        if effect in figures["crashed"]:
            out.print(one_line(f"no result: {figures['crashed'][effect]}"), markup=False)
        elif effect in figures["no_result"]:
            out.print("no result: the plain decoder did not learn the task")
    _print_errors(figures)


def _print_errors(figures: dict[str, Any]) -> None:
    for job, error in figures["errors"].items():
        err.print(one_line(f"{job}: {error}"), markup=False)
