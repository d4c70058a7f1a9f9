"""Help and harm on tasks of the lm-evaluation-harness, in `benchmarks evidence`: each way's answers, and the table."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_device import fake_device, on_fake_gpu
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from texts import make_text
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.evidence.task_reader import TaskReader
from benchmarks.evidence.tasks import AskedTasks, rows_of, scores_of
from memlm.api.params import RetrievalParams
from memlm.errors import InvalidInput
from memlm.generation.likelihood import loglikelihood, split_ids
from memlm.integrations.lm_eval import MemlmLM
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.retriever import Retriever

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the harness imports
LAM = AdaptiveLam(0.3, (-0.5, 0.2, 1.5, 0.1, -0.7), (1.0, 0.5, 0.5, 1.0, -1.0), (0.5, 0.5, 0.3, 0.5, 0.8))
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: {metric}
"""


def as_set(retriever: Retriever, **settings: object) -> Retriever:
    return replace(retriever, knn=replace(retriever.knn, **settings))


@pytest.fixture
def ways(lm) -> dict[str, Retriever | None]:
    tuned = lm.engine.stores.retriever(RetrievalParams())
    return {"alone": None, "one": as_set(tuned, adaptive=None, lam=0.4), "adaptive": as_set(tuned, adaptive=LAM)}


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks, one of questions with three answers and one without accuracies."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [make_text(number, 12).split() for number in range(6)]
    rows = [
        {"query": " ".join(words[:6]), "choices": [" ".join(words[6:9]), words[9], words[10]], "gold": number % 3}
        for number, words in enumerate(texts)
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, metric in (("own_choice", "acc"), ("own_norm", "acc_norm")):
        text = CHOICE.format(name=name, file=folder / "rows.jsonl", metric=metric)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def test_each_way_answers_as_its_retriever_does(lm, ways):
    reader = TaskReader(lm, ways)
    pairs = [("the memory", " of a model"), ("", "a page"), ("it is silent:", " the"), ("the memory", " is")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    found = {}
    for way, retriever in ways.items():
        reader.way = way
        found[way] = reader.loglikelihood(requests)
        for pair, (logprob, is_greedy) in zip(pairs, found[way], strict=True):
            context_ids, new_ids = split_ids(lm.tokenizer, *pair)
            read_ids = lm.tokenizer.framed(context_ids, as_document=True)
            expected, expected_greedy = loglikelihood(lm.checkpoint, read_ids, new_ids, retriever)
            assert logprob == pytest.approx(expected, abs=1e-3), (way, pair)
            assert is_greedy == expected_greedy
    assert len({round(found[way][0][0], 3) for way in ways}) == 3


def test_questions_are_read_on_the_device_and_mixed_on_the_host(model_folder, store_folder):
    checkpoint = load_checkpoint(model_folder, trainable=True)  # not packed, which only processors are
    with LanguageModel(checkpoint, [store_folder]) as lm:
        tuned = lm.engine.stores.retriever(RetrievalParams())
        reader = TaskReader(lm, {"alone": None, "one": as_set(tuned, adaptive=None, lam=0.4)})
        pairs = [("the memory", " of a model"), ("it is silent:", " the")]
        with fake_device() as host:
            on_fake_gpu(checkpoint.decoder)
            reader.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    sizes = [len(split_ids(lm.tokenizer, *pair)[1]) for pair in pairs]
    vocab = [shape for shape in host.crossings if shape[-1] == checkpoint.tokenizer.vocab_size]
    assert vocab == [(size, checkpoint.tokenizer.vocab_size) for size in sizes]


def test_scores_are_those_of_the_harness(lm, ways, own_tasks):
    reader = TaskReader(lm, ways)
    asked = AskedTasks(("own_choice",), own_tasks, 5)
    manager = TaskManager(include_path=str(own_tasks), include_defaults=False)
    for way, options in (("alone", {"use_store": False}), ("one", {"lam": 0.4})):
        reader.way = way
        done = simple_evaluate(
            model=MemlmLM(lm, **options), tasks=["own_choice"], limit=5, task_manager=manager, bootstrap_iters=0
        )
        (scores_Q,) = scores_of(reader, asked)[0].values()
        assert len(scores_Q) == 5
        assert scores_Q.mean() == pytest.approx(done["results"]["own_choice"]["acc,none"])


def test_a_task_without_accuracies_is_refused(lm, ways, own_tasks):
    with pytest.raises(InvalidInput, match="own_norm has no metric 'acc'"):
        scores_of(TaskReader(lm, ways), AskedTasks(("own_norm",), own_tasks))


def test_differences_are_paired():
    alone, mixed = np.array([1.0, 0, 1, 0, 1, 1, 0, 1]), np.array([1.0, 1, 0, 0, 1, 1, 1, 1])
    (row,) = rows_of("t", "w", {"a": mixed}, {"a": alone})
    differences = [100 * (one - other) for one, other in zip(mixed, alone, strict=True)]
    mean = sum(differences) / 8
    spread = math.sqrt(sum((each - mean) ** 2 for each in differences) / 7)
    assert row["points_more"] == pytest.approx(mean)
    assert row["points_more_error"] == pytest.approx(spread / math.sqrt(8))
    assert row["right"] == pytest.approx(100 * 6 / 8)
    assert row["changed"] == pytest.approx(100 * 3 / 8)


def test_the_command_compares_each_way_with_the_model_alone(model_folder, own_tasks, tmp_path):
    for name, count, first in (("stored", 14, 0), ("held-out", 14, 100)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{make_text(first + number, 30)} " * 3, encoding="utf-8")
    words = ["evidence", f"tiny={tmp_path / 'stored'},{tmp_path / 'held-out'}", "--model", str(model_folder)]
    sizes = ["--entries", "600", "--documents", "12", "--document-tokens", "60", "--only", "tasks"]
    refused = CliRunner().invoke(app, [*words, *sizes])
    assert "--tasks" in str(refused.exception)
    tasks = ["--tasks", "own_choice", "--include", str(own_tasks), "--limit", "6", "--json"]
    refused = CliRunner().invoke(app, [*words, *sizes, *tasks, "--keep-gain", "0"])
    assert "keep_gain is 0" in str(refused.exception)
    runs = dict[str, dict[str, dict[str, float]]]()
    for keep_gain in ("0.9", "0.5"):
        work = ["--work", str(tmp_path / "work"), "--keep-gain", keep_gain]
        done = CliRunner().invoke(app, [*words, *sizes, *tasks, *work])
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout[done.stdout.index("{") :])
        assert report["settings"]["tasks"].keys() == {"own_choice"}
        runs[keep_gain] = {result["metric"]: result for result in report["results"]}
    found = runs["0.9"]

    def of(figure: str, task: str, way: str) -> dict[str, float]:
        return dict(found[f"{figure}[table=tasks,text=tiny,task={task},way={way}]"])

    for metric, other in runs["0.5"].items():
        if metric.startswith("keep_gain["):
            assert "way=thresholded_lam" in metric
            assert (found[metric]["value"], other["value"]) == (0.9, 0.5)
        elif "way=thresholded_lam" not in metric:
            assert other == found[metric]
        elif metric.startswith("left_alone["):  # a smaller share of the gain takes fewer positions
            assert other["value"] > found[metric]["value"]
    assert sum(metric.startswith("keep_gain[") for metric in runs["0.5"]) == 2  # of the task, and of text

    assert of("points_more", "own_choice", "alone")["value"] == 0
    for way in ("one_lam", "adaptive_lam", "thresholded_lam"):
        assert of("questions", "own_choice", way)["value"] == 6
        right, alone = (of("right", "own_choice", each)["value"] for each in (way, "alone"))
        assert of("points_more", "own_choice", way)["value"] == pytest.approx(right - alone)
    full, most = (of("nats_less", "own text", way)["value"] for way in ("adaptive_lam", "thresholded_lam"))
    assert 0 < most <= full + 0.2
    assert of("left_alone", "own text", "adaptive_lam")["value"] == 0
    assert of("left_alone", "own text", "thresholded_lam")["value"] > 0
