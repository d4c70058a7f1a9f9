"""Evidence: help and harm of a datastore on tasks of the lm-evaluation-harness.

A question is read once, and the datastore is searched once. All ways come from that. A difference from the model alone
is paired: each question counts with the difference of its two scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from benchmarks.evidence.domains import (
    ADAPTIVE,
    ALONE,
    ONE_LAM,
    Prepared,
    ReadText,
    logprobs_of,
    nats_less,
    read_document,
    windows_for,
)
from benchmarks.evidence.texts import text_hash
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.data.corpus import Document
from memlm.errors import InvalidInput, Unavailable, check_range
from memlm.index.store.datastore import Datastore
from memlm.indexing.fitting import Trial, find_threshold
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.adaptive import features_of
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

if TYPE_CHECKING:
    from benchmarks.evidence.task_reader import TaskReader

METRIC = "acc"
THRESHOLDED, OWN_TEXT = "thresholded_lam", "own text"
MISSING = "lm-evaluation-harness is not installed; install it with `pip install 'memlm[lm-eval]'`"


@dataclass(frozen=True, slots=True)
class AskedTasks:
    """Tasks of the harness by their names, from a folder of tasks, and at most so many questions of each. The threshold
    of λ keeps the share `keep_gain` of the gain on text. Raises InvalidInput for a share of 0 and for more than 1.
    """

    names: tuple[str, ...]
    folder: Path | None = None
    limit: int | None = None
    keep_gain: float = 0.9

    def __post_init__(self) -> None:
        check_range("keep_gain", self.keep_gain, above=0, most=1)


def scores_of(reader: TaskReader, asked: AskedTasks) -> tuple[dict[str, Float64[np.ndarray, " Q"]], dict[str, str]]:
    """The accuracy at each question of each task, as the harness judges the answers of a model, and a hash of the
    questions of each task.

    Raises InvalidInput for a task without accuracies.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = None if asked.folder is None else str(asked.folder)
    done = simple_evaluate(
        model=reader, tasks=list(asked.names), limit=asked.limit, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=folder, include_defaults=folder is None),
    )  # fmt: skip
    assert done is not None  # that is the answer of other processes than the first
    scores, hashes = {}, {}
    for task, samples in done["samples"].items():
        if not samples or METRIC not in samples[0]:
            raise InvalidInput(f"the task {task} has no metric {METRIC!r}; give tasks that have", field="tasks")
        in_order = sorted(samples, key=lambda each: each["doc_id"])
        scores[task] = np.array([float(sample[METRIC]) for sample in in_order])
        hashes[task] = text_hash(Document("", json.dumps(sample["doc"], sort_keys=True)) for sample in in_order)
    return scores, hashes


def rows_of(text: str, way: str, scores: Mapping[str, Any], alone: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each task: the percentage of right answers, and by how many points it is more than the model alone."""
    rows = []
    for task, scores_Q in scores.items():
        right, right_error = _mean(100 * scores_Q)
        more, more_error = _mean(100 * (scores_Q - alone[task]))
        changed = 100 * float((scores_Q != alone[task]).mean())
        figures = {"right": right, "right_error": right_error, "points_more": more, "points_more_error": more_error}
        words = {"text": text, "task": task, "way": way, "questions": len(scores_Q)}
        rows.append({**words, **figures, "changed": changed})
    return rows


def _mean(values_Q: Float64[np.ndarray, " Q"]) -> tuple[float, float]:
    """The mean and its standard error over questions."""
    return float(values_Q.mean()), float(values_Q.std(ddof=min(1, len(values_Q) - 1)) / sqrt(len(values_Q)))


def tasks_of(asked: AskedTasks, checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each task and way, and one for each way with the gain on the test documents, as the task `own text`.

    `thresholded_lam` is the adaptive λ with the threshold that `memlm tune --keep-gain` finds on the same
    documents, and its rows tell this `keep_gain`. Raises Unavailable where the harness is not installed.
    """
    try:
        from benchmarks.evidence.task_reader import TaskReader
    except ImportError as error:
        raise Unavailable(MISSING) from error
    with Datastore.open(prepared.store) as datastore, LanguageModel(checkpoint) as lm:
        tuned = Retriever.of([ModelStore(datastore, checkpoint)], RetrievalParams())
        ways: dict[str, Retriever | None] = {
            ALONE: None,
            ONE_LAM: replace(tuned, knn=replace(tuned.knn, adaptive=None)),
        }
        if tuned.knn.adaptive is not None:
            threshold = threshold_of(checkpoint, prepared, tuned, asked.keep_gain)
            gated = replace(tuned, knn=replace(tuned.knn, adaptive=replace(tuned.knn.adaptive, threshold=threshold)))
            ways |= {ADAPTIVE: tuned, THRESHOLDED: gated}
        rows, reader = _own_text(checkpoint, prepared, tuned, ways), TaskReader(lm, ways, progress)
        alone: dict[str, Float64[np.ndarray, " Q"]] = {}
        for way in ways:
            reader.way = way
            scores, hashes = scores_of(reader, asked)
            alone = alone or scores
            rows += [
                {**row, "sha256": hashes[row["task"]]} for row in rows_of(prepared.domain.name, way, scores, alone)
            ]
    return [{**row, "keep_gain": asked.keep_gain} if row["way"] == THRESHOLDED else row for row in rows]


def threshold_of(checkpoint: Checkpoint, prepared: Prepared, tuned: Retriever, keep_gain: float) -> float:
    """The threshold of λ that keeps this share of the gain on the tuning documents."""
    assert tuned.knn.adaptive is not None
    parts = list[Trial]()
    for number, document in enumerate(prepared.domain.tuning):
        read = read_document(checkpoint, document, windows_for(checkpoint))
        found = tuned.search(read.keys_ND, read.max_logprobs_N)
        features_QF = features_of(found.neighbors, found.logweights_QK, tuned.knn.temperature, read.max_logprobs_N)
        knn_Q, _ = found.mix_targets(read.lm_logprobs_N, read.targets_N)
        lm_Q, knn_Q = (np.exp(each.astype(np.float64)) for each in (read.lm_logprobs_N, knn_Q))
        parts.append(Trial(features_QF, lm_Q, knn_Q, np.full(len(lm_Q), number)))
    return find_threshold(Trial.joined(parts), tuned.knn.adaptive, keep_gain)[0]


def _own_text(
    checkpoint: Checkpoint, prepared: Prepared, tuned: Retriever, ways: Mapping[str, Retriever | None]
) -> list[dict[str, Any]]:
    """A row for each way but the model alone: nats fewer on the test documents, and the share of λs that are 0."""
    texts, lams = list[ReadText](), {way: list[np.ndarray]() for way in ways}
    for document in prepared.domain.test:
        read = read_document(checkpoint, document, windows_for(checkpoint))
        found, logprobs = tuned.search(read.keys_ND, read.max_logprobs_N), {ALONE: read.lm_logprobs_N}
        for way, retriever in ways.items():
            if retriever is not None:
                logweights_NK, lams_N = retriever.knn.weigh(found.neighbors, read.max_logprobs_N)
                logprobs[way] = logprobs_of(read, replace(found, logweights_QK=logweights_NK, lams_Q=lams_N))
                lams[way].append(lams_N)
        texts.append(ReadText(document, read, logprobs))
    words = {"text": prepared.domain.name, "task": OWN_TEXT}
    return [
        {**words, "way": way, **nats_less(texts, way), "left_alone": float((np.concatenate(lams[way]) == 0).mean())}
        for way, retriever in ways.items() if retriever is not None
    ]  # fmt: skip
