"""Writes the tables of docs/reports/evidence.md and of tables/evidence.md from evidence-*.json, and draws the plots.

python -m benchmarks.pages.plot_evidence            writes tables and plots; needs matplotlib
python -m benchmarks.pages.plot_evidence --check    fails if a table is stale
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pages.evidence_papers import table_of_papers
from benchmarks.pages.evidence_rows import TEXTS, Rows, by_text, error_of, header, line, of, with_error
from benchmarks.pages.evidence_summary import percent, table_of_the_summary
from benchmarks.pages.evidence_tasks import table_of_tasks, table_of_text_beside_tasks
from benchmarks.pages.report import load, rows_of

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "docs" / "reports"
PAGES = (REPORTS / "evidence.md", ROOT / "benchmarks" / "tables" / "evidence.md")
WAYS = {"one_lam": "one λ", "adaptive_lam": "adaptive λ", "context_cache": "context cache", "both": "both"}
MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M",
    "stories260k": "stories260k",
    "trained-32m": "trained here",
}
GROUPS = (
    "inside",  # of documents
    "trained",  # a model that was trained here, with datastores of documents that it has not seen
    "learned",  # the same model, with datastores of documents that it learned from
    "million",  # datastores of a million entries and more
)
LEARNED = {
    "quarter": "of a quarter of the text",
    "equal_tokens": "of all, equal tokens",
    "equal_time": "of all, equal processor time",
}
ALL = "all tokens"  # the cut of all of them
CUTS = {
    "frequency": ("0", "1-9", "10-99", "100+"),
    "word": ("name", "number", "function word", "other word", "sign"),
    "overlap": ("none", "2 tokens", "4 tokens", "8 tokens"),
}
CUT_NAMES = {
    "frequency": "occurrences in the datastore",
    "word": "word",
    "overlap": "longest n-gram in the datastore",
}
TIMES = {
    "alone": "alone",
    "datastore at_once": "datastore, tokens searched together",
    "datastore one_by_one": "datastore, one token after the other",
    "passages in the time of at_once": "passages, in the time of tokens together",
    "passages in the time of one_by_one": "passages, in the time of one after the other",
}
ENERGY = {"joules_per_token": "J a token", "gpu_joules_per_token": "J of the GPU a token"}
TRACES = {
    "id": "ids",
    "title": "titles",
    "metadata": "metadata",
    "tokens": "runs of eight tokens",
    "key": "keys",
    "code": "codes of an index",
    "word": "words, in the indexes of words and of passages",
    "passage": "mean keys of passages",  # of an earlier version
    "chunk": "vectors of chunks",
}


def main() -> None:
    """Writes the tables and draws the plots, or checks the tables."""
    groups = groups_of({name: report for name, report in load().items() if name.startswith("evidence")})
    for page in PAGES:
        text = filled(page.read_text(encoding="utf-8"), groups)
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            sys.exit(f"{page.relative_to(ROOT)} is stale: run `python -m benchmarks.pages.plot_evidence`")
    if "--check" not in sys.argv[1:]:
        draw([row for report in groups[""] for row in rows_of(report)])


def groups_of(reports: dict[str, dict[str, Any]]) -> dict[str, Rows]:
    """The reports by the word behind `evidence-` in their names, if it is one of GROUPS. Their rows may differ from
    those of others in nothing that the rows tell, so they have tables of their own.
    """
    groups: dict[str, Rows] = {"": [], **{group: [] for group in GROUPS}}
    for name, report in reports.items():
        word = name.split("-")[1]
        groups[word if word in GROUPS else ""].append(report)
    return groups


def filled(page: str, groups: dict[str, Rows]) -> str:
    """The page with each table made anew. It stands between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is
    that of a table, or GROUP/TABLE.
    """
    tables = {
        f"{group}/{name}".removeprefix("/"): table for group in groups for name, table in tables_of(groups[group])
    }

    def made(found: re.Match[str]) -> str:
        lines = "\n".join(tables[found[1]]())
        return f"<!-- table: {found[1]} -->\n\n{lines}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", made, page, flags=re.DOTALL)


def tables_of(reports: Rows) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """The tables of some reports by their names."""
    rows = [row for report in reports for row in rows_of(report)]
    tables: dict[str, Callable[[], Iterator[str]]] = {
        "summary": lambda: table_of_the_summary(rows),
        "texts": lambda: table_of_texts(reports, rows),
        "gain-by-domain": lambda: table_of_gains(of(rows, "gain-by-domain")),
        "gain-by-token": lambda: table_of_tokens(of(rows, "gain-by-token")),
        "share-by-token": lambda: table_of_token_shares(of(rows, "gain-by-token")),
        "deletion": lambda: table_of_deletions(of(rows, "deletion")),
        "generation": lambda: table_of_generation(of(rows, "generation")),
        "facts": lambda: table_of_facts(of(rows, "facts")),
        "passages": lambda: table_of_passages(of(rows, "passages")),
        "equal-time": lambda: table_of_times(of(rows, "equal-time")),
        "questions": lambda: table_of_questions(of(rows, "questions")),
        "by-size": lambda: table_of_sizes(reports),
        "training": lambda: table_of_training(of(rows, "training")),
        "tasks": lambda: table_of_tasks(of(rows, "tasks")),
        "text-beside-tasks": lambda: table_of_text_beside_tasks(of(rows, "tasks")),
        "cost": lambda: table_of_cost(of(rows, "cost")),
        "papers": lambda: table_of_papers({name: rows_of(report) for name, report in load().items()}),
        "deletion-traces": lambda: table_of_traces(of(rows, "deletion-traces")),
    }
    for name in ("gain-by-domain", "passages", "equal-time", "questions"):
        tables[f"{name}-differences"] = partial(table_of_differences, of(rows, f"{name}-differences"))
    yield from tables.items()


def table_of_texts(reports: Rows, rows: Rows) -> Iterator[str]:
    """The texts of each domain by hash, and how many 13-grams of the test texts the datastore contains."""
    yield from header("text", "datastore", "tuning", "test", "13-grams of the test text in the datastore")
    shares = {row["text"]: row for row in of(rows, "gain-by-domain")}
    for name, share in shares.items():
        texts = next(texts for texts in map(texts_of_gains, reports) if name in texts)[name]
        parts = (texts[part] for part in ("stored", "tuning", "test"))
        cells = (f"{part['documents']} documents, `{part['sha256']}`" for part in parts)
        percent = f"{100 * share['overlap_share']:.2f} ± {error_of(share, 'overlap_share', 2, 100)} %"
        yield line(TEXTS[name], *cells, percent)


def texts_of_gains(report: dict[str, Any]) -> dict[str, Any]:
    """The texts of a report by domain, none for a report without gains."""
    has_gains = any("table=gain-by-domain" in result["metric"] for result in report["results"])
    return dict(report["settings"]["texts"]) if has_gains else {}


def table_of_gains(rows: Rows) -> Iterator[str]:
    """A line for each domain."""
    yield from header("text", "entries", "tokens", "alone", *WAYS.values())
    for name in dict.fromkeys(row["text"] for row in rows):
        ways = {row["way"]: row for row in rows if row["text"] == name}
        one = ways["one_lam"]
        cells = (with_error(ways[way], "nats_less") for way in WAYS)
        counts = f"{int(one['entries']):,}", f"{int(one['tokens']):,}"
        yield line(TEXTS[name], *counts, with_error(one, "nats_per_token"), *cells)


def table_of_tokens(rows: Rows) -> Iterator[str]:
    """A line for each cut, with the share of the tokens and the gain of both memories in each domain."""
    names = list(dict.fromkeys(row["text"] for row in rows))
    yield from header("cut", "tokens", *(f"{TEXTS[name]}: {way}" for name in names for way in ("datastore", "cache")))
    found = {(row["text"], row["cut"], row["way"]): row for row in rows}
    for cut, shown in cuts_of(rows).items():
        cells, shares = [], []
        for name in names:
            for way in ("adaptive_lam", "context_cache"):
                row = found.get((name, cut, way))
                cells.append("-" if row is None else with_error(row, "nats_less"))
            row = found.get((name, cut, "both"))
            shares.append("-" if row is None else f"{100 * row['share_of_tokens']:.1f}")
        yield line(shown, f"{', '.join(shares)} %", *cells)


def table_of_token_shares(rows: Rows) -> Iterator[str]:
    """A line for each cut, with the shares of its tokens that are less and more probable with the datastore."""
    counted = [row for row in rows if "share_losing" in row]
    if not counted:
        yield "The results do not have these shares yet."
        return
    names = list(dict.fromkeys(row["text"] for row in counted))
    found = {(row["text"], row["cut"], row["way"]): row for row in counted}
    columns = [(way, end) for way in ("one_lam", "adaptive_lam") for end in ("losing", "gaining")]
    yield from header("text", "cut", *(f"{WAYS[way]}: {end}" for way, end in columns))
    for name in names:
        for cut, shown in cuts_of(counted).items():
            some = [(found.get((name, cut, way)), f"share_{end}") for way, end in columns]
            cells = ["-" if row is None else percent(row, share) for row, share in some]
            yield line(TEXTS[name], shown, *cells)


def cuts_of(rows: Rows) -> dict[str, str]:
    """The names of the cuts that some rows may have, as the page shows them."""
    whole = {ALL: ALL} if any(row["cut"] == ALL for row in rows) else {}
    return whole | {f"{cut} {label}": f"{CUT_NAMES[cut]}: {label}" for cut, labels in CUTS.items() for label in labels}


def table_of_deletions(rows: Rows) -> Iterator[str]:
    """A line for each kind of index."""
    yield from header(
        "index", "held", "deleted", "purged", "never held", "off, deleted", "off, deleted, every list", "off, purged",
        "traces held", "deleted", "purged",
    )  # fmt: skip
    for row in rows:
        nats = (with_error(row, f"nats_{state}") for state in ("held", "deleted", "purged", "never"))
        off = (f"{row[name]:.1e}" for name in ("off_deleted", "off_deleted_exact", "off_purged"))
        traces = (f"{int(row[f'traces_{state}']):,}" for state in ("held", "deleted", "purged"))
        yield line(row["index"], *nats, *off, *traces)


def table_of_generation(rows: Rows) -> Iterator[str]:
    """A line for each domain and way."""
    yield from header(
        "text", "way", "texts", "distinct runs of 4", "longest copied run", "tokens from memory",
        "attribution precision",
    )  # fmt: skip
    for row in rows:
        precision = with_error(row, "attribution_precision", 2) if "attribution_precision" in row else "-"
        cells = (with_error(row, *figure) for figure in (("distinct", 2), ("copied_tokens", 1), ("from_memory", 2)))
        yield line(TEXTS[row["text"]], row["way"], f"{row['documents']:.0f}", *cells, precision)


def table_of_facts(rows: Rows) -> Iterator[str]:
    """A line for each domain, form of the question and setting."""
    yield from header("text", "question", "setting", "facts", "before", "taught", "deleted")
    for row in rows:
        form, setting = row["way"].split()
        cells = (with_error(row, f"right_{state}", 2) for state in ("before", "taught", "deleted"))
        yield line(TEXTS[row["text"]], form.replace("_", " "), setting, f"{row['facts']:.0f}", *cells)


def table_of_passages(rows: Rows) -> Iterator[str]:
    """A line for each domain and way of predicting text."""
    yield from header("text", "way", "nats a token", "less than alone")
    for row in rows:
        yield line(TEXTS[row["text"]], row["way"], with_error(row, "nats_per_token"), with_error(row, "nats_less"))


def table_of_differences(rows: Rows) -> Iterator[str]:
    """A line for each domain, with the differences of two ways and their standard errors. The numbers of tokens of
    passages that take the time of a datastore differ from domain to domain.
    """
    pairs = list(dict.fromkeys(row["way"] for row in rows))
    yield from header("text", *(named(pair) for pair in pairs))
    for name, ways in by_text(rows):
        shown = (
            f"{ways[pair]['less']:+.3f} ± {error_of(ways[pair], 'less', 3)}" if pair in ways else "-" for pair in pairs
        )
        yield line(TEXTS[name], *shown)


def named(pair: str) -> str:
    """The heading of a difference of two ways, which is called ONE against OTHER in the results."""
    for name, shown in (*WAYS.items(), ("by_words", "by words"), (" against ", " over ")):
        pair = pair.replace(name, shown)
    return pair


def table_of_times(rows: Rows) -> Iterator[str]:
    """A line for each domain and way, with its time a token and its nats."""
    yield from header(
        "text", "way", "tokens of passages", "ms a token", "time over the datastore", "nats a token", "less than alone"
    )
    for name, ways in by_text(rows):
        timed = [way for way in ways if way.startswith("passages of ")]
        for way in [*list(TIMES)[:3], *timed, *list(TIMES)[3:]]:
            row = ways[way]
            ratio = f"{row['time_over_datastore']:.2f}" if "time_over_datastore" in row else "-"
            nats = [with_error(row, each) if each in row else "-" for each in ("nats_per_token", "nats_less")]
            times = f"{row['passage_tokens']:.0f}", f"{row['ms_per_token']:.2f}", ratio
            yield line(TEXTS[name], TIMES.get(way, "passages"), *times, *nats)


def table_of_questions(rows: Rows) -> Iterator[str]:
    """A line for each domain and way of answering questions, with the right answers of each kind."""
    kinds = {"all": "all", "name": "names", "number": "numbers", "definition": "definitions"}
    yield from header("text", "way", *kinds.values(), "tokens of a prompt")
    found = {(row["text"], row["way"], row.get("cut", "all")): row for row in rows}
    for name, way in dict.fromkeys((row["text"], row["way"]) for row in rows):
        some = [found.get((name, way, kind)) for kind in kinds]
        cells = ["-" if row is None else f"{with_error(row, 'right', 2)} of {row['questions']:.0f}" for row in some]
        yield line(TEXTS[name], way.replace("_", " "), *cells, with_error(found[name, way, "all"], "prompt_tokens", 0))


def table_of_traces(rows: Rows) -> Iterator[str]:
    """A line for each kind of trace, with its numbers in all datastores together."""
    yield from header("trace", "datastores that have it", "traces", "found while held", "deleted", "purged")
    for kind, name in TRACES.items():
        some = [row for row in rows if row["cut"] == kind]
        have = sum(row["traces"] > 0 for row in some)
        states = ("traces", "traces_held", "traces_deleted", "traces_purged")
        sums = (f"{sum(int(row[state]) for row in some):,}" for state in states)
        yield line(name, f"{have} of {len(some)}", *sums)


def table_of_sizes(reports: Rows) -> Iterator[str]:
    """A line for each model, domain and size."""
    yield from header(
        "model",
        "text",
        "entries",
        "index",
        "lists searched",
        "alone",
        "one λ",
        "adaptive λ",
        "time a token over alone",
        "bytes an entry",
    )
    for report in reports:
        rows = sorted(of(rows_of(report), "by-size"), key=lambda row: int(row["entries"]))
        for one, adaptive in zip(rows[::2], rows[1::2], strict=True):
            cells = with_error(one, "nats_per_token"), with_error(one, "nats_less"), with_error(adaptive, "nats_less")
            low, high = one["over_alone_low"], one["over_alone"] + one["over_alone_error"]
            ratio = f"{one['over_alone']:.2f} ({low:.2f} to {high:.2f})"
            words = MODELS[report["settings"]["model"]], TEXTS[one["text"]], f"{int(one['entries']):,}", one["index"]
            lists = "-" if one["index"] == "Flat" else f"{one['nprobe']:.0f}"
            yield line(*words, lists, *cells, ratio, f"{one['bytes_per_entry']:,.0f}")


def table_of_training(rows: Rows) -> Iterator[str]:
    """A line for each model and way."""
    yield from header(
        "text", "model", "memory", "entries", "tokens read in training", "processor seconds", "nats a token", "less"
    )
    for row in rows:
        model, _, way = row["way"].rpartition(" ")
        counts = f"{int(row['entries']):,}", f"{row['tokens_seen']:,.0f}", f"{row['processor_s']:,.0f}"
        cells = with_error(row, "nats_per_token"), with_error(row, "nats_less")
        yield line(TEXTS[row["text"]], LEARNED[model], {"alone": "none", **WAYS}[way], *counts, *cells)


def table_of_cost(rows: Rows) -> Iterator[str]:
    """A line for each domain and way: medians, and the least and the most of a ratio."""
    energy = {name: shown for name, shown in ENERGY.items() if any(name in row for row in rows)}
    yield from header(
        "text",
        "way",
        "tokens/s",
        "ms to the first token",
        "time over alone",
        "MB on the disk",
        "MB of RAM",
        *energy.values(),
    )
    for row in rows:
        low, high = (f"{row[f'time_over_alone_{end}']:.2f}" for end in ("low", "high"))
        cells = [f"{row['tokens_per_s']:.1f}", f"{row['first_token_ms']:.0f}"]
        cells.append(f"{row['time_over_alone']:.2f} ({low} to {high})")
        cells += [f"{row[name] / 1e6:.1f}" if name in row else "-" for name in ("disk_bytes", "ram_bytes")]
        cells += [f"{row[name]:.2f}" if name in row else "-" for name in energy]
        yield line(TEXTS[row["text"]], str(WAYS.get(row["way"], row["way"])), *cells)


def draw(rows: Rows) -> None:
    """Gains by domain on the left, gains by cut of the tokens on the right."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "memlm", "font.size": 9, "svg.fonttype": "none"})
    gains, tokens = of(rows, "gain-by-domain"), of(rows, "gain-by-token")
    names = list(dict.fromkeys(row["text"] for row in gains))
    figure, panel = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
    bars(panel, names, [TEXTS[name] for name in names], {
        label: [next(row for row in gains if (row["text"], row["way"]) == (name, way)) for name in names]
        for way, label in WAYS.items()
    })  # fmt: skip
    panel.set_title("SmolLM2-135M, window of 512", fontsize=9)
    figure.savefig(REPORTS / "evidence-gain.svg", metadata={"Date": None})
    names = list(dict.fromkeys(row["text"] for row in tokens))
    figure, panels = plt.subplots(
        1, len(CUTS), figsize=(10.4, 3.2), sharey=True, layout="constrained", width_ratios=[*map(len, CUTS.values())]
    )
    for panel, (cut, labels) in zip(panels, CUTS.items(), strict=True):
        series = {}
        for name in names:
            by_cut = {row["cut"]: row for row in tokens if (row["text"], row["way"]) == (name, "adaptive_lam")}
            series[TEXTS[name]] = [by_cut.get(f"{cut} {label}") for label in labels]
        bars(panel, labels, [label.replace(" word", "") for label in labels], series)
        panel.set_title(CUT_NAMES[cut], fontsize=9)
    for panel in panels[1:]:
        panel.get_legend().remove()
        panel.set_ylabel("")
    figure.savefig(REPORTS / "evidence-tokens.svg", metadata={"Date": None})


def bars(panel: Any, places: Any, labels: list[str], series: dict[str, list[Any]]) -> None:
    """Groups of bars with standard errors. None is a missing bar."""
    width = 0.8 / len(series)
    for number, (name, rows) in enumerate(series.items()):
        shown = [(place, row) for place, row in enumerate(rows) if row is not None]
        at = [place + (number - (len(series) - 1) / 2) * width for place, _ in shown]
        gains, errors = ([row[f"nats_less{end}"] for _, row in shown] for end in ("", "_error"))
        panel.bar(at, gains, width, yerr=errors, label=name, error_kw={"linewidth": 0.8})
    panel.set_xticks(range(len(places)), labels)
    panel.set_ylabel("nats a token less than alone")
    panel.axhline(0, color="0.4", linewidth=0.6)
    panel.grid(alpha=0.3, axis="y")
    panel.set_axisbelow(True)
    panel.legend(fontsize=8)


if __name__ == "__main__":
    main()
