"""The report of a build, an addition or new keys, in lines for a person."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from memlm.base.figures import counted, duration
from memlm.base.printable import one_line
from memlm.cli.store.render import SERVED_WITHOUT_KEYS
from memlm.cli.terminal.console import emit_json, err, out
from memlm.index.factory import NO_INDEX


def print_build(report: Any, model: Path, *, json: bool) -> None:
    """Prints the report of a build: size, speed, and the quality of its keys, or how to make some."""
    if json:
        emit_json(report)
        return
    tokens, documents = counted(report.entries, "token"), counted(report.documents, "document")
    out.print(
        f"{tokens} from {documents}, {report.bytes_per_entry:,.0f} bytes a token; {report.tokens_per_s:,.0f} tokens/s"
    )
    if report.resumed_entries:
        out.print(f"{report.resumed_entries:,} of them were there from the interrupted build")
    if report.keyed_entries:
        _print_keys(report)
    else:
        to_make = f"memlm index keys {quote(str(report.path))} --model {quote(str(model))}"
        cost = f" would take about {duration(report.keys_s)}" if report.keys_s is not None else " were not made"
        served = SERVED_WITHOUT_KEYS if report.index == NO_INDEX else "neighbors come from the other documents"
        out.print(one_line(f"no keys: {served}. Keys{cost}: {to_make}"), markup=False)
    out.print(one_line(f"The datastore is in {report.path}."), markup=False)


def print_keys(report: Any, *, json: bool) -> None:
    """Prints the report of keys that were made."""
    if json:
        emit_json(report)
    elif not report.keyed_entries:
        out.print("all of these documents have keys")
    else:
        _print_keys(report)
        out.print(f"{counted(report.documents, 'document')}, {report.tokens_per_s:,.0f} tokens/s")


def _print_keys(report: Any) -> None:
    """Prints the quality of the index, the checks of keys and values, and the tuning."""
    from memlm.index.selection import IndexTrial

    for number, tried in enumerate(report.tried):
        out.print(f"{'chosen' if number == len(report.tried) - 1 else 'tried'}: {IndexTrial(**tried)}")
    out.print(f"keys of {counted(report.keyed_entries, 'token')}, index {report.index}")
    _print_quality(report)
    if (checked := report.key_check) is not None:
        aligned = "" if checked.aligned is None else f", {checked.aligned:.1%} have the token that follows"
        out.print(f"{checked.positions:,} positions read again: {checked.found:.1%} find themselves{aligned}")
        for problem in checked.problems(str(report.path)):
            err.print(one_line(problem), markup=False)
    _print_tuning(report)


def _print_quality(report: Any) -> None:
    """Prints how much searches by the index miss against exact search."""
    quality = report.quality
    if report.check == "none":
        done = "checked or tuned" if report.untuned else "checked"
        out.print(
            one_line(
                f"nothing was {done} (--check none); memlm index verify {quote(str(report.path))} --model MODEL does it"
            ),
            markup=False,
        )
    elif quality is None and not report.keeps_keys:
        out.print("not measured against exact search: keys of earlier entries were not kept")
    elif quality is None:
        out.print("not measured against exact search, which takes longer than quick checks may; see --check full")
    elif not quality.queries:
        out.print("the index is exact search: nothing is missed")
    else:
        out.print(
            f"against exact search: recall@{quality.k} {quality.recall:.3f} ± {quality.recall_error:.3f}, softmax mass"
            f" {quality.softmax_mass:.3f} ± {quality.softmax_mass_error:.3f}, {quality.nats_change:+.4f} ±"
            f" {quality.nats_change_error:.4f} nats per token"
        )
    if quality and quality.pruning_nats_change is not None:
        out.print(
            f"{report.pruned:.0%} of the entries are pruned: {quality.pruning_nats_change:+.4f} ±"
            f" {quality.pruning_nats_change_error:.4f} nats per token against all of them"
        )


def _print_tuning(report: Any) -> None:
    """Prints the gain of the tuning, or why there was none."""
    if (tuning := report.tuning) is not None:
        out.print(
            f"tuned on its own documents, each left out of its own search: gain {tuning.gain:.4f} ± "
            f"{tuning.gain_error:.4f} nats per token, {tuning.own_gain:.2f} on text that it holds"
        )
    if report.outgrown:
        err.print(one_line(f"its tuning is outgrown: {report.outgrown}"), markup=False)
    if report.check_was_cut:
        err.print(
            one_line(
                f"the checks were cut after {report.check_seconds:.0f} s, so their results depend on the load of the"
                f" machine; memlm tune HELDOUT --model MODEL --store {quote(str(report.path))} sets the defaults anew"
            ),
            markup=False,
        )
    elif report.untuned and report.check != "none":
        out.print(
            one_line(
                f"not tuned, because {report.untuned}; memlm tune HELDOUT --model MODEL --store"
                f" {quote(str(report.path))} sets the defaults with held-out text"
            ),
            markup=False,
        )
