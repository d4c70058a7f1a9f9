"""What `memlm bench past` tells of documents whose past is worth much, or nothing."""

import math

import numpy as np
import pytest
import torch
from reports import figures_of
from texts import make_text
from typer.testing import CliRunner

from memlm.bench import past as bench
from memlm.bench.past import SETTINGS, bench_past, past_logprobs
from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.model.checkpoint import load_checkpoint

pytestmark = pytest.mark.exhaustive


def by_loops(keys_ND, targets_N, temperature, gap):
    figures = []
    for here, key_D in enumerate(keys_ND):
        earlier = range(max(0, here - gap + 1))
        weights = [math.exp(-sum((a - b) ** 2 for a, b in zip(key_D, keys_ND[j], strict=True)) / temperature)
                   for j in earlier]  # fmt: skip
        agreeing = sum(weight for weight, j in zip(weights, earlier, strict=True) if targets_N[j] == targets_N[here])
        figures.append(math.log(agreeing / sum(weights)) if agreeing else -math.inf)
    return figures


@pytest.mark.parametrize("gap", [1, 4])
def test_shares_are_those_of_plain_loops(gap, monkeypatch):
    monkeypatch.setattr(bench, "ROWS_AT_ONCE", 7)
    generator = torch.Generator().manual_seed(0)
    keys_ND = torch.randn(40, 5, generator=generator)
    targets_N = torch.randint(4, (40,), generator=generator)
    told_SN = past_logprobs(keys_ND, targets_N, [0.5, 3.0], gap)
    for told_N, temperature in zip(told_SN.tolist(), (0.5, 3.0), strict=True):
        expected_N = by_loops(keys_ND.double().tolist(), targets_N.tolist(), temperature, gap)
        assert told_N == pytest.approx(expected_N, abs=1e-4)
    changed_N = targets_N.clone()
    changed_N[20:] = 5  # what comes later says nothing to what came before
    assert torch.equal(past_logprobs(keys_ND, changed_N, [0.5], gap)[0, :20], told_SN[0, :20])


def folder_of(path, texts):
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number}.txt").write_text(text)
    return Corpus([path])


def test_a_past_that_comes_again_is_worth_more_than_one_that_does_not(model_folder, tmp_path):
    again = folder_of(tmp_path / "again", [make_text(number, 120) * 2 for number in range(6)])
    once = folder_of(tmp_path / "once", [make_text(number, 240) for number in range(6)])
    figures, other = bench_past(model_folder, again), bench_past(model_folder, once)
    assert figures["documents"] == 3
    for name in ("nats_less_past", "nats_less_past_beyond_context"):
        assert figures[name] > other[name] + 0.3
        assert figures[f"{name}_error"] > 0
    assert figures["nats_less_past"] >= figures["nats_less_past_beyond_context"] - 0.05


def test_settings_are_fitted_on_the_other_documents(model_folder, tmp_path, monkeypatch):
    texts = folder_of(tmp_path / "t", [make_text(number, 120 - number) for number in range(4)])
    checkpoint, requests = load_checkpoint(model_folder), []

    def planted(read, scale, gap):
        """Of the documents that are fitted on, one setting is the best; of the others, another."""
        nats = np.full(len(SETTINGS), 50.0)
        nats[7 if len(requests) // 2 % 2 == 0 else 3] = 10.0
        requests.append((len(read.targets_N), gap))
        return nats

    monkeypatch.setattr(bench, "_nats", planted)
    figures = bench_past(model_folder, texts)
    assert [gap for _, gap in requests] == [1, checkpoint.decoder.config.context_length] * 4
    nats = (
        figures["nats_per_token"] * figures["tokens"] - 2 * 50.0
    )  # the setting of the fitted ones, on the measured ones
    assert figures["nats_less_past"] == pytest.approx(nats / figures["tokens"])
    assert figures["past_lam"] == SETTINGS[7][1]


def test_the_command_tells_it_and_wants_four_documents(model_folder, corpus_folder):
    command = ["bench", "past", str(corpus_folder), "--model", str(model_folder), "--document-tokens", "50", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert figures_of(result.stdout)["tokens"] == 4 * 50
    with pytest.raises(InvalidInput, match="there are 2 documents"):
        bench_past(model_folder, Corpus([corpus_folder]), max_tokens=101, document_tokens=100)
