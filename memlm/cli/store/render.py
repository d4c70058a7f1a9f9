"""Output of the commands on datastores, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from rich.text import Text

from memlm.api.datastores import SearchBy, SearchRequest
from memlm.api.generation import Neighbor
from memlm.api.passages import Passage
from memlm.base.figures import counted, duration, figure, file_size
from memlm.base.phrases import phrase_places, words_of
from memlm.base.printable import one_line, printable
from memlm.cli.terminal.console import emit_json, err, jsonable, out

SHOWN_FILES = 100
SERVED_WITHOUT_KEYS = (
    "it serves answer, passages, trace, search --by words and drafts, and generation finds no neighbors"
)


def print_neighbors(neighbors: Sequence[Neighbor], request: SearchRequest, *, json: bool) -> None:
    """Prints the places of a search, each with the text around it."""
    if json:
        emit_json({"neighbors": tuple(neighbors)})
        return
    by_words = request.by is SearchBy.WORDS
    for neighbor in neighbors:
        place = Text(one_line(f"{neighbor.document_id}:{neighbor.line}"), style="bold")
        if not by_words:
            place.append(
                one_line(f"  distance {figure(neighbor.distance)}, next {neighbor.token_text!r}"), style="not bold dim"
            )
        out.print(place)
        out.print(_snippet(neighbor.snippet, request.text if by_words else ""))
    if not neighbors and by_words:
        out.print("No text has these words in a row. Without --by words, places are found by the state of the model.")
    elif not neighbors:
        out.print("No place was found.")


def print_passages(passages: Sequence[Passage], *, json: bool) -> None:
    """Prints passages, each with its place and its score."""
    if json:
        emit_json({"passages": tuple(passages)})
        return
    for number, passage in enumerate(passages, 1):
        place = Text(one_line(f"[{number}] {passage.place}"), style="bold")
        out.print(place.append(f"  score {figure(passage.score)}", style="not bold dim"))
        for line in _pointed_out(passage).split(allow_blank=True):
            out.print(Text("  ").append(line))
        if passage.also:
            out.print(Text(one_line(f"  also in {'; '.join(passage.also)}"), style="dim"))
    if not passages:
        out.print("No passage has a word of the question. With an encoder, --by meaning ranks all passages.")


def _pointed_out(passage: Passage) -> Text:
    """The text of a passage, with its sentence bold."""
    text, sentence = passage.text.replace("\f", "\n"), passage.sentence
    if sentence is None:
        return Text(printable(text))
    begin, end = sentence.offset, sentence.offset + len(sentence.text)
    return Text.assemble(printable(text[:begin]), (printable(text[begin:end]), "bold"), printable(text[end:]))


def _snippet(snippet: str, phrase: str) -> Text:
    """A text on one line, cut to the width of the terminal, with a phrase in bold."""
    text = Text("  " + one_line(" ".join(snippet.split())), style="dim" if phrase else "")
    words = words_of(phrase)
    for begin, end in phrase_places(text.plain, words) if words else ():
        text.stylize("bold not dim", begin, end)
    if out.is_terminal:
        text.truncate(out.width, overflow="ellipsis")
    return text


def print_delete_preview(document_ids: list[str], *, json: bool) -> None:
    """Prints the documents that a deletion would delete."""
    if json:
        emit_json({"documents": document_ids})
        return
    for document_id in document_ids:
        out.print(one_line(document_id), markup=False)
    out.print(f"{counted(len(document_ids), 'document')} would be deleted")


def print_estimate(estimate: Any, files: list[str], out_folder: Path, *, json: bool) -> None:
    """Prints the files that a build would read, and its estimate."""
    if json:
        emit_json({**jsonable(estimate), "files": files})
        return
    for name in files[:SHOWN_FILES]:
        out.print(one_line(name), markup=False)
    if len(files) > SHOWN_FILES:
        out.print(f"and {len(files) - SHOWN_FILES:,} more (--json lists all)")
    print_lines(f"estimate for {out_folder}", _estimate_lines(estimate, len(files)))


def _estimate_lines(estimate: Any, num_files: int) -> list[tuple[str, str]]:
    """Names and values of an estimate, in the units of people."""
    from memlm.indexing.estimate import seconds_of_text

    ram, pace = f"{file_size(estimate.ram_bytes)} to build", ""
    if estimate.search_bytes:
        ram += f", {file_size(estimate.search_bytes)} to search"
    if estimate.tokens_per_s is not None:
        pace = f", {estimate.tokens_per_s:,.0f} tokens/s with this model on this machine"
    time = f"about {duration(seconds_of_text(estimate.entries))} until it answers"
    if estimate.seconds is not None:
        time += f", {duration(estimate.seconds)} for keys{pace}"
    return [
        ("files", f"{num_files:,}"),
        ("entries", f"about {estimate.entries:,}, one a token"),
        ("index", estimate.index),
        ("disk", f"{file_size(estimate.disk_bytes)} at most, {file_size(estimate.free_bytes)} are free"),
        ("RAM", ram),
        ("time", time),
    ]


def print_compaction(done: Any, *, json: bool) -> None:
    """Prints the report of a compaction."""
    if json:
        emit_json(done)
        return
    if done.linked_files:
        err.print(
            f"warning: {counted(done.linked_files, 'file')} with deleted documents remain under another name, as in a"
            " copy by `memlm index snapshot`: run `memlm index compact COPY --purge` on every copy, or remove it",
            markup=False,
        )
    if done.rolled_back_addition:
        out.print("The interrupted addition was given up: its documents are removed.")
    if done.was_tuned:
        out.print("It was tuned on its own documents.")
    if done.outgrown:
        err.print(one_line(f"its tuning is outgrown: {done.outgrown}"), markup=False)
    if done.segments_before <= 1 and not done.deleted_documents:
        out.print("There is at most one segment and nothing deleted: nothing to do.")
        return
    became = "one" if done.entries else "none"
    out.print(
        f"{counted(done.segments_before, 'segment')} became {became}, without"
        f" {counted(done.deleted_documents, 'deleted document')};"
        f" {done.bytes_before:,} bytes became {done.bytes_after:,}"
    )
    if done.left_documents:
        out.print(
            f"still in its files, as it was deleted meanwhile: {counted(done.left_documents, 'document')}; compact it"
            " again, or use --purge"
        )


def print_copy(report: Any, *, json: bool) -> None:
    """Prints the report of a copy."""
    if json:
        emit_json(report)
        return
    out.print(
        f"{report.path} has manifest {report.manifest}: {counted(report.documents, 'document')},"
        f" {counted(report.entries, 'entry')}, {report.bytes:,} bytes",
        markup=False,
    )
    out.print(
        f"{report.num_linked} of {report.num_files} files are hard links, {report.copied_bytes:,} bytes were copied"
        + (", and every checksum is right" if report.verified else "")
    )
    if report.deleted_documents:
        out.print(
            f"It still has the data of {counted(report.deleted_documents, 'deleted document')}, which `memlm index"
            f" compact {quote(report.path)} --purge` removes.",
            markup=False,
        )


def facts_of(snapshot: Any) -> dict[str, Any]:
    """All that is known of a snapshot."""
    manifest, defaults = snapshot.manifest, snapshot.defaults
    return {
        "entries": snapshot.num_entries,
        "keyed_entries": snapshot.keyed.num_entries,
        "keyed_documents": snapshot.keyed.num_documents,
        "pruned_entries": snapshot.num_pruned_entries,
        "documents": snapshot.num_documents,
        "deleted_documents": snapshot.num_deleted_documents,
        "index": snapshot.index_kind,
        "distances": snapshot.distances,
        "dim": snapshot.dim,
        "bytes": snapshot.bytes_on_disk,
        "manifest": manifest.number,
        "store_id": manifest.store_id,
        "segments": len(manifest.segments),
        "model": manifest.spec.model,
        "model_fingerprint": manifest.spec.model_fingerprint,
        "tokenizer_fingerprint": manifest.spec.tokenizer_fingerprint,
        "window": manifest.spec.context,
        "stride": manifest.spec.stride,
        "k": defaults.k,
        "lam": defaults.lam,
        "temperature": defaults.temperature,
        "tuned_on": defaults.tuned_on,
        "tuned_entries": defaults.tuned_entries,
        "gain": defaults.gain,
        "gain_error": defaults.gain_error,
        "adaptive": defaults.adaptive is not None,
        "nprobe": defaults.nprobe,
        "quality": manifest.quality,
    }


def print_info(snapshot: Any, *, json: bool) -> None:
    """Prints what is known of a datastore: as text the parts that a person asks for, as JSON all."""
    if json:
        emit_json(facts_of(snapshot))
        return
    print_lines(str(snapshot.path), info_lines(snapshot))


def print_lines(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Prints names and values, one a line. Long values go on below their beginning."""
    out.print(Text(one_line(title), style="bold"))
    width = max(len(name) for name, _ in facts) + 3
    for name, value in facts:
        line = Text(f"  {name:{width - 2}}", style="dim")
        line.append(one_line(value), style="not dim")
        if out.is_terminal:
            for number, part in enumerate(line.wrap(out, max(20, out.width - width))):
                out.print(part if number == 0 else Text(" " * width) + part)
        else:
            out.print(line)


def info_lines(snapshot: Any) -> list[tuple[str, str]]:
    """Names and values that `index info` shows."""
    manifest, defaults, spec = snapshot.manifest, snapshot.defaults, snapshot.manifest.spec
    committed = datetime.fromtimestamp((snapshot.path / manifest.name).stat().st_mtime, UTC).astimezone()
    pruned = f", {snapshot.num_pruned_entries:,} more are pruned" if snapshot.num_pruned_entries else ""
    gone = snapshot.num_deleted_documents
    deleted = f", and still {counted(gone, 'deleted document')}" if gone else ""
    segments = counted(len(manifest.segments), "segment")
    lam = "λ that adapts" if defaults.adaptive is not None else f"λ {defaults.lam:.3g}"
    settings = f"{lam}, k {defaults.k}, temperature {figure(defaults.temperature)} of squared distances"
    if defaults.nprobe is not None:
        settings += f", {defaults.nprobe} lists searched"
    tuned = "not yet: run `memlm tune` with held-out text"
    if defaults.tuned_on is not None:
        gain = (
            "" if defaults.gain is None else f", {defaults.gain:.4f} ± {defaults.gain_error or 0:.4f} nats a token less"
        )
        tuned = "; ".join(filter(None, (f"on {defaults.tuned_on}{gain}", snapshot.outgrown)))
    documents = counted(snapshot.num_documents, "document")
    about_keys = [
        ("model", f"{spec.model or 'unnamed'}, keys of {snapshot.dim} numbers, fingerprint {spec.model_fingerprint}"),
        ("windows", f"{spec.context:,} tokens, a new one every {spec.stride:,}"),
        ("index", f"{snapshot.index_kind}, {snapshot.distances} distances"),
        ("quality", _quality(manifest.quality)),
        ("defaults", settings),
        ("tuned", tuned),
    ]
    to_make = f"memlm index keys {quote(str(snapshot.path))} --model MODEL"
    if not snapshot.is_keyed:
        about_keys = [
            ("tokenizer", f"that of {spec.model or 'unnamed'}, fingerprint {spec.tokenizer_fingerprint}"),
            ("keys", one_line(f"none: {SERVED_WITHOUT_KEYS}; {to_make} makes them")),
        ]
    elif (keyed := snapshot.keyed).num_documents < snapshot.num_documents:
        share = keyed.num_entries / max(1, snapshot.num_entries)
        have = f"{keyed.num_documents:,} of {counted(snapshot.num_documents, 'document')}, {share:.0%} of the entries"
        about_keys.insert(0, ("keys", one_line(f"of {have}; {to_make} makes the others")))
    return [
        ("content", f"{counted(snapshot.num_entries, 'entry')} of {documents}{pruned}{deleted}"),
        ("on disk", f"{file_size(snapshot.bytes_on_disk)} in {segments}"),
        ("changed", f"{committed:%Y-%m-%d %H:%M}, manifest {manifest.number}, id {manifest.store_id or 'none'}"),
        *about_keys,
    ]


def _quality(quality: Any) -> str:
    if not quality:
        return "not measured"
    return (
        f"recall@{quality['k']} {quality['recall']:.3f}, softmax mass {quality['softmax_mass']:.3f},"
        f" {quality['nats_change']:+.4f} nats a token against exact search"
    )
