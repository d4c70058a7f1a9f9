"""`memlm operation`: the jobs of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.base.figures import counted
from memlm.base.printable import one_line
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import HERE, ServerTarget, client_of, to_this_server
from memlm.cli.terminal.console import ConsoleProgress, cell, emit_json, err, jsonable, out, print_table, table

if TYPE_CHECKING:
    from memlm.api.handles import Operation
    from memlm.api.operations import OperationInfo
    from memlm.base.progress import Progress

operation = typer.Typer(help="Jobs of a server: building, adding, synchronizing, compacting.", no_args_is_help=True)

FOLLOW_S = 0.5
OperationName = Annotated[str, typer.Argument(metavar="NAME", help="An operation's name.")]


@operation.command("info", epilog="Example: memlm operation info --target localhost:50051")
def show_operations(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One operation.")] = None,
    target: ServerTarget = HERE,
    json: options.Json = False,
) -> None:
    """Show the progress of an operation, or list yours, latest first."""
    with client_of(target) as client:
        if name is not None:
            print_operation(client.operations.get(name), json=json)
            return
        found = client.operations.list()
    if json:
        emit_json({"operations": [operation_json(info) for info in found]})
        return
    shown = table("name", "kind", "datastore", "state", "phase", "done")
    for info in found:
        share = f"{info.done / info.total:.0%}" if info.total else ""
        shown.add_row(*map(cell, (info.name, info.kind, info.store, info.state, info.phase)), share)
    print_table(shown)


@operation.command("wait", epilog="Example: memlm operation wait operations/0123 --target localhost:50051")
def wait_operation(name: OperationName, target: ServerTarget = HERE, json: options.Json = False) -> None:
    """Wait for the end of an operation. Fails if the operation fails."""
    with client_of(target) as client:
        show(client.operations.open(name), wait=True, json=json)


@operation.command("cancel", epilog="Example: memlm operation cancel operations/0123")
def cancel_operation(name: OperationName, target: ServerTarget = HERE, json: options.Json = False) -> None:
    """Cancel an operation and remove its unfinished work."""
    with client_of(target) as client:
        client.operations.cancel(name)
        print_operation(client.operations.get(name), json=json)


@operation.command("delete", epilog="Example: memlm operation delete operations/0123")
def delete_operation(name: OperationName, target: ServerTarget = HERE, json: options.Json = False) -> None:
    """Delete the record of an operation that has ended."""
    with client_of(target) as client:
        info = client.operations.get(name)
        client.operations.delete(name)
    print_operation(info, json=json)


def follow(job: Operation, progress: Progress) -> OperationInfo:
    """Reports the progress of an operation until it has ended, and returns its end."""
    while not (info := job.progress(FOLLOW_S)).has_ended:
        if info.phase:
            progress(info.phase, info.done, info.total or None)
    return info


def show(job: Operation, *, wait: bool, json: bool) -> None:
    """Shows an operation, or its progress to its end. Raises its error."""
    print_operation(follow_to_end(job) if wait else job.progress(), json=json)


def follow_to_end(job: Operation) -> OperationInfo:
    """Shows the progress of an operation to its end. Raises its error."""
    try:
        with ConsoleProgress() as progress:
            info = follow(job, progress)
    except KeyboardInterrupt:
        stop = f"memlm operation cancel {job.name}{to_this_server()}"
        err.print(f"{job.name} is still running; `{stop}` stops it", markup=False)
        raise
    info.outcome()
    return info


def print_operation(info: OperationInfo, *, json: bool) -> None:
    """Prints the state of an operation, and its report once it has ended."""
    if json:
        emit_json(operation_json(info))
        return
    share = f", {info.phase}: {info.done:,} of {info.total:,}" if info.phase and info.total else ""
    left = f", {info.left_s:,.0f} s left" if info.left_s is not None else ""
    out.print(one_line(f"{info.name}: {info.kind} {info.store}, {info.state}{share}{left}"), markup=False)
    if report := info.report:
        summary = (
            f"{counted(report.num_entries, 'entry')} of {counted(report.num_documents, 'document')}, {report.index},"
            f" {report.bytes_per_entry:,.0f} bytes an entry, {report.seconds:,.1f} s"
        )
        out.print(one_line(summary), markup=False)
        if report.num_deleted_documents:
            deleted = counted(report.num_deleted_documents, "deleted document")
            out.print(f"still in its files: {deleted}; compact it with --purge")
    if info.skipped:
        err.print(f"{counted(info.skipped, 'document')} could not be used; the server's log says which", markup=False)
    if info.error:
        err.print(one_line(str(info.error)), markup=False)


def operation_json(info: OperationInfo) -> dict[str, Any]:
    """An operation as JSON, whose error is its message."""
    return {**jsonable(info), "error": None if info.error is None else str(info.error)}
