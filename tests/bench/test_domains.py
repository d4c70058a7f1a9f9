"""Domains: texts of each, and the weight of each model by Bayes' rule."""

import math

import numpy as np
import pytest
import torch

from memlm.bench import domains
from memlm.bench.domains import DomainText, bench_domains, bits, held_out_texts, shares
from memlm.bench.learning import config_for, learn
from memlm.bench.tasks import LibraryText
from memlm.model import Decoder
from memlm.model.checkpoint import Checkpoint


def test_texts_are_of_their_domain_and_change_in_the_middle():
    texts = held_out_texts(0)
    code, prose = (DomainText(domain=domain).source.tobytes() for domain in ("code", "prose"))
    for rows, source, other in ((texts["code"], code, prose), (texts["prose"], prose, code)):
        assert all(row.astype(np.uint8).tobytes() in source for row in rows)
        assert not any(row.astype(np.uint8).tobytes() in other for row in rows)
    first, last = texts["change"][0].astype(np.uint8), texts["change"][-1].astype(np.uint8)
    assert first[:64].tobytes() in code
    assert first[64:].tobytes() in prose
    assert last[:64].tobytes() in prose
    assert last[64:].tobytes() in code


def test_the_model_of_both_reads_as_much_of_each():
    inputs_BT, _ = DomainText(100, domain="both").draw(np.random.default_rng(0), 4, 0)
    in_code = [row.astype(np.uint8).tobytes() in LibraryText().source.tobytes() for row in inputs_BT]
    assert in_code == [True, True, False, False]


def test_bits_and_shares_follow_bayes():
    task, models = LibraryText(length=8), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        decoder = Decoder(config_for(task, dim=16, ff_dim=16))
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.mul_(3)
        models.append(Checkpoint(None, decoder.eval(), None))
    text_BT = np.array([[65, 66, 67, 66]])
    with torch.inference_mode():
        nats = []
        for model in models:
            logprobs_TV = model.decoder.logprobs(model.decoder(torch.from_numpy(text_BT))[0][0])
            nats.append(-sum(float(logprobs_TV[t, text_BT[0, t + 1]]) for t in range(3)))
    assert bits(models[:1], text_BT) == pytest.approx(nats[0] / 3 / math.log(2), abs=1e-4)
    expected = 1 / (1 + math.exp(nats[0] - nats[1]))
    assert shares(models, text_BT)[0] == pytest.approx([expected, 1 - expected], abs=1e-4)
    # By the chain rule, the mixture gives the whole text the mean of the models' probabilities.
    whole = -math.log((math.exp(-nats[0]) + math.exp(-nats[1])) / 2)
    assert bits(models, text_BT) == pytest.approx(whole / 3 / math.log(2), abs=1e-4)


def test_a_branch_begins_as_its_model():
    config = config_for(DomainText(8), dim=16, ff_dim=16)
    first = Decoder(config)
    task = DomainText(8, domain="prose", begins=first)
    branch = learn(config, task, steps=1, seed=1, training={"learning_rate": 1e-9}).decoder
    for one, other in zip(first.parameters(), branch.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_each_model_and_the_mixture_have_a_row(monkeypatch):
    monkeypatch.setattr(domains, "STEPS", 2)
    monkeypatch.setattr(domains, "TEXTS", 2)
    figures = bench_domains(0)
    *alone, mixed = figures.values()
    assert list(figures) == ["branch of code", "branch of prose", "branch of both", "mixture of code and prose"]
    kinds = {"bits_code", "bits_prose", "bits_change"}
    assert all(row.keys() == kinds for row in alone)
    assert mixed.keys() == {*kinds, "share_8", "share_32"}
