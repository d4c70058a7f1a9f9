"""Renders README.md and tables/files.md from the reports in results/.

    python -m benchmarks.pages.report            writes both
    python -m benchmarks.pages.report --check    fails if one is stale

A report is a file FAMILY.json or FAMILY-WORD.json. memlm/bench/report.py describes its fields. `converted` marks a
report of an older format, which recorded neither its commit nor its versions.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
RESULTS = BENCHMARKS / "results"
README, FILES = BENCHMARKS / "README.md", BENCHMARKS / "tables" / "files.md"
ROW_WORDS = "table|task|entries|store|way|index|cut|prompts|streams|text|window|windows|keys|tokens|depth|context"


@dataclass(frozen=True)
class Family:
    """A table of the README: a title, the command, a sentence on the setup, and the rows as (metric, measure, unit).

    With `by_case` there is a row for each model and corpus, else one for each measure.
    """

    title: str
    command: str
    setup: str
    rows: tuple[tuple[str, str, str], ...]
    by_case: bool = False


FAMILIES = {
    "llama_cpp": Family(
        "Library against llama.cpp",
        "memlm bench versus",
        "`smollm2` (SmolLM2-135M, Q4_1), as it is and as llama.cpp converts it, greedy, on as many threads as cores. "
        "Tokens per second over those of llama.cpp, and times over its times.",
        (
            ("Q8_0_1_over_llama_cpp", "1 stream, Q8_0", "ratio"),
            ("Q8_0_4_over_llama_cpp", "4 streams, Q8_0", "ratio"),
            ("Q8_0_16_over_llama_cpp", "16 streams, Q8_0", "ratio"),
            ("Q8_0_prompt_over_llama_cpp", "prompt of 512 tokens, Q8_0", "ratio"),
            ("Q8_0_first_token_over_llama_cpp", "time from the file to the first token, Q8_0", "ratio"),
            ("source_1_over_llama_cpp", "1 stream, Q4_1", "ratio"),
            ("source_4_over_llama_cpp", "4 streams, Q4_1", "ratio"),
            ("source_16_over_llama_cpp", "16 streams, Q4_1", "ratio"),
            ("source_prompt_over_llama_cpp", "prompt of 512 tokens, Q4_1", "ratio"),
            ("source_first_token_over_llama_cpp", "time from the file to the first token, Q4_1", "ratio"),
            ("F16_1_over_llama_cpp", "1 stream, F16", "ratio"),
            ("F16_4_over_llama_cpp", "4 streams, F16", "ratio"),
            ("F16_16_over_llama_cpp", "16 streams, F16", "ratio"),
            ("F16_prompt_over_llama_cpp", "prompt of 512 tokens, F16", "ratio"),
            ("source_1_with_store_over_without", "1 stream with a datastore over without, Q4_1", "ratio"),
            ("F16_first_token_over_llama_cpp", "time from the file to the first token, F16", "ratio"),
            ("Q8_0_1_tokens_per_s", "1 stream, Q8_0", "tokens/s"),
            ("Q8_0_16_tokens_per_s", "16 streams, Q8_0", "tokens/s"),
            ("source_1_tokens_per_s", "1 stream, Q4_1", "tokens/s"),
            ("source_16_tokens_per_s", "16 streams, Q4_1", "tokens/s"),
            ("F16_1_tokens_per_s", "1 stream, F16", "tokens/s"),
            ("F16_16_tokens_per_s", "16 streams, F16", "tokens/s"),
        ),
    ),
    "versus": Family(
        "Server against transformers",
        "python -m benchmarks versus-transformers",
        "Tokens per second of a server over those of `generate` of `transformers`, with equal prompts.",
        (
            ("float32_1_over_transformers", "1 stream, float32", "ratio"),
            ("float32_16_over_transformers", "16 streams, float32, over one batch", "ratio"),
            ("float32_16_over_one_by_one", "16 streams, float32, over one prompt after another", "ratio"),
            ("bfloat16_1_over_transformers", "1 stream, bfloat16", "ratio"),
            ("bfloat16_16_over_transformers", "16 streams, bfloat16, over one batch", "ratio"),
            ("float32_1_tokens_per_s", "1 stream, float32", "tokens/s"),
            ("float32_16_tokens_per_s", "16 streams, float32", "tokens/s"),
        ),
    ),
    "load": Family(
        "Server under load",
        "memlm bench load",
        "`small` preset, float32, clients on the cores of the server, 64 tokens an answer, medians of three turns.",
        (
            ("plain_1_tokens_per_s", "1 stream", "tokens/s"),
            ("plain_32_tokens_per_s", "32 streams", "tokens/s"),
            ("plain_speedup", "32 streams over 1", "ratio"),
            ("store_speedup", "32 streams over 1, with a datastore", "ratio"),
            ("plain_1_first_token_ms_p50", "first token, 1 stream, p50", "ms"),
            ("plain_32_first_token_ms_p50", "first token, 32 streams, p50", "ms"),
            ("plain_32_first_token_ms_p99", "first token, 32 streams, p99", "ms"),
            ("refused_ms", "refusal by a full server", "ms"),
            ("cancel_to_next_accepted_ms", "cancellation to the next request's first token", "ms"),
        ),
    ),
    "serve": Family(
        "Cost of serving",
        "memlm bench serve",
        "One stream over gRPC against the same generation in process, and the front end at 32 streams.",
        (
            ("grpc_over_in_process", "time a token, gRPC over in process", "ratio"),
            ("front_us_per_token", "CPU time of the front end a token", "µs"),
            ("tokens_per_event", "tokens a message", "tokens"),
            ("append_over_prefill", "append to a session over the decoder's prefill", "ratio"),
            ("exit_idle_s", "exit of an idle server", "s"),
            ("import_client_ms", "`import memlm.client`", "ms"),
            ("import_and_connect_ms", "import and a first client", "ms"),
        ),
    ),
    "generate": Family(
        "Generation with a datastore",
        "memlm bench generate",
        "Time a token at batch 1, with and without a datastore.",
        (
            ("with_store_over_without", "with a datastore over without", "ratio"),
            ("ms_per_token_with", "with a datastore", "ms"),
            ("ms_per_token_without", "without", "ms"),
            ("recall", "recall@k of the index", "share"),
        ),
    ),
    "build": Family(
        "Building a datastore",
        "memlm bench build",
        "Tokens per second of a whole build over those of bare forward passes, without the final quality check.",
        (
            ("build_over_forward", "over one batch on all cores", "ratio"),
            ("build_over_reading", "over one batch on each core (the build's encoder)", "ratio"),
            ("build_tokens_per_s", "whole build", "tokens/s"),
            ("peak_memory_4x_over_1x", "peak RAM, 4 times the corpus over 1", "ratio"),
        ),
        by_case=True,
    ),
    "model": Family(
        "Decoder",
        "memlm bench model` and `python -m benchmarks memorizing",
        "GPT-2 small's shape with random parameters. Other implementations: `transformers`, "
        "memorizing-transformers-pytorch, and bare `nn.TransformerEncoderLayer`s for training.",
        (
            ("decode_float32_1_over_transformers", "decoding, 1 row, float32, over transformers", "ratio"),
            ("decode_float32_16_over_transformers", "decoding, 16 rows, float32, over transformers", "ratio"),
            ("decode_bfloat16_1_over_transformers", "decoding, 1 row, bfloat16, over transformers", "ratio"),
            ("decode_bfloat16_16_over_transformers", "decoding, 16 rows, bfloat16, over transformers", "ratio"),
            ("decode_float32_1_share_of_bandwidth", "decoding, 1 row, float32, share of RAM bandwidth", "share"),
            ("prefill_float32_over_transformers", "prefill of 512 tokens, float32, over transformers", "ratio"),
            ("prefill_bfloat16_over_transformers", "prefill of 512 tokens, bfloat16, over transformers", "ratio"),
            ("memorizing_float32_over_theirs", "kNN attention, 131,072 pairs, float32, over the other", "ratio"),
            ("memorizing_bfloat16_over_theirs", "kNN attention, 131,072 pairs, bfloat16, over the other", "ratio"),
            ("memorizing_float32_cost_of_largest_over_smallest", "a token at 262,144 pairs over 8,192", "ratio"),
            ("training_over_bare_layers", "training over bare layers", "ratio"),
            ("session_memorizing_bytes_over_formula", "bytes of a session over the formula", "ratio"),
        ),
    ),
}
IN_REPORTS = {  # families whose tables are elsewhere: title, page, command
    "evidence": ("What memory is worth", "../docs/reports/evidence.md", "python -m benchmarks evidence"),
    "datastore": ("Index types", "../docs/reports/datastore.md", "python -m benchmarks datastore"),
    "retrieval": (
        "Retrieval methods",
        "../docs/reports/datastore.md#retrieval-methods",
        "python -m benchmarks retrieval",
    ),
    "drafts": ("Drafts", "../docs/reports/drafts.md", "python -m benchmarks drafts"),
    "context": ("Context cache", "../docs/reports/context.md", "python -m benchmarks context"),
    "passkeys": ("Pass keys", "../docs/reports/context.md#pass-keys", "python -m benchmarks passkeys"),
    "scale": ("Scale", "../docs/scale.md", "python -m benchmarks scale"),
    "shards": ("Shards", "log/2026-11-27-shard-hops.md", "python -m benchmarks shards"),
    "variants": ("Variants of the decoder", "tables/variants.md", None),
    "effects": ("Effects of parts of the decoder", "tables/variants.md#effects", None),
}
IN_THE_LOG = {  # benches without files of results: title, entry, command
    "Right answers, sentences and sources": ("log/2026-11-28-asking.md", "python -m benchmarks asking"),
    "Answers in found passages": ("log/2026-11-28-passages-follow-the-text.md", "python -m benchmarks questions"),
}
GONE = "removed after commit d31043b"  # of a bench: its report and entries of the log stand, and git has the program


def main() -> None:
    """Writes both pages, or checks them."""
    for page, text in ((README, readme()), (FILES, files())):
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            sys.exit(f"{page.relative_to(BENCHMARKS.parent)} is stale: run `python -m benchmarks.pages.report`")


def load() -> dict[str, dict[str, Any]]:
    """The reports by their names."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a bench with several: words such as `entries` and `index`, and a value and error for each metric."""
    rows: dict[str, dict[str, Any]] = {}
    for result in report["results"]:
        metric, _, words = result["metric"].partition("[")
        if words:
            row = rows.setdefault(words, dict(re.findall(rf"({ROW_WORDS})=(.*?)(?=,(?:{ROW_WORDS})=|\]$)", words)))
            row[metric] = result["value"]
            if result["high"] is not None:
                row[f"{metric}_error"] = result["high"] - result["value"]
                row[f"{metric}_low"], row[f"{metric}_high"] = result["low"], result["high"]
    return list(rows.values())


def readme() -> str:
    """The text of README.md."""
    reports = load()
    unknown = {name for name in reports if family_of(name) not in FAMILIES.keys() | IN_REPORTS.keys()}
    assert not unknown, f"{unknown} belong to no family of {Path(__file__).name}"
    parts = [
        "# Benchmarks",
        "`memlm bench` measures speed on your machine. `python -m benchmarks`, from a checkout, measures what\n"
        "is reported, and does not come with the package. Both print reports with `--json`, the files of results/.\n"
        "This page and [the list of files](tables/files.md) are written from them. Experiments are in\n"
        "[log/](log/README.md).",
        "\n".join(commands_table()),
        "In the tables below, a cell has the median, and in brackets the range of n repeats if it was recorded.\n"
        "Compare values of one column only: the machines differ, and some were shared.",
    ]
    for name, family in FAMILIES.items():
        mine = {key: report for key, report in reports.items() if family_of(key) == name}
        parts += [f"## {family.title}", family.setup, "\n".join(table(family, mine))]
    return "\n\n".join(parts) + "\n"


def files() -> str:
    """The text of tables/files.md."""
    intro = (
        "The command of each file as it was called at its commit. Since then, `python -m benchmarks NAME` has taken\n"
        "the place of `memlm bench NAME` for what is reported."
    )
    return "\n\n".join(["# Files of results", intro, "\n".join(files_table(load()))]) + "\n"


def commands_table() -> Iterator[str]:
    """A row for each family: what is measured, by which command, and where the figures are."""
    yield "| measured | command | figures |"
    yield "|---|---|---|"
    for family in FAMILIES.values():
        anchor = re.sub(r"[^\w -]", "", family.title).lower().replace(" ", "-")
        yield f"| {family.title} | `{family.command}` | [below](#{anchor}) |"
    for name, (title, page, command) in IN_REPORTS.items():
        yield f"| {title} | {f'`{command}`' if command else GONE} | [page]({page}), `{name}*.json` |"
    for title, (entry, log_command) in IN_THE_LOG.items():
        yield f"| {title} | `{log_command}` | [log]({entry}) |"


def family_of(name: str) -> str:
    """The family of a file: its name up to the first dash."""
    return name.partition("-")[0]


def table(family: Family, reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A table with a row for each measure (and case) and a column for each machine."""
    machines = list(dict.fromkeys(machine_of(report) for report in reports.values()))
    cells: dict[tuple[str, str, str], str] = {}
    for name, report in reports.items():
        for result in report["results"]:
            place = result["metric"], case_of(report) if family.by_case else "", machine_of(report)
            assert place not in cells, f"{name}.json repeats {place}"
            cells[place] = cell(result)
    cases = list(dict.fromkeys(case for _, case, _ in cells))
    yield "| " + " | ".join(["measure", *["model and corpus"] * family.by_case, "unit", *machines]) + " |"
    yield "|---" * (2 + family.by_case + len(machines)) + "|"
    for metric, measure, unit in family.rows:
        for case in cases:
            values = [cells.get((metric, case, machine), "") for machine in machines]
            if any(values):
                yield "| " + " | ".join([measure, *[case] * family.by_case, unit, *values]) + " |"


def machine_of(report: dict[str, Any]) -> str:
    """The words for a machine: processor, widest instruction set, cores."""
    machine = report["machine"]
    processor = re.sub(r"\((?:R|TM)\)|\bCPU\b|@.*|\d+-Core Processor", "", machine["processor"])
    widest = [name for name in machine["instruction_sets"] if not name.startswith("amx")][-1:]
    matrix = [name for name in machine["instruction_sets"] if name.startswith("amx")][:1]
    return ", ".join([" ".join(processor.split()), *widest, *matrix, f"{machine['cores']} cores"])


def case_of(report: dict[str, Any]) -> str:
    """The words for the model and the data of a report."""
    settings = report["settings"]
    words = [settings["model"]] if "model" in settings else []
    words += [settings["corpus"]] if "corpus" in settings else []
    words += [f"{settings['entries']:,} entries"] if "entries" in settings else []
    words += [str(settings["index"])] if "index" in settings else []
    return ", ".join(words) or "as in the command"


def cell(result: dict[str, Any]) -> str:
    """A value with its range."""
    text = number(result["value"])
    if result["low"] is not None:
        repeats = f", n = {result['n']}" if result["n"] else ""
        text += f" ({number(result['low'])} to {number(result['high'])}{repeats})"
    return text


def number(value: float) -> str:
    """A number with three digits that matter, whole from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def files_table(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A row for each file: command, commit, date and machine."""
    yield "| file | command | commit | date | machine |"
    yield "|---|---|---|---|---|"
    for name, report in reports.items():
        command = f"`{report['command']}`" if report["command"] else "not recorded"
        commit = (report["commit"] or "not recorded")[:12]
        date = report["date"][:10] if report["date"] else f"by {report['converted']['stored']}"
        yield f"| `{name}.json` | {command} | {commit} | {date} | {machine_of(report)} |"


if __name__ == "__main__":
    main()
