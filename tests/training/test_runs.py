"""What a run does besides learning: it scores held-out text, goes on after a kill, and refuses what means nothing."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from texts import make_text
from training_runs import COMPRESSING, REMEMBERING, TINY, Killed, kill_at, loss_on, metrics_of, token_file

from memlm.cli.train import train_config
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, InvalidInput, NotFound
from memlm.model import Decoder, Memorizing
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.encoder import score_tokens
from memlm.training.data import KEPT_EPOCHS, DocumentStreams
from memlm.training.distributed import ProcessGroup, device_of
from memlm.training.init_from import config_with_memories
from memlm.training.metrics import flops_per_token
from memlm.training.train import train
from memlm.training.validation import HeldOut


@pytest.fixture
def corpus(corpus_folder) -> Corpus:
    return Corpus([corpus_folder])


@pytest.fixture
def held(tmp_path) -> Corpus:
    (tmp_path / "held").mkdir()
    for number, sentences in enumerate((1, 30, 4, 11)):
        (tmp_path / "held" / f"{number}.txt").write_text(make_text(number, sentences))
    (tmp_path / "held" / "none.txt").write_text("")
    return Corpus([tmp_path / "held"])


@pytest.mark.parametrize("config", [TINY, REMEMBERING, COMPRESSING], ids=["plain", "memorizing", "compressive"])
def test_held_out_text_costs_what_each_document_costs_by_itself(held, tokenizer: Tokenizer, config):
    torch.manual_seed(1)
    decoder = Decoder(config.model(tokenizer.vocab_size))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3)
    scores = [score_tokens(decoder, tokenizer.encode(each.text), tokenizer.start_id) for each in held]
    expected = -np.concatenate(scores).mean()
    assert loss_on(held, decoder, tokenizer) == pytest.approx(expected, rel=1e-5)


def test_processes_share_held_out_text(held, tokenizer: Tokenizer, monkeypatch):
    decoder = Decoder(REMEMBERING.model(tokenizer.vocab_size))
    memorizing_config: list[float] = []
    monkeypatch.setattr(ProcessGroup, "mean", lambda group, number: memorizing_config.append(number) or number)
    for rank in range(2):
        HeldOut(held, tokenizer).loss(decoder, ProcessGroup(rank, 2))
    nats, count = memorizing_config[0] + memorizing_config[2], memorizing_config[1] + memorizing_config[3]
    assert count == sum(len(tokenizer.encode(each.text)) for each in held)
    assert nats / count == pytest.approx(HeldOut(held, tokenizer).loss(decoder), rel=1e-5)


def test_the_last_step_is_scored_and_its_weights_are_kept_if_they_are_the_best(corpus, held, tmp_path):
    config = replace(TINY, steps=7, valid_every=4, patience=2)
    report = train(corpus, tmp_path / "m", config, valid=held)
    scores = {int(row["step"]): float(row["valid_loss"]) for row in metrics_of(tmp_path / "m") if row["valid_loss"]}
    assert sorted(scores) == [3, 6]
    assert report.valid_loss == pytest.approx(min(scores.values()), rel=1e-5)
    checkpoint = load_checkpoint(tmp_path / "m")
    assert loss_on(held, checkpoint.decoder, checkpoint.tokenizer) == pytest.approx(report.valid_loss, rel=1e-5)


def test_without_patience_the_last_weights_stay(corpus, held, tmp_path):
    config = replace(TINY, steps=40, valid_every=2, learning_rate=1.0, schedule="constant")  # far too fast: it diverges
    report = train(corpus, tmp_path / "m", config, valid=held)
    scores = [float(row["valid_loss"]) for row in metrics_of(tmp_path / "m") if row["valid_loss"]]
    assert scores[-1] > min(scores)
    assert report.valid_loss == pytest.approx(scores[-1], rel=1e-5)


def test_everything_at_once_resumes_to_the_bit(corpus, held, tmp_path):
    config = replace(
        REMEMBERING, batch_size=2, accumulate=2, dtype="bfloat16", valid_every=2, patience=4, checkpoint_every=3
    )
    whole = train(corpus, tmp_path / "whole", config, valid=held)
    for killed_at in (4, 7):
        folder = tmp_path / f"killed-{killed_at}"
        with pytest.raises(Killed):
            train(corpus, folder, config, valid=held, progress=kill_at(killed_at))
        resumed = train(corpus, folder, valid=held, resume=True)
        assert (resumed.losses, resumed.valid_loss) == (whole.losses, whole.valid_loss)
        assert load_checkpoint(folder).fingerprint == load_checkpoint(tmp_path / "whole").fingerprint


def test_tensorboard_has_no_step_twice_after_a_resume(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(TINY, tensorboard=True)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "m", config, progress=kill_at(9))
    report = train(corpus, tmp_path / "m", resume=True)
    board = EventAccumulator(str(tmp_path / "m" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == list(range(12))
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(report.losses, rel=1e-5)


def test_the_note_tells_loss_score_pace_and_share_of_the_peak(corpus, held, tmp_path):
    notes: list[str] = []

    def progress(phase: str, done: int, total: int | None, note: str = "") -> None:
        if phase == "train":
            notes.append(note)

    train(corpus, tmp_path / "m", replace(TINY, valid_every=6), valid=held, progress=progress)
    assert "valid" not in notes[4]
    assert all(word in notes[-1] for word in ("loss ", "valid ", "tokens/s", "% of peak"))


def test_memory_counts_among_the_operations():
    without = flops_per_token(Decoder(TINY.model(300)))
    seen = flops_per_token(Decoder(replace(TINY, model_fields={"xl_length": 16}).model(300))) - without
    assert seen == 12 * TINY.num_layers * TINY.dim * 16


def test_what_cannot_start_leaves_nothing_behind(corpus, tokenizer, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cases = [
        ({"init_from": tmp_path / "mistyped"}, TINY, NotFound, "mistyped"),
        ({"init_from": model_folder, "tokenizer": tokenizer}, TINY, InvalidInput, "its own tokenizer"),
        ({"init_from": model_folder}, replace(TINY, model_fields={"num_heads": 7}), InvalidInput, "num_heads"),
        ({}, replace(TINY, valid_every=2), InvalidInput, "--valid"),
    ]
    for given, config, error, says in cases:
        with pytest.raises(error, match=says):
            train(corpus, tmp_path / "m", config, **given)
        assert not (tmp_path / "m").exists()


def test_rows_that_processes_cannot_share_are_refused_before_anything_is_written(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(ProcessGroup, "join", classmethod(lambda cls, device: cls(0, 3)))
    with pytest.raises(InvalidInput, match="3 processes"):
        train(corpus, tmp_path / "m", TINY)
    assert not (tmp_path / "m").exists()


def test_a_resume_that_fails_keeps_what_was_learnt(corpus, tmp_path):
    with pytest.raises(Killed):
        train(corpus, tmp_path / "m", TINY, progress=kill_at(9))
    saved = (tmp_path / "m" / "training" / "tokenizer.json").read_text()
    (tmp_path / "m" / "training" / "tokenizer.json").write_text("{")
    with pytest.raises(Exception, match=r"tokenizer\.json"):
        train(corpus, tmp_path / "m", resume=True)
    (tmp_path / "m" / "training" / "tokenizer.json").write_text(saved)
    assert train(corpus, tmp_path / "m", resume=True).steps == TINY.steps
    with pytest.raises(AlreadyExists):
        train(corpus, tmp_path / "m", resume=True)


def test_a_run_that_scores_cannot_be_resumed_without_the_text(corpus, held, tmp_path):
    with pytest.raises(Killed):
        train(corpus, tmp_path / "m", replace(TINY, valid_every=2), valid=held, progress=kill_at(6))
    with pytest.raises(InvalidInput, match="--valid"):
        train(corpus, tmp_path / "m", resume=True)
    assert (tmp_path / "m" / "training" / "checkpoint.pt").exists()


def test_many_epochs_are_read_in_bounded_memory(tmp_path):
    data = DocumentStreams(token_file(tmp_path, [3, 40, 5]), 8, 2, seed=1, start_id=9, end_id=0)
    late = data.at(200)
    assert len(data._lengths) > 20
    assert len(data._assignments) <= KEPT_EPOCHS
    assert torch.equal(data.at(0).inputs_BT, DocumentStreams(**vars_of(data)).at(0).inputs_BT)
    assert torch.equal(data.at(200).inputs_BT, late.inputs_BT)


def vars_of(data: DocumentStreams) -> dict:
    return {name: getattr(data, name) for name in DocumentStreams.__dataclass_fields__}


def test_a_memory_that_is_there_keeps_what_nobody_changes():
    config = replace(TINY, model_fields={"memorizing": {"layers": [0], "top_k": 4, "mixing": "joint"}}).model(300)
    assert config_with_memories(config, {"memorizing": {"capacity": 99}}).memorizing == Memorizing(
        layers=(0,), top_k=4, capacity=99, mixing="joint"
    )
    assert config_with_memories(config, {"windows": [], "dim": config.dim}).memorizing == config.memorizing


def test_a_shape_asked_of_a_learnt_model_is_held_against_its_own(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text('dim = 64\ncontext_length = 8\n[model.memorizing]\nlayers = [0]\ntop_k = 2\nmixing = "joint"\n')
    config = train_config("tiny", file, {}, fine_tuning=True)
    assert config.model_fields == {
        "dim": 64, "context_length": 8, "memorizing": {"layers": [0], "top_k": 2, "mixing": "joint"},
    }  # fmt: skip
    with pytest.raises(InvalidInput, match="dim cannot change"):
        config_with_memories(TINY.model(300), config.model_fields)
    assert train_config("tiny", file, {}, fine_tuning=False).dim == 64


def test_a_file_of_settings_gives_a_learnt_model_memory(corpus_folder, model_folder, tmp_path):
    from typer.testing import CliRunner

    from memlm.cli.app import app

    command = ["train", str(corpus_folder), "--out", str(tmp_path / "m"), "--init-from", str(model_folder)]
    (tmp_path / "f.toml").write_text('[model]\nmemorizing = {layers = [0, 1], mixing = "joint"}\n')
    memory = ["--config", str(tmp_path / "f.toml"), "--steps", "1", "--batch-size", "2"]
    result = CliRunner().invoke(app, [*command, *memory, "--json"])
    assert result.exit_code == 0, result.output
    memorizing_config = json.loads((tmp_path / "m" / "config.json").read_text())["memorizing"]
    assert (memorizing_config["layers"], memorizing_config["mixing"], memorizing_config["normalize"]) == (
        [0, 1],
        "joint",
        "memory",
    )


def test_more_processes_than_devices_are_told_how_many_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InvalidInput, match="has 2 devices"):
        device_of(TINY)
    assert device_of(replace(TINY, device="cpu")) == torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("config", [TINY, REMEMBERING], ids=["plain", "memorizing"])
def test_a_compiled_model_learns_the_same(corpus_folder, corpus, tmp_path, config):
    config = replace(config, dtype="float32", steps=4)
    plain = train(corpus, tmp_path / "plain", config)
    script = (
        "import json, sys; from memlm.data.corpus import Corpus; from memlm.training.train import train\n"
        "from memlm.training.config import TrainConfig\n"
        "config = TrainConfig.from_dict(json.loads(sys.argv[3]))\n"
        "print(json.dumps(train(Corpus([sys.argv[1]]), sys.argv[2], config).losses))"
    )
    given = json.dumps(vars(replace(config, compile=True)))
    command = [sys.executable, "-c", script, str(corpus_folder), str(tmp_path / "compiled"), given]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    np.testing.assert_allclose(json.loads(compiled.stdout), plain.losses, rtol=1e-4)
