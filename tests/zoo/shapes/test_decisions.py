"""What the paper says of a Decision Transformer (arXiv 2106.01345), and its folder."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import SHAPE
from zoo.shapes.shape_twins import decision_logits

from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.model import DecoderState
from memlm.zoo.shapes.decisions import DecisionConfig, DecisionTransformer, Episodes
from memlm.zoo.shapes.fitting import fit

MODEL = replace(SHAPE, vocab_size=5, context_length=24, positions="none", tied_embeddings=False)
CONFIG = DecisionConfig(MODEL, state_dim=4, num_steps=8, return_scale=3.0)
CONFIGS = {
    "plain": CONFIG,
    "rotary, tied, in a window": replace(CONFIG, model=replace(MODEL, positions="rotary", windows=(7, 9))),
    "sums and experts": replace(
        CONFIG,
        model=replace(
            MODEL, positions="learned", tied_embeddings=True,
            layers=[{"mixer": {"kind": "performer", "features": 6}, "channel": {"kind": "experts", "experts": 3}}],
        ),
    ),
}  # fmt: skip


def make(config=CONFIG, seed=1):
    torch.manual_seed(seed)
    model = DecisionTransformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model


def drawn(rows=3, steps=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    returns_BT = torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    states_BTS = torch.randn(rows, steps, 4, generator=generator, dtype=torch.float64)
    return returns_BT, states_BTS, torch.randint(5, (rows, steps), generator=generator)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_episode_is_read_as_by_the_twin(name):
    model, (returns_BT, states_BTS, actions_BT) = make(CONFIGS[name]), drawn()
    got = model(returns_BT, states_BTS, actions_BT).detach().numpy()
    for row in range(3):
        expected = decision_logits(model, returns_BT[row].numpy(), states_BTS[row].numpy(), actions_BT[row].tolist())
        np.testing.assert_allclose(got[row], expected, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_acting_step_by_step_is_one_reading_also_where_rows_are_at_other_steps(name):
    model, episodes, later = make(CONFIGS[name]), drawn(), drawn(seed=1)
    expected, other = model(*episodes), model(*later)
    state = model.new_state(3)
    with torch.inference_mode():
        for step in range(8):
            if step == 3:  # another episode begins in the second row
                state.reset(1)
            here = [step, step if step < 3 else step - 3, step]
            source = [episodes, episodes if step < 3 else later, episodes]
            returns_B, states_BS, actions_B = (
                torch.stack([source[row][kind][row, here[row]] for row in range(3)]) for kind in range(3)
            )
            logits_BA = model.act(returns_B, states_BS, state)
            model.take(actions_B, state)
            for row in range(3):
                want = (expected if source[row] is episodes else other)[row, here[row]]
                torch.testing.assert_close(logits_BA[row], want.detach(), atol=1e-10, rtol=0)


def test_an_action_follows_from_its_state_and_return_and_the_actions_before_it():
    model, (returns_BT, states_BTS, actions_BT) = make(), drawn(1)
    before = model(returns_BT, states_BTS, actions_BT)[0]
    for kind, first in (("return", 4), ("state", 4), ("action", 5)):
        changed = [returns_BT.clone(), states_BTS.clone(), actions_BT.clone()]
        if kind == "action":
            changed[2][0, 4] = (changed[2][0, 4] + 1) % 5
        else:
            changed[0 if kind == "return" else 1][0, 4] += 1
        after = model(*changed)[0]
        assert torch.equal(after[:first], before[:first])
        assert not torch.isclose(after[first:], before[first:]).all(dim=1).any()


def test_every_parameter_learns_and_steps_that_are_not_real_teach_nothing():
    model, (_, states_BTS, actions_BT) = make(), drawn()
    is_real_BT = torch.arange(8) < torch.tensor([[8], [5], [1]])
    rewards_BT = torch.randn(3, 8, dtype=torch.float64)
    loss = model.loss(Episodes(states_BTS, actions_BT, rewards_BT, is_real_BT))
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    behind = ~is_real_BT
    states_BTS[behind], actions_BT[behind], rewards_BT[behind] = 7.0, 0, 5.0
    assert torch.equal(model.loss(Episodes(states_BTS, actions_BT, rewards_BT, is_real_BT)), loss)


def test_returns_are_sums_of_later_rewards():
    episodes = Episodes(
        torch.zeros(1, 4, 4), torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[1.0, 2.0, -4.0, 8.0]]),
        torch.tensor([[True, True, True, False]]),
    )  # fmt: skip
    assert episodes.returns_BT.tolist() == [[-1.0, -2.0, -4.0, 0.0]]
    assert episodes.rows(torch.tensor([0, 0])).returns_BT.shape == (2, 4)


class Ladder:
    """Each episode pays its action, and is over after its own number of steps."""

    def __init__(self, lasts):
        self.lasts, self.now, self.took = torch.tensor(lasts), 0, []

    def states(self):
        return torch.full((len(self.lasts), 4), float(self.now), dtype=torch.float64)

    def step(self, actions_B):
        runs_B = self.now < self.lasts
        self.took.append(actions_B)
        self.now += 1
        return torch.where(runs_B, actions_B.double(), 0.0), self.now >= self.lasts


def test_playing_asks_for_what_is_left_of_the_return(monkeypatch):
    model, asked = make(), []
    act = DecisionTransformer.act
    monkeypatch.setattr(
        DecisionTransformer, "act", lambda *given: asked.append(given[1].tolist()) or act(*given)
    )  # fmt: skip
    world = Ladder([3, 5])
    got_B = model.play(world, torch.tensor([9.0, 4.0], dtype=torch.float64), generator=torch.Generator().manual_seed(0))
    paid_BT = torch.stack(world.took, dim=1) * (torch.arange(5) < world.lasts[:, None])
    assert len(asked) == 5
    assert got_B.tolist() == paid_BT.sum(dim=1).tolist()
    for row, first in enumerate((9.0, 4.0)):
        assert [each[row] for each in asked] == [first - float(paid_BT[row, :step].sum()) for step in range(5)]
    likeliest = Ladder([8])
    model.play(likeliest, torch.zeros(1, dtype=torch.float64))
    again = Ladder([8])
    model.play(again, torch.zeros(1, dtype=torch.float64))
    assert torch.equal(torch.stack(likeliest.took), torch.stack(again.took))
    assert len(again.took) == 8


def test_an_episode_goes_on_from_a_saved_state():
    model, (returns_BT, states_BTS, actions_BT) = make(), drawn()
    with torch.inference_mode():
        state = model.new_state(3)
        model.act(returns_BT[:, 0], states_BTS[:, 0], state)
        restored = DecoderState.restore(state.save(), CONFIG.model)
        read = []
        for each in (state, restored):
            model.take(actions_BT[:, 0], each)
            read.append(model.act(returns_BT[:, 1], states_BTS[:, 1], each))
    assert torch.equal(*read)


def test_what_does_not_fit_is_refused():
    model, (returns_BT, states_BTS, actions_BT) = make(), drawn(1)
    state = model.new_state()
    with pytest.raises(InvalidInput, match="no state of the world yet; call act"):
        model.take(actions_BT[:, 0], state)
    for step in range(8):
        model.act(returns_BT[:, step], states_BTS[:, step], state)
        with pytest.raises(InvalidInput, match="no action yet; call take"):
            model.act(returns_BT[:, step], states_BTS[:, step], state)
        model.take(actions_BT[:, step], state)
    with pytest.raises(InvalidInput, match="has had its 8 steps"):
        model.act(returns_BT[:, 0], states_BTS[:, 0], state)
    with pytest.raises(InvalidInput, match="states have 3 numbers; the model reads 4"):
        model(returns_BT, states_BTS[..., :3], actions_BT)
    with pytest.raises(InvalidInput, match="9 steps; the model knows 8"):
        model(*(torch.cat([each, each[:, :1]], dim=1) for each in drawn(1)))
    with pytest.raises(InvalidInput, match="9 steps take 27 places; the model has 24"):
        replace(CONFIG, num_steps=9)
    with pytest.raises(InvalidInput, match="model has a stack of exits"):
        replace(CONFIG, model=replace(MODEL, stack="exits"))
    with pytest.raises(InvalidInput, match="return_scale"):
        replace(CONFIG, return_scale=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_holds_the_model(tmp_path, name):
    model, episodes = make(CONFIGS[name]), drawn()
    model.save(tmp_path / "model")
    loaded = DecisionTransformer.load(tmp_path / "model")
    assert loaded.config == model.config
    assert torch.equal(loaded(*episodes), model(*episodes))


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(NotFound):
        DecisionTransformer.load(tmp_path)
    make().save(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    for changes, error in (
        ({"model_type": "memlm"}, Incompatible),
        ({"format_version": 2}, Incompatible),
        ({"state_dim": 3}, Corrupt),
        ({"states": 3}, Corrupt),
        ({"model": {**given["model"], "tied_embeddings": True}}, Corrupt),
        ({"model": 3}, Corrupt),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**given, **changes}))
        with pytest.raises(error, match=str(tmp_path)):
            DecisionTransformer.load(tmp_path)


def test_a_loop_learns_what_a_return_asks_for():
    torch.manual_seed(0)
    model = DecisionTransformer(CONFIG)
    generator = torch.Generator().manual_seed(0)
    actions_BT = torch.randint(5, (64, 4), generator=generator)
    episodes = Episodes(torch.zeros(64, 4, 4), actions_BT, actions_BT.float(), torch.ones(64, 4, dtype=torch.bool))
    losses = fit(model, lambda step: model.loss(episodes), num_steps=60, learning_rate=1e-2)
    assert len(losses) == 60
    assert not model.training
    asked_B = torch.arange(17).float()  # any return from four actions of 0 to 4
    got_B = model.play(Ladder([4] * 17), asked_B)
    assert np.corrcoef(asked_B, got_B)[0, 1] > 0.9
