"""Training with memories, in several processes, and from models that have learnt already."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from other_families import save_as_others_do
from texts import make_text
from training_runs import COMPRESSING, REMEMBERING, TINY, Killed, kill_at, loss_on, metrics_of, token_file

from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, InvalidInput
from memlm.model import Decoder
from memlm.model.files.checkpoint import load_checkpoint
from memlm.training.config import TrainConfig
from memlm.training.data import DocumentStreams
from memlm.training.distributed import ProcessGroup
from memlm.training.init_from import add_memories, config_with_memories
from memlm.training.train import train
from memlm.training.trainer import Trainer


@pytest.fixture
def corpus(corpus_folder) -> Corpus:
    return Corpus([corpus_folder])


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_rows_read_whole_documents_in_order_each_once_an_epoch(tmp_path, num_rows):
    sizes = [5, 1, 17, 8, 30, 3, 12]
    data = DocumentStreams(token_file(tmp_path, sizes), 7, num_rows, seed=4, start_id=9, end_id=0)
    whole = [data.at(step) for step in range(60)]
    seen: list[list[int]] = []
    for row in range(num_rows):
        inputs, targets, starts = (
            torch.cat([getattr(batch, name)[row] for batch in whole])
            for name in ("inputs_BT", "targets_BT", "starts_BT")
        )
        begins = starts.nonzero()[:, 0].tolist()
        assert begins[0] == 0
        for begin, end in pairwise(begins):
            document = targets[begin : end - 1].tolist()
            assert inputs[begin:end].tolist() == [9, *document]
            assert targets[end - 1] == 0
            assert document == list(range(document[0], document[0] + len(document)))
            assert len(document) == sizes[document[0] // 1000 - 1]
        seen.append([int(targets[begin]) // 1000 for begin in begins[:-1]])
    first = [seen[row][: len(data._row(row, 0)[0])] for row in range(num_rows)]
    assert sorted(chain.from_iterable(first)) == list(range(1, 8))
    loads = [sum(sizes[document - 1] + 1 for document in row) for row in first]
    assert max(loads) - min(loads) <= 31


def test_any_step_and_any_rows_can_be_read_by_themselves(tmp_path):
    data = DocumentStreams(token_file(tmp_path, [5, 40, 17, 8]), 6, 4, seed=1, start_id=0, end_id=0)
    for step in (0, 3, 50):
        whole, part = data.at(step), data.at(step, range(1, 3))
        assert torch.equal(whole.inputs_BT[1:3], part.inputs_BT)
        assert torch.equal(whole.starts_BT[1:3], part.starts_BT)


def test_fewer_documents_than_rows_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"3 documents.*smaller --batch-size"):
        DocumentStreams(token_file(tmp_path, [5, 6, 7]), 7, 4, seed=4, start_id=9, end_id=0)


@pytest.mark.parametrize("config", [REMEMBERING, COMPRESSING], ids=["memorizing", "compressive"])
def test_a_model_with_memory_learns(corpus, tmp_path, config):
    report = train(corpus, tmp_path / "m", replace(config, steps=30), valid=corpus)
    assert report.valid_loss < report.losses[0] - 0.5
    checkpoint = load_checkpoint(tmp_path / "m")
    assert checkpoint.decoder.config == config.model(checkpoint.tokenizer.vocab_size)


@pytest.mark.parametrize("config", [REMEMBERING, COMPRESSING], ids=["memorizing", "compressive"])
def test_a_resumed_run_with_memory_is_the_same_to_the_bit(corpus, tmp_path, config):
    whole = train(corpus, tmp_path / "whole", config)
    for killed_at in (5, 9):
        folder = tmp_path / f"killed-{killed_at}"
        with pytest.raises(Killed):
            train(corpus, folder, config, progress=kill_at(killed_at))
        resumed = train(corpus, folder, resume=True)
        assert resumed.losses == whole.losses
        assert load_checkpoint(folder).fingerprint == load_checkpoint(tmp_path / "whole").fingerprint


def losses_of(path: Path) -> list[float]:
    return [float(row["loss"]) for row in metrics_of(path)]


def test_memory_is_carried_from_step_to_step(corpus, tmp_path):
    """What is learnt with memory differs from what is learnt with one that is emptied at every step."""
    whole = train(corpus, tmp_path / "whole", REMEMBERING)
    original, Trainer._loss = Trainer._loss, forgetful(Trainer._loss)
    try:
        emptied = train(corpus, tmp_path / "emptied", REMEMBERING)
    finally:
        Trainer._loss = original
    assert whole.losses[0] == emptied.losses[0]
    assert whole.losses[1:] != emptied.losses[1:]


def forgetful(original):
    def loss(self, number, part):
        self.states = [None] * len(self.states)
        return original(self, number, part)

    return loss


@pytest.mark.parametrize("config", [TINY, REMEMBERING], ids=["plain", "memory"])
def test_accumulated_batches_equal_one_large_one(corpus, tmp_path, config):
    config = replace(config, dtype="float32", steps=6)
    large = train(corpus, tmp_path / "large", replace(config, batch_size=4))
    small = train(corpus, tmp_path / "small", replace(config, batch_size=2, accumulate=2))
    np.testing.assert_allclose(small.losses, large.losses, rtol=1e-4)
    assert small.tokens == large.tokens


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TINY, id="plain", marks=pytest.mark.exhaustive),
        pytest.param(REMEMBERING, id="memorizing"),
        pytest.param(COMPRESSING, id="compressive", marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_learn_what_one_learns(corpus_folder, corpus, tmp_path, config):
    config = replace(config, dtype="float32", steps=6, checkpoint_every=2)
    alone = train(corpus, tmp_path / "alone", config, valid=corpus)
    script = (
        "import hashlib, json, sys; from memlm.data.corpus import Corpus; from memlm.training.train import train\n"
        "from memlm.training.config import TrainConfig\n"
        "from memlm.training.trainer import Trainer\n"
        "corpus, finish = Corpus([sys.argv[1]]), Trainer.run\n"
        "def run_and_print(run, *given):\n"
        "    pace = finish(run, *given)\n"
        "    weights = [tensor.numpy().tobytes() for tensor in run.decoder.state_dict().values()]\n"
        "    print(hashlib.sha256(b''.join(weights)).hexdigest(), *run.losses, run.valid_loss)\n"
        "    return pace\n"
        "Trainer.run = run_and_print\n"
        "train(corpus, sys.argv[2], TrainConfig.from_dict(json.loads(sys.argv[3])), valid=corpus)"
    )
    given = json.dumps(vars(config))
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment["MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-c", script, str(corpus_folder), str(tmp_path / "two"), given]
    group = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=120)[0].split() for process in group)
    assert [process.returncode for process in group] == [0, 0]
    assert first == second  # the same losses and, to the bit, the same weights
    np.testing.assert_allclose([float(loss) for loss in first[1:]], [*alone.losses, alone.valid_loss], rtol=1e-5)
    np.testing.assert_allclose(losses_of(tmp_path / "two"), alone.losses, rtol=1e-5)
    one, two = (load_checkpoint(tmp_path / name).decoder.weights() for name in ("alone", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-3, rtol=1e-2)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_processes_that_cannot_share_the_rows_are_told_so():
    with pytest.raises(InvalidInput, match="3 processes"):
        ProcessGroup(0, 3).shard(range(4))
    assert list(ProcessGroup(1, 2).shard(range(4, 8))) == [6, 7]


def test_training_ends_when_held_out_text_stops_getting_better_with_the_best_weights(tmp_path):
    """A large rate on little text overfits at once."""
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.txt").write_text(make_text(seed, 60))
    learnt, held = Corpus([tmp_path / "a.txt"]), Corpus([tmp_path / "b.txt"])
    config = replace(TINY, steps=400, valid_every=4, patience=3, learning_rate=0.02, batch_size=2)
    report = train(learnt, tmp_path / "m", config, valid=held)
    rows = metrics_of(tmp_path / "m")
    scores = [float(row["valid_loss"]) for row in rows if row["valid_loss"]]
    assert report.steps < 400
    assert len(scores) - 1 - scores.index(min(scores)) == 3
    assert report.valid_loss == pytest.approx(min(scores), abs=1e-3)
    assert [int(row["step"]) for row in rows] == list(range(report.steps))


def test_metrics_go_on_where_a_run_goes_on(corpus, tmp_path):
    with pytest.raises(Killed):
        train(corpus, tmp_path / "m", TINY, progress=kill_at(9))
    assert len(losses_of(tmp_path / "m" / "training")) == 9
    report = train(corpus, tmp_path / "m", resume=True)
    assert losses_of(tmp_path / "m") == pytest.approx(report.losses, rel=1e-4)
    rows = metrics_of(tmp_path / "m")
    assert [int(row["step"]) for row in rows] == list(range(12))
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)


def test_tensorboard_is_named_where_it_is_missing(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InvalidInput, match=r"memlm\[tensorboard\]"):
        train(corpus, tmp_path / "m", replace(TINY, tensorboard=True))


def old_and_new(folder: Path, fields: dict) -> tuple[Decoder, Decoder]:
    old = load_checkpoint(folder, trainable=True).decoder.eval()
    torch.manual_seed(0)
    return old, add_memories(old, config_with_memories(old.config, fields)).eval()


@pytest.mark.parametrize("kind", ["ours", "gpt2", "llama", "gpt_neox"])
def test_a_model_that_gets_memorizing_layers_starts_exactly_where_it_was(kind, model_folder, tmp_path, tokenizer):
    folder = model_folder if kind == "ours" else save_as_others_do(kind, tmp_path / kind, tokenizer)
    old, new = old_and_new(folder, {"memorizing": {"layers": [1]}, "context_length": 32})
    tokens = torch.randint(1, 300, (1, 100), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        got = new.logits(new(tokens)[0])
        for begin in range(0, 100, 32):
            expected = old.logits(old(tokens[:, begin : begin + 32])[0])
            torch.testing.assert_close(got[:, begin : begin + 32], expected, atol=1e-5, rtol=1e-5)
    assert new.blocks[1].attention.knn.mixing == "tanh"


def test_it_is_then_trained_and_opens_its_gates(model_folder, corpus, tmp_path):
    config = replace(
        TINY, learning_rate=3e-3, optimizer="adamw", steps=25,
        model_fields={"memorizing": {"layers": [1]}, "context_length": 16},
    )  # fmt: skip
    report = train(corpus, tmp_path / "m", config, init_from=model_folder)
    checkpoint = load_checkpoint(tmp_path / "m")
    assert report.losses[0] == pytest.approx(losses_of(tmp_path / "m")[0], rel=1e-4)
    assert checkpoint.decoder.blocks[1].attention.knn.gate_H.abs().max() > 1e-4
    assert checkpoint.tokenizer.fingerprint == load_checkpoint(model_folder).tokenizer.fingerprint
    assert report.losses[-1] < report.losses[0]


def test_what_cannot_change_in_a_learnt_model_is_refused_by_name(model_folder, tmp_path, tokenizer):
    config = load_checkpoint(model_folder).decoder.config
    with pytest.raises(InvalidInput, match="dim cannot change"):
        config_with_memories(config, {"dim": 64})
    gpt2 = load_checkpoint(save_as_others_do("gpt2", tmp_path / "m", tokenizer)).decoder.config
    with pytest.raises(InvalidInput, match="96 learned positions"):
        config_with_memories(gpt2, {"context_length": 128, "memorizing": {"layers": [0]}})
    with pytest.raises(Incompatible, match="qkv"):
        add_memories(load_checkpoint(model_folder, trainable=True).decoder, replace(config, num_layers=3))


def test_held_out_text_is_scored_from_an_empty_memory(corpus, tmp_path):
    train(corpus, tmp_path / "m", replace(REMEMBERING, steps=10))
    checkpoint = load_checkpoint(tmp_path / "m")
    once = loss_on(corpus, checkpoint.decoder, checkpoint.tokenizer)
    assert loss_on(corpus, checkpoint.decoder, checkpoint.tokenizer) == once


def test_settings_come_from_preset_file_and_command_line_in_that_order(tmp_path):
    from memlm.cli.train import train_config

    file = tmp_path / "f.toml"
    file.write_text('steps = 7\nlearning_rate = 0.5\n[model]\nxl_length = 4\npositions = "alibi"\n')
    config = train_config("tiny", file, {"steps": 9}, fine_tuning=False)
    assert (config.steps, config.learning_rate, config.model(300).xl_length) == (9, 0.5, 4)
    assert config.model(300).positions == "alibi"
    assert train_config("tiny", None, {}, fine_tuning=True).optimizer == "adamw"
    for text, says in (("hidden = 3", "hidden"), ("[model]\nhidden = 3", "hidden"), ("[", "TOML")):
        file.write_text(text)
        with pytest.raises(InvalidInput, match=says):
            train_config("tiny", file, {}, fine_tuning=False)


@pytest.mark.parametrize(
    "change",
    [{"schedule": "spiral"}, {"patience": 2}, {"accumulate": 0}, {"min_rate": 2.0}, {"model_fields": {"dims": 3}}],
)
def test_new_settings_that_mean_nothing_are_refused(change):
    with pytest.raises(InvalidInput):
        TrainConfig(**change)


def test_tensorboard_gets_what_the_csv_gets(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = train(corpus, tmp_path / "m", replace(TINY, tensorboard=True, valid_every=6), valid=corpus)
    board = EventAccumulator(str(tmp_path / "m" / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(report.losses, rel=1e-5)
    assert [event.step for event in board.Scalars("valid_loss")] == [5, 11]
