"""Questions that people ask -> how often their answers stand in the first passages that a search finds."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from memlm.api.passages import Passage
from memlm.base.progress import Progress, silent
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel

FIRST = (1, 3, 8)  # passages


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the documents that answer it, the texts of which one is in the answer, and its kind. One that no
    document answers has neither.
    """

    text: str
    documents: frozenset[str]  # ids, or names of files without endings
    answers: tuple[str, ...]
    kind: str
    id: str

    def names(self, document_id: str) -> bool:
        """Whether a document is one that answers."""
        return bool({document_id, PurePosixPath(document_id).stem} & self.documents)

    def is_about(self, passage: Passage) -> bool:
        """Whether a passage is of a document that answers."""
        return self.names(passage.document_id)

    def is_answered_by(self, passage: Passage) -> bool:
        """Whether a passage is of a document that answers, and has an answer in its text."""
        return self.is_about(passage) and any(_plain(answer) in _plain(passage.text) for answer in self.answers)


def questions_of(path: Path, words: Path | None = None) -> list[Question]:
    """Reads JSON Lines of `question`, `answers`, and `files` or `document_id`. `kind` and `id` are optional, by default
    the question; answers and documents are left out where no document answers. Given `words`, JSON Lines of `id` and
    `question`, the questions of these ids alone, in these words. Raises InvalidInput for an id that there is not.
    """
    questions = [*_read(path)]
    if words is None:
        return questions
    by_id = {each.id: each for each in questions}
    rows = [json.loads(line) for line in words.read_text(encoding="utf-8").splitlines()]
    if unknown := [row["id"] for row in rows if row["id"] not in by_id][:1]:
        raise InvalidInput(f"{words} has the id {unknown[0]}, which no question of {path} has; give the file that has")
    return [replace(by_id[row["id"]], text=row["question"]) for row in rows]


def bench_questions(
    lm: LanguageModel, questions: Sequence[Question], *, ways: Sequence[str], progress: Progress = silent
) -> dict[str, Any]:
    """The share of questions of each kind whose answer stands in the first passages, by each way of searching, and the
    milliseconds a search. Questions about documents that the datastores lack do not count. Raises InvalidInput where
    none is left.
    """
    stored = {each.id for store in lm.engine.stores.model_stores([]) for each in store.snapshot.documents()}
    stored |= {PurePosixPath(each).stem for each in stored}
    asked = [each for each in questions if each.documents & stored]
    if not asked:
        raise InvalidInput("no question is about a document of the datastores; give the questions on these documents")
    rows = list[dict[str, Any]]()
    for number, way in enumerate(ways):
        lm.find_passages(asked[0].text, k=1, by=way)  # makes the indexes
        ranks, times_ms = defaultdict[str, list[int]](list), list[float]()
        for done, question in enumerate(asked):
            begin_s = time.perf_counter()
            found = lm.find_passages(question.text, k=max(FIRST), by=way)
            times_ms.append(1000 * (time.perf_counter() - begin_s))
            rank = next((place for place, each in enumerate(found, 1) if question.is_answered_by(each)), 1 << 30)
            for kind in dict.fromkeys(("all", question.kind)):
                ranks[kind].append(rank)
            progress("ask", number * len(asked) + done + 1, len(ways) * len(asked), way)
        for kind, each in ranks.items():
            shares = {f"first_{most}": sum(rank <= most for rank in each) / len(each) for most in FIRST}
            rows.append({"by": way, "kind": kind, "questions": len(each), **shares, "ms": statistics.median(times_ms)})
    return {"rows": rows}


def _read(path: Path) -> Iterator[Question]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        names = [PurePosixPath(name).stem for name in row.get("files", ())]
        names += [row["document_id"]] if "document_id" in row else []
        yield Question(
            row["question"], frozenset(names), tuple(row.get("answers", ())), row.get("kind", "all"),
            str(row.get("id", row["question"])),
        )  # fmt: skip


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
