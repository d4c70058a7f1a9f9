"""`memlm index`: build a datastore, change it, look into it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memlm.cli import options
from memlm.cli.console import ConsoleProgress, emit_json, err, out, table, tell_problem

app = typer.Typer(help="Build a datastore, change it, look into it.", no_args_is_help=True)

Stride = Annotated[int | None, typer.Option(help="Tokens that each further window adds (default: half the context).")]


@app.command(epilog="Example: memlm index build docs/ --model model --out store")
def build(
    corpus: options.Corpora,
    model: options.Model,
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="STORE", help="The datastore's new folder.")],
    index: Annotated[str, typer.Option(metavar="auto|FACTORY", help="auto, or a Faiss factory string.")] = "auto",
    target: Annotated[
        float | None,
        typer.Option(help="Share of the softmax mass to find (default: 0.95; with --max-memory 0.99)."),
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What searching may want in memory, as 500M or 2GiB.")
    ] = None,
    keep_keys: Annotated[bool, typer.Option(help="Keep the keys, to re-rank by and to compact from.")] = True,
    prune: Annotated[
        float | None,
        typer.Option(metavar="P", help="Leave out of the index what the model alone gives this probability."),
    ] = None,
    stride: Stride = None,
    seed: Annotated[int, typer.Option(help="Same seed, same index.")] = 0,
    dtype: options.Dtype = "float32",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what it would take.")] = False,
    glob: options.Glob = "**/*",
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Build a datastore with one entry per token; an interrupted build goes on where it stopped."""
    from memlm.build import build_index
    from memlm.corpus import Corpus

    documents = Corpus(corpus, glob, on_error, tell_problem)
    if dry_run:
        _print_estimate(model, documents, out_folder, index=index, stride=stride, dtype=dtype, json=json)
        return
    with ConsoleProgress() as progress:
        report = build_index(
            model, documents, out_folder, index=index, target=target, max_memory=options.num_bytes(max_memory),
            keep_keys=keep_keys, prune=prune, stride=stride, seed=seed, dtype=dtype, progress=progress,
        )  # fmt: skip
    _print_build(report, json=json)


@app.command(epilog="Example: memlm index add store more/ --model model")
def add(
    store: options.StoreArgument,
    corpus: options.Corpora,
    model: options.Model,
    replace: Annotated[bool, typer.Option(help="Put documents in the place of those that have their ids.")] = False,
    dtype: options.Dtype = "float32",
    glob: options.Glob = "**/*",
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Add documents, as one more segment; readers go on reading."""
    from memlm.build import add_to_index
    from memlm.corpus import Corpus

    documents = Corpus(corpus, glob, on_error, tell_problem)
    with ConsoleProgress() as progress:
        report = add_to_index(model, documents, store, replace=replace, dtype=dtype, progress=progress)
    _print_build(report, json=json)


@app.command(epilog="Example: memlm index delete store --where license=unknown")
def delete(
    store: options.StoreArgument,
    document_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids of documents.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Those whose metadata has this; of several, all must hold."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell which.")] = False,
    json: options.Json = False,
) -> None:
    """Delete documents by id or by metadata: once this is done, they contribute to no answer."""
    from memlm.index.datastore import Datastore

    if bool(document_ids) == bool(where):
        raise typer.BadParameter("give ids of documents, or --where FIELD=VALUE")
    fields = dict(_field(each) for each in where or ())
    with Datastore.open(store) as datastore:
        if dry_run:
            _print_doomed(datastore.matching(fields) if fields else list(document_ids or ()), json=json)
            return
        deleted = datastore.delete_where(fields) if fields else datastore.delete(document_ids or ())
        number = datastore.manifest.number
    if json:
        emit_json({"documents": deleted.num_documents, "entries": deleted.num_entries, "manifest": number})
    else:
        out.print(f"deleted {deleted.num_documents:,} documents, {deleted.num_entries:,} entries (manifest {number})")


@app.command(epilog="Example: memlm index compact store --model model")
def compact(
    store: options.StoreArgument,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", metavar="MODEL", help="Measure the new index with this model.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Merge all segments into one without what was deleted; readers go on reading."""
    from memlm.build import compact_index

    with ConsoleProgress() as progress:
        done = compact_index(store, model, progress=progress)
    if json:
        emit_json(done)
    elif done.segments_before == 1 and not done.deleted_documents:
        out.print("There is one segment and nothing deleted: nothing to do.")
    else:
        out.print(
            f"{done.segments_before} segments became one; {done.deleted_documents:,} deleted documents are gone;"
            f" {done.bytes_before:,} bytes became {done.bytes_after:,}"
        )


@app.command(epilog="Example: memlm index verify store --model model")
def verify(
    store: options.StoreArgument,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Also read documents again, and compare their keys."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check every checksum and count, and that positions find themselves; exits 1 where something is wrong."""
    from memlm.index.datastore import Datastore

    with Datastore.open(store) as datastore:
        problems = datastore.verify()
        if model and not problems:
            problems = _key_problems(datastore, model)
    if json:
        emit_json({"ok": not problems, "problems": problems})
    else:
        for problem in problems:
            err.print(problem, markup=False)
        out.print(f"{len(problems)} problems" if problems else "every file is as its manifest says")
    raise typer.Exit(1 if problems else 0)


@app.command(epilog="Example: memlm index info store")
def info(store: options.StoreArgument, json: options.Json = False) -> None:
    """Show what a datastore holds, how it was built, and its defaults."""
    from memlm.index.datastore import Datastore

    with Datastore.open(store) as datastore:
        facts = _facts(datastore)
    if json:
        emit_json(facts)
        return
    shown = table("", "", title=str(store))
    shown.show_header = False
    for name, value in facts.items():
        shown.add_row(name.replace("_", " "), _readable(value))
    out.print(shown)


@app.command(epilog="Example: memlm index spalm store heldout/ --model model")
def spalm(
    store: options.StoreArgument,
    texts: options.Texts,
    model: options.Model,
    k: Annotated[int, typer.Option("--k", help="Neighbours a position.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Learn from at most this many tokens.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Same seed, same gate.")] = 0,
    glob: options.Glob = "**/*",
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Train a gate between model and datastore on held-out text, and keep it with the model."""
    from memlm.corpus import Corpus
    from memlm.spalm import train_spalm as run

    with ConsoleProgress() as progress:
        documents = Corpus(texts, glob, on_error, tell_problem)
        report = run(model, store, documents, k=k, max_tokens=max_tokens, seed=seed, progress=progress)
    if json:
        emit_json(report)
        return
    out.print(f"{report.base_nats:.4f} nats per token alone, {report.gated_nats:.4f} gated, {report.share:.1%} memory")
    if report.gated_nats >= report.base_nats:
        out.print("The gate does not help: nothing was kept.")


@app.command(epilog="Example: memlm index search store 'import os' --model model")
def search(
    store: options.StoreArgument,
    text: Annotated[str, typer.Argument(help="The context whose likes are sought.")],
    model: options.Model,
    k: Annotated[int, typer.Option("--k", help="Neighbours to show.")] = 8,
    nprobe: options.Nprobe = None,
    json: options.Json = False,
) -> None:
    """Show the places of a datastore whose context is most like a text's end."""
    from memlm.language_model import load

    with load(model, [store]) as lm:
        print_neighbors(lm.search(text, k=k, nprobe=nprobe), json=json)


@app.command(epilog="Example: memlm index tune store heldout/ --model model")
def tune(
    store: options.StoreArgument,
    texts: options.Texts,
    model: options.Model,
    max_tokens: Annotated[int, typer.Option(help="Tune on at most this many tokens.")] = 50_000,
    skip_loss: Annotated[
        float | None,
        typer.Option(metavar="NATS", help="Do not ask the datastore where that costs no more a token (default: ask)."),
    ] = None,
    follow_loss: Annotated[
        float | None,
        typer.Option(
            metavar="NATS", help="Follow the last neighbours in place of a search where that costs no more a token."
        ),
    ] = None,
    glob: options.Glob = "**/*",
    on_error: options.OnError = "skip",
    json: options.Json = False,
) -> None:
    """Find k, lam and temperature on held-out text, and keep them as the store's defaults."""
    from memlm.corpus import Corpus
    from memlm.tune import tune as run

    with ConsoleProgress() as progress:
        documents = Corpus(texts, glob, on_error, tell_problem)
        report = run(
            model, store, documents, max_tokens=max_tokens, skip_loss=skip_loss, follow_loss=follow_loss,
            progress=progress,
        )  # fmt: skip
    if json:
        emit_json(report)
        return
    out.print(
        f"k {report.k}, lam {report.lam:.3f}, temperature {report.temperature:.4g}, from {report.tokens:,} tokens"
    )
    out.print(
        f"nats per token: model {report.base_nats:.4f}, with datastore {report.knn_nats:.4f}"
        f" (gain {report.gain:.4f} ± {report.gain_error:.4f})"
    )
    verdict = "kept" if report.adaptive_kept else "not kept: not better by twice the error"
    out.print(
        f"with a lam that adapts {report.adaptive_nats:.4f} (gain over one lam {report.adaptive_gain:.4f} ±"
        f" {report.adaptive_gain_error:.4f}; {verdict})"
    )
    verdict = "kept" if report.skip_kept else "not kept; see --skip-loss"
    out.print(
        f"{report.skipped:.0%} of searches could be left out for {report.skip_loss:.4f} nats per token ({verdict})"
    )
    verdict = "kept" if report.follow_kept else "not kept; see --follow-loss"
    if report.follow is not None:
        out.print(
            f"{report.followed:.0%} of searches could be replaced by {report.follow} or more pointers for"
            f" {report.follow_loss:.4f} nats per token ({verdict})"
        )
    if report.nprobe is not None:
        out.print(f"{report.nprobe} lists are searched; more would gain {report.nprobe_loss:.4f} nats per token")


def print_neighbors(neighbors: tuple[Any, ...], *, json: bool) -> None:
    """A table of places, nearest first."""
    if json:
        emit_json({"neighbors": neighbors})
        return
    shown = table("place", "distance", "next", "text")
    shown.columns[3].justify = "left"
    for neighbor in neighbors:
        place = f"{neighbor.document_id}:{neighbor.line}"
        shown.add_row(place, f"{neighbor.distance:.4g}", repr(neighbor.token_text), " ".join(neighbor.snippet.split()))
    out.print(shown)


def _field(said: str) -> tuple[str, str]:
    name, equals, value = said.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--where is {said!r}; expected FIELD=VALUE, as license=unknown")
    return name, value


def _print_doomed(document_ids: list[str], *, json: bool) -> None:
    if json:
        emit_json({"documents": document_ids})
        return
    for document_id in document_ids:
        out.print(document_id, markup=False)
    out.print(f"{len(document_ids):,} documents would be deleted")


def _key_problems(datastore: Any, model: Path) -> list[str]:
    from memlm.checkpoint import load_checkpoint
    from memlm.memory import Memory
    from memlm.quality import check_keys

    checkpoint = load_checkpoint(model)
    Memory(datastore, checkpoint)
    return check_keys(datastore, checkpoint).problems(str(datastore.path))


def _print_estimate(
    model: Path, documents: Any, out_folder: Path, *, index: str, stride: int | None, dtype: str, json: bool
) -> None:
    from memlm.checkpoint import load_checkpoint
    from memlm.estimate import estimate_build

    checkpoint = load_checkpoint(model, dtype=dtype)
    told = estimate_build(checkpoint, documents, out_folder, index=index, stride=stride)
    if json:
        emit_json(told)
    else:
        shown = table("", "", title=f"what {out_folder} would take")
        shown.show_header = False
        for name in told.__slots__:
            shown.add_row(name.replace("_", " "), _readable(getattr(told, name)))
        out.print(shown)
    told.check(out_folder)


def _print_build(report: Any, *, json: bool) -> None:
    from memlm.index.choice import Tried

    if json:
        emit_json(report)
        return
    quality = report.quality
    for number, tried in enumerate(report.tried):
        out.print(f"{'chosen' if number == len(report.tried) - 1 else 'tried'}: {Tried(**tried)}")
    out.print(
        f"{report.entries:,} entries from {report.documents:,} documents, {report.bytes_per_entry:,.0f} bytes each;"
        f" {report.tokens_per_s:,.0f} tokens/s, index {report.index}"
    )
    if report.resumed_entries:
        out.print(f"{report.resumed_entries:,} of them were there from the interrupted build")
    out.print(
        f"against exact search: recall@{quality.k} {quality.recall:.3f} ± {quality.recall_error:.3f}, softmax mass"
        f" {quality.softmax_mass:.3f} ± {quality.softmax_mass_error:.3f}, {quality.nats_change:+.4f} ±"
        f" {quality.nats_change_error:.4f} nats per token"
    )
    if quality.pruning_nats_change is not None:
        out.print(
            f"{report.pruned:.0%} of the entries are pruned: {quality.pruning_nats_change:+.4f} ±"
            f" {quality.pruning_nats_change_error:.4f} nats per token against all of them"
        )
    checked = report.key_check
    out.print(
        f"{checked.positions:,} positions read again: {checked.found:.1%} find themselves, {checked.aligned:.1%} have"
        " the token that follows"
    )
    for problem in checked.problems(str(report.path)):
        err.print(problem, markup=False)
    out.print(f"The datastore is in {report.path}.", markup=False)


def _facts(datastore: Any) -> dict[str, Any]:
    manifest, defaults = datastore.manifest, datastore.defaults
    return {
        "entries": datastore.num_entries,
        "pruned_entries": datastore.num_pruned_entries,
        "documents": datastore.num_documents,
        "deleted_documents": datastore.num_deleted_documents,
        "index": datastore.index_kind,
        "distances": datastore.distances,
        "dim": datastore.dim,
        "bytes": datastore.bytes_on_disk,
        "manifest": manifest.number,
        "segments": len(manifest.segments),
        "model_fingerprint": manifest.spec.model_fingerprint,
        "tokenizer_fingerprint": manifest.spec.tokenizer_fingerprint,
        "context": manifest.spec.context,
        "stride": manifest.spec.stride,
        "k": defaults.k,
        "lam": defaults.lam,
        "temperature": defaults.temperature,
        "tuned_on": defaults.tuned_on,
        "gain": defaults.gain,
        "gain_error": defaults.gain_error,
        "adaptive": defaults.adaptive is not None,
        "skip_above": defaults.skip_above,
        "follow": defaults.follow,
        "nprobe": defaults.nprobe,
        "quality": manifest.quality,
    }


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
