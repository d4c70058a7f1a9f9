"""`memlm trace`."""

from __future__ import annotations

from dataclasses import fields

import typer
from rich.text import Text

from memlm.api.tracing import Trace, TracedSpan, TraceRequest
from memlm.base.figures import counted
from memlm.base.printable import one_line, printable
from memlm.cli.terminal import options
from memlm.cli.terminal.connection import Target, host_of
from memlm.cli.terminal.console import emit_json, out
from memlm.cli.terminal.fields import with_fields

SPAN_STYLE = "bold underline"
WORDS_BEFORE = 4  # of a span in a document


@with_fields(leave_out=("text", "spans_per_token", "max_documents", "rank_by"))
def trace(
    context: typer.Context,
    request: TraceRequest,
    text: options.TracedText = None,
    file: options.PromptFile = None,
    model: options.ModelOrTarget = None,
    store: options.Stores = None,
    target: Target = None,
    json: options.Json = False,
) -> None:
    """Find the passages of a text that stand word for word in datastores, with their documents."""
    read = options.read_prompt(text, file)
    asked = {each.name: getattr(request, each.name) for each in fields(request) if each.name != "text"}
    with host_of(context, target, model, store) as host:
        print_trace(host.trace(read, **asked), read, json=json)


def print_trace(trace: Trace, text: str, *, json: bool) -> None:
    """Prints the text with its spans marked, where it is a terminal, and each span with its places."""
    if json:
        emit_json(trace)
        return
    if out.is_terminal:
        out.print(marked(text, trace.spans))
        out.print()
    num_documents = len({(place.store, place.document_id) for span in trace.spans for place in span.places})
    for number, span in enumerate(trace.spans, start=1):
        _print_span(number, span)
    if not trace.spans:
        out.print("No passage stands word for word in the datastore. --min-tokens finds shorter ones.")
        return
    spans, documents = counted(len(trace.spans), "span"), counted(num_documents, "document")
    out.print(f"{trace.share:.0%} of {counted(trace.tokens, 'token')} stand in {documents}: {spans}", style="dim")


def marked(text: str, spans: tuple[TracedSpan, ...]) -> Text:
    """The text with its spans underlined, and the number of each behind it."""
    shown, last = Text(), 0
    for number, span in enumerate(spans, start=1):
        begin = max(span.begin, last)  # spans may overlap
        shown.append(printable(text[last:begin]))
        shown.append(printable(text[begin : span.end]), style=SPAN_STYLE)
        shown.append(f"[{number}]", style="dim")
        last = max(last, span.end)
    shown.append(printable(text[last:]))
    return shown


def _print_span(number: int, span: TracedSpan) -> None:
    places = "1,000 or more places" if span.count == 1000 else counted(span.count, "place")
    head = Text(f"{number:>3} ", style="dim")
    head.append(one_line(" ".join(span.text.split())), style="not dim bold")
    _print_line(head)
    _print_line(Text(f"    {counted(span.tokens, 'token')}, {places}", style="dim"))
    for place in span.places:
        before, _, after = place.snippet.partition(span.text)
        around = [*before.split()[-WORDS_BEFORE:], "…", *after.split()]
        line = Text("    " + one_line(f"{place.document_id}:{place.line}  "))
        _print_line(line.append(one_line(" ".join(around)), style="dim"))


def _print_line(line: Text) -> None:
    if out.is_terminal:
        line.truncate(out.width, overflow="ellipsis")
    out.print(line)
