"""`memlm shard` and `memlm index shard`: a datastore over several processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.base.cpu import spin_briefly
from memlm.base.options import RAY as RAY_URL
from memlm.base.options import check_address
from memlm.base.printable import one_line
from memlm.cli.store.engine import ENGINES
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out, print_table, table
from memlm.cli.terminal.interruption import on_interrupt, this_command
from memlm.distributed.shard_finder import no_shards
from memlm.errors import InvalidInput, check_choice

if TYPE_CHECKING:
    from memlm.distributed.ray_shards import PlacedShard

RAY = "On a Ray cluster"


def shard(
    store: Annotated[str, typer.Argument(metavar="STORE|ray://NAME", help="Datastore folder, or shards on Ray.")],
    number: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Which shard this is: 1/4 for the first of four.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT|unix:PATH", help="Where servers find it. Port 0: any free port.")
    ] = "127.0.0.1:0",
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Search in this process, or place all shards on a Ray cluster.")
    ] = "local",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the shards on Ray.", rich_help_panel=RAY)] = None,
    shards: Annotated[int | None, typer.Option(metavar="N", help="How many.", rich_help_panel=RAY)] = None,
    replicas: Annotated[int, typer.Option(help="Processes of each shard.", rich_help_panel=RAY)] = 1,
    stop: Annotated[bool, typer.Option("--stop", help="End the shards of ray://NAME.", rich_help_panel=RAY)] = False,
) -> None:
    """Search one shard of a datastore for servers (`memlm serve --shard`), until SIGTERM or Ctrl-C.

    With --engine ray, start all shards on a Ray cluster, for `memlm serve --store ray://NAME`, and return. `memlm shard
    ray://NAME` shows them. A shard authenticates nobody. Listen in a network of your own.
    """
    check_choice("engine", engine, ENGINES)
    if store.startswith(RAY_URL):
        _on_ray(store.removeprefix(RAY_URL), stop=stop)
    elif engine == "ray":
        if name is None or shards is None or number is not None or stop:
            raise InvalidInput(
                "the engine ray starts all shards; give --name and --shards, and no --shard", field="engine"
            )
        _place(Path(store), name, shards, replicas)
    elif name or shards or replicas != 1 or stop:
        raise InvalidInput("this is for shards on Ray; give --engine ray, or ray://NAME with --stop", field="engine")
    elif number is None:
        raise InvalidInput("which shard is this? give --shard 1/4 for the first of four", field="shard")
    else:
        _serve(Path(store), number, listen)


def _serve(store: Path, number: str, listen: str) -> None:
    """Answers searches for one shard until a signal."""
    spin_briefly()  # before Faiss loads: servers and other shards want the cores too
    from memlm.distributed.shard_server import ShardSegments, ShardServer
    from memlm.index.store.shards import ShardNumber

    check_address("listen", listen)
    segments = ShardSegments(store, ShardNumber.parse(number))
    with ShardServer(segments, listen) as server:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: server.stop(wait=False))
        line = f"shard {number} of {store}: {segments.description.entries:,} entries at {server.address}"
        err.print(one_line(line), markup=False, soft_wrap=True)
        server.wait()


@contextmanager
def _joined() -> Iterator[None]:
    """Joins the cluster of RAY_ADDRESS, or else this node's. Raises InvalidInput where Ray is not installed."""
    try:
        from memlm.distributed.ray_shards import joined
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"shards on Ray need {error.name}, which is not installed; pip install 'memlm[ray]'", field="engine"
        ) from error
    with joined(None):
        yield


def _place(store: Path, name: str, shards: int, replicas: int) -> None:
    """Starts all shards on a cluster, and shows them."""
    from memlm.index.store.manifest import read_manifest

    read_manifest(store)  # a wrong folder is told before a cluster is asked
    with _joined():
        from memlm.distributed.ray_shards import place

        _show(place(store, name, num_shards=shards, replicas=replicas))
    out.print(f"Search them: memlm serve --model MODEL --store {RAY_URL}{name}", markup=False)


def _on_ray(name: str, *, stop: bool) -> None:
    """Shows the shards of a name, or ends them."""
    with _joined():
        from memlm.distributed import ray_shards

        if stop:
            out.print(f"{ray_shards.stop(name)} processes were ended", markup=False)
            return
        found = ray_shards.find(name, wait_s=10.0)
        if not found:
            raise no_shards(RAY_URL + name)
        _show([each for each in found.values() if each is not None])
        if silent := [actor for actor, each in found.items() if each is None]:
            err.print(f"no answer from {', '.join(silent)}", markup=False)


def _show(placed: Sequence[PlacedShard]) -> None:
    shown = table("shard", "address", "node", "process", "problem")
    for each in placed:
        shown.add_row(f"{each.shard}/{each.num_shards}", each.address, each.node[:8], str(each.pid), each.problem)
    print_table(shown)


def split_store(
    store: options.StoreArgument,
    shards: Annotated[int, typer.Option(metavar="N", help="How many processes will search the datastore.")],
    json: options.Json = False,
) -> None:
    """Cut large segments, so that N shards have about as many entries each, and show the shards."""
    from memlm.index.store.datastore import Datastore
    from memlm.index.store.shards import shards_of, split

    resumes = f"{store} is complete, with some documents moved; to go on: {this_command()}"
    with on_interrupt(lambda: resumes), ConsoleProgress() as progress:
        cut = split(store, shards, progress)
    with Datastore.open(store) as datastore:
        segments = datastore.snapshot.segments
        numbers = shards_of([segment.record for segment in segments], shards)
    rows = []
    ordered = sorted(zip(numbers, segments, strict=True), key=lambda each: each[0])
    for number, members in groupby(ordered, key=lambda each: each[0]):
        mine = [segment for _, segment in members]
        rows.append(
            {
                "shard": number,
                "segments": len(mine),
                "entries": sum(segment.num_live_entries for segment in mine),
                "bytes": sum(file.bytes for segment in mine for file in segment.record.files.values()),
            }
        )
    if json:
        emit_json({"segments_cut": cut, "shards": rows})
        return
    if cut:
        out.print(
            f"{cut} segment{'s were' if cut > 1 else ' was'} cut and indexed anew; `memlm index verify"
            f" {quote(str(store))} --model MODEL` measures the new indexes",
            markup=False,
        )
    shown = table("shard", "segments", "entries", "bytes")
    for row in rows:
        shown.add_row(str(row["shard"]), str(row["segments"]), f"{row['entries']:,}", f"{row['bytes']:,}")
    print_table(shown)
    out.print(f"Start each: memlm shard {quote(str(store))} --shard 1/{shards} --listen HOST:PORT", markup=False)
