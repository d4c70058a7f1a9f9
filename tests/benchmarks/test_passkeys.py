"""The heat map of `python -m benchmarks passkeys`: texts with a key at each depth, read once, and asked for it."""

import random

import pytest
import torch
from reports import figures_of
from texts import make_text
from typer.testing import CliRunner

from benchmarks import passkeys
from benchmarks.commands import app
from benchmarks.needles import NAMES, QUESTION, answers_of
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.model.attention.extended_attention import remembering_alone
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.own_past import ContextSettings, OwnPast

WINDOW = 12
SETTINGS = ContextSettings(k=4, temperature=1.0, lam=0.5)


@torch.inference_mode()
def asked_plainly(checkpoint, filler_ids, depth, *, seed):
    """The text, and the answers by way, of one that is read whole from its beginning, a state for each way."""
    decoder, tokenizer, draw = checkpoint.decoder, checkpoint.tokenizer, random.Random(seed)
    for each in passkeys.DEPTHS:
        name, digits = draw.choice(NAMES), str(draw.randrange(10_000, 100_000))
        if each == depth:
            break
    told, question, answer = (
        tokenizer.encode(text).tolist()
        for text in (f"{QUESTION.format(name)}{digits}.\n\n", QUESTION.format(name), digits)
    )
    place = round(depth * (len(filler_ids) - len(told)))
    ids = [tokenizer.start_id, *filler_ids[:place], *told, *filler_ids[place + len(told) :]]
    answers = []
    for way in passkeys.WAYS:
        state, cache = decoder.new_state(capacity=len(ids) + 100), ContextCache(decoder.config.dim)
        past = OwnPast(SETTINGS, cache) if way == "context_cache" else None
        with remembering_alone(layers_of(checkpoint)):
            for begin in range(0, len(ids), 40):
                piece = ids[begin : begin + 40]
                keys_1TD = decoder.keys(torch.tensor([piece]), state)
                if past:
                    past.read(piece, keys_1TD[0].numpy())
            if way != "extended_attention":
                answers.append(list(answers_of(checkpoint, state, past, question, answer))[-1])
        if way == "extended_attention":
            answers += answers_of(checkpoint, state, None, question, answer)
    return ids, answers


def layers_of(checkpoint):
    return [block.attention.extended for block in checkpoint.decoder.blocks]


@pytest.mark.parametrize("depths", [passkeys.DEPTHS, (0.0, 0.5), (0.3,)])
def test_a_text_read_from_its_key_on_is_answered_as_one_read_whole(model_folder, tokenizer, depths):
    checkpoint = load_checkpoint(model_folder, attention_window=WINDOW, extended_attention=4, dtype="float32")
    filler_ids = tokenizer.encode(make_text(0, 500)).tolist()[:400]
    answered = dict(passkeys._asked(checkpoint, filler_ids, SETTINGS, depths, seed=3))
    assert list(answered) == list(reversed(depths))
    for depth, answers in answered.items():
        _, expected = asked_plainly(checkpoint, filler_ids, depth, seed=3)
        for answer, plain in zip(answers, expected, strict=True):
            assert answer.nats == pytest.approx(plain.nats, abs=1e-3)
    assert len({round(answer.nats, 3) for answers in answered.values() for answer in answers}) >= 2 * len(depths)


def test_each_text_tells_its_key_once_at_its_depth(model_folder, tokenizer):
    checkpoint = load_checkpoint(model_folder, attention_window=WINDOW, extended_attention=4)
    filler_ids = tokenizer.encode(make_text(0, 500)).tolist()[:400]
    for depth in passkeys.DEPTHS:
        ids, _ = asked_plainly(checkpoint, filler_ids, depth, seed=0)
        before = tokenizer.decode(ids).split("The pass key of ")
        assert len(before) == 2
        assert len(ids) == 401
        assert len(tokenizer.encode(before[0])) == pytest.approx(depth * 380, abs=8)


@torch.inference_mode()
def test_extended_attention_that_only_remembers_reads_as_the_window_alone(model_folder, tokenizer):
    plain = load_checkpoint(model_folder, attention_window=WINDOW)
    extended = load_checkpoint(model_folder, attention_window=WINDOW, extended_attention=4)
    ids_1T = torch.tensor([tokenizer.encode(make_text(0, 60)).tolist()])
    alone, remembered, searched = (each.decoder.new_state(capacity=600) for each in (plain, extended, extended))
    keys = plain.decoder.keys(ids_1T, alone)
    with remembering_alone(layers_of(extended)):
        torch.testing.assert_close(extended.decoder.keys(ids_1T, remembered), keys, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(extended.decoder.keys(ids_1T, searched), keys, atol=1e-3)
    # The question searches what was remembered.
    question_11 = ids_1T[:, :1]
    asked = extended.decoder.keys(question_11, remembered)
    assert not torch.allclose(asked, plain.decoder.keys(question_11, alone), atol=1e-3)


def test_the_command_has_a_row_for_each_depth(model_folder, corpus_folder, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(make_text(number, 400))
    command = ["passkeys", str(tmp_path), "--model", str(model_folder), "--tokens", "600", "--window", "40"]
    command += ["--depth", "1", "--depth", "0"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    figures = figures_of(result.stdout)
    for way in ("attention_window", "context_cache", "extended_attention"):
        for depth in ("0.0", "1.0"):
            assert figures[f"answers[way={way},tokens=600,depth={depth}]"] == 1
    assert "context cache" in CliRunner().invoke(app, command).output


def test_too_little_text_is_refused(model_folder, corpus_folder):
    with pytest.raises(InvalidInput, match="shorter texts"):
        passkeys.bench_passkeys(
            model_folder, Corpus([corpus_folder]), lengths=[90_000], window=40, extended_attention=4, trials=1,
            dtype="auto", device="auto", progress=lambda *_: None,
        )  # fmt: skip


def test_a_depth_between_tenths_is_refused(model_folder, corpus_folder):
    command = ["passkeys", str(corpus_folder), "--model", str(model_folder), "--depth", "0.25"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InvalidInput)
    assert "multiple of 0.1" in str(result.exception)
