"""Exits that learn: aligned and mixed losses, halting, and what leaving at them computes (arXiv 1910.10073)."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from training_runs import TINY
from zoo.exit_twins import ExitTwin

from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.generation.early_exit import calibrate, load_rule, rule_of
from memlm.language_model import load
from memlm.model import Decoder
from memlm.model.early_exit import ExitRule, forward_early_exit
from memlm.model.exits import Exits
from memlm.training.config import TrainConfig
from memlm.training.train import train

PLAIN = replace(SHAPE, context_length=40, num_layers=4)


def exits(**fields) -> Decoder:
    return make(replace(PLAIN, stack=Exits(**fields)))


def read(decoder: Decoder, tokens: list[int], rules: list[ExitRule]) -> tuple[torch.Tensor, list[int]]:
    """Logits by token, each read with its own rule, and the layers used."""
    state, got, layers = decoder.new_state(), [], []
    with torch.inference_mode():
        for token, rule in zip(tokens, rules, strict=True):
            hidden, used = forward_early_exit(decoder, torch.tensor([[token]]), state, rule)
            got.append(decoder.logits(hidden[0, 0]))
            layers.append(used)
    return torch.stack(got), layers


def forced(layer: int) -> ExitRule:
    """Leaves at the first exit from a layer on."""
    return ExitRule("state", 0.0, first_layer=layer)


def loss_of(decoder: Decoder, tokens: list[int], targets: list[int]) -> torch.Tensor:
    hidden, _ = decoder(torch.tensor([tokens]))
    return decoder.loss(hidden, torch.tensor([targets]))


@pytest.mark.parametrize("measure", ["softmax", "state", "halt"])
def test_a_threshold_of_one_is_the_whole_model_to_the_bit(measure):
    decoder, tokens = exits(layers=(1, 2), halt="geometric"), tokens_of(12)
    got, layers = read(decoder, tokens, [ExitRule(measure, 1.0)] * 12)
    state = decoder.new_state()
    whole = torch.cat([logits(decoder, [token], state) for token in tokens])
    assert torch.equal(got, whole)
    assert set(layers) == {4}


@pytest.mark.parametrize("weighting", ["uniform", "sqrt", "linear"])
@pytest.mark.parametrize("layers", [(), (1, 3)])
def test_the_aligned_loss_is_that_of_the_twin(weighting, layers):
    decoder, tokens = exits(layers=layers, weighting=weighting), tokens_of(13)
    twin = ExitTwin(decoder, tokens[:-1], tokens[1:])
    assert loss_of(decoder, tokens[:-1], tokens[1:]).item() == pytest.approx(twin.aligned(), abs=1e-10)


@pytest.mark.parametrize("halt", ["multinomial", "geometric"])
@pytest.mark.parametrize(("oracle", "smoothing"), [("likelihood", 0.0), ("likelihood", 3.0), ("correctness", 2.0)])
def test_the_halting_loss_is_that_of_the_twin(halt, oracle, smoothing):
    decoder = exits(halt=halt, oracle=oracle, smoothing=smoothing, halt_weight=0.7, depth_cost=0.2)
    tokens = tokens_of(13)
    likeliest = logits(decoder, tokens[:-1]).argmax(dim=1).tolist()  # some targets are right
    targets = [likeliest[n] if n % 3 else tokens[n + 1] for n in range(12)]
    twin = ExitTwin(decoder, tokens[:-1], targets)
    assert len({twin.best_exit(t) for t in range(12)}) > 1
    expected = twin.aligned() + 0.7 * twin.halting_loss()
    assert loss_of(decoder, tokens[:-1], targets).item() == pytest.approx(expected, abs=1e-10)


def test_of_exits_that_are_right_the_oracle_takes_the_first_one_and_without_any_too():
    stack = exits(halt="geometric", oracle="correctness", depth_cost=0.1).stack
    right = torch.tensor([[[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 1]]]).double()
    assert stack.oracle(right).tolist() == [[1, 3, 0, 0]]


def test_targets_that_are_none_change_no_loss():
    decoder, tokens = exits(halt="multinomial"), tokens_of(13)
    hidden, _ = decoder(torch.tensor([tokens[:-1]]))
    targets = torch.tensor([[*tokens[1:8], *[-100] * 5]])
    padded = decoder.loss(hidden, targets)
    assert padded.item() == pytest.approx(loss_of(decoder, tokens[:7], tokens[1:8]).item(), abs=1e-12)


def test_the_gradient_of_an_exit_reaches_no_later_layer():
    decoder, tokens = exits(layers=(2,)), tokens_of(13)
    decoder(torch.tensor([tokens[:-1]]))
    (early,) = decoder.stack._passes
    norm = decoder.stack.norm_behind(2, decoder)
    torch.nn.functional.cross_entropy(
        decoder.logits(norm(early.streams_EBTD[0]))[0], torch.tensor(tokens[1:])
    ).backward()
    has_gradient = [any(p.grad is not None for p in block.parameters()) for block in decoder.blocks]
    assert has_gradient == [True, True, False, False]
    assert norm.weight.grad.abs().sum() > 0
    assert decoder.norm.weight.grad is None


def test_leaving_at_a_layer_is_the_model_cut_behind_it():
    decoder, tokens = exits(), tokens_of(16)
    for layer in (1, 2, 3):
        got, used = read(decoder, tokens, [forced(layer)] * 16)
        assert set(used) == {layer}
        cut = make(replace(PLAIN, num_layers=layer))
        weights = {name: tensor for name, tensor in decoder.state_dict().items() if name in cut.state_dict()}
        cut.load_state_dict({**weights, "norm.weight": decoder.stack.norms[str(layer)].weight})
        torch.testing.assert_close(got, logits(cut, tokens), atol=1e-12, rtol=0)


def test_tokens_leave_at_exits_alone():
    decoder = exits(layers=(2,))
    assert set(read(decoder, tokens_of(8), [forced(1)] * 8)[1]) == {2}
    assert set(read(decoder, tokens_of(8), [forced(3)] * 8)[1]) == {4}


def test_mixed_training_reads_copied_states_as_generation_does(monkeypatch):
    decoder, tokens = exits(training="mixed", layers=(1, 3)).train(), tokens_of(13)
    depths = [1, 4, 3, 1, 1, 3, 4, 3, 1, 4, 4, 1]
    monkeypatch.setattr(decoder.stack, "draw_depths", lambda context: torch.tensor([depths]))
    mixed = loss_of(decoder, tokens[:-1], tokens[1:])
    got, used = read(decoder.eval(), tokens[:-1], [forced(depth) for depth in depths])
    assert used == depths
    expected = torch.nn.functional.cross_entropy(got, torch.tensor(tokens[1:]))
    assert mixed.item() == pytest.approx(expected.item(), abs=1e-12)


def test_drawn_exits_follow_from_the_texts_and_are_even():
    decoder = exits(training="mixed", layers=(1, 2)).train()
    drawn = []
    for seed in range(30):
        decoder(torch.tensor([tokens_of(40, seed), tokens_of(40, seed + 30)]))
        drawn.append(decoder.stack._passes[0].depth_BT)
    decoder(torch.tensor([tokens_of(40, 29), tokens_of(40, 59)]))
    assert torch.equal(decoder.stack._passes[0].depth_BT, drawn[-1])
    assert not torch.equal(drawn[0], drawn[1])
    shares = torch.stack(drawn).flatten().bincount(minlength=5) / 2400
    assert shares.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3], abs=0.05)


@pytest.mark.parametrize("halt", ["multinomial", "geometric"])
def test_tokens_leave_where_the_sum_of_the_halting_passes_the_threshold(halt):
    decoder, tokens = exits(layers=(1, 3), halt=halt), tokens_of(16)
    for threshold in (0.2, 0.5, 0.8):
        _, used = read(decoder, tokens[:1], [ExitRule("halt", threshold)])
        q = ExitTwin(decoder, tokens[:1], tokens[1:2]).halts(0)
        sums = dict(zip(q, accumulate(q.values()), strict=True))
        assert used == [next((layer for layer in q if sums[layer] > threshold), 4)]
    by_threshold = [sum(read(decoder, tokens, [ExitRule("halt", t)] * 16)[1]) for t in (1.0, 0.7, 0.4, 0.0)]
    assert by_threshold == sorted(by_threshold, reverse=True)
    assert by_threshold[-1] == 16


def test_segments_and_pieces_have_the_loss_of_the_whole_text():
    shape = replace(PLAIN, context_length=6, xl_length=30, stack=Exits(halt="geometric"))
    decoder, tokens = make(shape), tokens_of(16)
    twin = ExitTwin(decoder, tokens[:-1], tokens[1:])
    loss = loss_of(decoder, tokens[:-1], tokens[1:]).item()
    assert loss == pytest.approx(twin.aligned() + 0.1 * twin.halting_loss(), abs=1e-10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": (5,)}, "layers is 5"),
        ({"layers": (2, 1)}, "expected each once, in order"),
        ({"weighting": "cubic"}, "weighting is 'cubic'"),
        ({"training": "mixed", "halt": "geometric"}, "choose aligned training or no halt"),
        ({"smoothing": -1.0}, "smoothing"),
    ],
)
def test_exits_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(InvalidInput, match=message):
        replace(PLAIN, stack=Exits(**fields))


def test_halting_that_was_not_learned_is_refused():
    for decoder in (make(PLAIN), exits()):
        with pytest.raises(InvalidInput, match="has not learned to halt"):
            read(decoder, tokens_of(2), [ExitRule("halt", 0.5)] * 2)


def test_a_trained_model_halts_by_itself_or_by_a_calibrated_rule(tmp_path, corpus_folder, monkeypatch):
    stack = {"kind": "exits", "layers": [1, 2], "halt": "geometric", "depth_cost": 0.3}
    fields = {"model_fields": {"stack": stack}, "steps": 40, "num_layers": 3, "context_length": 64}
    train(Corpus([corpus_folder]), tmp_path / "model", TrainConfig(**{**vars(TINY), **fields}))
    prompt = "the memory of a model, the memory"
    with load(tmp_path / "model") as lm:
        assert rule_of(lm.checkpoint) == ExitRule("halt", 0.5)
        drawn = [t.id for t in lm.generate(prompt, early_exit=True, temperature=0.0, max_tokens=8)]
        decoder, ids, expected, layers = lm.checkpoint.decoder, lm.checkpoint.tokenizer.prompt(prompt), [], []
        state = decoder.new_state()
        with torch.inference_mode():
            hidden, _ = decoder(torch.tensor([ids]), state)
            for _ in range(8):
                expected.append(int(decoder.logits(hidden[0, -1]).argmax()))
                hidden, used = forward_early_exit(
                    decoder, torch.tensor([[expected[-1]]]), state, rule_of(lm.checkpoint)
                )
                layers.append(used)
    assert drawn == expected[: len(drawn)]
    assert np.mean(layers) < 3
    monkeypatch.setattr("memlm.generation.early_exit.THRESHOLDS", (0.9, 0.5))
    report = calibrate(tmp_path / "model", Corpus([corpus_folder]), measure="halt", delta=0.9, prompts=20)
    assert report.rule is not None
    with load(tmp_path / "model") as lm:
        assert rule_of(lm.checkpoint) == load_rule(tmp_path / "model") == report.rule
