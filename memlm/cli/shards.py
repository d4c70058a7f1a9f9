"""`memlm shard` and `memlm index shard`: a datastore over several processes."""

from __future__ import annotations

import signal
from itertools import groupby
from typing import Annotated

import typer

from memlm.base.cpu import spin_briefly
from memlm.base.options import check_address
from memlm.base.printable import one_line
from memlm.cli import options
from memlm.cli.console import ConsoleProgress, emit_json, err, out, print_table, table
from memlm.cli.interruption import on_interrupt, this_command


def shard(
    store: options.StoreArgument,
    number: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Which shard this is: 1/4 for the first of four.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT|unix:PATH", help="Where servers find it. Port 0: any free port.")
    ] = "127.0.0.1:0",
) -> None:
    """Search one shard of a datastore for servers (`memlm serve --shard`), until SIGTERM or Ctrl-C.

    It authenticates nobody. Listen in a network of your own.
    """
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
            f"{cut} segment{'s were' if cut > 1 else ' was'} cut and indexed anew; `memlm index verify {store} --model"
            " MODEL` measures the new indexes",
            markup=False,
        )
    shown = table("shard", "segments", "entries", "bytes")
    for row in rows:
        shown.add_row(str(row["shard"]), str(row["segments"]), f"{row['entries']:,}", f"{row['bytes']:,}")
    print_table(shown)
    out.print(f"Start each: memlm shard {store} --shard 1/{shards} --listen HOST:PORT", markup=False)
