"""Questions and ways of asking -> a row of each answer in a file, and a table of the ways.

An answer takes a second or more, so that a run of hundreds goes on where it was stopped: a row is kept for the same
question in the same words, way, model, search and datastores.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.asking.ways import MODEL_ALONE, WAYS, ask
from benchmarks.per_token import per_token
from benchmarks.questions import Question
from memlm.base.progress import Progress, silent
from memlm.errors import InvalidInput, check_choice
from memlm.language_model import LanguageModel

JUDGED = ("right", "sentence_right", "source_right", "exact", "f1", "logprob")
TIMES = ("first_token_ms", "processor_ms", "prompt_tokens")


def bench_asking(
    lm: LanguageModel,
    questions: Sequence[Question],
    rows: Path,
    *,
    ways: Sequence[str] = tuple(WAYS),
    by: str = "auto",
    limit: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Asks the first `limit` questions of an order that `seed` draws, each in all ways, and appends each answer to the
    JSON Lines of `rows` before the next. Those that are there are not asked again. Returns `table` of them. Raises
    InvalidInput for an unknown way, and where no document of a question is stored.
    """
    for way in ways:
        check_choice("way", way, WAYS)
    order = np.random.default_rng(seed).permutation(len(questions))[:limit]
    drawn = [questions[place] for place in order]
    _check_stored(lm, drawn)
    lm.find_passages(drawn[0].text, k=1, by=by)  # makes the indexes
    state, (known, end) = _state(lm, by), _read(rows)
    answered = dict[tuple[str, str], dict[str, Any]]()
    with rows.open("a", encoding="utf-8") as file:
        file.write(end)
        for done, (question, way) in enumerate((question, way) for question in drawn for way in ways):
            key = hashlib.sha256("\0".join((state, way, question.text, *question.answers)).encode()).hexdigest()[:16]
            row = known.get(key)
            if row is None and (figures := ask(lm, question, way, by=by)) is not None:
                row = {"key": key, "way": way, "id": question.id, "documents": sorted(question.documents), **figures}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
            if row is not None:
                answered[way, question.id] = row
            progress("ask", done + 1, len(drawn) * len(ways), way)
    return [*table(answered, ways)]


def table(answered: Mapping[tuple[str, str], Mapping[str, Any]], ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each way: means with standard errors, over the documents that answer where there are some, and medians
    of times. `named` is the share with a source, `as_alone` the share with the text of the model alone.
    """
    for way in ways:
        rows = [row for (name, _), row in answered.items() if name == way]
        if not rows:
            continue
        figures: dict[str, Any] = {"way": way, "questions": len(rows)}
        for name in JUDGED:
            if name in rows[0]:
                figures[name], figures[f"{name}_error"] = _mean(rows, [float(row[name]) for row in rows])
        figures["named"], figures["named_error"] = _mean(rows, [float(bool(row["source"])) for row in rows])
        alone = [answered.get((MODEL_ALONE, row["id"])) for row in rows]
        pairs = [
            (row["text"], other["text"]) for row, other in zip(rows, alone, strict=True) if other and "text" in row
        ]
        if pairs:
            figures["as_alone"] = statistics.fmean(text == other for text, other in pairs)
        yield figures | {name: statistics.median(row[name] for row in rows) for name in TIMES}


def _mean(rows: Sequence[Mapping[str, Any]], values: Sequence[float]) -> tuple[float, float]:
    sums, sizes = defaultdict[str, float](float), defaultdict[str, float](float)
    for row, value in zip(rows, values, strict=True):
        about = row["documents"][0] if row["documents"] else row["id"]
        sums[about] += value
        sizes[about] += 1
    return per_token(np.array([*sums.values()]), np.array([*sizes.values()]))


def _state(lm: LanguageModel, by: str) -> str:
    manifests = [each.snapshot.manifest for each in lm.engine.stores.model_stores([])]
    stores = sorted((each.store_id, each.number) for each in manifests)
    return json.dumps([lm.info.model_fingerprint, by, lm.engine.passage_encoder is not None, stores])


def _read(rows: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """The rows by their keys, and what ends the last line: that of a run that was killed may be half."""
    text = rows.read_text(encoding="utf-8") if rows.exists() else ""
    known = dict[str, dict[str, Any]]()
    for line in text.split("\n"):  # an answer may have other line ends
        with suppress(ValueError):
            row = json.loads(line)
            known[row["key"]] = row
    return known, "" if not text or text.endswith("\n") else "\n"


def _check_stored(lm: LanguageModel, questions: Sequence[Question]) -> None:
    stored = [each.id for store in lm.engine.stores.model_stores([]) for each in store.snapshot.documents()]
    for question in questions:
        if question.documents and not any(question.names(each) for each in stored):
            raise InvalidInput(
                f"the question {question.id} is about {', '.join(sorted(question.documents))}, which no datastore has;"
                " give the questions on these documents"
            )
