import math

import numpy as np
import pytest
import torch
from training_runs import TINY, Killed, kill_at

from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, Corrupt, InvalidInput, NotFound
from memlm.model.files.checkpoint import load_checkpoint
from memlm.training.config import TrainConfig, learning_rate_at
from memlm.training.data import Batches, write_tokens
from memlm.training.train import train


@pytest.fixture
def corpus(corpus_folder) -> Corpus:
    return Corpus([corpus_folder])


def test_training_lowers_the_loss_and_leaves_a_model(corpus, tmp_path):
    report = train(corpus, tmp_path / "m", TrainConfig(**{**vars(TINY), "steps": 30}), valid=corpus)
    assert report.losses[-1] < report.losses[0] - 0.5
    assert report.valid_loss < math.log(300)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "metrics.csv",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert load_checkpoint(tmp_path / "m").decoder.num_parameters == report.num_parameters


def test_same_seed_same_model_other_seed_other_model(corpus, tmp_path):
    reports = [
        train(corpus, tmp_path / str(number), TrainConfig(**{**vars(TINY), "seed": seed}))
        for number, seed in enumerate((0, 0, 1))
    ]
    prints = [load_checkpoint(tmp_path / str(number)).fingerprint for number in range(3)]
    assert reports[0].losses == reports[1].losses != reports[2].losses
    assert prints[0] == prints[1] != prints[2]


def test_a_resumed_run_continues_to_the_same_losses_and_weights(corpus, tmp_path):
    whole = train(corpus, tmp_path / "whole", TINY)
    for killed_at in (3, 5, 9, 12):
        folder = tmp_path / f"killed-{killed_at}"
        with pytest.raises(Killed):
            train(corpus, folder, TINY, progress=kill_at(killed_at))
        resumed = train(corpus, folder, resume=True)
        assert resumed.losses == whole.losses
        assert load_checkpoint(folder).fingerprint == load_checkpoint(tmp_path / "whole").fingerprint


def test_nothing_that_was_there_is_overwritten(corpus, tmp_path):
    with pytest.raises(NotFound, match="without --resume"):
        train(corpus, tmp_path / "m", TINY, resume=True)
    train(corpus, tmp_path / "m", TINY)
    with pytest.raises(AlreadyExists, match="another folder"):
        train(corpus, tmp_path / "m", TINY)
    with pytest.raises(AlreadyExists, match="nothing to resume"):
        train(corpus, tmp_path / "m", TINY, resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(AlreadyExists, match="not empty"):
        train(corpus, tmp_path / "mine", TINY)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_broken_checkpoint_is_refused_by_name(corpus, tmp_path):
    with pytest.raises(Killed):
        train(corpus, tmp_path / "m", TINY, progress=kill_at(9))
    with pytest.raises(AlreadyExists, match="--resume"):
        train(corpus, tmp_path / "m", TINY)
    (tmp_path / "m" / "training" / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(Corrupt, match=r"checkpoint\.pt"):
        train(corpus, tmp_path / "m", resume=True)


def test_a_corpus_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(InvalidInput, match="at least 33"):
        train(Corpus([tmp_path / "a.txt"]), tmp_path / "m", TINY)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(("cross", "message"), [("source", "cross none"), ("retro", "chunk_store")])
def test_a_decoder_that_reads_more_than_its_text_is_refused(corpus, tmp_path, cross, message):
    with pytest.raises(InvalidInput, match=message):
        train(corpus, tmp_path / "model", TrainConfig(**{**vars(TINY), "model_fields": {"cross": cross}}))
    assert not (tmp_path / "model").exists()


def test_minutes_become_steps(corpus, tmp_path):
    config = TrainConfig(**{**vars(TINY), "steps": None, "minutes": 0.005})
    assert train(corpus, tmp_path / "m", config).steps >= 1


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate_at(step, 100, TrainConfig(learning_rate=1.0, warmup=0.1)) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("change", [{"steps": 0}, {"steps": 1, "minutes": 1.0}, {"batch_size": 0}, {"warmup": 2.0}])
def test_settings_that_mean_nothing_are_refused(change):
    with pytest.raises(InvalidInput):
        TrainConfig(**change)


def test_an_epoch_reads_every_window_once(tmp_path):
    np.arange(3000).astype("<u4").tofile(tmp_path / "t")
    batches = Batches(tmp_path / "t", context_length=7, batch_size=1, seed=3)
    rows = [batches.at(step) for step in range(batches.windows_per_epoch)]
    assert all(torch.equal(batch.inputs_BT[0, 1:], batch.targets_BT[0, :-1]) for batch in rows)
    assert len({tuple(batch.inputs_BT[0].tolist()) for batch in rows}) == len(rows)
    assert torch.equal(batches.at(5).inputs_BT, batches.at(5).inputs_BT)
    again = Batches(tmp_path / "t", context_length=7, batch_size=2, seed=3).at(2).inputs_BT
    assert torch.equal(again, torch.cat([rows[4].inputs_BT, rows[5].inputs_BT]))


def test_documents_are_set_apart_by_the_end_of_text(corpus, tokenizer: Tokenizer, tmp_path):
    write_tokens(corpus, tokenizer, tmp_path / "t", num_bytes=1)
    tokens = np.fromfile(tmp_path / "t", dtype="<u4").tolist()
    assert tokens.count(tokenizer.end_id) == len(list(corpus)) + 1
    assert tokenizer.decode(tokens) == "".join(document.text for document in corpus)
