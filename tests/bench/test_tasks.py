"""Synthetic tasks: their answers follow from their texts, and the trainer's own steps learn them."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from memlm.bench.learning import TaskBatches, config_for, learn, score
from memlm.bench.tasks import (
    Assignments,
    CountsInOrder,
    FarDictionary,
    GappedInduction,
    LibraryText,
    OffsetCopy,
    Recall,
    RunningParity,
    Task,
)
from memlm.training.validation import PADDING

TASKS: list[Task] = [
    OffsetCopy(symbols=9, length=7),
    OffsetCopy(symbols=9, length=7, unique=True),
    GappedInduction(stages=(2, 3), length=30),
    Recall(stages=(2, 3), noise_tokens=5),
    FarDictionary(stages=((1, 2), (3, 3)), segment=8),
    Assignments(stages=(4, 9)),
    RunningParity(stages=(3, 9)),
    CountsInOrder(stages=(1, 2), segment=20),
    LibraryText(length=16),
]

FAR = FarDictionary(stages=((1, 2), (1, 3)), segment=4, keys=2, values=2)
FAST = {"learning_rate": 3e-2, "batch_size": 16}


def answer_copy(task, text, place):
    return text[place + 1 - task.length]


def answer_pair(task, text, place):
    """The token that followed this one in an earlier pair."""
    return next(text[p + 1] for p in range(place) if text[p] == text[place])


def answer_assignment(task, text, place):
    end = text.index(task.variables + task.values)
    return next(text[p + 1] for p in reversed(range(0, end, 2)) if text[p] == text[place])


def answer_parity(task, text, place):
    return sum(text[1 : place + 1]) % 2  # behind the mark


def answer_counts(task, text, place):
    end = text.index(task.symbols)
    order = sorted(range(task.symbols), key=lambda symbol: (-text[:end].count(symbol), symbol))
    return order[place - end]


ANSWERS = {
    OffsetCopy: answer_copy, GappedInduction: answer_pair, Recall: answer_pair, FarDictionary: answer_pair,
    Assignments: answer_assignment, RunningParity: answer_parity, CountsInOrder: answer_counts,
}  # fmt: skip


def drawn(task, stage=-1, rows=40, seed=0):
    return task.draw(np.random.default_rng(seed), rows, task.stages[stage])


@pytest.mark.parametrize("task", TASKS[:-1], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("stage", [0, -1])
def test_each_answer_follows_from_its_text(task, stage):
    inputs_BT, targets_BT = drawn(task, stage)
    assert inputs_BT.shape == targets_BT.shape
    assert inputs_BT.shape[1] <= task.num_tokens
    assert 0 <= inputs_BT.min() <= inputs_BT.max() < task.vocab_size
    num_asked = 0
    for text, targets in zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True):
        for place in (place for place, target in enumerate(targets) if target != PADDING):
            assert targets[place] == ANSWERS[type(task)](task, text, place)
            num_asked += 1
    assert num_asked >= 40


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_the_longest_text_fills_the_context(task):
    longest = max(drawn(task, stage).inputs_BT.shape[1] for stage in range(len(task.stages)))
    assert longest == task.num_tokens or isinstance(task, RunningParity)


def test_a_far_dictionary_has_its_pairs_in_the_first_segment_and_its_questions_in_the_last():
    task = FarDictionary(stages=((3, 4),), segment=10)
    inputs_BT, targets_BT = drawn(task)
    is_value_BT = (inputs_BT >= task.keys) & (inputs_BT < task.keys + task.values)
    assert is_value_BT[:, :10].sum(axis=1).tolist() == [3] * 40
    assert not is_value_BT[:, 10:].any()
    assert (targets_BT[:, :30] == PADDING).all()
    assert ((targets_BT[:, 30:] != PADDING).sum(axis=1) == task.questions).all()


def test_the_frequencies_of_counts_drift():
    inputs_BT, _ = drawn(CountsInOrder(stages=(8,)), rows=200)
    first, last = inputs_BT[:, :100], inputs_BT[:, 400:500]
    shares = [(each[:, :, None] == np.arange(8)).mean(axis=1) for each in (first, last, inputs_BT[:, 100:200])]
    assert np.abs(shares[0] - shares[1]).sum(axis=1).mean() > 1.2 * np.abs(shares[0] - shares[2]).sum(axis=1).mean()


def test_held_out_text_is_text_that_is_not_read():
    task = LibraryText(length=64)
    read = {bytes(row.astype(np.uint8)) for row in drawn(task, rows=3000).inputs_BT}
    assert not task.is_held_out
    held = [bytes(row.astype(np.uint8)) for row in drawn(task.held_out, rows=3000).inputs_BT]
    assert not read & {row for row in held if len(set(row)) > 10}


def test_batches_follow_from_seed_stage_and_step():
    batches, other = (TaskBatches(Recall(), 4, seed) for seed in (0, 1))
    first = batches.at(3)
    assert torch.equal(first.inputs_BT, TaskBatches(Recall(), 4, 0).at(3).inputs_BT)
    assert not torch.equal(first.inputs_BT, batches.at(4).inputs_BT)
    assert not torch.equal(first.inputs_BT, other.at(3).inputs_BT)
    assert torch.equal(batches.at(3, range(1, 3)).targets_BT, first.targets_BT[1:3])
    batches.stage = 1
    assert batches.at(3).inputs_BT.shape != first.inputs_BT.shape
    assert first.starts_BT is not None
    assert first.starts_BT.nonzero().tolist() == [[row, 0] for row in range(4)]


def test_a_small_copy_is_learned_alike_twice_and_not_through_a_window_that_is_too_short():
    task = OffsetCopy(symbols=8, length=4)
    runs = [learn(config_for(task), task, steps=200, check_every=5, training=FAST) for _ in range(2)]
    assert runs[0].is_learned
    assert runs[0].accuracy >= task.passed
    assert runs[0].steps < 200  # it ends when it is learned
    assert runs[1].accuracy == runs[0].accuracy
    blind = learn(config_for(task, windows=(2, 2)), task, steps=runs[0].steps, training=FAST)
    assert not blind.is_learned
    assert blind.accuracy < 3 * task.chance


def test_a_stage_follows_when_the_one_before_is_passed():
    learned = learn(config_for(FAR), FAR, steps=200, check_every=5, training=FAST)
    assert learned.is_learned
    assert learned.stage == 2
    hopeless = learn(config_for(Recall()), Recall(), steps=5, check_every=5)
    assert (hopeless.stage, hopeless.steps) == (0, 5)


def test_a_model_with_memory_learns_in_segments():
    task = replace(FAR, stages=((1, 2),))
    config = config_for(task, xl_length=4)
    assert config.context_length == 4
    assert learn(config, task, steps=200, check_every=5, training=FAST).is_learned


def test_a_run_ends_after_its_seconds():
    assert learn(config_for(Recall()), Recall(), steps=10_000, seconds=0.2).steps < 100


def test_seconds_in_which_the_processor_serves_others_cut_no_run():
    class Waiting(OffsetCopy):
        def draw(self, generator, rows, stage):
            time.sleep(0.2)
            return super().draw(generator, rows, stage)

    task = Waiting(symbols=4, length=3)
    learn(config_for(task, dim=16), task, steps=1)  # the first optimizer of a process loads modules
    begin = time.perf_counter()
    learned = learn(config_for(task, dim=16), task, steps=10, seconds=1.5)
    assert time.perf_counter() - begin > 2
    assert learned.steps == 10
    assert learned.seconds < 1.5


def test_a_score_is_of_the_asked_positions_alone():
    task = OffsetCopy(symbols=5, length=4)
    decoder = learn(config_for(task), task, steps=1).decoder
    inputs_BT, targets_BT = (
        torch.from_numpy(each) for each in task.draw(np.random.default_rng([0, 0, 1 << 40]), 128, 0)
    )
    with torch.no_grad():
        logprobs_BTV = decoder.logprobs(decoder(inputs_BT)[0])
    is_asked = targets_BT != PADDING
    expected = -logprobs_BTV[is_asked].gather(1, targets_BT[is_asked][:, None]).mean()
    assert score(decoder, task)[1] == pytest.approx(float(expected), rel=1e-5)
