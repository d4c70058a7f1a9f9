"""Evidence of what memory is worth: tables of one model on texts of several domains.

Each table reads a domain that was prepared before: a datastore of some of its texts, whose λ, temperature and k, and
those of the context cache, are tuned on held-out documents. Figures are of other held-out documents, and errors are
standard errors over these. A folder keeps what was prepared, so that each table can run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.evidence.cost import check_cost, cost
from benchmarks.evidence.deletion import deletion
from benchmarks.evidence.domains import Prepared, prepare
from benchmarks.evidence.equal_time import check_equal_time, equal_time
from benchmarks.evidence.gain import gain_by_domain
from benchmarks.evidence.generation import facts, generation
from benchmarks.evidence.passages import check_passages, passages
from benchmarks.evidence.questions import questions
from benchmarks.evidence.size import by_size
from benchmarks.evidence.tasks import AskedTasks, tasks_of
from benchmarks.evidence.texts import Domain, Sizes, domain_of, text_hash
from benchmarks.evidence.tokens import gain_by_token
from benchmarks.evidence.training import training
from memlm.base.progress import Progress, silent
from memlm.errors import InvalidInput, check_choice
from memlm.model.files.checkpoint import Checkpoint

TASKS = "tasks"  # the table that needs files of the caller
Table = Callable[[Checkpoint, Prepared, Progress], list[dict[str, Any]]]
TABLES: dict[str, Table] = {
    "gain-by-domain": gain_by_domain,
    "gain-by-token": gain_by_token,
    "deletion": deletion,
    "generation": generation,
    "facts": facts,
    "passages": passages,
    "equal-time": equal_time,
    "questions": questions,
    "by-size": by_size,
    "cost": cost,
}
# Tables of models that are trained here, which need no datastore of the given model.
OwnTable = Callable[[Checkpoint, Domain, Path, Sizes, Progress], list[dict[str, Any]]]
OWN_TABLES: dict[str, OwnTable] = {"training": training}
NAMES = (*TABLES, *OWN_TABLES, TASKS)
# What some tables refuse, before any work begins. Where no table was asked for, these are left out.
CHECKS: dict[str, Callable[[Checkpoint, Domain], None]] = {
    "passages": check_passages,
    "equal-time": check_equal_time,
    "cost": check_cost,
}


def bench_evidence(
    checkpoint: Checkpoint,
    domains: Sequence[str],
    work: Path,
    only: Sequence[str] = (),
    sizes: Sizes | None = None,
    *,
    asked: AskedTasks | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Iterator[dict[str, Any]]:
    """The rows of some tables, by default of all, for each domain. `texts` names the texts of each domain by hash. The
    table of tasks needs some that are `asked`. Yields the figures without rows before any work, and so far behind each
    table, so that an error in a later one loses none. Without `only`, the tables that need a longer model or longer
    texts are left out, and `left_out` has the reason by domain and table.

    Raises InvalidInput for an unknown table or domain, and for what is too short for a table of `only`.
    """
    sizes = sizes or Sizes()
    check_tables(only, asked)
    tables = dict(TABLES)
    if asked is not None:
        tables[TASKS] = partial(tasks_of, asked)
    drawn = [domain_of(given, checkpoint.tokenizer, sizes, seed) for given in domains]
    left_out = refusals(checkpoint, drawn, only)
    figures: dict[str, Any] = {
        "model": checkpoint.path.name, "dtype": str(checkpoint.decoder.dtype).removeprefix("torch."),
        "device": str(checkpoint.decoder.device), "seed": str(seed),
        "sizes": asdict(sizes), "texts": {domain.name: _named(domain) for domain in drawn}, "rows": [],
    }  # fmt: skip
    if left_out:
        figures["left_out"] = left_out
    yield figures
    for domain in drawn:
        for name in only or [name for name in (*tables, *OWN_TABLES) if name not in left_out.get(domain.name, {})]:
            if name in OWN_TABLES:
                rows = OWN_TABLES[name](checkpoint, domain, work / f"{domain.name}.{name}", sizes, progress)
            else:
                prepared = prepare(checkpoint, domain, work / domain.name, sizes, progress)
                rows = tables[name](checkpoint, prepared, progress)
            figures["rows"] += [{"table": name, **row} for row in rows]  # a row may name another table
            if asked is not None:
                figures["tasks"] = {row["task"]: row["sha256"] for row in figures["rows"] if "sha256" in row}
            yield figures


def check_tables(only: Sequence[str], asked: AskedTasks | None) -> None:
    """Raises InvalidInput for an unknown table, and for that of tasks without any."""
    for name in only:
        check_choice("only", name, NAMES)
    if TASKS in only and asked is None:
        raise InvalidInput(f"the table {TASKS!r} needs tasks of the harness; name them by --tasks", field="tasks")


def refusals(checkpoint: Checkpoint, domains: Sequence[Domain], only: Sequence[str]) -> dict[str, dict[str, str]]:
    """Why some tables cannot be made of some domains, by domain and table. Raises InvalidInput if one is of `only`."""
    refused: dict[str, dict[str, str]] = {}
    for domain in domains:
        for name in CHECKS.keys() & only if only else CHECKS:
            try:
                CHECKS[name](checkpoint, domain)
            except InvalidInput as error:
                if only:
                    raise
                refused.setdefault(domain.name, {})[name] = str(error)
    return refused


def _named(domain: Domain) -> dict[str, Any]:
    parts = {"stored": domain.stored, "tuning": domain.tuning, "test": domain.test}
    return {name: {"documents": len(each), "sha256": text_hash(each)} for name, each in parts.items()}
