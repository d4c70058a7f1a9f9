"""Keys that `python -m benchmarks context --needles` hides in texts, and the answers that it counts."""

import numpy as np
import pytest
import torch
from reports import figures_of
from texts import make_text
from typer.testing import CliRunner

from benchmarks import context, needles
from benchmarks.commands import app
from benchmarks.needles import LENGTHS, QUESTION, Answer, hide
from memlm.bench import texts
from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.own_past import ContextSettings, OwnPast

WINDOW = 400  # the tests' tokenizer makes many tokens of a sentence


@pytest.mark.parametrize("num_keys", [1, 4])
def test_the_keys_stand_in_the_first_window(tokenizer, num_keys):
    filler_ids = tokenizer.encode(make_text(0, 3000)).tolist()
    hidden = hide(tokenizer, filler_ids, num_keys, WINDOW, seed=0)
    told = tokenizer.decode(hidden.ids[:WINDOW])
    assert len(hidden.ids) == LENGTHS[-1] * WINDOW
    assert len(dict(hidden.keys)) == num_keys
    assert all(f"{QUESTION.format(name)}{digits}." in told for name, digits in hidden.keys)
    assert hidden == hide(tokenizer, filler_ids, num_keys, WINDOW, seed=0)
    assert hidden.keys != hide(tokenizer, filler_ids, num_keys, WINDOW, seed=1).keys


def test_an_answer_is_right_if_each_token_is_the_likeliest():
    logprobs_NV = np.log(np.array([[0.1, 0.9], [0.8, 0.2]], np.float32))
    assert needles._judged(logprobs_NV, [1, 0]) == Answer(True, pytest.approx(-np.log(0.9 * 0.8)))
    assert needles._judged(logprobs_NV, [1, 1]) == Answer(False, pytest.approx(-np.log(0.9 * 0.2)))


@torch.inference_mode()
def test_a_past_that_holds_the_answer_gives_it(checkpoint):
    decoder, question, answer = checkpoint.decoder, [5, 6, 7, 8], [40, 41, 42]
    past = OwnPast(ContextSettings(1, 1.0, 0.99), ContextCache(decoder.config.dim))
    state, ids = decoder.new_state(), [*question, *answer]
    past.read(ids, decoder.keys(torch.tensor([ids]), state)[0].numpy())
    alone, mixed = needles.answers_of(checkpoint, decoder.new_state(), past, question, answer)
    assert mixed.is_right
    assert not alone.is_right
    assert mixed.nats < 0.1 < alone.nats
    assert len(past.cache) == len(ids)


@pytest.mark.exhaustive
def test_the_command_asks_after_each_length(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(context, "SIZES", (100,))
    monkeypatch.setattr(texts, "TOKENS", 20)
    monkeypatch.setattr(needles, "LENGTHS", (1, 2))
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(make_text(number, 96))
    command = ["context", str(tmp_path), "--model", str(model_folder), "--window", "40", "--repeats", "1"]
    result = CliRunner().invoke(app, [*command, "--needles", "2", "--json"])
    assert result.exit_code == 0, result.output
    figures = figures_of(result.stdout)
    for way in ("attention_window", "context_cache", "extended_attention"):
        assert figures[f"answers[way={way},keys=1,windows=2]"] == 2
        assert figures[f"answers[way={way},keys=4,windows=1]"] == 8
        assert 0 <= figures[f"right[way={way},keys=4,windows=2]"] <= 1
    assert "extended attention" in CliRunner().invoke(app, [*command, "--needles", "1"]).output


def test_too_little_text_is_refused(model_folder, corpus_folder):
    from memlm.data.corpus import Corpus

    with pytest.raises(InvalidInput, match="give more documents"):
        list(needles.filler(load_checkpoint(model_folder).tokenizer, Corpus([corpus_folder]), 32_000, 2))
