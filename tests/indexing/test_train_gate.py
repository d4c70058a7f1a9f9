"""The gate between what a model has in mind and what its datastore recalls."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from texts import make_text

from memlm.data.corpus import Corpus
from memlm.errors import Corrupt, InvalidInput, NotFound
from memlm.indexing.build import build_index
from memlm.indexing.train_gate import train_spalm
from memlm.language_model import load
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.gate import GATE_FILE, SpalmGate, load_gate

PROMPT = "the memory of a model"


def gate_of(dim: int) -> SpalmGate:
    torch.manual_seed(0)
    gate = SpalmGate(dim).double()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return gate


def test_it_equals_its_plain_twin():
    gate = gate_of(6)
    hidden, neighbors = torch.randn(3, 6).double(), torch.randn(3, 4, 6).double()
    present_QK = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    got = gate(hidden, neighbors, present_QK).detach().numpy()
    scale, weight, bias = (parameter.detach().numpy() for parameter in gate.parameters())
    for q in range(3):
        h, found = hidden[q].numpy(), neighbors[q][present_QK[q]].numpy()
        if not len(found):
            np.testing.assert_array_equal(got[q], h)
            continue
        raised = np.exp(found @ h)
        recalled = (raised[:, None] * found).sum(axis=0) / raised.sum()
        g = 1 / (1 + np.exp(-(weight @ h + bias)))
        np.testing.assert_allclose(got[q], g * h + (1 - g) * scale * recalled, atol=1e-12)


def test_its_gradients_equal_finite_differences():
    gate = gate_of(5)
    hidden, neighbors = torch.randn(2, 5).double().requires_grad_(), torch.randn(2, 3, 5).double().requires_grad_()
    present_QK = torch.tensor([[True, True, False], [True, True, True]])
    names, parameters = zip(*gate.named_parameters(), strict=True)

    def run(hidden, neighbors, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(gate, given, (hidden, neighbors, present_QK))

    assert torch.autograd.gradcheck(run, (hidden, neighbors, *parameters))


def test_open_it_is_the_model_and_shut_it_is_the_memory():
    gate = gate_of(6)
    hidden, neighbors, present_QK = torch.randn(2, 6).double(), torch.randn(2, 1, 6).double(), torch.ones(2, 1).bool()
    with torch.no_grad():
        gate.gate.bias.fill_(1e4)
        assert torch.equal(gate(hidden, neighbors, present_QK), hidden)
        gate.gate.bias.fill_(-1e4)
        gate.scale.fill_(1.0)
        assert torch.equal(gate(hidden, neighbors, present_QK), neighbors[:, 0])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model that learnt little, a store of text that it never saw, and held-out text like it."""
    from memlm.training.config import TrainConfig
    from memlm.training.train import train

    folder = tmp_path_factory.mktemp("spalm")
    for name, seeds in (("learnt", range(4)), ("stored", range(10, 40)), ("held", range(50, 58)), ("test", (90, 91))):
        (folder / name).mkdir()
        for seed in seeds:
            (folder / name / f"{name}-{seed}.txt").write_text(make_text(seed, 150))
    config = TrainConfig(
        dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ff_dim=48, context_length=32, vocab_size=280,
        batch_size=8, steps=40,
    )  # fmt: skip
    train(Corpus([folder / "learnt"]), folder / "model", config)
    build_index(folder / "model", Corpus([folder / "stored"]), folder / "store")
    return folder


def test_a_trained_gate_helps_on_text_it_never_saw_and_leaves_the_model_alone(place, tmp_path):
    folder = Path(shutil.copytree(place / "model", tmp_path / "model"))
    before = load_checkpoint(folder).fingerprint
    report = train_spalm(folder, place / "store", Corpus([place / "held"]), seed=1)
    assert report.gated_nats < report.base_nats - 0.05
    assert 0 < report.share < 1
    assert load_checkpoint(folder).fingerprint == before
    text = (place / "test" / "test-90.txt").read_text()
    with load(folder, [place / "store"]) as lm:
        alone, gated = lm.score(text, use_store=False), lm.score(text, spalm=True, k=16)
        assert gated.base.nll == pytest.approx(alone.nll)
        assert gated.nll < alone.nll
        assert gated.lam == 0.0
        together = lm.generate_batch([PROMPT, "a"], spalm=True, k=16, max_tokens=4, temperature=0)
        single = [token.id for token in lm.generate(PROMPT, spalm=True, k=16, max_tokens=4, temperature=0)]
    assert [token.id for token in together[0].tokens] == single


def test_generation_and_scoring_agree_about_the_gate(place, tmp_path):
    folder = Path(shutil.copytree(place / "model", tmp_path / "model"))
    train_spalm(folder, place / "store", Corpus([place / "held"]), seed=1)
    with load(folder, [place / "store"]) as lm:
        tokens = list(lm.generate(PROMPT, spalm=True, k=16, max_tokens=8, temperature=0))
        text = lm.detokenize([*lm.tokenize(PROMPT), *(token.id for token in tokens)])
        scored = lm.score(text, spalm=True, k=16, token_scores=True, top_logprobs=1)
        scores = scored.token_scores[-len(tokens) :]
        ids = [token.id for token in tokens]
        assert lm.tokenize(text)[-len(ids) :] == ids, "another greedy text would do: this one is tokenized otherwise"
    for score, token in zip(scores, tokens, strict=True):
        assert score.logprob == pytest.approx(token.logprob, abs=1e-3)
        assert [(each.token_id, each.logprob) for each in score.top_logprobs] == [(token.id, score.logprob)]


def test_what_cannot_be_is_refused(place, tmp_path):
    folder = Path(shutil.copytree(place / "model", tmp_path / "model"))
    with load(folder, [place / "store"]) as lm, pytest.raises(NotFound, match="memlm tune --spalm"):
        lm.score("a", spalm=True)
    with pytest.raises(InvalidInput, match="is in the datastore"):
        train_spalm(folder, place / "store", Corpus([place / "stored"]))
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(InvalidInput, match=r"1,000"):
        train_spalm(folder, place / "store", Corpus([tmp_path / "short.txt"]))
    (folder / GATE_FILE).write_bytes(b"no gate")
    with pytest.raises(Corrupt, match="anew"):
        load_gate(folder)
