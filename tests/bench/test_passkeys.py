"""The heat map of `memlm bench passkeys`: texts with a key at each depth, read once, and asked for it."""

import pytest
import torch
from reports import figures_of
from texts import make_text
from typer.testing import CliRunner

from memlm.bench import passkeys
from memlm.bench.needles import QUESTION
from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.model.checkpoint import load_checkpoint
from memlm.model.extended_attention import remembering_alone
from memlm.retrieval.own_past import ContextSettings

WINDOW = 12
SETTINGS = ContextSettings(k=4, temperature=1.0, lam=0.5)


@pytest.fixture
def read(checkpoint, monkeypatch):
    """The tokens of each text that was read before its question, in order."""
    seen = list[list[int]]()

    def answers(checkpoint, state, past, question, answer):
        seen.append([*read_ids[id(state)], *question, *answer])
        return iter(())

    read_ids = dict[int, list[int]]()
    fork, keys = type(checkpoint.decoder.new_state()).fork, type(checkpoint.decoder).keys

    def forked(state):
        twin = fork(state)
        read_ids[id(twin)] = list(read_ids[id(state)])
        kept.append(twin)
        return twin

    kept = []  # an id stays with its state
    monkeypatch.setattr(type(checkpoint.decoder.new_state()), "fork", forked)

    def keyed(decoder, tokens, state):
        read_ids.setdefault(id(state), []).extend(tokens[0].tolist())
        return keys(decoder, tokens, state)

    monkeypatch.setattr(type(checkpoint.decoder), "keys", keyed)
    monkeypatch.setattr(passkeys, "answers_of", answers)
    return seen


def test_each_text_tells_its_key_once_at_its_depth(model_folder, tokenizer, read):
    checkpoint = load_checkpoint(model_folder, attention_window=WINDOW)
    filler_ids = tokenizer.encode(make_text(0, 500)).tolist()[:400]
    depths = [depth for depth, _ in passkeys._asked(checkpoint, filler_ids, SETTINGS, seed=0)]
    assert depths == list(passkeys.DEPTHS)
    sizes = set()
    for depth, ids in zip(depths, read, strict=True):
        text = tokenizer.decode(ids[1:])
        digits = text[-5:]
        name = text.removesuffix(digits).rsplit("pass key of ", 1)[1].split()[0]
        told = f"{QUESTION.format(name)}{digits}.\n\n"
        assert text.count(told) == 1
        before = len(tokenizer.encode(text.split(told)[0]).tolist())
        assert before == pytest.approx(depth * (400 - len(tokenizer.encode(told))), abs=3)
        sizes.add(len(ids) - len(tokenizer.encode(QUESTION.format(name))) - len(tokenizer.encode(digits)))
    assert sizes == {401}  # with the start token, at every depth


@torch.inference_mode()
def test_extended_attention_that_only_remembers_reads_as_the_window_alone(model_folder, tokenizer):
    plain = load_checkpoint(model_folder, attention_window=WINDOW)
    extended = load_checkpoint(model_folder, attention_window=WINDOW, extended_attention=4)
    ids_1T = torch.tensor([tokenizer.encode(make_text(0, 60)).tolist()])
    alone, remembered, searched = (each.decoder.new_state(capacity=600) for each in (plain, extended, extended))
    layers = [block.attention.extended for block in extended.decoder.blocks]
    keys = plain.decoder.keys(ids_1T, alone)
    with remembering_alone(layers):
        torch.testing.assert_close(extended.decoder.keys(ids_1T, remembered), keys, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(extended.decoder.keys(ids_1T, searched), keys, atol=1e-3)
    # The question searches what was remembered.
    question_11 = ids_1T[:, :1]
    asked = extended.decoder.keys(question_11, remembered)
    assert not torch.allclose(asked, plain.decoder.keys(question_11, alone), atol=1e-3)


def test_the_command_has_a_row_for_each_depth(model_folder, corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(passkeys, "DEPTHS", (0.0, 1.0))
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(make_text(number, 400))
    command = ["bench", "passkeys", str(tmp_path), "--model", str(model_folder), "--tokens", "600", "--window", "40"]
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
